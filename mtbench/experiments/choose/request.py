"""The request of a race. `mtbench choose` and `mtbench.choose` have these options.

Light: the command line makes its help of this file without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self, get_args

from pydantic import Field

from mtbench.errors import UserError
from mtbench.options import AUTO, common, texts
from mtbench.options.common import COMPARED, DECISION, OUTPUT
from mtbench.options.fields import option
from mtbench.plan.formats import LimitName
from mtbench.plan.request import DEMONSTRATION, RACED_BLOCKS, DecodingRequest, RunRequest, TimedSession, default_limit


class RaceRequest(DecodingRequest):
    """The arms of a race, and the criteria. It has one suite and one engine."""

    suite: Annotated[
        common.Suites,
        Field(description="Suite as NAME or NAME:REST; prompts:FILE for your own. See `mtbench ls suites`."),
    ] = (DEMONSTRATION,)
    engine: Annotated[
        common.Engines,
        Field(
            description="How forward passes run: graph, eager (as papers measure) or invariant; or the name of a "
            "serving engine. See `mtbench ls engines`.",
        ),
    ] = ("graph",)
    method: Annotated[
        Sequence[str],
        option("Arm to race, such as 'mars:tau=0.95|0.8'. Repeatable; default auto: all that can run.", COMPARED),
    ] = (AUTO,)
    max_loss: common.MaxLoss = 1.0
    slo: Annotated[
        Mapping[LimitName, float],
        option(
            "Limits of 95th percentiles, such as ttft=500ms,itl=50ms (between two commits); default: none.",
            DECISION,
            metavar="LIMITS",
            parse=texts.latency_limits(get_args(LimitName)),
            show=texts.shown_limits,
        ),
    ] = Field(default_factory=dict)
    limit: Annotated[
        common.ItemLimit,
        Field(
            description=f"Most items of the suite, or all; default: {RACED_BLOCKS} blocks of the largest batch size.",
        ),
    ] = None

    def completed(self) -> Self:
        """Return the request of a command: without a limit, the items of as many blocks as a race needs."""
        given = "limit" in self.model_fields_set
        return self if given else self.changed(limit=default_limit(self.batch_size, (), RACED_BLOCKS))

    def run_request(self) -> RunRequest:
        """Return the request of the run that the race is; its methods are the candidates, none for all.

        Raises UserError for several suites, and for candidates beside `auto`.
        """
        if len(self.suite) != 1:
            raise UserError(f"one race has one suite, not {', '.join(self.suite)}; race each by itself.")
        if len(self.engine) != 1:
            raise UserError(f"one race has one engine, not {', '.join(self.engine)}; race in each by itself.")
        if AUTO in self.method and len(self.method) > 1:
            raise UserError(f"--method {AUTO} names all arms that can run; leave it out, or the others.")
        same = {name: getattr(self, name) for name in DecodingRequest.model_fields if name in self.model_fields_set}
        limit = self.completed().limit
        method = () if AUTO in self.method else tuple(self.method)
        return RunRequest(method=method, limit=limit, rounds=1, max_loss=self.max_loss, **same)


class RaceSession(TimedSession):
    """How one call carries out a race."""

    dry_run: common.DryRun = False
    workers: common.Workers = None
    deploy: Annotated[
        Literal["race", "all"],
        option("Print the command for the engine of the race, or for all engines.", OUTPUT, resumable=True),
    ] = "race"
