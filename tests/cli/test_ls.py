"""`mtbench ls`: one line for each method, suite and family at 80 columns; with a name, its details."""

from pathlib import Path
from typing import Any

import pytest
from architectures import save_architecture
from typer.testing import CliRunner

from mtbench.cli import ls
from mtbench.decoding.registry import METHODS
from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import FAMILIES
from mtbench.options.fields import fields_of
from mtbench.options.texts import shown

WIDTH = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ls, "out", Terminal(width=WIDTH))
    monkeypatch.setattr("mtbench.cli.session.out", Terminal(width=WIDTH))


def listed(*words: str) -> str:
    result = CliRunner().invoke(ls.app, list(words))
    assert result.exception is None, result.exc_info
    return result.stdout


@pytest.mark.parametrize(
    ("kind", "names"),
    [("methods", METHODS), ("suites", SUITES), ("families", FAMILIES)],
    ids=["methods", "suites", "f"],
)
def test_a_list_has_one_line_for_each_name(kind: str, names: Any) -> None:
    """No line is wider than the terminal."""
    head, *rest = listed(kind).splitlines()
    lines = rest[: rest.index("")]
    assert [line.split()[0] for line in lines] == list(names)
    assert max(map(len, [head, *rest])) <= WIDTH


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_described_with_every_option(name: str) -> None:
    """Each option has its default and its help."""
    words = " ".join(listed("methods", name).split())
    for option, field in fields_of(METHODS[name]).items():
        assert f" {option} {shown(field.default)} " in words
    assert "claims" in words


def test_arms_in_engines_are_listed_with_the_reasons_of_the_others(tmp_path: Path) -> None:
    """Of a configuration alone, in an engine that is not installed, too; an engine that serves none says why."""
    folder = save_architecture(tmp_path / "model", "qwen3_next")
    (folder / "model.safetensors").unlink()
    text = " ".join(listed("arms", "--model", str(folder), "--engine", "sglang").split())
    assert text.startswith("SGLang (no package) Can be raced arm ar@ar/sglang mtp@ar/sglang")
    assert "prompt-lookup SGLang does not have it" in text
    error = CliRunner().invoke(ls.app, ["arms", "--model", str(folder), "--engine", "llamacpp"]).exception
    assert "a qwen3_next model; it knows llama, qwen2, qwen3. Else give a GGUF file" in str(error)


@pytest.mark.parametrize("name", list(SUITES))
def test_a_suite_is_described_with_its_subtasks(name: str) -> None:
    """Its token limit, its metric and its subtasks are there; no data is read."""
    words = " ".join(listed("suites", name).split())
    assert f"at most {SUITES[name].max_new_tokens}" in words
    assert SUITES[name].metric or "nothing: measures speed" in words
    assert all(subtask in words for subtask in SUITES[name].subtasks)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method"], "unknown listing 'method' (did you mean 'methods'?)"),
        (["methods", "marz"], "unknown method 'marz' (did you mean 'mars'?)"),
        (["families", "tyni"], "unknown family 'tyni' (did you mean 'tiny'?)"),
    ],
)
def test_an_unknown_name_is_refused(words: list[str], reason: str) -> None:
    """With the nearest name."""
    error = CliRunner().invoke(ls.app, words).exception
    assert isinstance(error, UserError)
    assert reason in str(error)
