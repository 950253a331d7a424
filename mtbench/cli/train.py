"""`mtbench train`: one command per objective, made from its fields; `init`, `answers`, `--recipe`."""

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from typer.core import TyperGroup

from mtbench.cli.parameters import command, parameters, record_of, with_parameters
from mtbench.cli.session import err, hide_types_of_flags, importing, out, say, warn
from mtbench.errors import FAILED, MISTAKE, UserError, unknown
from mtbench.hardware.machine import choose_waiting
from mtbench.options import common
from mtbench.options.common import OUTPUT, TRAINED
from mtbench.options.fields import option
from mtbench.records import Record


class Commands(TyperGroup):
    """The commands of this module, and one per objective. These are made when needed: objectives import torch."""

    def invoke(self, ctx: Any) -> Any:
        choose_waiting()
        return super().invoke(ctx)

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

NO_VARIABLES: Mapping[str, Any] = {}  # of the chat template
Size = Annotated[int, option("As in the model's config.json.", TRAINED, ge=1)]


class CheckpointOptions(Record):
    """The options of every objective's command, besides those of the objective and of `Settings`."""

    base: common.Base
    data: common.Data
    out: common.NewFolder
    examples: Annotated[
        common.Examples, Field(description="Conversations to train on, of each --data; default: all.")
    ] = None
    teacher: Annotated[
        str | None, option("Checkpoint to distil from, as in --base; of self-distill by default the base.", TRAINED)
    ] = None
    mask_token: Annotated[
        str | None,
        option(
            "Reserved token of the tokenizer, such as '<filename>', as the mask token of a base without one.", TRAINED
        ),
    ] = None
    grow_vocabulary: Annotated[
        bool, option("Add a row for a mask token to the embedding of a base without one.", TRAINED)
    ] = False
    chat_template_kwargs: common.ChatTemplateKwargs = NO_VARIABLES
    data_dir: common.DataDir = None
    offline: common.Offline = False
    dry_run: common.TrainingDryRun = False
    report_to: Annotated[str, option("Tracker that gets the losses, such as wandb.", OUTPUT)] = "none"


@app.callback(invoke_without_command=True)
@command
def recipe(
    ctx: typer.Context,
    recipe: Annotated[str | None, option("Train all stages of a recipe, such as tiny.", TRAINED)] = None,
    out_folder: Annotated[
        Path | None, option("Folder of its checkpoints; default checkpoints/NAME.", OUTPUT, flags=("-o", "--out"))
    ] = None,
    workers: Annotated[
        common.Workers, Field(description="Stages trained in parallel; default: 1 on a GPU, else one per core.", ge=1)
    ] = None,
    launcher: Annotated[
        str | None,
        option("Command that starts a stage, such as 'accelerate launch --num_processes 8'.", common.MACHINE),
    ] = None,
    base: Annotated[str | None, option("Checkpoint to start from, in the place of the recipe's own.", TRAINED)] = None,
    data: Annotated[Sequence[str], option("Data in the place of the recipe's own. Repeatable.", TRAINED)] = (),
    seeds: Annotated[
        int | None, option("Train every stage with so many random seeds: NAME-1, NAME-2 …", TRAINED, ge=1, le=100)
    ] = None,
    flops: Annotated[
        float | None, option("FLOPs of each training, in the place of a recipe's own.", TRAINED, ge=1)
    ] = None,
    mask_token: Annotated[
        str | None, option("Reserved token of the tokenizer as the mask token of --base, if it has none.", TRAINED)
    ] = None,
    data_dir: common.DataDir = None,
    offline: common.Offline = False,
    dry_run: common.TrainingDryRun = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        if recipe is not None:
            raise UserError(f"--recipe {recipe} sets the objectives itself; leave out {ctx.invoked_subcommand!r}.")
        for name, value in (("--seeds", seeds), ("--flops", flops), ("--mask-token", mask_token)):
            if value is not None:
                raise UserError(
                    f"{name} before {ctx.invoked_subcommand!r} is for --recipe; give it after that, if at all."
                )
        return
    from mtbench.training import recipe_runner

    if recipe is None and dry_run:
        raise UserError("--dry-run needs an objective or --recipe; see `mtbench train --help`.")
    if recipe is None:
        out.print(ctx.get_help())
        raise typer.Exit(MISTAKE)
    stages = _stages(recipe, base, data, seeds, flops, mask_token)
    folder = out_folder or Path("checkpoints") / recipe
    workers = workers or recipe_runner.default_workers()
    session = ["--data-dir", data_dir] if data_dir else []
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


def _stages(
    recipe: str, base: str | None, data: Sequence[str], seeds: int | None, flops: float | None, mask_token: str | None
) -> tuple[Any, ...]:
    """Return the stages of a recipe with what takes the place of its own. Raises UserError for other recipes."""
    from mtbench.training.recipes import RECIPES, changed, seeded

    if recipe not in RECIPES:
        raise unknown("recipe", recipe, RECIPES, "mtbench train --help")
    stages = changed(RECIPES[recipe], base, tuple(data), flops=flops, mask_token=mask_token)
    if flops is not None and not any(stage.settings.flops for stage in stages):
        having = ", ".join(name for name, of in RECIPES.items() if any(stage.settings.flops for stage in of))
        raise UserError(
            f"recipe {recipe} has no trainings by FLOPs; leave out --flops {flops:g}. Those that have: {having}."
        )
    return stages if seeds is None else seeded(stages, seeds)


@app.command()
@command
def init(
    data: common.Data,
    out: common.NewFolder,
    examples: Annotated[
        common.Examples, Field(description="Conversations to learn the tokenizer from, of each --data.")
    ] = 20_000,
    seed: common.TrainingSeed = 42,
    vocab_size: Annotated[Size, Field(description="At most this many tokens, with special tokens.")] = 512,
    hidden_size: Size = 128,
    intermediate_size: Size = 384,
    num_hidden_layers: Size = 4,
    num_attention_heads: Size = 4,
    num_key_value_heads: Size = 2,
    max_position_embeddings: Annotated[Size, Field(description="Maximum context length.")] = 8192,
    data_dir: common.DataDir = None,
    offline: common.Offline = False,
) -> None:
    """Make an untrained Qwen2 with a byte-level BPE tokenizer learned from the data."""
    from mtbench.training.init_model import initialise

    initialise(
        _conversations(data, examples, seed, data_dir, offline=offline),
        out,
        seed=seed,
        data={"data": [*data], "examples": examples, "seed": seed},
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_position_embeddings,
    )
    _print_path(out)


@app.command()
@command
def answers(
    teacher: Annotated[str, option("Checkpoint that writes the answers: a folder, a hub id or FAMILY:ROLE.", TRAINED)],
    data: common.Data,
    out: Annotated[common.NewFolder, Field(description="JSONL file to write; must not exist.")],
    examples: common.Examples = None,
    max_new_tokens: Annotated[
        int, option("Budget of an answer; answers that reach it are left out.", TRAINED, ge=1)
    ] = 512,
    keep_cut: Annotated[
        bool, option("Keep answers that reach the budget; they are learned without an end.", TRAINED)
    ] = False,
    minutes: Annotated[
        float | None, option("End after so many minutes with the answers so far.", TRAINED, ge=0.01, le=1e6)
    ] = None,
    chat_template_kwargs: common.ChatTemplateKwargs = NO_VARIABLES,
    seed: common.TrainingSeed = 42,
    data_dir: common.DataDir = None,
    offline: common.Offline = False,
) -> None:
    """Write a checkpoint's own answers to conversations, as data to train a draft on."""
    from mtbench.training.distillation_data import write_answers

    written, cut = write_answers(
        teacher,
        _conversations(data, examples, seed, data_dir, offline=offline),
        out,
        max_new_tokens=max_new_tokens,
        keep_cut=keep_cut,
        options=chat_template_kwargs,
        minutes=minutes,
        offline=offline,
    )
    warn(
        f"{written:,} answers; {cut:,} {'of them cut' if keep_cut else 'left out'}: they reach {max_new_tokens} tokens"
    )
    _print_path(out)


def _conversations(
    data: Sequence[str], examples: int | None, seed: int, data_dir: str | None, *, offline: bool
) -> Iterator[Any]:
    from mtbench.training.conversations import read_conversations

    folder = None if data_dir is None else Path(data_dir)
    return chain.from_iterable(read_conversations(d, examples, seed, data_dir=folder, offline=offline) for d in data)


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
    from mtbench.training.trainer import Settings

    def run(ctx: typer.Context, **_: Any) -> None:
        _train(record_of(ctx, CheckpointOptions), record_of(ctx, objective), record_of(ctx, Settings))

    return with_parameters(run, parameters(CheckpointOptions, objective, Settings))


def _train(options: CheckpointOptions, objective: Any, settings: Any) -> None:
    """Train; in a dry run, check the request and count the conversations."""
    with importing():
        from mtbench.report.progress import TrainingProgress
        from mtbench.training.train import TrainingRequest, check, train

    shared = CheckpointOptions.model_fields.keys() & TrainingRequest.__dataclass_fields__.keys()
    given: dict[str, Any] = {name: getattr(options, name) for name in shared}
    given |= {"data": tuple(options.data), "data_dir": None if options.data_dir is None else Path(options.data_dir)}
    request = TrainingRequest(name=options.out.name, objective=objective, settings=settings, **given)
    if options.dry_run:
        say(check(request).data.summary)
        return
    train(request, TrainingProgress(err), options.report_to)
    _print_path(options.out)


def _print_path(path: Path) -> None:
    if os.environ.get("RANK", "0") == "0":  # under `accelerate launch` only the first process prints
        say(path)
