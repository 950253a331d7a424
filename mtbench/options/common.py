"""The options that several commands take, and the panels of `--help`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mtbench.options import texts
from mtbench.options.engine_options import EngineOption
from mtbench.options.fields import option
from mtbench.options.texts import PlainValue
from mtbench.records import Price

MOST_ITEMS = 1 << 24  # of a suite
MOST_IDS = 1 << 24  # of a vocabulary
MOST_ROWS, MOST_NEW_TOKENS, MOST_ROUNDS = 1 << 16, 1 << 24, 1000
COLDEST, HOTTEST = 1e-4, 10.0  # temperature
BUILDS, GATE, COMPARED, BENCHMARK, DECODING = "Builds", "Gate", "What to compare", "Benchmark", "Decoding"
LOAD, SERVER, DECISION, TIMING = "Load", "Server", "Decision", "Batches and timing"
MACHINE, OUTPUT, TRAINED, OBJECTIVE, TRAINING = "Machine", "Output", "What to train", "Objective", "Training"
OF_MEASURING = (BUILDS, GATE, COMPARED, BENCHMARK, DECODING, LOAD, SERVER, DECISION, TIMING, MACHINE, OUTPUT)
PANELS = (TRAINED, OBJECTIVE, TRAINING, *OF_MEASURING)  # in their order


def heat(temperature: float) -> float:
    """Return the temperature that tokens are sampled at: 0, which is greedy, below 1e-4.

    There the noise moves only logits that differ by less than 0.004. Logits below 3e34 over T are finite in float32.
    """
    return temperature if temperature >= COLDEST else 0.0


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
        "Simulated acceptance: probabilities by draft position, such as 0.8,0.6, of which the last one repeats; "
        "length=2.4, mean tokens per forward with the model's own (vLLM's synthetic_acceptance_length); or FILE or "
        "FILE#KEY, lengths by number of drafts: the acceptance.yaml of a run, or InferenceX's.",
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
    Sequence[EngineOption],
    option(
        "An engine's own option, such as 'vllm:enforce-eager', or 'vllm:kv-cache-dtype=auto|fp8': every arm with each "
        "value; plain decoding has the first. Repeatable. A stored plan's are used only if they are given again.",
        COMPARED,
        metavar="ENGINE:OPTION[=VALUE]",
        parse_all=lambda given: [*map(EngineOption.read, given)],
    ),
]
OffOn = Literal["off", "on"]
PrefixCaches = Annotated[
    Sequence[OffOn],
    option(
        "Whether serving engines keep the prompt of a conversation for its next turn: off, on, or off,on for every arm "
        "with each; plain decoding has the first.",
        COMPARED,
        min_length=1,
        parse=lambda text: text.split(","),
        show=texts.joined,
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
MaxContext = Annotated[
    int | None,
    option(
        "Longest prompt with its answer; later turns of a conversation are left out; default: what the checkpoints' "
        "contexts hold.",
        BENCHMARK,
        ge=1,
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
        "End after 90s, 30m or 2h, with loading, starts of servers, judging and page; continue with --resume.",
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
        "0, and less than 0.0001, is greedy. Above, all arms share one random seed per request and position.",
        DECODING,
        ge=0,
        le=HOTTEST,
    ),
    AfterValidator(heat),
]
TopP = Annotated[
    float, option("Draw from the likeliest tokens that have this probability together.", DECODING, gt=0, le=1)
]
TopK = Annotated[int, option("Draw from so many of the likeliest tokens; 0: all.", DECODING, ge=0, le=MOST_IDS)]
MinP = Annotated[
    float, option("Draw from tokens at least this share as likely as the likeliest; 0: all.", DECODING, ge=0, lt=1)
]
SamplingSource = Annotated[
    Literal["own", "model"],
    option(
        "own: the options given; model: the others are read from the checkpoint's generation_config.json or GGUF file, "
        "as transformers reads it: greedy without do_sample.",
        DECODING,
        flags=("--sampling",),
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
ChatTemplateDate = Annotated[
    Annotated[str, AfterValidator(texts.time)] | None,
    option(
        "Date, or date and time, that a chat template reads; default: the day of the plan (serve: the time).",
        DECODING,
        metavar="DATE",
        exclude_if=lambda date: date is None,  # few templates read any
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
    Path | None,
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
Directory = Annotated[Path, option("A run directory.", COMPARED, argument=True)]
NewFolder = Annotated[Path, option("Folder to write; must not exist.", OUTPUT, flags=("-o", "--out"))]

# Of a server

MaxNumSeqs = Annotated[int, option("Requests decoded at the same time.", SERVER, ge=1, le=4096)]
MaxQueue = Annotated[int, option("Requests that may wait for a row; others get 503.", SERVER, ge=1)]
RequestTimeout = Annotated[
    float,
    option(
        "Time that a request may take, waiting included, such as 90s or 5m.",
        SERVER,
        ge=0.1,
        le=86_400,
        flags=("--request-timeout",),
        metavar="DURATION",
        parse=texts.seconds,
        show=texts.shown_seconds,
    ),
]

# Of a training

Data = Annotated[
    Sequence[str],
    option("A suite (its training split), a file, or a data set of the hub. Repeatable.", TRAINED, min_length=1),
]
Base = Annotated[str, option("Checkpoint to start from: a folder, a hub id or FAMILY:ROLE (tiny:ar).", TRAINED)]
Examples = Annotated[int | None, option("Conversations of each --data; default: all.", TRAINED, ge=1)]
TrainingSeed = Annotated[int, option("Random seed.", TRAINED, ge=0)]
TrainingDryRun = Annotated[
    bool, option("Check everything that needs no weights, or print a recipe's commands; do not train.", OUTPUT)
]
