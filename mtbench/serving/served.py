"""The content of a server: one method on the checkpoints of a family, loaded once."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mtbench.decoding.arms import Arm, parse_arms
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method
from mtbench.errors import UserError
from mtbench.lineup.lineup import Lineup
from mtbench.measure.model_pool import ModelPool, use_threads
from mtbench.models import families
from mtbench.models.auto import fastest_dtype
from mtbench.models.families import short_name
from mtbench.options import AUTO
from mtbench.options.classes import check_value, per_request
from mtbench.plan.request import RunRequest
from mtbench.sampling import GREEDY, Sampling

LONGEST = 4096  # positions of a row, unless the user wants more
DEFAULT_FAMILY = "tiny"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A loaded model with its method."""

    name: str  # as clients call it
    arm: str
    method: Method
    rows: int
    max_length: int  # positions of a request, prompt and answer
    vocabulary: int  # ids below it may be in a prompt
    end_ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase  # for the threads that do not decode
    make: Callable[[], Batch]
    sampling: Sampling = GREEDY  # of requests that do not name a setting
    date: str | None = None  # that the chat template reads; None: the machine's clock

    def option(self, name: str, value: float) -> float:
        """Return a request's value of an option. Raises UserError with what is allowed."""
        try:
            check_value(type(self.method), name, value)
        except ValueError as error:
            raise UserError(f"{name}={value} is not allowed; {name} is {error}.") from None
        dataclasses.replace(self.method, **{name: float(value)})  # type: ignore[type-var]  # refuses some combinations
        return float(value)

    @property
    def window(self) -> int:
        """Most tokens that a forward commits."""
        return self.method.variants[-1].window().commits

    @property
    def options(self) -> Mapping[str, float]:
        """The options that requests may set, with the values for those that do not."""
        return {name: getattr(self.method, name) for name in per_request(self.method)}


def load(request: RunRequest, method: str, rows: int, max_length: int | None = None) -> Served:
    """Load the checkpoints of `request` and check that `method` runs on it. Raises UserError for any mistake."""
    arm = _one_arm(method, request.engine)
    family = families.family(request.family or DEFAULT_FAMILY, request.model, request.checkpoint)
    entrant = Lineup(family, request).entrant(arm)
    if entrant.fault is not None:
        raise UserError(f"{str(arm)!r} cannot be served: {entrant.fault}.")
    checkpoints, chosen = family.checkpoints(arm.roles), entrant.method
    if request.dtype == AUTO:
        dtype = fastest_dtype(request.device, checkpoints.values(), offline=request.offline)
        request = request.changed(dtype=dtype)
    pool = ModelPool(request)
    runners = pool.runners_for(arm.on, checkpoints, arm.engine)
    use_threads(pool)
    longest = min(runner.checkpoint.max_positions for runner in runners.values())
    length = min(LONGEST, longest) if max_length is None else max_length
    if not chosen.block < length <= longest:
        raise UserError(
            f"--max-length {length} is not allowed; it is a number of positions from {chosen.block + 1} to the context "
            f"of the checkpoint, {longest:,}."
        )
    make = pool.engine(arm.engine or "").batch
    target, given = runners.target.checkpoint, request.model or request.checkpoint.get(arm.on)
    return Served(
        name=family.name if given is None else short_name(given),
        arm=str(arm),
        method=chosen,
        rows=rows,
        max_length=length,
        vocabulary=min(runner.checkpoint.vocabulary for runner in runners.values()),
        end_ids=target.end_ids,
        tokenizer=copy.deepcopy(target.tokenizer),
        make=lambda: make(chosen, runners, rows, length),
        sampling=request.sampling,
        date=request.chat_template_date,
    )


def _one_arm(method: str, engines: Sequence[str]) -> Arm:
    arms = parse_arms([method], engines)
    if len(arms) != 1:
        raise UserError(f"--method {method!r} names {len(arms)} arms, and a server has one; give one value per option.")
    if arms[0].engine is None:
        raise UserError(
            f"{str(arms[0])!r} runs in an external engine, and a server decodes in mtbench's loop; choose another "
            "method. See `mtbench ls methods`."
        )
    return arms[0]
