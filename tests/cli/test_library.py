"""The library: `import mtbench` gives everything, `mtbench.run` does what the command does."""

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import mtbench
from mtbench.cli import main
from mtbench.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that examples/library.py makes."""
    out = tmp_path_factory.mktemp("library") / "run"
    spec = importlib.util.spec_from_file_location("library", ROOT / "examples" / "library.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.warns(UserWarning, match="1 of 6 blocks; 6 take"):
        module.main(str(out))
    return out


def test_every_public_name_is_there() -> None:
    """Each name of `__all__` is imported when it is used, and is listed by `dir`."""
    for name in mtbench.__all__:
        assert getattr(mtbench, name) is not None
    assert set(mtbench.__all__) <= set(dir(mtbench))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mtbench.nothing


def test_a_frame_has_one_row_per_cell(example: Path) -> None:
    """Its figures are those of results.json."""
    results = mtbench.read(example)
    frame = results.to_frame()
    cells = json.loads((example / "results.json").read_text())["cells"]
    assert results.record["cells"] == cells
    assert list(frame["arm"]) == [cell["arm"] for cell in cells]
    assert list(frame["accuracy.value"]) == [cell["accuracy"]["value"] for cell in cells]
    assert list(frame["speedup.baseline"].dropna()) == ["ar@mars/graph"] * 2
    assert list(frame["speedup.value"].dropna()) == [cell["speedup"][0]["value"] for cell in cells[1:]]
    assert list(frame["speedup.verdict.reason.text"].dropna()) == ["1 of 6 blocks"] * 2
    assert list(frame["options"]) == [cell["options"] for cell in cells]
    assert (example / "report.html").is_file()


def test_items_have_one_row_per_item_and_arm(example: Path) -> None:
    """Sums over items are the figures of the cells."""
    results = mtbench.read(example)
    items = results.items()
    assert len(items) == 3 * 8
    assert not items.duplicated(["cell", "item"]).any()
    by_cell = items.groupby("cell")
    frame = results.to_frame().set_index("cell")
    pd.testing.assert_series_equal(by_cell["tokens"].sum(), frame["tokens"].sort_index(), check_names=False)
    pd.testing.assert_series_equal(by_cell["score"].mean(), frame["accuracy.value"].sort_index(), check_names=False)


def test_a_finished_run_is_resumed_without_work(example: Path) -> None:
    """The results are the same; an option that disagrees with the plan is refused."""
    before = (example / "results.json").read_text()
    assert mtbench.run(out=example, resume=True).record == json.loads(before)
    with pytest.raises(UserError, match=r"has limit=8, not 9; go on with `mtbench run -o .* --resume`"):
        mtbench.run(out=example, resume=True, limit=9)
    with pytest.raises(UserError, match="is never overwritten"):
        mtbench.run(out=example)


@pytest.mark.parametrize("name", ["run", "choose", "gate", "load", "reproduce"])
def test_arguments_are_the_options_of_the_command(name: str) -> None:
    """`help(mtbench.run)` shows them with their defaults. `progress` is the library's own."""
    shown = inspect.signature(getattr(mtbench, name)).parameters.keys() - {"progress"}
    command = {parameter.opts[-1].removeprefix("--").replace("-", "_") for parameter in main.load(name).params}
    assert shown == command - {"json", "dry_run", "fail_on", "help"}
    assert inspect.signature(mtbench.run).parameters["batch_size"].default == (1, 8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"metod": "ar"}, "unknown option of mtbench.run 'metod' (did you mean 'method'?)"),
        ({"batch_size": 0}, "--batch-size 0 is not allowed"),
        ({"resume": True}, "--resume needs the directory"),
    ],
)
def test_a_mistake_is_a_user_error(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Nothing is written."""
    out = None if "resume" in options else tmp_path / "run"
    with pytest.raises(UserError) as error:
        mtbench.run(out=out, **options)
    assert reason in str(error.value)
    assert not list(tmp_path.iterdir())
