"""The request of a run, and how one call executes it. `mtbench run` and `mtbench.run` have these options.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from mtbench.options import common
from mtbench.options.engine_options import ANY, NO_PREFIX_CACHE, PREFIX_CACHE, EngineOption
from mtbench.options.fields import option
from mtbench.records import Record

if TYPE_CHECKING:  # the command line reads the defaults without torch
    from mtbench.plan.formats import Elimination
    from mtbench.sampling import Sampling

DEMONSTRATION = "arithmetic"  # the suite of the embedded demonstration
TIMED_BLOCKS = 16  # blocks that later rounds repeat
RACED_BLOCKS = 64  # blocks of a race, at most
REFILLS = 8  # least prompts per slot of a refilled block: slots run empty at its end, and that must weigh little
CHECKPOINTS = "path or hub id of the checkpoint of each role"


class SamplingOptions(Record):
    """How tokens are drawn. With `sampling_source` model, a plan's are those of the model, but for those given."""

    temperature: common.Temperature = 0.0
    top_p: common.TopP = 1.0
    top_k: common.TopK = 0
    min_p: common.MinP = 0.0
    sampling_source: common.SamplingSource = "own"

    @property
    def sampling(self) -> "Sampling":
        """The settings that decoding takes."""
        from mtbench.sampling import Sampling  # imports torch

        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def of_sampling(self) -> dict[str, Any]:
        """These options by name."""
        return {name: getattr(self, name) for name in SamplingOptions.model_fields}

    @property
    def words(self) -> str:
        """The settings in words; empty for greedy decoding that is nobody's choice."""
        model = " (--sampling model)" if self.sampling_source == "model" else ""
        return f"{'sampled at ' * (self.temperature > 0)}{self.sampling}{model}" if self.temperature or model else ""


class DecodingRequest(SamplingOptions):
    """The options that a run and a race share: what is decoded, how, and how it is scored."""

    suite: common.Suites = (DEMONSTRATION,)
    family: common.Family = None
    model: common.Model = None
    checkpoint: common.Checkpoints = Field(default_factory=dict)
    engine: common.Engines = ("graph",)
    engine_option: common.EngineOptions = ()
    prefix_cache: common.PrefixCaches = ("off",)
    batch_size: common.BatchSizes = (1, 8)
    metric: common.Metric = None
    subtask: common.Subtasks = ()
    max_new_tokens: common.MaxNewTokens = None
    max_context: common.MaxContext = None
    dtype: common.Dtype = "auto"
    device: common.Device = "auto"
    seed: common.Seed = 0
    chat_template_kwargs: common.ChatTemplateKwargs = Field(default_factory=dict)
    chat_template_date: common.ChatTemplateDate = None
    data_dir: common.DataDir = None
    offline: common.Offline = False
    skip_unscorable: common.SkipUnscorable = False
    allow_unsandboxed_code: common.AllowUnsandboxedCode = False
    protocol: common.ProtocolChoice = "own"

    @property
    def settings(self) -> list[EngineOption]:
        """The options of serving engines that are a part of an arm."""
        caches = (PREFIX_CACHE if given == "on" else NO_PREFIX_CACHE for given in self.prefix_cache)
        return [*self.engine_option, EngineOption(ANY, tuple(caches))]


class PlanRequest(DecodingRequest):
    """The request of a plan. `limit` is None for all items."""

    method: common.Methods = ()
    batching: common.Batchings = ("static",)
    limit: Annotated[
        common.ItemLimit,
        Field(
            description="Items per suite, or per subtask of a suite with subtasks; default: "
            f"{TIMED_BLOCKS} blocks of the largest batch size."
        ),
    ] = None
    rounds: common.Rounds = 3
    weights: common.Weights = None
    simulate_acceptance: common.SimulatedAcceptance = None
    ignore_eos: common.IgnoreEos = False


class RunRequest(PlanRequest):
    """The request of a run."""

    apart: common.Apart = False
    time_budget_s: common.TimeBudget = None
    max_loss: common.MaxLoss = 2.0
    price_per_hour: common.PricePerHour = None

    def completed(self) -> Self:
        """Return the request of a command: without a limit, the items of a few blocks."""
        if "limit" in self.model_fields_set:
            return self
        return self.changed(limit=default_limit(self.batch_size, self.batching))


class ReproduceRequest(RunRequest):
    """The request of a reproduction. An option that is not given has the published table's value."""

    name: Annotated[
        str, option("A published table; without a name, list all tables.", common.BENCHMARK, argument=True)
    ] = ""
    protocol: common.ProtocolChoice = "paper"

    def completed(self) -> Self:
        """Return the request as it is: the table says how many items."""
        return self


class Session(Record):
    """How one call carries out an experiment. It is not stored: every `--resume` chooses again."""

    plugin: common.Plugins = ()
    out: common.Out = None
    resume: common.Resume = False
    json_to: common.JsonTo = None


class RunSession(Session):
    """How one call carries out a run."""

    dry_run: common.DryRun = False
    workers: common.Workers = None
    ray: common.Ray = None
    server: common.Servers = ()
    peak_memory: common.PeakMemory = False
    fail_on: common.FailOn = ("divergent", "void", "failed")


def default_limit(batch_size: Sequence[int], batching: Sequence[str], blocks: int = TIMED_BLOCKS) -> int:
    """Return the items per suite or subtask of a command without `--limit`, for any suite.

    The default fills the blocks that every round times, at the largest batch size. More items narrow accuracy
    intervals, not those of time. A verdict on accuracy takes more; the results say how many.
    """
    prompts_per_row = REFILLS if "refill" in batching else 1
    return blocks * max(1, *batch_size) * prompts_per_row


class TimedSession(Session):
    """How one call carries out an experiment whose time is this call's alone."""

    time_budget_s: common.TimeBudget = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How one call executes a plan on this machine. It is not part of the plan: every `--resume` chooses again."""

    time_budget_s: float | None = None  # None: the plan's
    workers: int | None = None
    ray: str | None = None
    data_dir: str | None = None  # folder of the suites' data on this machine; None: the plan's
    offline: bool = False  # nothing is downloaded, whatever the plan
    allow_unsandboxed_code: bool = False
    peak_memory: bool = False  # measure it on a CPU too
    timed_only: bool = False  # the untimed passes are left out
    wait: Callable[[], None] | None = None  # called before every block, in the process that decodes
    # Called with the cells of a group before its first block and after every block, when their lines are stored. It
    # returns cells that leave: they decode no further blocks.
    leave: "Callable[[Sequence[str]], Sequence[Elimination]] | None" = None
    began: float | None = None  # when the time budget began, by time.monotonic; None: now
    servers: frozenset[str] = frozenset()  # that the plan may use: URL, or URL=VARIABLE (mtbench/decoding/external.py)
    engine_options: frozenset[EngineOption] = frozenset()  # that the plan may give to serving engines

    @classmethod
    def of(
        cls, request: Any, *, servers: Iterable[str] = (), engine_options: Iterable[EngineOption] = (), **session: Any
    ) -> "Execution":
        """Return the execution of a request: its options that every `--resume` may change."""
        same = ("time_budget_s", "data_dir", "offline", "allow_unsandboxed_code")
        options = {name: getattr(request, name) for name in same if hasattr(request, name)}
        allowed = {"servers": frozenset(servers), "engine_options": frozenset(engine_options)}
        return cls(**{**options, **session, **allowed})
