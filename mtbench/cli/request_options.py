"""The options of a request, declared once: `mtbench run` and `mtbench plan` take them all."""

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mtbench.errors import UserError

if TYPE_CHECKING:
    from mtbench.runs.plan import RunRequest

# Options that several commands take.
DataOption = Annotated[Path | None, Option("--data-dir", help="Folder with the suites' data.")]
OfflineOption = Annotated[bool, Option("--offline", help="Never touch the network.")]
CheckpointOption = Annotated[list[str], Option("--checkpoint", help="ROLE=PATH_OR_ID for one role. Repeats.")]
DtypeOption = Annotated[str, Option("--dtype", help="auto, float32, bfloat16, float16 or float64.")]
DeviceOption = Annotated[str, Option("--device", help="auto, cpu or cuda.")]
SkipOption = Annotated[
    bool, Option("--skip-unscorable", help="Leave out items whose score cannot be had on this machine.")
]
UnsandboxedOption = Annotated[
    bool, Option("--allow-unsandboxed-code", help="Run generated programs although nothing confines them.")
]
WorkersOption = Annotated[
    int | None,
    Option("--workers", help="Processes that decode side by side, each with a GPU of its own; default: 1."),
]
RayOption = Annotated[
    str | None,
    Option("--ray", help="Decode on a Ray cluster: its address, auto, or local; one worker for each GPU."),
]


def options(
    suite: Annotated[list[str], Option("--suite", help="Suite, or name:rest. Repeats.")] = ["arithmetic"],  # noqa: B006
    family: Annotated[str | None, Option("--family", help="Checkpoints that belong together.")] = None,
    model: Annotated[str | None, Option("--model", help="Path or hub id: a family with the role ar alone.")] = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    weights: Annotated[
        str | None, Option("--weights", help="random:SHAPE: random weights in all roles; simulated, speed only.")
    ] = None,
    accept: Annotated[
        str | None,
        Option(
            "--accept",
            help="Scripted acceptance: RUN_DIRECTORY, or probabilities such as 0.8,0.6, mask by mask; the last one "
            "repeats for deeper masks.",
        ),
    ] = None,
    method: Annotated[list[str], Option("--method", help="Arm such as 'mars:tau=0.95|0.8,cache=block'. Repeats.")] = [],  # noqa: B006
    engine: Annotated[
        str, Option("--engine", help="How forwards are executed: graph, eager (as papers measure) or invariant.")
    ] = "graph",
    batch_size: Annotated[str, Option("--batch-size", help="One or several, such as 1,8.")] = "1,8",
    batching: Annotated[
        str, Option("--batching", help="static, refill (a finished row takes the next prompt), or static,refill.")
    ] = "static",
    limit: Annotated[
        int | None, Option("--limit", help="Items per suite, or per subtask of one that has them; default: all.")
    ] = None,
    subtask: Annotated[list[str], Option("--subtask", help="Of a suite that has several, this one. Repeats.")] = [],  # noqa: B006
    rounds: Annotated[int, Option("--rounds", help="Times the first blocks are timed.")] = 3,
    time_budget: Annotated[
        str | None, Option("--time-budget", help="Stop starting batches after 90s, 30m or 2h.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option("--max-new-tokens", help="Default: the suite's.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: Annotated[int, Option("--seed", help="Of blocks, orders, drawn data and sampling.")] = 0,
    temperature: Annotated[
        float, Option("--temperature", help="0: greedy. Above: sampled, with the same dice for every arm.")
    ] = 0.0,
    data_dir: DataOption = None,
    bundle: Annotated[
        Path | None, Option("--bundle", help="Data and checkpoints from this file, which `mtbench fetch` made.")
    ] = None,
    offline: OfflineOption = False,
    skip_unscorable: SkipOption = False,
    allow_unsandboxed_code: UnsandboxedOption = False,
    protocol: Annotated[
        str,
        Option(
            "--protocol",
            help="own, or paper: decode on behind stop strings, which cut the text only when it is scored.",
        ),
    ] = "own",
    fixed_length: Annotated[
        bool, Option("--fixed-length", help="Ignore end tokens: equal tokens for all arms.")
    ] = False,
    accuracy_margin: Annotated[float, Option("--accuracy-margin", help="0.02 means 2 points.")] = 0.02,
) -> None:
    """Never called: its signature is the table. Names are `RunRequest`'s fields, but for `time_budget` and `bundle`."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of a request before its own. It finds them in `ctx.params`; `**_` takes them."""
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
    asked = list(inspect.signature(options).parameters.values())
    merged = [*own[:1], *asked, *own[1:]]  # the context comes first
    command.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in merged}
    return command


def request_of(params: Mapping[str, Any]) -> "RunRequest":
    """What was asked for. Raises UserError for text that cannot be read."""
    from mtbench.runs.plan import RunRequest

    asked = {name: params[name] for name in RunRequest.model_fields if name in params}
    asked |= {
        "checkpoint": dict(role_and_path(text) for text in params["checkpoint"]),
        "batch_size": whole_numbers(params["batch_size"]),
        "batching": params["batching"].split(","),
        "time_budget_s": _seconds(params["time_budget"]),
        "data_dir": None if params["data_dir"] is None else str(params["data_dir"].resolve()),
    }
    return RunRequest(**asked if params["bundle"] is None else _bundled(params["bundle"], asked))


def _bundled(bundle: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The request on what a bundle holds; its checkpoints stand back where others are named."""
    from mtbench.evaluation.registry import SUITES
    from mtbench.runs.bundle import open_bundle

    if asked["data_dir"] is not None:
        raise UserError("--bundle and --data-dir both say where the data are; give one of them.")
    opened = open_bundle(bundle)
    specs = [spec.partition(":") for spec in asked["suite"]]
    suites = [f"{name}{colon}{SUITES[name].resolve_variant(rest, opened.data_dir)}" for name, colon, rest in specs]
    asked = {**asked, "data_dir": str(opened.data_dir), "suite": suites}
    if asked["model"] or asked["weights"] or asked["family"] not in (None, opened.family):
        return asked
    checkpoints = {**opened.checkpoints, **asked["checkpoint"]}
    return {**asked, "family": opened.family, "model": opened.model, "checkpoint": checkpoints}


def role_and_path(text: str) -> tuple[str, str]:
    role, equals, path = text.partition("=")
    if not equals or not role or not path:
        raise UserError(f"--checkpoint {text!r} is not ROLE=PATH_OR_ID, such as `--checkpoint mars=./my-mars`.")
    return role, path


def whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--batch-size {text!r} is not allowed; it is whole numbers, such as 1,8.") from None


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found:
        raise UserError(f"--time-budget {text!r} is not allowed; write 90s, 30m or 2h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
