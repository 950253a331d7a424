"""The options of a run: declared once, one for every field of a request, the same for `run` and `plan`."""

import inspect
from typing import Any

import pytest
from typer.testing import CliRunner

from mtbench.cli import main
from mtbench.cli.request_options import options, request_of
from mtbench.errors import UserError
from mtbench.runs.run_request import OPTIONS, RunRequest

DEFAULTS: dict[str, Any] = {name: p.default for name, p in inspect.signature(options).parameters.items()}


def test_every_field_of_a_request_has_its_option() -> None:
    """No field lacks an option, and no option lacks a field; a bundle sets several, a plugin none."""
    assert {name.replace("time_budget", "time_budget_s") for name in DEFAULTS} == {*OPTIONS, "bundle", "plugin"}


def test_without_options_a_request_has_its_own_defaults() -> None:
    """The command line and the library start from the same run. Only a command has a default limit."""
    request = RunRequest()
    for name in set(OPTIONS) - {"limit"}:
        value, default = getattr(request_of(DEFAULTS), name), getattr(request, name)
        assert (tuple(value) if isinstance(default, tuple) else value) == default, name


@pytest.mark.parametrize(
    ("text", "batch_size", "batching", "limit"),
    [
        (None, "1,8", "static", 128),
        (None, "1", "static", 16),
        (None, "4,2", "static,refill", 512),
        ("all", "8", "static", None),
        ("7", "8", "static", 7),
    ],
)
def test_the_default_limit_fills_the_blocks_that_every_round_times(
    text: str | None, batch_size: str, batching: str, limit: int | None
) -> None:
    """16 blocks of the largest batch size, refilled ones with eight prompts per row; `all` takes every item."""
    asked = DEFAULTS | {"limit": text, "batch_size": batch_size, "batching": batching}
    assert request_of(asked).limit == limit


def test_a_limit_that_is_no_number_is_refused() -> None:
    """The error says what is allowed."""
    with pytest.raises(UserError, match="--limit 'most' is not allowed; give a whole number of items, or all"):
        request_of(DEFAULTS | {"limit": "most"})


def test_run_and_plan_take_the_same_options() -> None:
    """`run` has more options, which are not part of the plan."""
    names = {name: {p.name for p in main.load(name).params} for name in ("run", "plan")}
    assert set(DEFAULTS) < names["plan"] < names["run"]
    assert names["run"] - names["plan"] == {
        "resume",
        "dry_run",
        "json_to",
        "workers",
        "ray",
        "server",
        "fail_on",
        "peak_memory",
    }


@pytest.mark.parametrize(("batching", "read"), [("static", ["static"]), ("static,refill", ["static", "refill"])])
def test_batchings_are_split_by_commas(batching: str, read: list[str]) -> None:
    """Like batch sizes."""
    assert request_of(DEFAULTS | {"batching": batching}).batching == read


def test_text_that_cannot_be_read_is_refused() -> None:
    """The error says what is allowed."""
    with pytest.raises(UserError, match="write 500ms, 90s, 30m or 2h"):
        request_of(DEFAULTS | {"time_budget": "soon"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    """In one line that names the option."""
    with pytest.raises(UserError, match=r"^the options: temperature is (nan|inf): input should be a finite number"):
        request_of(DEFAULTS | {"temperature": value})


@pytest.mark.parametrize("command", ["choose", "gate", "gate calibrate", "load"])
def test_what_is_resumed_keeps_its_options(command: str) -> None:
    """All commands that store what was asked refuse another value, and a resumption without the folder, in one way."""

    def mistake(*words: str) -> str:
        result = CliRunner().invoke(main.app, [*command.split(), *words, "--resume"])
        assert isinstance(result.exception, UserError), result.output
        return str(result.exception)

    assert mistake() == f"--resume needs the directory: `mtbench {command} -o DIR --resume`."
    assert mistake("-o", "x", "--seed", "3", "--device", "cpu") == (
        "what began goes on with the same options, so --device, --seed cannot change; "
        f"go on with `mtbench {command} -o x --resume`."
    )
