"""`mtbench train`: a command per objective, made from its fields; `init`, to begin with; `--recipe`, many in order."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option
from typer.core import TyperGroup

from mtbench.cli.request_options import DataOption as DataDirOption
from mtbench.cli.request_options import OfflineOption
from mtbench.errors import UserError, unknown

if TYPE_CHECKING:
    from mtbench.training.recipes import Stage


class Commands(TyperGroup):
    """`init` and a command per objective. Those are made when asked for: objectives need torch, other commands not."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_objective_commands()]

    def get_command(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, name) or _objective_commands().get(name)


app = typer.Typer(
    cls=Commands,
    help="Train a checkpoint by an objective, make an untrained one (init), or train all stages of a recipe.",
)
out = Console()
err = Console(stderr=True)

OutOption = Annotated[Path, Option("--out", "-o", help="Folder to write; must not exist.")]
DataOption = Annotated[
    list[str],
    Option("--data", help="A suite (its training split), a file, a folder, or a data set of the hub. Repeats."),
]
DryRunOption = Annotated[bool, Option("--dry-run", help="Print what it will cost; train nothing.")]


@app.callback(invoke_without_command=True)
def recipe(
    ctx: typer.Context,
    name: Annotated[str | None, Option("--recipe", help="Train all stages of a recipe, such as tiny.")] = None,
    folder: Annotated[Path | None, Option("--out", "-o", help="Its folder; default checkpoints/NAME.")] = None,
    only: Annotated[list[str], Option("--only", help="Only this stage and what it needs. Repeats.")] = [],  # noqa: B006
    workers: Annotated[
        int | None, Option("--workers", min=1, help="Stages side by side; default: 1 on a GPU, else one per core.")
    ] = None,
    launcher: Annotated[
        str | None, Option("--launcher", help="Starts a stage, such as 'accelerate launch --num_processes 8'.")
    ] = None,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
    dry_run: DryRunOption = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        if name is not None:
            raise UserError(f"--recipe {name} trains by objectives of its own; leave out {ctx.invoked_subcommand!r}.")
        return
    from mtbench.training import cost, recipe_runner
    from mtbench.training.recipes import RECIPES

    if name is None:
        out.print(ctx.get_help())
        raise typer.Exit(2)
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES, "mtbench train --help")
    stages = recipe_runner.needed(RECIPES[name], only)
    folder = folder or Path("checkpoints") / name
    workers = workers or recipe_runner.default_workers()
    if dry_run:
        _print_cost(cost.estimate(stages, folder, workers, data_dir=data_dir, offline=offline))
        return
    session = [*(["--data-dir", str(data_dir.resolve())] if data_dir else []), *["--offline"] * offline]
    launch = [*(shlex.split(launcher) if launcher else [sys.executable]), "-m", "mtbench"]
    if not recipe_runner.run(stages, folder, workers, launch, session, err):
        raise typer.Exit(2)
    out.print(recipe_runner.how_to_use(stages, folder), soft_wrap=True, markup=False, highlight=False)


@app.command()
def init(
    data: DataOption,
    directory: OutOption,
    examples: Annotated[int, Option("--examples", min=1, help="Conversations to learn the tokenizer from.")] = 20_000,
    seed: Annotated[int, Option("--seed", min=0)] = 42,
    vocab_size: Annotated[int, Option(help="At most; special tokens included.")] = 512,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: Annotated[int, Option(help="Longest context.")] = 8192,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
) -> None:
    """An untrained Qwen2 with a byte-level BPE of its own, learned from the data."""
    from mtbench.training.conversations import read_conversations
    from mtbench.training.init_model import initialise

    initialise(
        chain.from_iterable(read_conversations(d, examples, seed, data_dir=data_dir, offline=offline) for d in data),
        directory,
        seed=seed,
        data={"data": data, "examples": examples, "seed": seed},
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_position_embeddings,
    )
    _print_path(directory)


@app.command()
def answers(
    teacher: Annotated[str, Option("--teacher", help="Checkpoint that answers: a folder or a hub id.")],
    data: DataOption,
    file: Annotated[Path, Option("--out", "-o", help="File.jsonl to write; must not exist.")],
    examples: Annotated[int | None, Option("--examples", min=1, help="Of each --data; default: all.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="An answer cut by it is left out.")] = 512,
    seed: Annotated[int, Option("--seed", min=0)] = 42,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
) -> None:
    """A checkpoint's own answers to conversations, as data to train a draft on."""
    from mtbench.training.conversations import read_conversations
    from mtbench.training.distillation_data import write_answers

    read = (read_conversations(d, examples, seed, data_dir=data_dir, offline=offline) for d in data)
    written, left_out = write_answers(
        teacher, chain.from_iterable(read), file, max_new_tokens=max_new_tokens, offline=offline
    )
    err.print(f"{written:,} answers; {left_out:,} left out, cut by {max_new_tokens} tokens", highlight=False)
    _print_path(file)


@app.command()
def page(
    checkpoints: Annotated[list[Path], typer.Argument(help="Folders that `mtbench train` made.")],
    file: Annotated[Path | None, Option("--out", "-o", help="Default: beside the first folder.")] = None,
) -> None:
    """One page of several trainings: losses, accuracy by how far ahead, calibration."""
    from mtbench.training.page import write_training_page

    _print_path(write_training_page(checkpoints, file))


def common(
    base: Annotated[str, Option("--base", help="Checkpoint to start from: a folder or a hub id.")],
    data: DataOption,
    directory: OutOption,
    examples: Annotated[
        int | None, Option("--examples", min=1, help="Conversations to train on, of each --data; default: all.")
    ] = None,
    teacher: Annotated[str | None, Option("--teacher", help="Checkpoint to distil from.")] = None,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
    dry_run: DryRunOption = False,
    report_to: Annotated[str, Option("--report-to", help="Where losses go beside the record, such as wandb.")] = "none",
) -> None:
    """Never called: its signature is the table of what every objective's command takes beside options."""


@cache
def _objective_commands() -> Mapping[str, Any]:
    from mtbench.training.objectives import OBJECTIVES

    made = typer.Typer()
    for kind in OBJECTIVES.values():
        paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
        made.command(kind.name, help="\n\n".join(p.replace("\n", " ") for p in paragraphs))(_command(kind))
    commands: Mapping[str, Any] = typer.main.get_group(made).commands
    return commands


def _command(objective: type[Any]) -> Callable[..., None]:
    """The command of an objective: `common`, the objective's options and those of every training."""
    from mtbench.training.recipes import Stage
    from mtbench.training.trainer import Settings

    def command(**given: Any) -> None:
        stage = Stage(
            name=given["directory"].name,
            objective=_chosen(objective, given, objective.name),
            base=given["base"],
            data=tuple(given["data"]),
            examples=given["examples"],
            settings=_chosen(Settings, given, objective.name),
            teacher=given["teacher"],
        )
        _train(stage, **{name: given[name] for name in ("directory", "data_dir", "offline", "dry_run", "report_to")})

    parameters = [
        *inspect.signature(common).parameters.values(),
        *_parameters(objective, "Objective"),
        *_parameters(Settings, "Training"),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameters(holder: type[Any], panel: str) -> list[inspect.Parameter]:
    """The options of a dataclass as Typer wants them; those not said are None. What is said is read by `_chosen`."""
    from mtbench.options import options_of, show

    made = []
    for o in options_of(holder):
        flag = o.name.replace("_", "-")
        default = f"default {show(o.default)}"
        if isinstance(o.default, bool):
            switch = Option(f"--{flag}/--no-{flag}", help=f"{o.help} ({default})", rich_help_panel=panel)
            annotation: Any = Annotated[bool | None, switch]
        else:
            text = o.kind if o.default is None else f"{o.kind}; {default}"
            value = Option(f"--{flag}", help=f"{o.help} ({text})", metavar="VALUE", rich_help_panel=panel)
            annotation = Annotated[str | None, value]
        made.append(inspect.Parameter(o.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return made


def _chosen(holder: type[Any], given: Mapping[str, Any], command: str) -> Any:
    """A dataclass with what was said of it. Raises UserError for a value that is not allowed."""
    from mtbench.options import options_of, value_of

    values = {}
    for name in (o.name for o in options_of(holder) if given[o.name] is not None):
        flag = f"--{name.replace('_', '-')}"
        try:
            values[name] = given[name] if isinstance(given[name], bool) else value_of(holder, name, given[name])
        except ValueError as error:
            raise UserError(
                f"{flag} {given[name]!r} is not allowed; it is {error}. See `mtbench train {command} --help`."
            ) from None
    return holder(**values)


def _train(
    stage: "Stage", directory: Path, data_dir: Path | None, offline: bool, dry_run: bool, report_to: str
) -> None:
    from mtbench.report.progress import TrainingProgress
    from mtbench.training import cost
    from mtbench.training.page import write_training_page
    from mtbench.training.train import train

    if dry_run:
        _print_cost(cost.estimate((stage,), directory.parent, 1, data_dir=data_dir, offline=offline))
        return
    assert stage.objective is not None
    assert stage.base is not None
    train(
        stage.objective,
        stage.base,
        stage.data,
        stage.to_read(),
        stage.settings,
        directory,
        teacher=stage.teacher,
        data_dir=data_dir,
        offline=offline,
        progress=TrainingProgress(err),
        report_to=report_to,
    )
    if _speaks():
        err.print(f"its page: {write_training_page([directory])}", soft_wrap=True, markup=False, highlight=False)
    _print_path(directory)


def _speaks() -> bool:
    """Under `accelerate launch` the first process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def _print_path(path: Path) -> None:
    if _speaks():
        out.print(str(path), soft_wrap=True, markup=False, highlight=False)


def _print_cost(estimated: Any) -> None:
    out.print(estimated.table())
    for line in estimated.notes():
        out.print(line, soft_wrap=True, markup=False, highlight=False)
