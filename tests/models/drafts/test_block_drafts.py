"""Block drafts as modules: logits and cache against plain Python, how each format is read, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import BLOCK, CONFIGS, DSPARK, random_tensors, save_draft
from small import MASK, save_small

from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.hardware import probe
from mtbench.lineup.planner import make_plan
from mtbench.models.drafts.block_formats import recognise
from mtbench.models.drafts.dflash import BlockDraftConfig
from mtbench.models.drafts.loading import draft_config, inspect_draft, load_draft
from mtbench.models.loading import Checkpoint, inspect, load
from mtbench.plan.plan import RunRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft of every format."""
    folder = tmp_path_factory.mktemp("formats")
    save_small(folder / "target")
    for kind, config in CONFIGS.items():
        save_draft(folder / kind, config, random_tensors(config))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Checkpoint:
    return load(str(folder / "target"), dtype=torch.float64)


def test_a_forward_reads_no_embedding_whole(folder: Path, target: Checkpoint) -> None:
    """Rows of an embedding are looked up; the LM head, here the target's, is read."""
    draft = load_draft(str(folder / "vanilla"), target).model
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    body = sum(sizes.values()) - sizes["markov_head.markov_w1.weight"]
    assert probe.count(draft).body == body
    assert draft.num_parameters() == body + target.model.lm_head.weight.numel()


def read(config: dict[str, Any], **changes: Any) -> BlockDraftConfig:
    found = recognise(config | changes, "")
    assert found is not None
    return found


def test_a_tap_is_the_output_of_the_layer_named() -> None:
    """In both formats layer 0's output is `hidden_states[1]`, and −1 the embedding; without a list they are spread."""
    assert read(CONFIGS["z-lab"]).taps == (1, 3)
    assert read(DSPARK, markov_head_type="rnn").taps == (0, 2)
    spread = {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": 36}
    assert read(CONFIGS["z-lab"], **spread, num_hidden_layers=5, layer_types=None).taps == (2, 10, 18, 26, 34)
    assert read(CONFIGS["z-lab"], **spread, num_hidden_layers=1, layer_types=None).taps == (19,)


def test_a_block_predicts_one_token_less_where_its_first_position_does_not() -> None:
    """z-lab's masks predict themselves; DeepSpec's positions predict the next one."""
    assert read(CONFIGS["z-lab"]).predicts == BLOCK - 1
    assert read(CONFIGS["dflash"]).predicts == BLOCK
    nested = {**CONFIGS["z-lab"]["dflash_config"], "block_size": 16}
    assert read(CONFIGS["z-lab"], dflash_config=nested).predicts == 15


NESTED = CONFIGS["z-lab"]["dflash_config"]
ZLAB_2 = CONFIGS["dflash2 flat"]
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "gemma's experts": (
        {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "enable_moe_block": True},
        "enable_moe_block is True, which is not supported",
    ),
    "mask too large": ({"mask_token_id": 40}, "mask_token_id is 40, not a whole number from 0 to 39"),
    "last tap": ({"target_layer_ids": [0, 2]}, "target_layer_ids has the target's last layer"),
    "head": (
        {"markov_head_type": "lstm", "markov_rank": 4},
        "markov_head_type is 'lstm'; supported: vanilla, gated, rnn",
    ),
    "confidence": (
        {"enable_confidence_head": True, "confidence_head_with_markov": True},
        "confidence head reads the Markov head, and markov_rank is 0",
    ),
    "window": ({"layer_types": ["sliding_attention"] * 2}, "sliding attention"),
    "domino": (
        {"architectures": [], "dflash_config": {**NESTED, "projector_type": "domino", "emb_dim": 7}},
        "gru_hidden_dim is None, not a whole number from 1 to",
    ),
    "window that is off": ({**ZLAB_2, "use_sliding_window": False}, "sliding_attention, which needs a sliding_window"),
    "group": ({**ZLAB_2, "conv_group_size": 5}, "conv_group_size is 5, which does not divide hidden_size, 32"),
    "unknown": ({**ZLAB_2, "dflash_config": {"use_swa": True}}, "dflash_config has 'use_swa', which is not supported"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_configuration_that_cannot_be_run_is_one_line(case: str, tmp_path: Path) -> None:
    """With the value and the next command."""
    changes, said = UNREADABLE[case]
    source = str(save_draft(tmp_path, CONFIGS["dflash"] | changes, {"fc.weight": torch.zeros(1)}))
    with pytest.raises(UserError) as error:
        draft_config(source)
    assert said in str(error.value)
    assert "ive another checkpoint" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_draft_of_another_target_is_refused(folder: Path, tmp_path: Path) -> None:
    changes = {"target_layer_ids": [0, 3], "num_target_layers": 9}
    source = save_draft(tmp_path, CONFIGS["dflash"] | changes, random_tensors(CONFIGS["dflash"]))
    with pytest.raises(UserError, match="it reads the output of layer 4, and the target has 3 layers"):
        inspect_draft(str(source), inspect(str(folder / "target")))


def test_a_weight_by_two_names_is_refused(folder: Path, tmp_path: Path) -> None:
    """A codebook is stored with or without `.weight`; with both, which one holds is not known."""
    name, tensors = "candidate_selector.successor_codebook", random_tensors(CONFIGS["dflash2"])
    source = save_draft(tmp_path, CONFIGS["dflash2"], {**tensors, name: torch.zeros(2, 2)})
    with pytest.raises(UserError, match="has a weight by two names; give another"):
        inspect_draft(str(source), inspect(str(folder / "target")))


# Refusals of the method, at planning, before a model is loaded.


@pytest.mark.parametrize(
    ("options", "draft", "said"),
    [
        ("ahead=6", "dflash", r"ahead=6, but draft .*DFlash of DeepSpec.* predicts 5 tokens .*use `ahead=5` or less"),
        ("ahead=6", "domino", r"Domino\) predicts 5 tokens in a block; use `ahead=5`"),
        ("ahead=4,confidence=0.5", "z-lab", r"confidence=0.5 needs a confidence head, and .* has none"),
        (
            "ahead=2,tree=4x2",
            "dflash2",
            r"tree=4x2 takes 4 choices at a depth, .*DFlash 2\) has 3 candidates; take fewer",
        ),
        ("tree=2x2,confidence=0.5", "vanilla", r"confidence=0.5 needs a chain, and tree=2x2 is none"),
        ("ahead=4", "target", r"is a whole model \(qwen2\), and a draft that drafts a block at once is needed"),
    ],
)
def test_what_cannot_draft_is_refused_by_name(folder: Path, options: str, draft: str, said: str) -> None:
    checkpoints = {"ar": str(folder / "target"), "dflash": str(folder / draft)}
    with pytest.raises(UserError, match=said):
        plan(checkpoints, f"dflash:{options}")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("draft", "served"), [("z-lab", True), ("vanilla", True), ("domino", False), ("jetspec", False)]
)
def test_an_engine_without_a_drafts_head_has_no_setting(folder: Path, engine: str, draft: str, served: bool) -> None:
    """It would draft without the head that the draft was trained with, or with another attention."""
    setting = SERVING_ENGINES[engine]().setting(METHODS["dflash"](), {"dflash": str(folder / draft)})
    assert isinstance(setting, str) != served


def test_a_draft_in_another_role_is_named(folder: Path) -> None:
    checkpoints = {"ar": str(folder / "target"), "dspark": str(folder / "vanilla")}
    made = plan(checkpoints, "dflash:draft=dspark,ahead=5,confidence=0.5")
    assert made.cells[-1].checkpoints == checkpoints


def plan(checkpoints: dict[str, str], *methods: str) -> Any:
    request = RunRequest(method=list(methods), checkpoint=checkpoints, suite=["arithmetic"], limit=2, device="cpu")
    return make_plan(request)
