"""The options of a race with their defaults. For `mtbench choose` and `mtbench.choose`.

Light: the command line reads the defaults from here for its help, without torch.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from mtbench.errors import UserError
from mtbench.records import Record
from mtbench.runs.run_request import DEFAULTS, OPTIONS, RACED_BLOCKS, RunRequest, default_limit

AUTO = "auto"  # of `--candidates`


class RaceRequest(Record):
    """The options that say what is raced and by what it is judged. `plan_race` and `settings` check the values."""

    suite: str = DEFAULTS.suite[0]
    candidates: Sequence[str] = (AUTO,)  # arms; auto: all that can run
    family: str | None = DEFAULTS.family
    model: str | None = DEFAULTS.model
    checkpoint: Mapping[str, str] = Field(default_factory=dict)
    batch_size: Sequence[int] = DEFAULTS.batch_size
    max_loss: float = 1.0  # of accuracy, in points
    objective: str = "speed"
    slo: str | None = None  # such as ttft=500ms,itl=50ms
    limit: int | Literal["all"] | None = None  # most items; null: those of RACED_BLOCKS blocks of the largest size
    max_new_tokens: int | None = DEFAULTS.max_new_tokens
    temperature: float = DEFAULTS.temperature
    data_dir: str | None = DEFAULTS.data_dir
    offline: bool = DEFAULTS.offline
    allow_unsandboxed_code: bool = DEFAULTS.allow_unsandboxed_code
    dtype: str = DEFAULTS.dtype
    device: str = DEFAULTS.device
    seed: int = DEFAULTS.seed

    def run_request(self) -> RunRequest:
        """Return the request of the run that the race is; its methods are the candidates, none for all."""
        own = ("suite", "limit")
        same = {name: getattr(self, name) for name in OPTIONS if name in RACE_OPTIONS and name not in own}
        if AUTO in self.candidates and len(self.candidates) > 1:
            raise UserError(f"--candidates {AUTO} names all arms that can run; leave it out, or the others.")
        candidates = () if AUTO in self.candidates else tuple(self.candidates)
        limit = default_limit(self.batch_size, (), RACED_BLOCKS) if self.limit is None else self.limit
        return RunRequest(
            suite=(self.suite,), method=candidates, limit=limit if isinstance(limit, int) else None, **same
        )


RACE_OPTIONS = tuple(RaceRequest.model_fields)
RACE_DEFAULTS = RaceRequest()
