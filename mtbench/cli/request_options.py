"""The options of a run, declared once for `mtbench run` and `mtbench plan`. The defaults are `RunRequest`'s."""

import copy
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError
from typer import Context, Option

from mtbench import plugins, records
from mtbench.errors import UserError
from mtbench.runs.run_request import (
    ALL,
    DEFAULTS,
    OPTIONS,
    TIMED_BLOCKS,
    RunRequest,
    default_limit,
    seconds,
    to_resume,
)


def _load_plugins(paths: Sequence[str]) -> list[str]:
    """Import the files of `--plugin` as soon as the option is read. Raises UserError for one that cannot be used."""
    if paths:
        importlib.import_module("mtbench.decoding.arms")  # its check of default arms holds for them, too
    return [plugins.load_file(path).path for path in paths]


# Options that several commands take.
PluginOption = Annotated[
    list[str],
    Option(
        "--plugin",
        metavar="FILE.py",
        callback=_load_plugins,
        help="Import a file that registers methods or suites. It is code: name only files you trust. Repeatable.",
    ),
]
DataOption = Annotated[Path | None, Option("--data-dir", help="Folder with the suites' data.")]
OfflineOption = Annotated[bool, Option("--offline", help="Never use the network.")]
FamilyOption = Annotated[
    str | None, Option("--family", help="Family of checkpoints; default: the suite's. See `mtbench ls families`.")
]
ModelOption = Annotated[
    str | None, Option("--model", help="Folder, hub id or GGUF file of a single checkpoint; its role is `ar`.")
]
CheckpointOption = Annotated[
    list[str], Option("--checkpoint", help="ROLE=PATH_OR_ID: the checkpoint of one role. Repeatable.")
]
DtypeOption = Annotated[str, Option("--dtype", help="auto (the fastest here), float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, Option("--device", help="auto, cpu or cuda.")]
SeedOption = Annotated[int, Option("--seed", help="Random seed for block order, data and sampling.")]
SkipOption = Annotated[bool, Option("--skip-unscorable", help="Leave out items that cannot be scored on this machine.")]
UnsandboxedOption = Annotated[
    bool, Option("--allow-unsandboxed-code", help="Run generated code without a sandbox (unsafe).")
]
WorkersOption = Annotated[int | None, Option("--workers", help="Worker processes, each with its own GPU; default: 1.")]
RayOption = Annotated[
    str | None,
    Option("--ray", help="Decode on a Ray cluster, one worker per GPU. Its address, `auto` or `local`."),
]
ServerOption = Annotated[
    list[str],
    Option("--server", help="URL or URL=VARIABLE: a server that the stored plan may ask, and its key. Repeatable."),
]
PeakMemoryOption = Annotated[
    bool,
    Option("--peak-memory", help="Measure peak memory on a CPU too: one process per cell, which takes minutes."),
]
EngineOption = Annotated[
    str, Option("--engine", help="How forward passes run: graph, eager (as papers measure) or invariant.")
]
TokensOption = Annotated[
    int | None, Option("--max-new-tokens", help="Maximum tokens of an answer; default: the suite's.")
]
BudgetOption = Annotated[
    str | None,
    Option(
        "--time-budget",
        help="Start no batch after 90s, 30m or 2h, counted from loading the models; continue with --resume.",
    ),
]
LossOption = Annotated[
    float,
    Option("--max-loss", help="Loss of accuracy that you accept, in points: the margin of the verdict `not worse`."),
]
OutOption = Annotated[Path | None, Option("-o", "--out", help="Run directory; default: runs/<suite>-<time>.")]
ResumeOption = Annotated[bool, Option("--resume", help="Run what is missing in -o DIR.")]
DryRunOption = Annotated[bool, Option("--dry-run", help="Print the plan and a time estimate; run nothing.")]
FailOnOption = Annotated[
    str,
    Option("--fail-on", help="End with exit code 1 if a cell is divergent, void or failed: some of these, or none."),
]
PriceOption = Annotated[
    float | None,
    Option(
        "--price-per-hour",
        metavar="PRICE",
        help="Price of the machine that one worker decodes on, per hour; adds the cost per million tokens.",
    ),
]
JsonOption = Annotated[
    Path | None, Option("--json", help="Also write results.json to this file; `-` is standard output.")
]

PANELS: Mapping[str, Sequence[str]] = {  # panel of `--help` -> parameters, in this order
    "Builds": ("base", "head", "base_plugin", "allow_torch", "allow_dirty"),
    "Gate": ("margin", "blocks", "pairs", "interleave", "counts_only", "allow_changed", "process_limit"),
    "What to compare": (
        "method",
        "plugin",
        "url",
        "engine",
        "family",
        "model",
        "checkpoint",
        "weights",
        "simulate_acceptance",
    ),
    "Benchmark": (
        "suite",
        "subtask",
        "limit",
        "metric",
        "data_dir",
        "bundle",
        "offline",
        "skip_unscorable",
        "allow_unsandboxed_code",
    ),
    "Decoding": ("max_new_tokens", "temperature", "chat_template_kwargs", "seed", "protocol", "ignore_eos"),
    "Load": ("request_rate", "concurrency", "poisson", "duration", "requests", "slo", "client", "client_python"),
    "Server": ("max_num_seqs", "max_queue", "request_timeout"),
    "Decision": ("max_loss", "objective"),
    "Batches and timing": ("batch_size", "batching", "rounds", "time_budget"),
    "Machine": ("device", "dtype", "workers", "ray", "server", "peak_memory"),
    "Output": ("directory", "resume", "dry_run", "fail_on", "json_to", "price_per_hour"),
}


def options(
    suite: Annotated[
        list[str], Option("--suite", help="Suite as NAME or NAME:REST. Repeatable. See `mtbench ls suites`.")
    ] = list(DEFAULTS.suite),  # noqa: B006
    family: FamilyOption = DEFAULTS.family,
    model: ModelOption = DEFAULTS.model,
    checkpoint: CheckpointOption = [],  # noqa: B006
    weights: Annotated[
        str | None,
        Option("--weights", help="random:SHAPE: random weights for all roles. Simulated: measures speed only."),
    ] = DEFAULTS.weights,
    simulate_acceptance: Annotated[
        str | None,
        Option(
            "--simulate-acceptance",
            help="Simulated acceptance: RUN_DIRECTORY; probabilities by draft position, such as 0.8,0.6, of which the "
            "last one repeats; rates=0.8,0.5, shares of forwards that accept so many drafts (vLLM's "
            "synthetic_acceptance_rates); or length=2.4, mean tokens per forward with the model's own (vLLM's "
            "synthetic_acceptance_length, SGLANG_SIMULATE_ACC_LEN), length=2.4,independent with one probability.",
        ),
    ] = DEFAULTS.simulate_acceptance,
    method: Annotated[
        list[str],
        Option(
            "--method",
            help="Arm, such as 'mars:tau=0.95|0.8,cache=block'. Repeatable; default: the default arms of the methods "
            "whose checkpoints are there; with `ar` alone, also all methods that need no training. See "
            "`mtbench ls methods`.",
        ),
    ] = list(DEFAULTS.method),  # noqa: B006
    engine: EngineOption = DEFAULTS.engine,
    batch_size: Annotated[str, Option("--batch-size", help="One or several sizes, such as 1,8.")] = ",".join(
        map(str, DEFAULTS.batch_size)
    ),
    batching: Annotated[
        str, Option("--batching", help="static, refill (a finished row takes the next prompt), or static,refill.")
    ] = ",".join(DEFAULTS.batching),
    limit: Annotated[
        str | None,
        Option(
            "--limit",
            metavar="INTEGER|all",
            help="Items per suite, or per subtask of a suite with subtasks; default: "
            f"{TIMED_BLOCKS} blocks of the largest batch size.",
        ),
    ] = None,
    subtask: Annotated[
        list[str], Option("--subtask", help="Only this subtask of the suite. Repeatable; default: all.")
    ] = list(DEFAULTS.subtask),  # noqa: B006
    metric: Annotated[
        str | None,
        Option("--metric", help="How `prompts:FILE` scores its answers: exact (default), contains, number or none."),
    ] = DEFAULTS.metric,
    rounds: Annotated[int, Option("--rounds", help="How often the first blocks are timed.")] = DEFAULTS.rounds,
    time_budget: BudgetOption = None,
    max_new_tokens: TokensOption = DEFAULTS.max_new_tokens,
    dtype: DtypeOption = DEFAULTS.dtype,
    device: DeviceOption = DEFAULTS.device,
    seed: SeedOption = DEFAULTS.seed,
    temperature: Annotated[
        float,
        Option(
            "--temperature",
            help="0 is greedy. Above 0, all arms share one random seed per request and position.",
        ),
    ] = DEFAULTS.temperature,
    chat_template_kwargs: Annotated[
        list[str],
        Option(
            "--chat-template-kwargs",
            metavar="NAME=VALUE|JSON",
            help="Variables of the chat template, such as enable_thinking=false or '{\"enable_thinking\": false}'. "
            "Repeatable.",
        ),
    ] = [],  # noqa: B006
    data_dir: DataOption = None,
    bundle: Annotated[
        Path | None, Option("--bundle", help="Read data and checkpoints from this file, made by `mtbench fetch`.")
    ] = None,
    offline: OfflineOption = DEFAULTS.offline,
    skip_unscorable: SkipOption = DEFAULTS.skip_unscorable,
    allow_unsandboxed_code: UnsandboxedOption = DEFAULTS.allow_unsandboxed_code,
    protocol: Annotated[
        str,
        Option("--protocol", help="own, or paper: ignore stop strings while decoding; cut the text before scoring."),
    ] = DEFAULTS.protocol,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Ignore end tokens: every answer takes its whole token budget.")
    ] = DEFAULTS.ignore_eos,
    max_loss: LossOption = DEFAULTS.max_loss,
    plugin: PluginOption = [],  # noqa: B006
    price_per_hour: PriceOption = DEFAULTS.price_per_hour,
) -> None:
    """Never called. Its signature declares the options: the fields of `RunRequest`, and three that others read."""


def with_options(command: Callable[..., None], without: Collection[str] = ()) -> Callable[..., None]:
    """Give `command` the options of a run and its own, in panels. It reads them from `ctx.params`; `**_` is unused.

    `without`: options of a run that the command does not take. Its own take the place of those with the same name.
    """
    own = {n: p for n, p in inspect.signature(command).parameters.items() if p.kind is not p.VAR_KEYWORD}
    request = {n: p for n, p in inspect.signature(options).parameters.items() if n not in {*without, *own}}
    return _with_signature(command, [*own.values(), *request.values()])


def in_panels(command: Callable[..., None]) -> Callable[..., None]:
    """Sort the options of `command` into the panels of its help."""
    return _with_signature(command, list(inspect.signature(command).parameters.values()))


def _with_signature(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Callable[..., None]:
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    order = [name for names in PANELS.values() for name in names]
    outside = [p for p in parameters if p.name not in panel_of]  # the context and arguments come first
    inside = sorted((p for p in parameters if p.name in panel_of), key=lambda p: order.index(p.name))
    merged = [*outside, *(_in_panel(p, panel_of[p.name]) for p in inside)]
    command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in merged}
    return command


def _in_panel(parameter: inspect.Parameter, panel: str) -> inspect.Parameter:
    kind, declared = get_args(parameter.annotation)
    option = copy.copy(declared)
    option.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[kind, option])


def was_given(ctx: Context, name: str) -> bool:
    """Return whether the option is on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_arguments(ctx: Context, without: Collection[str] = ()) -> list[str]:
    """Return the options of a run that are on the command line, as another process gets them."""
    arguments: list[str] = []
    for name in inspect.signature(options).parameters:
        if name in without or name not in ctx.params or not was_given(ctx, name):
            continue
        flag, value = f"--{name.replace('_', '-')}", ctx.params[name]
        if value is True:
            arguments.append(flag)
        else:
            for one in value if isinstance(value, list) else [value]:
                arguments += [flag, str(one)]
    return arguments


def given_fields(ctx: Context) -> set[str]:
    """Return the fields of `RunRequest` that options on the command line set."""
    fields = {"time_budget": "time_budget_s"}
    return {fields.get(name, name) for name in ctx.params if was_given(ctx, name)} & set(OPTIONS)


def request_of(params: Mapping[str, Any]) -> RunRequest:
    """Return the request that the options make. Raises UserError for text that cannot be read."""
    fields = fields_of(params, OPTIONS) | {"time_budget_s": seconds(params["time_budget"])}
    fields["batching"] = params["batching"].split(",")
    fields["limit"] = item_limit(params["limit"], fields["batch_size"], fields["batching"])
    if params["bundle"] is not None:
        fields = _from_bundle(params["bundle"], fields)
    return records.validate(fields, RunRequest, "the options", "see `mtbench run --help`.")


def fields_of(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the named fields of a request, by what the options say. Raises UserError for text that cannot be read."""
    return {name: params[name] for name in names if name in params} | {
        "checkpoint": checkpoints(params["checkpoint"]),
        "chat_template_kwargs": template_options(params["chat_template_kwargs"]),
        "batch_size": whole_numbers(params["batch_size"]),
        "data_dir": absolute(params["data_dir"]),
    }


def _from_bundle(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Point the request at a bundle's data, and at its checkpoints unless the request names others."""
    from mtbench.evaluation.registry import SUITES
    from mtbench.runs.bundle import open_bundle  # imports torch

    if fields["data_dir"] is not None:
        raise UserError("--bundle and --data-dir both name the data; give one of them.")
    bundle = open_bundle(path)
    suites = []
    for spec in fields["suite"]:
        name, colon, rest = spec.partition(":")
        suites.append(f"{name}{colon}{SUITES[name].resolve_variant(rest, bundle.data_dir)}")
    bundled = {**fields, "data_dir": str(bundle.data_dir), "suite": suites}
    if fields["model"] or fields["weights"] or fields["family"] not in (None, bundle.family):
        return bundled
    roles = {**bundle.checkpoints, **fields["checkpoint"]}
    return {**bundled, "family": bundle.family, "model": bundle.model, "checkpoint": roles}


def checkpoints(texts: Sequence[str]) -> dict[str, str]:
    """Return role -> path or hub id of every ROLE=PATH_OR_ID. Raises UserError for other text."""
    found = {}
    for text in texts:
        role, _, path = text.partition("=")
        if not role or not path:
            raise UserError(f"--checkpoint {text!r} is not ROLE=PATH_OR_ID, such as `--checkpoint mars=./my-mars`.")
        found[role] = path
    return found


def template_options(texts: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Return name -> value of every NAME=VALUE or JSON object: true, false or a number if it is one, else text.

    Raises UserError for other text.

    >>> template_options(["enable_thinking=false", "budget=512", "effort=low"])
    {'enable_thinking': False, 'budget': 512, 'effort': 'low'}
    """
    found: dict[str, bool | int | float | str] = {}
    for text in texts:
        if text.startswith("{"):
            found |= _object(text)
            continue
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise UserError(
                f"--chat-template-kwargs {text!r} is not NAME=VALUE, such as `--chat-template-kwargs "
                "enable_thinking=false`."
            )
        found[name] = _plain_value(value)
    return found


def _object(text: str) -> dict[str, bool | int | float | str]:
    """Return the variables of a JSON object. Raises UserError unless all values are plain."""
    try:
        return TypeAdapter(dict[str, bool | int | float | str]).validate_json(text, strict=True)
    except ValidationError:
        raise UserError(
            f"--chat-template-kwargs {text!r} is no JSON object of texts, numbers and truth values, such as "
            "'{\"enable_thinking\": false}'."
        ) from None


def _plain_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):  # the text "False" would be true in a template
        return text.lower() == "true"
    for number in (int, float):
        try:
            value = number(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text


def whole_numbers(text: str) -> list[int]:
    """Return the batch sizes in text such as `1,8`. Raises UserError for other text."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--batch-size {text!r} is not allowed; give whole numbers, such as 1,8.") from None


def item_limit(text: str | None, batch_size: Sequence[int], batching: Sequence[str]) -> int | None:
    """Return the items per suite or subtask, by default those of a few blocks; None: all. Raises UserError.

    >>> item_limit("100", [8], ["static"]), item_limit("all", [8], ["static"]), item_limit(None, [1, 8], ["static"])
    (100, None, 128)
    """
    limit = number_or_all(text)
    if limit is None:
        return default_limit(batch_size, batching)
    return None if limit == ALL else int(limit)


def number_or_all(text: str | None) -> int | str | None:
    """Return a `--limit` as a number or as `all`; None: it was not given. Raises UserError for other text."""
    if text is None or text == ALL:
        return text
    try:
        return int(text)
    except ValueError:
        raise UserError(f"--limit {text!r} is not allowed; give a whole number of items, or {ALL}.") from None


def resumed(ctx: Context, directory: Path | None, command: str, changeable: Collection[str]) -> Path:
    """Return the directory that `--resume` goes on with. Raises UserError for an option that is not `changeable`."""
    return to_resume(directory, given(ctx, changeable), command)


def given(ctx: Context, without: Collection[str] = ()) -> list[str]:
    """Return the options on the command line."""
    return [name for name in ctx.params if was_given(ctx, name) and name not in without]


def absolute(path: Path | None) -> str | None:
    """Return the absolute path of a folder, as files store it."""
    return None if path is None else str(path.resolve())
