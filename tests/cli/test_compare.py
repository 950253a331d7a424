"""`mtbench compare`: what it prints of two and three runs, what it writes as JSON, and one line for every mistake."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_runs import AR, MARS, TASK, MadeRun, answer, hidden
from schemas import validator
from typer.testing import CliRunner, Result

from mtbench.cli import main
from mtbench.cli.session import err, out
from mtbench.errors import UserError

ANSWERS = [answer("a" * (n + 2), 2, float(n % 3 > 0)) for n in range(14)]
OTHERS = [answer("b" * (n + 2), 1, 1.0) for n in range(14)]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three runs: two cells; other tokens and another torch; one cell, without forwards, and another task version."""
    made = [
        MadeRun({AR: ANSWERS, MARS: ANSWERS}),
        MadeRun({AR: OTHERS, MARS: ANSWERS}, session={"packages": {"torch": "2.12.0"}}, wall_s=2.0),
        MadeRun({AR: [hidden("a" * (n + 2)) for n in range(9)]}, task=TASK | {"version": "2"}),
    ]
    return [run.write(tmp_path / name) for name, run in zip(("one", "two", "three"), made, strict=True)]


def compare(words: Sequence[Any], columns: int = 80) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out, "width", columns)
        patch.setattr(err, "width", columns)
        return CliRunner().invoke(main.app, ["compare", *map(str, words)])


def mistake(*words: Any) -> str:
    """The one line that the command line prints for it."""
    result = compare(words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def row(shown: str, name: str) -> list[str]:
    """The values of the first row with this name."""
    return next(line for line in shown.splitlines() if line.startswith(name)).removeprefix(name).split()


def test_two_runs(runs: list[Path]) -> None:
    """All figures are there in a wide terminal; the last line says how to get a verdict on times."""
    shown = compare(runs[:2], columns=200).stdout
    assert "run 2: other torch: 2.13.0 → 2.12.0" in shown
    assert "arithmetic, batch size 2" in shown
    words = " ".join(row(shown, "ar@ar/graph"))
    assert re.fullmatch(
        r"14 of 14 64\.3 → 100\.0 \[.*?\] 4\.25 → 8\.50 \[2\.00, 2\.00\] 4\.25 → 8\.50 8\.5 → 8\.5 17 → 8", words
    ), words
    assert row(shown, "ar@mars/graph")[:3] == ["0", "of", "14"]
    assert not re.search("faster|slower|speedup", shown)
    assert "tokens/s: each run's own items in its own session" in shown
    assert shown.splitlines()[-1] == "For a verdict on speed: `mtbench gate --base ENV --head ENV`"


def test_three_runs_are_each_compared_with_the_first(runs: list[Path]) -> None:
    """Rows name the run; what is not compared has its reason, and cells of one run are named."""
    shown = compare(runs, columns=200).stdout
    assert row(shown, "ar@ar/graph, run 2")[0] == "14"
    assert row(shown, "ar@ar/graph, run 3")
    assert "run 3: accuracy not compared: other version of the task: version 1, 2" in shown
    assert f"only in run 1, not in run 3: {MARS}" in shown
    assert "not in run 2" not in shown


def test_a_cell_that_is_not_compared_has_its_reason(tmp_path: Path) -> None:
    """It has no figures."""
    paths = [
        MadeRun({AR: ANSWERS[:2], MARS: ANSWERS[:2]}, prompts=[[1, last], [1, 3]]).write(tmp_path / str(last))
        for last in (2, 4)
    ]
    shown = compare(paths).stdout
    assert "all arms: run 2: not compared: other prompts in 1 of 2 common items" in shown
    assert "accuracy, %" not in shown


@pytest.mark.parametrize("target", ["-", "file"])
def test_the_json_is_as_its_schema_says(runs: list[Path], tmp_path: Path, target: str) -> None:
    """On standard output it stands alone; the tables go to standard error."""
    where = "-" if target == "-" else tmp_path / "comparison.json"
    result = compare([*runs, "--json", where])
    written = result.stdout if target == "-" else Path(where).read_text()
    document = json.loads(written)
    validator("comparison").validate(document)
    assert [run["directory"] for run in document["runs"]] == [*map(str, runs)]
    cells = document["comparisons"][0]["cells"]
    assert [cell["cell"] for cell in cells] == [AR, MARS]
    assert cells[0]["figures"]["tokens_per_forward"]["value"] == pytest.approx(2)
    assert [cells[0]["figures"][run]["tokens_per_s"] for run in ("base", "head")] == [17.0, 8.5]
    shown = result.stderr if target == "-" else result.stdout
    assert "arithmetic, batch size 2" in shown


def test_mistakes_cost_one_line(runs: list[Path], tmp_path: Path) -> None:
    """Each names what is wrong and what to do."""
    one, two, _ = runs
    assert mistake(one).endswith("give two or more: `mtbench compare RUN RUN`.")
    again = one.parent / "two" / ".." / "one"
    assert mistake(one, two, again) == f"'{again}' is the same directory as '{one}'; give two different runs."
    assert "is no run directory: it holds no plan.json" in mistake(one, one.parent)
    assert "is no directory" in mistake(one, tmp_path / "nothing")
    assert mistake(one, two, "--json", tmp_path).startswith(f"'{tmp_path}' exists and is never overwritten")


def test_an_unfinished_run_is_refused(runs: list[Path]) -> None:
    """It has fewer blocks than its plan; a failed cell is finished."""
    timings = runs[1] / f"timings/{AR}.jsonl"
    timings.write_text("".join(timings.read_text().splitlines(keepends=True)[:-1]))
    assert mistake(*runs) == (
        f"'{runs[1]}' is not finished: blocks are missing in 1 of 2 cells, for example {AR}; finish it with "
        f"`mtbench run -o {runs[1]} --resume`."
    )
    (runs[1] / "failures.jsonl").write_text(json.dumps({"cell": AR, "error": "no memory"}) + "\n")
    assert f"not compared: failed in {runs[1]}: no memory" in compare(runs, columns=300).stdout


def test_runs_without_a_common_cell_are_refused(runs: list[Path], tmp_path: Path) -> None:
    other = MadeRun({MARS: ANSWERS}).write(tmp_path / "other")
    assert f"have no cell in common; for example, they have {AR} and {MARS}." in mistake(runs[2], other)


def test_names_that_cannot_be(runs: list[Path], tmp_path: Path) -> None:
    """Too long, or a link to itself."""
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x" * 300, tmp_path / "loop"):
        assert "is no directory" in mistake(runs[0], name)
