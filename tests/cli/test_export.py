"""`mtbench export`, and what a serving engine gets of a draft that it cannot load as it is."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig
from typer.testing import CliRunner

from mtbench.cli.export import app
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.models.families import EMBEDDED, TINY
from mtbench.models.loading import inspect

MARS = EMBEDDED + "draft_mars"


def test_a_mars_model_gets_its_mask_token_for_vllm(tmp_path: Path) -> None:
    """The weights are copied, so that the folder is whole on another machine."""
    out = tmp_path / "out"
    assert CliRunner().invoke(app, [MARS, "--for", "vllm", "--out", str(out)]).output.strip() == str(out)
    assert AutoConfig.from_pretrained(out).pard_token == inspect(MARS).mask_id
    weights = out / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (TINY / "draft_mars" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists and is never overwritten"):
        app([MARS, "--for", "vllm", "--out", str(out)], standalone_mode=False)


def test_an_eagle_draft_gets_vllms_names(tmp_path: Path) -> None:
    """Its taps are the layers whose input is read."""
    out = tmp_path / "out"
    CliRunner().invoke(app, [EMBEDDED + "eagle", "--for", "vllm", "--out", str(out)])
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (TINY / "eagle", out))
    assert {name.replace("layers.0.", "layer."): weight.sum() for name, weight in theirs.items()} == {
        name: weight.sum() for name, weight in ours.items()
    }
    assert "layers.0.self_attn.q_proj.weight" in theirs


@pytest.mark.parametrize("name", ["speculative", "mars-speculative"])
def test_vllm_gets_a_draft_that_feeds_masks_as_a_linked_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written once. A draft of one token a forward is served from its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = SERVING_ENGINES["vllm"]()

    def served(per_forward: int) -> Path:
        method = METHODS[name](ahead=3, per_forward=per_forward)
        checkpoints = {"ar": EMBEDDED + "ar", "draft": MARS}
        model, setting = engine.prepared_arm(method, checkpoints, "ar", "float32", offline=True)
        assert model == str(TINY / "ar")
        config = json.loads(setting.words[1])
        assert config.get("parallel_drafting", False) == (per_forward > 1)
        return Path(config["model"])

    folder = served(3)
    assert folder.is_relative_to(tmp_path)
    assert json.loads((folder / "config.json").read_text())["pard_token"] == inspect(MARS).mask_id
    assert (folder / "model.safetensors").resolve() == (TINY / "draft_mars" / "model.safetensors").resolve()
    assert served(3) == folder
    assert served(1) == TINY / "draft_mars"


def test_medusa_heads_become_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's names, and nothing of the target, which is served without them: vLLM loads every file of weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = TINY / "medusa"
    method, engine = METHODS["medusa"](heads=3), SERVING_ENGINES["vllm"]()
    model, setting = engine.prepared_arm(method, {"mine": EMBEDDED + "medusa"}, "mine", "float32", offline=True)
    config = json.loads(setting.words[1])
    folder = Path(config.pop("model"))
    assert config == {"method": "medusa", "num_speculative_tokens": 3}
    served = sorted(file.name for file in Path(model).iterdir())
    assert served == sorted(file.name for file in target.iterdir() if file.name != "medusa.safetensors")
    assert (Path(model) / "model.safetensors").resolve() == (target / "model.safetensors").resolve()
    assert engine.prepared_arm(METHODS["ar"](), {"mine": str(target)}, "mine", "float32", offline=True)[0] == model
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    sizes = {"hidden_size": 128, "vocab_size": 512, "num_heads": 4, "num_hidden_layers": 1}
    kind = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
    assert json.loads((folder / "config.json").read_text()) == kind | sizes
    ours, theirs = load_file(target / "medusa.safetensors"), load_file(folder / "model.safetensors")
    assert len(theirs) == len(ours) == 12
    for k in range(4):
        assert theirs[f"blocks.{k}.layers.0.weight"].equal(ours[f"{k}.hidden.weight"])
        assert theirs[f"blocks.{k}.layers.0.bias"].equal(ours[f"{k}.hidden.bias"])
        assert theirs[f"lm_heads.{k}.weight"].equal(ours[f"{k}.head"])
