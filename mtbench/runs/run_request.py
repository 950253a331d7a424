"""The options of a run with their defaults, and how one call executes it. For `mtbench run` and `mtbench.run`.

Light: the command line reads the defaults from here for its help, without torch.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from mtbench.errors import UserError
from mtbench.records import Former, Price, Upgraded, points

if TYPE_CHECKING:  # the command line reads the defaults without torch
    from mtbench.runs.formats import LeftLine

ALL = "all"  # of `--limit`
TIMED_BLOCKS = 16  # blocks that later rounds repeat
RACED_BLOCKS = 64  # blocks of a race, at most
REFILLS = 8  # least prompts per slot of a refilled block: slots run empty at its end, and that must weigh little
CHECKPOINTS = "path or hub id of the checkpoint of each role"


class DecodingRequest(Upgraded):
    """The options that a run and a race share: what is decoded, how, and how it is scored."""

    FORMER: ClassVar[Mapping[str, Former]] = {"template_option": Former("chat_template_kwargs")}

    suite: Sequence[str] = Field(("arithmetic",), description="suites, each as name or name:rest")
    family: str | None = Field(None, description="family of checkpoints; null: the suite's own")
    model: str | None = Field(None, description="path or hub id of the only checkpoint; null: the family's checkpoints")
    checkpoint: Mapping[str, str] = Field(default_factory=dict, description=CHECKPOINTS)
    engine: str = Field("graph", description="engine of the methods whose loop is ours")
    batch_size: Sequence[int] = Field((1, 8), description="batch sizes, in requests")
    metric: str | None = Field(None, description="metric of the suites that have several; null: their own")
    subtask: Sequence[str] = Field((), description="subtasks to ask; empty: all subtasks")
    max_new_tokens: int | None = Field(None, description="most tokens of an answer; null: the suite's own number")
    dtype: str = Field("auto", description="number type of the weights; auto: the fastest on the device")
    device: str = Field("auto", description="cpu, cuda, or auto: a GPU if there is one")
    seed: int = Field(0, description="seed of blocks, orders and drawn data")
    temperature: float = Field(0.0, description="sampling temperature; 0: greedy decoding")
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(
        default_factory=dict, description="variables of the chat template by name, such as enable_thinking"
    )
    data_dir: str | None = Field(None, description="directory of the suites' data; null: the usual place")
    offline: bool = Field(False, description="true: nothing is downloaded")
    skip_unscorable: bool = Field(False, description="true: items that cannot be scored here are left out")
    allow_unsandboxed_code: bool = Field(False, description="true: generated programs may run unconfined")
    protocol: str = Field("own", description="own: stop strings end the decoding; paper: they cut the scored text")


class RunRequest(DecodingRequest):
    """The options of `mtbench run` and `mtbench plan`. The planner checks the values; a record checks the types."""

    FORMER: ClassVar[Mapping[str, Former]] = {
        **DecodingRequest.FORMER,
        "accept": Former("simulate_acceptance"),
        "fixed_length": Former("ignore_eos"),
        "accuracy_margin": Former("max_loss", points, "in points"),
    }

    method: Sequence[str] = Field((), description="methods with their options; empty: the default arms of every method")
    batching: Sequence[str] = Field(("static",), description="ways of batching: static, refill")
    limit: int | None = Field(None, description="most items per suite or subtask; null: all items")
    rounds: int = Field(3, description="how many times the first blocks are timed")
    time_budget_s: float | None = Field(None, description="seconds of decoding before a session stops; null: no limit")
    weights: str | None = Field(None, description="random:SHAPE for random weights; null: real checkpoints")
    simulate_acceptance: str | None = Field(
        None, description="run, probabilities, rates or length that script the acceptance; null: no script"
    )
    ignore_eos: bool = Field(False, description="true: every answer takes its whole budget of tokens")
    max_loss: float = Field(2.0, description="accepted loss of accuracy, in points: the margin of `not worse`")
    price_per_hour: Price | None = Field(
        None, description="price of the machine that one worker decodes on, per hour; null: not given"
    )


def default_limit(batch_size: Sequence[int], batching: Sequence[str], blocks: int = TIMED_BLOCKS) -> int:
    """Return the items per suite or subtask of a command without `--limit`, whatever the suite.

    They fill so many blocks of the largest batch size; by default as many as every round times: more items would make
    the accuracy more precise and no time, since later rounds repeat these blocks. A verdict on accuracy takes more; a
    dry run says how many.
    """
    prompts_per_row = REFILLS if "refill" in batching else 1
    return blocks * max(1, *batch_size) * prompts_per_row


def seconds(text: str | None, name: str = "--time-budget") -> float | None:
    """Return the seconds in text such as 500ms, 90s, 30m or 2h; None without text. A plain number is in seconds.

    Raises UserError for other text. `name`: of the option.

    >>> seconds("500ms"), seconds("30m"), seconds("90")
    (0.5, 1800.0, 90.0)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smh]?)", text)
    if not found:
        raise UserError(f"{name} {text!r} is not allowed; write 500ms, 90s, 30m or 2h.")
    return float(found[1]) * {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]


def latency_limits(text: str | None, known: Collection[str]) -> dict[str, float]:
    """Return the limits in text such as `ttft=500ms,itl=50ms`, in seconds; none without text.

    Raises UserError for a name that is not `known`, for one that is given twice, and for another value.

    >>> latency_limits("ttft=500ms,itl=0.05s", ["ttft", "itl"])
    {'ttft': 0.5, 'itl': 0.05}
    """
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise UserError(f"--slo {text!r}: {name!r} is not known; limits: {', '.join(known)}, such as ttft=500ms.")
        read = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", value)
        if read is None or not 0 < float(read[1]) < math.inf:
            raise UserError(f"--slo {text!r}: {value!r} is not a time; write 500ms or 2s.")
        if name in found:
            raise UserError(f"--slo {text!r}: {name} is given twice.")
        found[name] = float(read[1]) / (1000 if read[2] == "ms" else 1)
    return found


def to_resume(directory: Path | None, given: Collection[str], command: str) -> Path:
    """Return the directory that `--resume` of a command goes on with.

    given: options that may not be given then. Raises UserError if there are any, or without a directory.
    """
    if directory is None:
        raise UserError(f"--resume needs the directory: `mtbench {command} -o DIR --resume`.")
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise UserError(
            f"what began goes on with the same options, so {named} cannot change; "
            f"go on with `mtbench {command} -o {directory} --resume`."
        )
    return directory


DEFAULTS = RunRequest()
OPTIONS = tuple(RunRequest.model_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How one call executes a plan on this machine. It is not part of the plan: every `--resume` chooses again."""

    time_budget_s: float | None = None  # None: the plan's
    workers: int | None = None
    ray: str | None = None
    data_dir: str | None = None  # folder of the suites' data on this machine; None: the plan's
    offline: bool = False  # nothing is downloaded, whatever the plan says
    allow_unsandboxed_code: bool = False
    peak_memory: bool = False  # measure it on a CPU too
    timed_only: bool = False  # the untimed passes are left out
    wait: Callable[[], None] | None = None  # called before every block, in the process that decodes
    # Called with the cells of a group before its first block and after every block, when their lines are stored. It
    # returns cells that leave: they decode no further blocks.
    leave: "Callable[[Sequence[str]], Sequence[LeftLine]] | None" = None
    servers: frozenset[str] = frozenset()  # that the plan may ask: URL, or URL=VARIABLE (mtbench/decoding/external.py)

    @classmethod
    def of(
        cls,
        request: RunRequest,
        *,
        workers: int | None = None,
        ray: str | None = None,
        peak_memory: bool = False,
        servers: Iterable[str] = (),
    ) -> "Execution":
        """Return the execution that a request asks for."""
        return cls(
            time_budget_s=request.time_budget_s,
            workers=workers,
            ray=ray,
            data_dir=request.data_dir,
            offline=request.offline,
            allow_unsandboxed_code=request.allow_unsandboxed_code,
            peak_memory=peak_memory,
            servers=frozenset(servers),
        )
