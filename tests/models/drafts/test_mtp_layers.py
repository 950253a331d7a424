"""Layers for multi-token prediction: how each family stores them, what is refused, and how a plan names them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import PROMPTS, requests_for
from mtp_checkpoints import (
    LAYERS,
    Headed,
    change_config,
    change_weights,
    save_headed,
)
from safetensors.torch import save_file
from small import small_tokenizer

from mtbench.errors import UserError
from mtbench.hardware import probe
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.checkpoint_files import WEIGHTS
from mtbench.models.drafts.loading import draft_config, load_draft
from mtbench.models.drafts.mtp import LAYOUTS, MtpConfig, recognise
from mtbench.models.families import locate, split_part
from mtbench.models.loading import Calls, Checkpoint, load
from mtbench.plan.plan import Plan, RunRequest

PART = "#mtp"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Headed]:
    """A checkpoint of a family, made once."""
    known: dict[str, Headed] = {}

    def headed(family: str) -> Headed:
        if family not in known:
            known[family] = save_headed(tmp_path_factory.mktemp(family) / "X", family)
        return known[family]

    return headed


@pytest.fixture
def mimo(made: Callable[[str], Headed], tmp_path: Path) -> Path:
    """A checkpoint's folder to change."""
    return shutil.copytree(made("mimo").folder, tmp_path / "X")


def plan(folder: Path, method: str = "mtp", **how: Any) -> Plan:
    request: dict[str, Any] = {"model": str(folder), "suite": ["synthetic"], "limit": 2, "dtype": "float64"}
    return make_plan(RunRequest(method=["ar", method], device="cpu", max_new_tokens=8, **(request | how)))


def of(model: Any, folder: Path) -> Checkpoint:
    """A checkpoint of a model that has not been loaded for decoding."""
    none = torch.zeros(0, dtype=torch.long)
    return Checkpoint(str(folder), model, small_tokenizer(), (), None, none, 40, 256, Calls(model.device))


# --- What is read -------------------------------------------------------------------------------------------------


def test_several_layers_are_named_counted_and_all_needed(tmp_path: Path) -> None:
    one, two = (save_headed(tmp_path / f"{count}", "mimo", count).folder for count in (1, 2))
    single, draft = (load_draft(f"{folder}{PART}", load(str(folder))).model for folder in (one, two))
    assert draft.format.name == "multi-token prediction as in MiMo, 2 layers"
    assert draft.num_parameters() == single.num_parameters()  # those that a forward reads
    assert probe.count(draft) == probe.count(single)
    with pytest.raises(UserError, match=r"tree=2 needs a draft of one layer, .*MiMo, 2 layers, which draft a chain"):
        plan(two, "eagle:tree=2,draft=#mtp")
    folder = shutil.copytree(two, tmp_path / "3")
    change_config(folder, num_nextn_predict_layers=3)
    with pytest.raises(UserError, match=r"lacks 1\d weights of its configuration, such as 'layers\.2\.block\."):
        plan(folder)


def test_another_head_of_one_of_several_layers_is_refused(tmp_path: Path) -> None:
    """The paper has one; a checkpoint may store a copy with each layer."""
    folder = save_headed(tmp_path / "X", "glm", 2).folder
    load_draft(f"{folder}{PART}", load(str(folder)))  # copies are dropped
    name = f"model.layers.{LAYERS + 1}.shared_head.head.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name] * 2}))
    with pytest.raises(UserError, match=r"its layer 1 has another LM head than the target"):
        load_draft(f"{folder}{PART}", load(str(folder)))


@pytest.mark.parametrize("family", ["glm", "deepseek"])
def test_a_copy_of_the_targets_head_is_dropped_and_another_head_is_used(
    made: Callable[[str], Headed], family: str, tmp_path: Path
) -> None:
    target = made(family).target()
    draft = load_draft(f"{made(family).folder}{PART}", target).model
    assert draft.get_output_embeddings() is target.model.get_output_embeddings()
    assert draft.get_input_embeddings() is target.model.get_input_embeddings()
    folder = shutil.copytree(made(family).folder, tmp_path / "X")
    name = f"model.layers.{LAYERS}.shared_head.head.weight"
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name] * 2}))
    other = load_draft(f"{folder}{PART}", target).model
    assert torch.equal(other.get_output_embeddings().weight, target.model.get_output_embeddings().weight * 2)


def test_a_routers_bias_stays_in_float32(made: Callable[[str], Headed]) -> None:
    """As transformers keeps the target's: rounded, it would choose other experts."""
    target = load(str(made("deepseek").folder), dtype=torch.bfloat16)
    draft = load_draft(f"{made('deepseek').folder}{PART}", target).model
    gate = draft.block.mlp.gate
    assert (gate.e_score_correction_bias.dtype, gate.weight.dtype) == (torch.float32, torch.bfloat16)
    want = made("deepseek").longer.model.layers[LAYERS].mlp.gate.e_score_correction_bias
    assert torch.equal(gate.e_score_correction_bias, want.float())


@pytest.mark.parametrize(
    ("model", "stored", "ours"),
    [
        ("deepseek_v3", "model.layers.61.eh_proj.weight", "join.weight"),
        ("deepseek_v3", "model.layers.61.shared_head.head.weight", "lm_head.weight"),
        ("deepseek_v3", "model.layers.62.enorm.weight", None),
        ("deepseek_v3", "model.layers.61.self_attn.rotary_emb.inv_freq", None),
        ("mimo", "model.mtp_layers.0.token_layernorm.weight", "token_norm.weight"),
        ("mimo", "model.mtp_layers.0.input_layernorm.weight", "block.input_layernorm.weight"),
        ("hy_v3", "model.layers.61.final_layernorm.weight", "last_norm.weight"),
        ("hy_v3", "model.layers.61.mlp.router.gate.weight", "block.mlp.gate.weight"),
        ("qwen3_next", "mtp.pre_fc_norm_hidden.weight", "feature_norm.weight"),
        ("qwen3_5_text", "mtp.layers.0.self_attn.q_norm.weight", "block.self_attn.q_norm.weight"),
        ("exaone_moe", "mtp.norm.weight", "last_norm.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.up_proj.weight", "block.mlp.up_proj.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight", "join.weight"),
        ("longcat_flash", "model.mtp.layers.0.transformer_layer.mlp.up_proj.weight", "block.mlp.up_proj.weight"),
        ("longcat_flash", "model.mtp.layers.0.self_attn.q_a_proj.weight", "block.self_attn.q_a_proj.weight"),
    ],
)
def test_tensors_have_the_published_names(model: str, stored: str, ours: str | None) -> None:
    raw = {"model_type": model, "hidden_size": 64, "vocab_size": 40}
    config = recognise(raw | {LAYOUTS[model].layers: 61, LAYOUTS[model].counted_by: 1}, "mtp")
    assert isinstance(config, MtpConfig)
    assert config.taps == (61,)
    assert config.rename(stored) == ours


@pytest.mark.parametrize(
    ("model", "stored", "ours"),
    [
        ("deepseek_v3", "model.layers.62.enorm.weight", "layers.1.token_norm.weight"),
        ("mimo", "model.mtp_layers.1.input_layernorm.weight", "layers.1.block.input_layernorm.weight"),
        ("qwen3_5_text", "mtp.layers.1.mlp.up_proj.weight", "layers.1.block.mlp.up_proj.weight"),
        ("qwen3_5_text", "mtp.fc.weight", "layers.0.join.weight"),
        ("ernie4_5_moe", "model.mtp_linear_proj.1.weight", "layers.1.join.weight"),
        ("longcat_flash", "model.mtp.layers.1.hnorm.m.weight", "layers.1.feature_norm.weight"),
    ],
)
def test_tensors_of_two_layers_have_the_published_names(model: str, stored: str, ours: str | None) -> None:
    raw = {"model_type": model, "hidden_size": 64, "vocab_size": 40}
    config = recognise(raw | {LAYOUTS[model].layers: 61, LAYOUTS[model].counted_by: 2}, "mtp")
    assert isinstance(config, MtpConfig)
    assert config.rename(stored) == ours


def test_a_layer_is_of_another_kind_than_the_targets_layers(made: Callable[[str], Headed]) -> None:
    """No experts in ERNIE's and EXAONE's; and no recurrence in Qwen's, whose targets are refused for theirs."""
    for family in ("ernie", "exaone"):
        names = [name for name, _ in made(family).runners()["#mtp"].model.named_parameters()]
        assert "block.mlp.up_proj.weight" in names
    folder = made("qwen").folder
    change_config(folder, layer_types=["linear_attention", "full_attention", "full_attention"])
    with pytest.raises(UserError, match=r"layers of type linear_attention, which cannot undo a rejected token"):
        plan(folder)


# --- How a plan names it ------------------------------------------------------------------------------------------


def test_an_arm_reads_the_layers_of_its_own_target(made: Callable[[str], Headed]) -> None:
    """Whatever role the target has; the cell says where they lie."""
    paths = {role: str(made(family).folder) for role, family in (("ar", "glm"), ("other", "mimo"))}
    planned = plan(
        Path(paths["ar"]), "mtp:on=other|ar", model=None, family="tiny", checkpoint=paths, suite=["synthetic"]
    )
    found = {cell.on: cell for cell in planned.cells if cell.method == "mtp"}
    for role, path in paths.items():
        assert found[role].checkpoints == {role: path, PART: path + PART}
    assert found["ar"].arm == "mtp@ar/graph"


def test_a_whole_cell_runs_and_is_described(made: Callable[[str], Headed]) -> None:
    """Loaded, decoded, described and counted by its name in the plan."""
    planned, path = plan(made("mimo").folder, "mtp:ahead=2"), str(made("mimo").folder)
    pool = ModelPool(planned.request)
    pool.load(planned.cells)
    want, got = (pool.decode(cell, requests_for(PROMPTS, 8))[0] for cell in planned.cells[:2])
    assert [g.token_ids for g in got] == [g.token_ids for g in want]
    assert pool.describe()["layers"][path + PART] == "mtbench's, multi-token prediction as in MiMo"
    shapes = probe.described(None, None, pool.checkpoints)["shapes"]
    assert shapes[path + PART]["layers"] == 1
    assert shapes[path + PART]["body"] < shapes[path]["body"]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("/data/model#mtp", ("/data/model", "mtp")),
        ("/data#1/model", ("/data#1/model", "")),
        ("/data#1/model#mtp", ("/data#1/model", "mtp")),
        ("#mtp", ("#mtp", "")),
    ],
)
def test_a_part_is_a_word_after_the_last_sign(source: str, parts: tuple[str, str]) -> None:
    assert split_part(source) == parts
    assert locate(source) == parts[0]


# --- What is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_nextn_predict_layers": None},
            r"num_nextn_predict_layers is 0, not a number of layers .*Give another checkpoint",
        ),
        (
            {"model_type": "qwen2"},
            r"no 'mtp' layers of a known format in .*/X' \(qwen2; found: num_nextn_predict_layers, "
            r"model\.mtp_layers\.0\.final_layernorm\.weight, .* …\); known: deepseek_v3, .*, qwen3_next; name a",
        ),
        ({"mtp_layer_types": ["x"]}, r"mtp_layer_types is \['x'\], not full_attention or sliding_attention for each"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"its weights are quantized"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, r"cannot undo a rejected token"),
    ],
)
def test_a_target_without_layers_is_refused_by_name(mimo: Path, changes: dict[str, Any], said: str) -> None:
    change_config(mimo, **changes)
    with pytest.raises(UserError, match=said) as error:
        plan(mimo)
    assert "\n" not in str(error.value)


# Other formats, as vLLM reads them: model type, entry of config.json that counts layers, and the name of a tensor.
UNREAD = [
    ("glm5_next", "text_config:num_nextn_predict_layers", "model.language_model.layers.32.eh_proj.weight"),
    ("mimo_v2_flash", None, "model.mtp.layers.0.eh_proj.weight"),
]


@pytest.mark.parametrize(("model", "entry", "tensor"), UNREAD)
def test_an_unknown_format_is_named_with_what_was_found_and_what_is_read(
    model: str, entry: str | None, tensor: str, tmp_path: Path
) -> None:
    """In one line, whatever the library says of the target."""
    where, _, name = (entry or "").rpartition(":")
    told = {"num_hidden_layers": 32, **({name: 1} if name else {})}
    config = {"model_type": model, **({where: told} if where else told)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({tensor: torch.zeros(1), "model.layers.3.mlp.up_proj.weight": torch.zeros(1)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError) as error:
        draft_config(f"{tmp_path}{PART}", offline=True)
    found = ", ".join(filter(None, (name, tensor)))
    assert f"({model}; found: {found}); known: deepseek_v3, " in str(error.value)
    assert "\n" not in str(error.value)
    small_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        plan(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "how", "said"),
    [
        ("mtp:draft=draft", {"model": None, "family": "tiny"}, r"'draft' is a whole model .*token by token"),
        ("mtp", {"model": None, "weights": "random:qwen2.5-0.5b"}, r"'random:qwen2.5-0.5b' are random weights.*#mtp"),
        ("mtp", {"model": None, "family": "tiny"}, r"no 'mtp' layers of a known format in .* \(qwen2\)"),
        ("ar:on=ar#mtp", {}, r"'mtp' is a part of .* that drafts, and a whole model is needed; leave out `#mtp`"),
    ],
)
def test_what_is_no_such_draft_is_refused(mimo: Path, method: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan(mimo, method, **how)
