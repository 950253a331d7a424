"""The options of a race with their defaults. For `mtbench choose` and `mtbench.choose`.

Light: the command line reads the defaults from here for its help, without torch.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from mtbench.errors import UserError
from mtbench.records import Former
from mtbench.runs.run_request import RACED_BLOCKS, DecodingRequest, RunRequest, default_limit

AUTO = "auto"  # of `--method`


class RaceRequest(DecodingRequest):
    """The options that say what is raced and by what it is judged. `plan_race` and `settings` check the values."""

    FORMER: ClassVar[Mapping[str, Former]] = {**DecodingRequest.FORMER, "candidates": Former("method")}

    method: Sequence[str] = (AUTO,)  # arms; auto: all that can run
    max_loss: float = 1.0  # of accuracy, in points
    objective: str = "speed"
    slo: str | None = None  # such as ttft=500ms,itl=50ms
    limit: int | Literal["all"] | None = None  # most items; null: those of RACED_BLOCKS blocks of the largest size

    def run_request(self) -> RunRequest:
        """Return the request of the run that the race is; its methods are the candidates, none for all.

        Raises UserError for several suites, and for candidates beside `auto`.
        """
        if len(self.suite) != 1:
            raise UserError(f"one race has one suite, not {', '.join(self.suite) or 'none'}; race each by itself.")
        if AUTO in self.method and len(self.method) > 1:
            raise UserError(f"--method {AUTO} names all arms that can run; leave it out, or the others.")
        same = {name: getattr(self, name) for name in DecodingRequest.model_fields}
        limit = default_limit(self.batch_size, (), RACED_BLOCKS) if self.limit is None else self.limit
        return RunRequest(
            method=() if AUTO in self.method else tuple(self.method),
            limit=limit if isinstance(limit, int) else None,
            **same,
        )


RACE_OPTIONS = tuple(RaceRequest.model_fields)
RACE_DEFAULTS = RaceRequest()
