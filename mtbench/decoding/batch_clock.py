"""The clock of one run of a batch: wall-clock time from an idle device to an idle device, and its parts.

Prefill is the time until all rows hold their first request, plus every pause in which free rows are refilled. Decoding
is the rest. On a GPU the spans of steps come from CUDA events, so that no step waits for the host.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.run_state import WorkloadRun
from mtbench.hardware.stopwatch import Stopwatch


class Clock:
    """The clock of a run without measured times."""

    def mark(self) -> None:
        """Note the time before and after each step."""

    def pause(self) -> None:
        """Note the time before free rows are refilled."""

    def resume(self) -> None:
        """Note the time after it."""


class BatchClock(Clock):
    """It runs from its creation until `stop`; `end_prefill`, `pause`, `resume` and `mark` divide this time.

    A reading is an array of four times in seconds: wall-clock time; the host's time inside forwards, in those of
    models other than the target, and outside models.
    """

    def __init__(self, runners: ModelRunners, *, one_launch: bool) -> None:
        """`one_launch`: each step is a single launch, so that its span on a GPU contains no gaps between launches."""
        self._runners, self._one_launch = runners, one_launch
        self._stopwatch = Stopwatch(runners.target.device)
        self._uncounted = self._model_calls() - self._forwards()
        self._started = self._paused = self._read()
        self._first_prefill_s = 0.0

    def mark(self) -> None:
        self._stopwatch.mark()

    def end_prefill(self) -> None:
        """End the prefill: all rows hold their first request."""
        self._prefill = self._read() - self._started
        self._first_prefill_s = float(self._prefill[0])

    def pause(self) -> None:
        """Count the time from here to `resume` as prefill."""
        self._paused = self._read()

    def resume(self) -> None:
        self._prefill += self._read() - self._paused

    def stop(self) -> None:
        self._whole = self._read() - self._started
        self._laps = self._stopwatch.laps()

    @property
    def timed_heads(self) -> bool:
        """Whether the method computed anything outside its models."""
        return bool(self._whole[3] > 0)

    def _read(self) -> NDArray[np.float64]:
        runners = self._runners.values()
        model_s = sum(runner.host_s for runner in runners)
        heads_s = sum(runner.heads_s for runner in runners)
        return np.array([self._stopwatch.now(), model_s, model_s - self._runners.target.host_s, heads_s])

    def timing(
        self, run: WorkloadRun, generations: Sequence[Generation], *, rows: int, kv_bytes: int, heads: bool
    ) -> Timing:
        """Return the times and counts of the run. `heads`: the method computes something outside its models."""
        cuda, wall_s, prefill_s = self._stopwatch.cuda, float(self._whole[0]), float(self._prefill[0])
        decode_s, device_s, draft_s, head_s = (self._whole - self._prefill).tolist()
        if cuda:
            device_s = sum(self._laps[0::2]) if self._one_launch else None
        # A step's span begins at the end of the previous step: it contains the host's work between the two.
        spans = [self._laps[0], *(wait + step for wait, step in zip(self._laps[1::2], self._laps[2::2], strict=True))]
        until_first_token = min(map(_forwards_until_first_token, generations[:rows]))
        return Timing(
            rows=rows,
            items=len(generations),
            prompt_tokens=sum(len(request.prompt_ids) for request in run.requests),
            tokens=sum(len(g.token_ids) for g in generations),
            row_forwards=sum(g.forwards or 0 for g in generations),
            batch_forwards=run.steps,
            wall_s=wall_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            device_s=device_s,
            ttft_s=self._first_prefill_s + sum(spans[:until_first_token]),
            step_s=spans,
            draft_s=None if cuda and len(self._runners) > 1 else draft_s,
            head_s=None if cuda and heads else head_s,
            preparation_s=run.preparation_s,
            kv_bytes=kv_bytes,
            miscounted=self._model_calls() - self._forwards() - self._uncounted,
        )

    def _forwards(self) -> int:
        return sum(runner.forwards for runner in self._runners.values())

    def _model_calls(self) -> int:
        """Forwards that the hooks on the models counted; two runners may share a model."""
        return sum(calls.n for calls in {runner.checkpoint.calls for runner in self._runners.values()})


def _forwards_until_first_token(generation: Generation) -> int:
    """Return the number of the first forward that committed a token, from 1."""
    commits = generation.commits or [1]
    return next(forward for forward, count in enumerate(commits, start=1) if count)
