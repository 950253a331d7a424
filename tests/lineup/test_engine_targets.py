"""Targets that an engine serves and mtbench's own loop does not: planned there, refused here."""

from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, MODELS, SHAPE, save_architecture
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

from mtbench.cli.main import app
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.lineup.planner import make_plan
from mtbench.models.configuration import refuse_unserved
from mtbench.models.families import EMBEDDED, locate
from mtbench.plan.plan import Plan, RunRequest

REFUSED = {  # by mtbench's own loop
    "qwen3_next": "layers of type linear_attention, which cannot undo a rejected token",
    "qwen3_5_text": "layers of type linear_attention, which cannot undo a rejected token",
    "granitemoehybrid": "layers of type linear_attention, which cannot undo a rejected token",
    "lfm2": "layers of type conv, which cannot undo a rejected token",
    "int8": "has no usable quantised weights: compressed-tensors",
    "gptq": "has no usable quantised weights: Loading a GPTQ",
}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM counts as installed; it is not started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(SERVING_ENGINES["vllm"], "python", classmethod(lambda cls: Path("python")))


def plan(folder: Path, engine: str) -> Plan:
    asked: dict[str, Any] = {"suite": ["arithmetic"], "limit": 2, "batch_size": [1], "rounds": 1}
    return make_plan(RunRequest(**asked, model=str(folder), engine=[engine], method=["ar", "prompt-lookup"]))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_target_of_vllm_is_planned_there(name: str, tmp_path: Path) -> None:
    folder = save_architecture(tmp_path / name, name)
    assert [(cell.arm, cell.fault, cell.flags) for cell in plan(folder, "vllm").cells] == [
        ("ar@ar/vllm", None, []),
        ("prompt-lookup@ar/vllm", None, []),
    ]
    if name in REFUSED:
        with pytest.raises(UserError, match=REFUSED[name]):
            plan(folder, "graph")


def test_a_model_that_reads_images_is_planned_by_its_text_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_5", text_config=SHAPE | MODELS["qwen3_5_text"])
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(locate(f"{EMBEDDED}ar")).save_pretrained(tmp_path)
    assert [cell.fault for cell in plan(tmp_path, "vllm").cells] == [None, None]
    with pytest.raises(UserError, match=r"\(qwen3_5\) reads more than text, .* checkpoint of its text model alone"):
        refuse_unserved(config, "folder")
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "' + "1 + 1 = " * 400 + '"}\n')
    with pytest.raises(UserError, match=r"do not fit the context of .* \(1024\)"):
        make_plan(RunRequest(suite=[f"prompts:{prompts}"], model=str(tmp_path), engine=["vllm"], method=["ar"]))


def test_a_race_on_a_configuration_alone_says_what_would_be_run(tmp_path: Path) -> None:
    """Of a hybrid of 80 billion parameters. Without weights no time is measured."""
    AutoConfig.for_model("qwen3_next").save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(locate(f"{EMBEDDED}ar")).save_pretrained(tmp_path)
    words = ["choose", "--engine", "vllm", "--model", str(tmp_path), "--suite", "arithmetic", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--method", "prompt-lookup", "--limit", "64", "--batch-size", "1,8"])
    assert result.exit_code == 0, result.exception
    assert "prompt-lookup@ar/vllm" in result.stdout
    said = " ".join(result.stdout.split())
    takes = "4 server starts take about 5 min (a guess: none was measured here); at most "
    blocks = "32 blocks, and a decision needs 6 at each batch size"
    assert f"{takes}{blocks}; how long a block takes is not known: checkpoint '{tmp_path}' has no weights" in said
