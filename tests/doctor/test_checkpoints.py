"""`mtbench doctor`: which code would decode a checkpoint here, and why by no faster one."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from interpreted import definition, use_definitions
from safetensors.torch import load_file, save_file
from small import save_small, small_tokenizer
from transformers import BloomConfig, GPT2Config, GPT2LMHeadModel, HeliumConfig
from typer.testing import CliRunner

from mtbench import kernels
from mtbench.cli import main
from mtbench.doctor import checks
from mtbench.doctor.checks import Subject, all_checks
from mtbench.errors import UserError

[CHECK] = [check for check in all_checks() if check.name == "checkpoints"]


def found(*models: str) -> tuple[str, str, dict[str, Any]]:
    """Return state and text, and what is said of the only checkpoint."""
    figures, (state, text, _) = CHECK.result(Subject("cpu", models=models))
    [one, *_] = figures["found"].values()
    return state, text, one


def test_an_embedded_checkpoint_is_decoded_by_mtbenchs_decoder() -> None:
    """On a CPU PyTorch's operations are no fall-back."""
    assert found() == (
        "pass",
        "embedded:tiny/ar: mtbench's decoder in float32",
        {"code": "mtbench's decoder", "dtype": "float32", "why": None},
    )


def test_kernels_that_run_or_fail_their_check_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU; afterwards they are as before, so that one checkpoint says nothing of the next."""
    monkeypatch.setattr(kernels, "_off", [])
    use_definitions(monkeypatch)
    folder = str(save_small(tmp_path / "small"))
    assert found(folder)[2]["code"] == "mtbench's decoder and kernels"
    use_definitions(monkeypatch, swiglu=lambda both: 1.1 * definition("swiglu")(both))
    state, text, one = found(folder)
    assert (state, one["code"]) == ("warn", "mtbench's decoder")
    assert "(logits are wrong by" in text
    assert kernels.off() is None


def test_other_layers_are_told_with_the_reason(tmp_path: Path) -> None:
    """And a draft that reads another model's hidden states, and what cannot be loaded."""
    folder = save_small(tmp_path / "helium", config=HeliumConfig, head_dim=8, num_hidden_layers=6)
    state, text, one = found(str(folder))
    assert (state, one["code"]) == ("warn", "transformers' modules")
    assert one["why"].startswith("its layers compute something else")
    assert one["why"] in text
    state, _, one = found("embedded:tiny/eagle")
    assert (state, one["code"]) == ("pass", "mtbench's modules of EAGLE-3, DeepSpec's format")
    state, text, one = found("./nowhere")
    assert (state, one["code"]) == ("fail", None)
    assert "./nowhere: nothing (checkpoint" in text
    assert "does not exist" in text


def test_what_a_plan_refuses_or_what_does_not_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The refusal is that of `mtbench run`, before weights are read: these are none. It names what is lacking."""
    bloom, gpt2 = tmp_path / "bloom", save_small(tmp_path / "gpt2", config=GPT2Config, n_embd=32, n_head=4)
    BloomConfig(vocab_size=40, hidden_size=32, n_head=4, n_layer=1).save_pretrained(bloom)
    small_tokenizer().save_pretrained(bloom)
    (bloom / "model.safetensors").write_text("no weights")
    said = f"checkpoint '{bloom}' (bloom) cannot be decoded exactly: its attention does not use transformers' attention"
    assert found(str(bloom))[0] == "fail"
    assert said in found(str(bloom))[1]
    started_at = time.monotonic()
    done = CliRunner().invoke(main.app, ["run", "--model", str(bloom), "--method", "ar", "-o", str(tmp_path / "run")])
    assert time.monotonic() - started_at < 2
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith(said)
    assert "loading" not in done.output
    assert found(str(gpt2))[:1] == ("warn",)
    monkeypatch.setattr(GPT2LMHeadModel, "forward", lambda *_, **__: 1 / 0)
    state, text, one = found(str(gpt2))
    assert (state, one["code"]) == ("fail", None)
    assert "transformers' modules of 'gpt2' do not run (ZeroDivisionError: division by zero)" in text


def test_the_command_takes_several_and_writes_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "all_checks", lambda: [CHECK])
    file = tmp_path / "found.json"
    words = ["--model", "embedded:tiny/ar", "--model", "random:qwen2.5-x", "--device", "cpu", "--json", str(file)]
    done = CliRunner().invoke(main.app, ["doctor", *words])
    assert done.exit_code == 1
    [written] = json.loads(file.read_text())["checks"]
    told = written["figures"]["found"]
    assert list(told) == ["embedded:tiny/ar", "random:qwen2.5-x"]
    assert told["random:qwen2.5-x"]["code"] is None
    assert "✗  checkpoints" in done.stdout


def test_a_checkpoint_whose_logits_are_not_numbers_fails(tmp_path: Path) -> None:
    """Its weights are finite; a product of them exceeds float32."""
    folder = save_small(tmp_path / "small")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(1e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    state, text, one = found(str(folder))
    assert (state, one["code"]) == ("fail", None)
    assert "nothing (the target's logits at token 1 of item 0 are not numbers (NaN or +inf) in float32" in text
