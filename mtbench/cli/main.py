"""The command `mtbench`. A command's module is imported when the command is used: torch takes seconds.

Exit codes: 0: all is ok; 1: a cell is divergent, void or failed (`mtbench run --fail-on`), or a part of another command
failed, such as a check of `mtbench doctor`; 2: a user's mistake or something missing; 3: the time budget ended the run;
130: interrupted.
"""

import errno
import importlib
import shlex
import signal
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from mtbench import plugins
from mtbench.cli import session
from mtbench.cli.session import err, out, say
from mtbench.errors import INTERRUPTED, MISTAKE, UserError, first_line, is_out_of_memory
from mtbench.experiments.registry import KINDS
from mtbench.programs import processes
from mtbench.version import __version__

UsageError: type[Any] = typer.BadParameter.__base__ or typer.BadParameter  # raised by the option parser of Typer
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class Entry(NamedTuple):
    """A command that is not loaded yet. The Typer `app` of `module` contains the command, or is the command."""

    module: str
    panel: str
    help: str
    completes: bool = False  # the same command completes what an interrupted one left


EXPERIMENT = "mtbench.cli.experiments"
COMPARE, STAGES, TRAIN, SERVE = "Compare", "Stages of a run", "Train", "Serve"
_EXPERIMENTS = {
    name: Entry(EXPERIMENT, COMPARE, " ".join(kind.help.partition("\n\n")[0].split())) for name, kind in KINDS.items()
}
COMMANDS = _EXPERIMENTS | {
    "doctor": Entry(
        "mtbench.cli.doctor", COMPARE, "Check this machine: can figures that are measured here be trusted?"
    ),
    "compare": Entry(
        "mtbench.cli.compare",
        COMPARE,
        "Compare finished runs, cell by cell: tokens, accuracy and tokens per forward on the same items.",
    ),
    "ls": Entry("mtbench.cli.ls", COMPARE, "List methods, suites, families or engines, or describe one of them."),
    "fetch": Entry("mtbench.cli.fetch", COMPARE, "Install a serving engine, or use an installation of yours."),
    "schemas": Entry("mtbench.cli.schemas", COMPARE, "Write the JSON Schemas of the files that mtbench writes."),
    "plan": Entry("mtbench.cli.run", STAGES, "Write the plan of a run: prompts as token ids, cells, blocks, rounds."),
    "generate": Entry("mtbench.cli.run", STAGES, "Decode the missing batches of a plan.", True),
    "score": Entry("mtbench.cli.run", STAGES, "Score the stored texts of a run. Needs no model and no GPU.", True),
    "report": Entry(
        "mtbench.cli.run", STAGES, "Rebuild results.json, report.md and report.html from stored lines.", True
    ),
    "train": Entry(
        "mtbench.cli.train",
        TRAIN,
        "Train a checkpoint by an objective, make an untrained one (init), or train all stages of a recipe.",
        completes=True,
    ),
    "export": Entry("mtbench.cli.export", TRAIN, "Write a draft's files as a serving engine loads them."),
    "serve": Entry("mtbench.cli.serve", SERVE, "Serve one method by OpenAI's API, to measure it as a service."),
}


class LazyGroup(TyperGroup):
    """The commands, listed from COMMANDS and imported when one is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=entry.help, rich_help_panel=entry.panel) for name, entry in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else command, rest

    def get_params(self, ctx: Any) -> Any:
        session.hide_types_of_flags(self)
        return super().get_params(ctx)


def load(name: str) -> Any:
    """Import a command and return it."""
    module = importlib.import_module(COMMANDS[name].module)
    group = typer.main.get_group(module.command(name) if COMMANDS[name].module == EXPERIMENT else module.app)
    command = group.commands.get(name, group)
    session.hide_types_of_flags(command)
    return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compare multi-token decoding methods on your model and your machine. `mtbench run` without options runs the "
    "embedded demonstration.",
)


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. A user's mistake is one line and exit code 2."""
    processes.name_command()
    try:
        code = _execute()
    except KeyboardInterrupt:  # outside a command, or a second one while the first one was handled
        code = INTERRUPTED
    if code == INTERRUPTED:
        session.ignore_interrupts()
        say(f"interrupted; {_how_to_resume()}", err)
    sys.exit(code)


def _execute() -> Any:
    _started().clear()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler interrupts like Ctrl-C
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # so does a terminal that closes
    try:
        return app(prog_name="mtbench", standalone_mode=False)
    except UserError as error:
        options = zip(error.add[::2], error.add[1::2], strict=True)
        add = [word for option in options if option[0] not in sys.argv for word in option]
        again = shlex.join(["mtbench", *sys.argv[1:], *add])
        return _complain(f"{error}: `{again}`" if error.add else str(error))
    except UsageError as error:
        return _complain_of_usage(error.format_message(), error.ctx.command_path if error.ctx else "mtbench")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return _complain(f"cannot write {error.filename or 'the output'}: {error.strerror}; {_how_to_resume()}")
        if not is_out_of_memory(error):
            raise
        return _complain(f"out of memory ({first_line(error)}); free memory and try again. {_how_to_resume()}")


def _started() -> list[Any]:
    frame = sys.modules.get("mtbench.experiments.experiment")  # not imported: nothing has begun
    return [] if frame is None else frame.started


def _how_to_resume() -> str:
    command = "".join(sys.argv[1:2])
    if command in COMMANDS and COMMANDS[command].completes:
        return "what is complete is kept; resume with the same command"
    if not _started():
        return "nothing was started"
    from mtbench.plan.directory import command_of

    path = _started()[-1]
    files = "" if command == "gate" else plugins.as_options()  # a gate names the programs that it runs
    again = f"mtbench {command_of(path) or command} -o {path} --resume{files}"
    return f"complete results are kept; resume with `{again}`"


def _complain_of_usage(mistake: str, command: str) -> int:
    """Print the option parser's message and the command whose help explains it; an empty message prints nothing."""
    mistake = mistake.rstrip(". ")
    ending = "" if mistake.endswith("?") else "."
    return _complain(f"{mistake}{ending} See `{command} --help`.") if mistake else MISTAKE


def _complain(mistake: str) -> int:
    say(f"error: {mistake}", err)
    return MISTAKE
