"""`mtbench train`: one command per objective, made from its fields; `init`, `answers`, `page`, `--recipe`."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from mtbench.cli.session import FAILED, MISTAKE, err, hide_types_of_flags, importing, out, say, warn
from mtbench.errors import UserError, unknown


class Commands(TyperGroup):
    """The commands of this module, and one per objective. These are made when needed: objectives import torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_objective_commands()]

    def get_command(self, ctx: Any, name: str) -> Any:
        command = super().get_command(ctx, name) or _objective_commands().get(name)
        if command is not None:
            hide_types_of_flags(command)
        return command


app = typer.Typer(
    cls=Commands,
    help="Train a checkpoint by an objective, make an untrained one (init), or train all stages of a recipe.",
)

DataDirOption = Annotated[Path | None, Option("--data-dir", help="Folder with the suites' data.")]
OfflineOption = Annotated[bool, Option("--offline", help="Never use the network.")]
OutOption = Annotated[Path, Option("--out", "-o", help="Folder to write; must not exist.")]
DataOption = Annotated[
    list[str],
    Option("--data", help="A suite (its training split), a file, or a data set of the hub. Repeatable."),
]
DryRunOption = Annotated[
    bool,
    Option("--dry-run", help="Check everything that needs no weights, or print a recipe's commands; do not train."),
]


@app.callback(invoke_without_command=True)
def recipe(
    ctx: typer.Context,
    name: Annotated[str | None, Option("--recipe", help="Train all stages of a recipe, such as tiny.")] = None,
    folder: Annotated[
        Path | None, Option("--out", "-o", help="Folder of its checkpoints; default checkpoints/NAME.")
    ] = None,
    workers: Annotated[
        int | None,
        Option("--workers", min=1, help="Stages trained in parallel; default: 1 on a GPU, else one per core."),
    ] = None,
    launcher: Annotated[
        str | None,
        Option("--launcher", help="Command that starts a stage, such as 'accelerate launch --num_processes 8'."),
    ] = None,
    base: Annotated[
        str | None, Option("--base", help="Checkpoint to start from, in the place of the recipe's own.")
    ] = None,
    data: Annotated[
        list[str] | None, Option("--data", help="Data in the place of the recipe's own. Repeatable.")
    ] = None,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
    dry_run: DryRunOption = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        if name is not None:
            raise UserError(f"--recipe {name} sets the objectives itself; leave out {ctx.invoked_subcommand!r}.")
        return
    from mtbench.training import recipe_runner
    from mtbench.training.recipes import RECIPES, changed

    if name is None:
        out.print(ctx.get_help())
        raise typer.Exit(MISTAKE)
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES, "mtbench train --help")
    stages = changed(RECIPES[name], base, tuple(data or ()))
    folder = folder or Path("checkpoints") / name
    workers = workers or recipe_runner.default_workers()
    session = ["--data-dir", str(data_dir.resolve())] if data_dir else []
    if offline:
        session.append("--offline")
    if dry_run:
        for stage in recipe_runner.missing(stages, folder):
            say(shlex.join(["mtbench", *recipe_runner.arguments(stage, stages, folder), *session]))
        return
    launch = [*(shlex.split(launcher) if launcher else [sys.executable]), "-m", "mtbench"]
    if not recipe_runner.run(stages, folder, workers, launch, session, warn):
        raise typer.Exit(FAILED)
    _print_path(folder)


@app.command()
def init(
    data: DataOption,
    directory: OutOption,
    examples: Annotated[int, Option("--examples", min=1, help="Conversations to learn the tokenizer from.")] = 20_000,
    seed: Annotated[int, Option("--seed", min=0)] = 42,
    vocab_size: Annotated[int, Option(help="At most this many tokens, with special tokens.")] = 512,
    hidden_size: int = 128,
    intermediate_size: int = 384,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: Annotated[int, Option(help="Maximum context length.")] = 8192,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
) -> None:
    """Make an untrained Qwen2 with a byte-level BPE tokenizer learned from the data."""
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
    teacher: Annotated[str, Option("--teacher", help="Checkpoint that writes the answers: a folder or a hub id.")],
    data: DataOption,
    file: Annotated[Path, Option("--out", "-o", help="JSONL file to write; must not exist.")],
    examples: Annotated[
        int | None, Option("--examples", min=1, help="Conversations of each --data; default: all.")
    ] = None,
    max_new_tokens: Annotated[
        int, Option(min=1, help="Budget of an answer; answers that reach it are left out.")
    ] = 512,
    keep_cut: Annotated[
        bool, Option("--keep-cut", help="Keep answers that reach the budget; they are learned without an end.")
    ] = False,
    minutes: Annotated[
        float | None, Option("--minutes", min=0.01, max=1e6, help="End after so many minutes with the answers so far.")
    ] = None,
    seed: Annotated[int, Option("--seed", min=0)] = 42,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
) -> None:
    """Write a checkpoint's own answers to conversations, as data to train a draft on."""
    from mtbench.training.conversations import read_conversations
    from mtbench.training.distillation_data import write_answers

    read = (read_conversations(d, examples, seed, data_dir=data_dir, offline=offline) for d in data)
    written, cut = write_answers(
        teacher,
        chain.from_iterable(read),
        file,
        max_new_tokens=max_new_tokens,
        keep_cut=keep_cut,
        minutes=minutes,
        offline=offline,
    )
    warn(
        f"{written:,} answers; {cut:,} {'of them cut' if keep_cut else 'left out'}: they reach {max_new_tokens} tokens"
    )
    _print_path(file)


@app.command("token-map")
def token_map(
    base: Annotated[str, Option("--base", help="Checkpoint whose tokens are counted: a folder or a hub id.")],
    data: Annotated[
        list[str], Option("--data", help="A file of answers, or a data set of the hub; no suite. Repeatable.")
    ],
    size: Annotated[int, Option("--size", min=1, help="Tokens of the map: the most frequent ones.")],
    file: Annotated[
        Path, Option("--out", "-o", help="JSON file to write, or .pt, which SGLang reads; must not exist.")
    ],
    offline: OfflineOption = False,
) -> None:
    """Write the tokens most frequent in answers, as the `token_map` of a draft."""
    from mtbench.training.draft_vocabulary import write_token_map

    share = write_token_map(base, data, file, size=size, offline=offline)
    warn(f"{size:,} tokens: {share:.1%} of the answers' tokens")
    _print_path(file)


@app.command()
def page(
    checkpoints: Annotated[list[Path], typer.Argument(help="Folders that `mtbench train` made.")],
    file: Annotated[
        Path | None, Option("--out", "-o", help="HTML file to write; default: beside the first folder.")
    ] = None,
) -> None:
    """Write a page about several trainings: losses, accuracy by tokens ahead, calibration."""
    from mtbench.training.document import write_training_page

    _print_path(write_training_page(checkpoints, file))


def common(
    base: Annotated[str, Option("--base", help="Checkpoint to start from: a folder or a hub id.")],
    data: DataOption,
    out: OutOption,
    examples: Annotated[
        int | None, Option("--examples", min=1, help="Conversations to train on, of each --data; default: all.")
    ] = None,
    teacher: Annotated[str | None, Option("--teacher", help="Checkpoint to distil from.")] = None,
    mask_token: Annotated[
        str | None,
        Option(help="Reserved token of the tokenizer, such as '<filename>', as the mask token of a base without one."),
    ] = None,
    grow_vocabulary: Annotated[
        bool, Option("--grow-vocabulary", help="Add a row for a mask token to the embedding of a base without one.")
    ] = False,
    data_dir: DataDirOption = None,
    offline: OfflineOption = False,
    dry_run: DryRunOption = False,
    report_to: Annotated[str, Option("--report-to", help="Tracker that gets the losses, such as wandb.")] = "none",
) -> None:
    """Declare the parameters that every objective's command takes besides its options. Never called."""


@cache
def _objective_commands() -> Mapping[str, Any]:
    with importing():
        from mtbench.training.registry import OBJECTIVES

    group = typer.Typer()
    for kind in OBJECTIVES.values():
        paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
        help_text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
        group.command(kind.name, help=help_text)(_command(kind))
    commands: Mapping[str, Any] = typer.main.get_group(group).commands
    return commands


def _command(objective: type[Any]) -> Callable[..., None]:
    """Return the command of an objective, with the parameters of `common`, the objective and `Settings`."""
    from mtbench.training.trainer import Settings

    def command(**given: Any) -> None:
        chosen, settings = (_chosen(holder, given, objective.name) for holder in (objective, Settings))
        _train(objective=chosen, settings=settings, **given)

    parameters = [
        *inspect.signature(common).parameters.values(),
        *_parameters(objective, "Objective"),
        *_parameters(Settings, "Training"),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameters(holder: type[Any], panel: str) -> list[inspect.Parameter]:
    """Return the options of a dataclass as Typer parameters. One that is not given is None; see `_chosen`."""
    from mtbench.options.classes import options_of, show

    parameters = []
    for option in options_of(holder):
        flag = option.name.replace("_", "-")
        default = f"default {show(option.default)}"
        if isinstance(option.default, bool):
            switch = Option(f"--{flag}/--no-{flag}", help=f"{option.help} ({default})", rich_help_panel=panel)
            annotation: Any = Annotated[bool | None, switch]
        else:
            allowed = option.kind if option.default is None else f"{option.kind}; {default}"
            value = Option(f"--{flag}", help=f"{option.help} ({allowed})", metavar="VALUE", rich_help_panel=panel)
            annotation = Annotated[str | None, value]
        parameters.append(
            inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return parameters


def _chosen(holder: type[Any], given: dict[str, Any], command: str) -> Any:
    """Return the dataclass with its options, which are taken out of `given`. Raises UserError for a wrong value."""
    from mtbench.options.classes import options_of, value_of

    values = {}
    for option in options_of(holder):
        value = given.pop(option.name)
        if value is None:
            continue
        try:
            values[option.name] = value if isinstance(value, bool) else value_of(holder, option.name, value)
        except ValueError as error:
            flag = f"--{option.name.replace('_', '-')}"
            raise UserError(
                f"{flag} {value!r} is not allowed; it is {error}. See `mtbench train {command} --help`."
            ) from None
    return holder(**values)


def _train(*, out: Path, data: list[str], dry_run: bool, report_to: str, **given: Any) -> None:
    """Train as the parameters of `common` say; in a dry run, check them and count the conversations."""
    with importing():
        from mtbench.report.progress import TrainingProgress
        from mtbench.training.document import write_training_page
        from mtbench.training.train import TrainingRequest, check, train

    request = TrainingRequest(name=out.name, out=out, data=tuple(data), **given)
    if dry_run:
        say(check(request).data.summary)
        return
    train(request, TrainingProgress(err), report_to)
    if _is_main_process():
        warn(f"page: {write_training_page([out])}")
    _print_path(out)


def _is_main_process() -> bool:
    """Return whether this process prints: under `accelerate launch` only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _print_path(path: Path) -> None:
    if _is_main_process():
        say(path)
