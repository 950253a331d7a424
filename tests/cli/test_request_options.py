"""The options of a request: declared once, one for every field, the same for `run` and `plan`."""

import inspect
from typing import Any

import pytest
import typer

from mtbench.cli import main
from mtbench.cli.request_options import options, request_of
from mtbench.errors import UserError
from mtbench.runs.plan import RunRequest

DEFAULTS: dict[str, Any] = {name: p.default for name, p in inspect.signature(options).parameters.items()}


def test_every_field_of_a_request_has_its_option() -> None:
    """None is forgotten, none says something that nobody reads; a bundle says where other fields' things are."""
    fields = set(RunRequest.model_fields)
    assert {name.replace("time_budget", "time_budget_s") for name in DEFAULTS} == fields | {"bundle"}


def test_nothing_said_is_a_requests_own_defaults() -> None:
    """The command line and the library start from the same run."""
    request = RunRequest()
    for name in RunRequest.model_fields:
        said, default = getattr(request_of(DEFAULTS), name), getattr(request, name)
        assert (tuple(said) if isinstance(default, tuple) else said) == default, name


def test_run_and_plan_take_the_same_options() -> None:
    """`run` has its own beside them."""
    commands = {
        c.callback.__name__: typer.main.get_command_from_info(c, pretty_exceptions_short=True, rich_markup_mode=None)
        for c in main.app.registered_commands
        if c.callback
    }
    names = {name: {p.name for p in command.params} for name, command in commands.items()}
    assert set(DEFAULTS) < names["plan"] < names["run"]
    assert names["run"] - names["plan"] == {"resume", "dry_run", "json_to", "workers", "ray"}


@pytest.mark.parametrize(("batching", "read"), [("static", ["static"]), ("static,refill", ["static", "refill"])])
def test_batchings_are_split_by_commas(batching: str, read: list[str]) -> None:
    """As batch sizes are."""
    assert request_of(DEFAULTS | {"batching": batching}).batching == read


def test_text_that_cannot_be_read_is_refused() -> None:
    """In words, with what is allowed."""
    with pytest.raises(UserError, match="write 90s, 30m or 2h"):
        request_of(DEFAULTS | {"time_budget": "soon"})
