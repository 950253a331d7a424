"""`mtbench import`: what it prints and writes of other tools' files, beside a run of ours, and its mistakes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import AR, MARS, Answer, MadeRun
from schemas import validator
from tool_files import TEXTS
from typer.testing import CliRunner, Result

from mtbench import records
from mtbench.cli import main
from mtbench.cli.session import err, out
from mtbench.errors import UserError
from mtbench.results.aggregate import assemble
from mtbench.results.figure_formats import AcceptanceFigures, DerivedAcceptance
from mtbench.results.format import ResultCell
from mtbench.results.imports.importer import OURS
from mtbench.runs.directory import RunDirectory


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in TEXTS}


def import_files(words: Sequence[Any], columns: int = 80) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out, "width", columns)
        patch.setattr(err, "width", columns)
        return CliRunner().invoke(main.app, ["import", *map(str, words)])


def test_figures_of_one_definition_share_a_row(files: dict[str, Path]) -> None:
    """Their tools are named; what only one tool has stands under its name. Tables fit in 80 characters."""
    shown = import_files([files["vllm"], files["aiperf"], files["guidellm"]]).stdout
    shared = shown.partition("Same definition\n")[2].partition("\nvLLM\n")[0].splitlines()
    assert shared[2].split() == ["vLLM:", "spec_decode_acceptance_length", "=", "aiperf:", "tokens", "2.40", "2.40"]
    assert max(map(len, shown.splitlines())) <= 80
    own = shown.partition("\nguidellm\n")[2].splitlines()
    assert own[2].split() == ["request_totals.successful", "requests", "6"]
    assert "mtbench forms no ratio and no verdict with them." in " ".join(shown.split())


@pytest.mark.parametrize("target", ["-", "file"])
def test_the_json_is_as_its_schema_says(files: dict[str, Path], tmp_path: Path, target: str) -> None:
    """On standard output it stands alone; the tables go to standard error."""
    where = "-" if target == "-" else tmp_path / "imported.json"
    result = import_files([*files.values(), "--json", where])
    document = json.loads(result.stdout if target == "-" else Path(where).read_text())
    validator("imported").validate(document)
    assert {entry["file"] for entry in document["results"]} == set(map(str, files.values()))
    assert "Same definition" in (result.stderr if target == "-" else result.stdout)


def test_a_directory_gets_json_and_markdown(files: dict[str, Path], tmp_path: Path) -> None:
    """Markdown shows a stranger's text as it is."""
    files["vllm"].write_text(TEXTS["vllm"].replace('"Qwen/Qwen3-8B"', '"<b>a|b</b>\\u001b[2J"', 1))
    assert import_files([files["vllm"], "--out", tmp_path / "out"]).exit_code == 0
    page = (tmp_path / "out" / "imported.md").read_text()
    assert "| spec\\_decode\\_acceptance\\_length | tokens | 2.40 |" in page
    assert "&lt;b>a\\|b&lt;/b>" in page
    assert "\x1b" not in page
    validator("imported").validate(json.loads((tmp_path / "out" / "imported.json").read_text()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run: one arm decodes two tokens per forward, the other one."""
    two, one = ([Answer([5] * 4, [size] * (4 // size)) for _ in range(8)] for size in (2, 1))
    run = RunDirectory.open(MadeRun({AR: two, MARS: one}).write(tmp_path / "run"))
    run.write_json("results.json", records.dump(assemble(run)))
    return run.path


def test_a_run_stands_beside_where_the_definition_is_the_same(files: dict[str, Path], run: Path) -> None:
    """Our acceptance stands in the row of vLLM's; no latency of ours does."""
    result = import_files([files["vllm"], files["guidellm"], "--beside", run, "--json", "-"])
    document = json.loads(result.stdout)
    validator("imported").validate(document)
    first, second = document["beside"]
    assert (first["cell"], second["cell"]) == (AR, MARS)
    ours = {figure["name"]: figure["value"] for figure in first["figures"]}
    assert ours["acceptance.derived.vllm"] == 2.0
    assert not ours.keys() - {"acceptance.derived.vllm", "acceptance.rate"}
    row = next(line for line in result.stderr.splitlines() if line.startswith("spec_decode_acceptance_length"))
    assert row.split()[2:] == ["2.40", "2.00", "1.00"]


def test_every_figure_that_is_called_ours_exists() -> None:
    """A renamed field of results.json does not become a missing value. Shares become percent by their scale."""
    for meaning in OURS.values():
        field, _, rest = str(meaning.ours).partition(".")
        assert field in ResultCell.model_fields
        known = {*AcceptanceFigures.model_fields, *(f"derived.{name}" for name in DerivedAcceptance.model_fields)}
        assert rest in known
        assert meaning.scale == (100.0 if meaning.unit == "percent" else 1.0)


def test_mistakes_are_one_line(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    for words, line in (
        ([tmp_path / "other"], "no known format; mtbench imports vLLM"),
        ([files["vllm"], files["vllm"]], "is the same file as"),
        ([files["vllm"], "--beside", tmp_path], "holds no plan.json"),
    ):
        result = import_files(words)
        assert isinstance(result.exception, UserError), result.output
        assert line in str(result.exception)
        assert "\n" not in str(result.exception)
