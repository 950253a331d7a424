"""The options of the commands. Each is a type, with its help, bounds, panel and the way from text to its value.

A request lists its options as fields with defaults. `mtbench/cli/parameters.py` makes the command's parameters of them,
`read` makes a request of what a command line or a library call gives. The JSON Schemas have the same texts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mtbench.errors import UserError, unknown
from mtbench.records import Price, field_path
from mtbench.runs import option_texts as texts
from mtbench.runs.option_texts import PlainValue

MOST_ITEMS = 1 << 24  # of a suite
MOST_ROWS, MOST_NEW_TOKENS, MOST_ROUNDS = 1 << 16, 1 << 24, 1000
HOTTEST = 10.0  # temperature
BUILDS, GATE, COMPARED, BENCHMARK, DECODING = "Builds", "Gate", "What to compare", "Benchmark", "Decoding"
LOAD, SERVER, DECISION, TIMING = "Load", "Server", "Decision", "Batches and timing"
MACHINE, OUTPUT = "Machine", "Output"
PANELS = (BUILDS, GATE, COMPARED, BENCHMARK, DECODING, LOAD, SERVER, DECISION, TIMING, MACHINE, OUTPUT)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How a field is an option of a command. Its help is the field's description.

    `parse` makes the value of one text, `parse_all` of the texts of a repeatable option. Both raise ValueError that
    says what is allowed. `show` is the way back. `resumable`: `--resume` may change it.
    """

    panel: str
    flags: tuple[str, ...] = ()  # empty: made of the field's name
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    parse_all: Callable[[Sequence[str]], Any] | None = None
    show: Callable[[Any], str | list[str]] | None = None
    argument: bool = False  # it stands on the command line without a flag
    resumable: bool = False
    permission: bool = False  # only the command that runs can give it; a stored one counts for nothing


def option(help: str, panel: str, **more: Any) -> Any:
    """Return the mark of a type that is an option: its help, the panel of `--help`, fields of `Option`, and bounds.

    Bounds are those of pydantic's `Field`: `ge`, `gt`, `le`, `lt`, `min_length`.
    """
    own = {name: more.pop(name) for name in Option.__dataclass_fields__.keys() & more.keys()}
    field: Any = Field(description=help, **more)
    field.metadata.append(Option(panel=panel, **own))
    return field


def option_of(field: FieldInfo) -> Option | None:
    """Return how a field is an option; None if it is none."""
    return next((entry for entry in field.metadata if isinstance(entry, Option)), None)


def options(kind: type[BaseModel]) -> dict[str, Option]:
    """Return the options of a request by the names of their fields."""
    found = {name: option_of(field) for name, field in kind.model_fields.items()}
    return {name: option for name, option in found.items() if option is not None}


def flag_of(name: str, option: Option | None) -> str:
    """Return an option as it stands on the command line.

    >>> flag_of("max_new_tokens", None)
    '--max-new-tokens'
    """
    return option.flags[-1] if option is not None and option.flags else f"--{name.replace('_', '-')}"


def argument_of(name: str, option: Option | None) -> str:
    """Return an option as the argument of a library function: its flag with underscores."""
    return flag_of(name, option).removeprefix("--").replace("-", "_")


def read(given: Mapping[str, Any], kind: type[M], see: str) -> M:
    """Return the request with the given options: values, or texts as the command line has them.

    `see`: the command that explains them. Raises UserError in one line for a value that is not allowed.
    """
    fields = kind.model_fields
    values = {name: _value(name, fields[name], value) for name, value in given.items()}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0], see) from None


def words(given: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return options as they stand on a command line.

    >>> class Request(BaseModel):
    ...     batch_size: BatchSizes = (1,)
    ...     method: Methods = ()
    ...     offline: Offline = False
    >>> words({"batch_size": (1, 8), "method": ["a", "b"], "offline": True}, Request)
    ['--batch-size', '1,8', '--method', 'a', '--method', 'b', '--offline']
    """
    said: list[str] = []
    for name, value in given.items():
        option = option_of(kind.model_fields[name])
        if value is None or value is False or option is None:
            continue
        flag, texts = flag_of(name, option), shown(value, option)
        said += [flag] if value is True else [word for text in texts for word in (flag, text)]
    return said


def shown(value: Any, option: Option) -> list[str]:
    """Return a value as the texts of the command line that make it; one for an option that is not repeatable."""
    made = value if option.show is None or isinstance(value, str) else option.show(value)
    several = made if isinstance(made, Collection) and not isinstance(made, str) else [made]
    return [f"{part:g}" if isinstance(part, float) else str(part) for part in several]


def _value(name: str, field: FieldInfo, value: Any) -> Any:
    """Return what the record takes for a value or a text. Raises UserError for text that cannot be read."""
    option, kinds = option_of(field), [*parts(field.annotation)]
    several = [*value] if isinstance(value, list | tuple) else [value]
    given = [str(part) for part in several if isinstance(part, str | Path)]
    if option is None or len(given) != len(several):
        lone = isinstance(value, int | float) and Sequence in {get_origin(kind) for kind in kinds}
        return (value,) if lone else value
    try:
        if option.parse_all is not None:
            return option.parse_all(given)
        if option.parse is not None and len(given) == 1:
            return option.parse(given[0])
    except ValueError as error:
        text = ",".join(given)
        raise UserError(f"{flag_of(name, option)} {text!r} is not allowed; {error}.") from None
    if Sequence in {get_origin(kind) for kind in kinds}:
        return given
    return given[0] if isinstance(value, Path) else value


def _refusal(kind: type[BaseModel], error: ErrorDetails, see: str) -> UserError:
    """Return the first finding of a validation in one line: the option, its value and what is allowed."""
    if isinstance(raised := error.get("ctx", {}).get("error"), UserError):
        return raised
    name, value = str(error["loc"][0]), error["input"]
    field = kind.model_fields[name]
    flag = flag_of(name, option_of(field))
    if error["type"] == "literal_error":
        return unknown(flag.removeprefix("--"), str(value), choices(field), see)
    option = option_of(field)
    if isinstance(value, float) and option is not None and option.parse is texts.seconds:
        value = texts.shown_seconds(value)
    elif isinstance(value, float):
        value = texts.shown_number(value)
    elif isinstance(value, str):
        value = repr(value)
    place = field_path((flag, *error["loc"][1:])) if isinstance(value, dict | list) else flag
    said = error["msg"].removeprefix("Value error, ")
    return UserError(f"{place} {value} is not allowed; {allowed(field) or said[:1].lower() + said[1:]}.")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field allows; none if it takes others."""
    return tuple(str(choice) for kind in parts(field.annotation) for choice in _literals(kind))


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def parts(kind: Any) -> Iterable[Any]:
    """Yield a type and the types that it is made of, such as list[int] and int."""
    yield kind
    if get_origin(kind) is not Literal:
        for part in get_args(kind):
            yield from parts(part)


def allowed(field: FieldInfo) -> str:
    """Return the numbers that a field allows, in words; empty if it has no bounds.

    >>> class Request(BaseModel):
    ...     rounds: Rounds = 3
    ...     max_loss: MaxLoss = 1.0
    >>> allowed(Request.model_fields["rounds"])
    'it is a whole number from 1 to 1,000'
    >>> allowed(Request.model_fields["max_loss"])
    'it is a number above 0 and below 100'
    """
    kinds = [*parts(field.annotation)]
    marks = [*field.metadata, *(mark for kind in kinds for mark in getattr(kind, "__metadata__", ()))]
    marks += [mark for info in marks if isinstance(info, FieldInfo) for mark in info.metadata]
    low = next((mark for mark in marks if isinstance(mark, Ge | Gt)), None)
    high = next((mark for mark in marks if isinstance(mark, Le | Lt)), None)
    if low is None and high is None:
        return ""
    option = option_of(field)
    time = option is not None and option.parse is texts.seconds
    noun = "a time" if time else "a number" if float in kinds else "a whole number"
    as_text: Callable[[Any], str] = texts.shown_seconds if time else texts.shown_number
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"it is {noun} from {as_text(low.ge)} to {as_text(high.le)}"
    said = []
    if low is not None:
        said.append(f"of at least {as_text(low.ge)}" if isinstance(low, Ge) else f"above {as_text(low.gt)}")
    if high is not None:
        said.append(f"of at most {as_text(high.le)}" if isinstance(high, Le) else f"below {as_text(high.lt)}")
    return f"it is {noun} {' and '.join(said)}"


# The options that several commands take

Suites = Annotated[
    Sequence[str],
    option(
        "Suite as NAME or NAME:REST; prompts:FILE for your own. Repeatable. See `mtbench ls suites`.",
        BENCHMARK,
        min_length=1,
    ),
]
Suite = Annotated[str, option("Suite as NAME or NAME:REST. See `mtbench ls suites`.", BENCHMARK, min_length=1)]
Family = Annotated[
    str | None, option("Family of checkpoints; default: the suite's. See `mtbench ls families`.", COMPARED)
]
Model = Annotated[str | None, option("Folder, hub id or GGUF file of a single checkpoint; its role is `ar`.", COMPARED)]
Checkpoints = Annotated[
    Mapping[str, str],
    option(
        "ROLE=PATH_OR_ID: the checkpoint of one role. Repeatable.",
        COMPARED,
        parse_all=texts.checkpoints,
        show=texts.pairs,
    ),
]
Weights = Annotated[
    str | None, option("random:SHAPE: random weights for all roles. Simulated: measures speed only.", COMPARED)
]
SimulatedAcceptance = Annotated[
    str | None,
    option(
        "Simulated acceptance: probabilities by draft position, such as 0.8,0.6, of which the last one repeats; or "
        "length=2.4, mean tokens per forward with the model's own (vLLM's synthetic_acceptance_length, "
        "SGLANG_SIMULATE_ACC_LEN).",
        COMPARED,
    ),
]
Methods = Annotated[
    Sequence[str],
    option(
        "Arm, such as 'mars:tau=0.95|0.8,cache=block'. Repeatable; default: the default arms of the "
        "methods whose checkpoints are there; with `ar` alone, also all methods that need no training. See "
        "`mtbench ls methods`.",
        COMPARED,
    ),
]
EngineName = Literal["graph", "eager", "invariant"]
Engine = Annotated[
    EngineName, option("How forward passes run: graph, eager (as papers measure) or invariant.", COMPARED)
]
Engines = Annotated[
    Sequence[str],
    option(
        "How forward passes run: graph, eager (as papers measure) or invariant; or the name of a serving engine. "
        "Repeatable: every arm in each. See `mtbench ls engines`.",
        COMPARED,
        min_length=1,
    ),
]
EngineOptions = Annotated[
    Sequence[str],
    option(
        "An engine's own option, such as 'vllm:tensor-parallel-size=2' or 'vllm:enforce-eager'. Repeatable. A stored "
        "plan's are used only if they are given again.",
        COMPARED,
        metavar="ENGINE:OPTION[=VALUE]",
        parse_all=texts.engine_options,
    ),
]
BatchSize = Annotated[int, Field(ge=1, le=MOST_ROWS)]
BatchSizes = Annotated[
    Sequence[BatchSize],
    option("One or several sizes, such as 1,8.", TIMING, min_length=1, parse=texts.numbers(int), show=texts.joined),
]
Batching = Literal["static", "refill"]
Batchings = Annotated[
    Sequence[Batching],
    option(
        "static, refill (a finished row takes the next prompt), or static,refill.",
        TIMING,
        min_length=1,
        parse=lambda text: text.split(","),
        show=texts.joined,
    ),
]
ItemLimit = Annotated[
    int | None,
    option(
        "Items per suite, or per subtask of a suite with subtasks, or all.",
        BENCHMARK,
        ge=1,
        le=MOST_ITEMS,
        metavar="INTEGER|all",
        parse=texts.item_limit,
    ),
]
Subtasks = Annotated[Sequence[str], option("Only this subtask of the suite. Repeatable; default: all.", BENCHMARK)]
Metric = Annotated[
    str | None, option("How `prompts:FILE` scores its answers: exact (default), contains, number or none.", BENCHMARK)
]
Rounds = Annotated[int, option("How often the first blocks are timed.", TIMING, ge=1, le=MOST_ROUNDS)]
Apart = Annotated[
    bool,
    option(
        "Arms decode one after the other: each a whole round, in a server of its own that no other runs beside, in "
        "turned order (A B, B A); intervals are over rounds. For servers that do not fit together.",
        TIMING,
    ),
]
TimeBudget = Annotated[
    float | None,
    option(
        "Start no batch after 90s, 30m or 2h, counted from loading the models; continue with --resume.",
        TIMING,
        ge=0,
        flags=("--time-budget",),
        parse=texts.seconds,
        show=texts.shown_seconds,
        resumable=True,
    ),
]
MaxNewTokens = Annotated[
    int | None, option("Maximum tokens of an answer; default: the suite's.", DECODING, ge=1, le=MOST_NEW_TOKENS)
]
Dtype = Annotated[
    Literal["auto", "float64", "float32", "bfloat16", "float16"],
    option("auto (the fastest here), float32, bfloat16, float16 or float64.", MACHINE),
]
Device = Annotated[str, option("auto, cpu or cuda.", MACHINE)]
Seed = Annotated[int, option("Random seed for block order, data and sampling.", DECODING)]
Temperature = Annotated[
    float,
    option(
        "0 is greedy. Above 0, all arms share one random seed per request and position.", DECODING, ge=0, le=HOTTEST
    ),
]
ChatTemplateKwargs = Annotated[
    Mapping[str, PlainValue],
    option(
        "Variables of the chat template, such as enable_thinking=false or '{\"enable_thinking\": false}'. Repeatable.",
        DECODING,
        metavar="NAME=VALUE|JSON",
        parse_all=texts.template_variables,
        show=texts.pairs,
    ),
]
DataDir = Annotated[
    str | None, option("Folder with the suites' data.", BENCHMARK, metavar="PATH", parse=texts.absolute, resumable=True)
]
Offline = Annotated[bool, option("Never use the network.", BENCHMARK, resumable=True)]
SkipUnscorable = Annotated[bool, option("Leave out items that cannot be scored on this machine.", BENCHMARK)]
AllowUnsandboxedCode = Annotated[
    bool, option("Run generated code without a sandbox (unsafe).", BENCHMARK, resumable=True, permission=True)
]
Protocol = Literal["own", "paper"]  # paper: ignore stop strings while decoding; cut the text before scoring
ProtocolChoice = Annotated[
    Protocol, option("own, or paper: ignore stop strings while decoding; cut the text before scoring.", DECODING)
]
IgnoreEos = Annotated[bool, option("Ignore end tokens: every answer takes its whole token budget.", DECODING)]
MaxLoss = Annotated[
    float,
    option("Loss of accuracy that you accept, in points; within it an arm is `not worse`.", DECISION, gt=0, lt=100),
]
PricePerHour = Annotated[
    Price | None,
    option(
        "Price of the machine that one worker decodes on, per hour; adds the cost per million tokens.",
        OUTPUT,
        metavar="PRICE",
    ),
]
Plugins = Annotated[
    Sequence[str],
    option(
        "Import a file that registers methods, suites or engines. It is code: name only files you trust. Repeatable.",
        COMPARED,
        metavar="FILE.py",
        resumable=True,
    ),
]
Out = Annotated[
    str | None,
    option(
        "Directory of the files; default: runs/<name>-<time>.",
        OUTPUT,
        flags=("-o", "--out"),
        metavar="PATH",
        resumable=True,
    ),
]
Resume = Annotated[bool, option("Run what is missing in -o DIR.", OUTPUT, resumable=True)]
DryRun = Annotated[bool, option("Print the plan and a time estimate; run nothing.", OUTPUT, resumable=True)]
JsonTo = Annotated[
    str | None,
    option(
        "Also write the results as JSON to this file; `-` is standard output.",
        OUTPUT,
        flags=("--json",),
        metavar="PATH",
        resumable=True,
    ),
]
Workers = Annotated[int | None, option("Worker processes, each with its own GPU; default: 1.", MACHINE, resumable=True)]
Ray = Annotated[
    str | None,
    option("Decode on a Ray cluster, one worker per GPU. Its address, `auto` or `local`.", MACHINE, resumable=True),
]
Servers = Annotated[
    Sequence[str],
    option(
        "URL or URL=VARIABLE: a server that the stored plan may ask, and its key. Repeatable.", MACHINE, resumable=True
    ),
]
PeakMemory = Annotated[
    bool,
    option("Measure peak memory on a CPU too: one process per cell, which takes minutes.", MACHINE, resumable=True),
]
Cause = Literal["divergent", "void", "failed"]
FailOn = Annotated[
    Sequence[Cause],
    option(
        "End with exit code 1 if a cell is divergent, void or failed: some of these, or none.",
        OUTPUT,
        parse=lambda text: [] if text == "none" else text.split(","),
        show=lambda causes: texts.joined(causes) or "none",
        resumable=True,
    ),
]
