"""A stopwatch that accounts for work still queued on a GPU."""

import time
from itertools import pairwise

import torch


class Stopwatch:
    """Measures time on a device: `now` synchronises and reads the clock, `mark` does not synchronise."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def now(self) -> float:
        """Wait until the device is idle; return seconds of a monotonic clock."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self) -> None:
        """Record the current time; on a GPU, the time at which the device finishes the work queued so far."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Return the seconds between consecutive marks. On a GPU, call `now` first."""
        return [
            b - a if isinstance(a, float) else a.elapsed_time(b) / 1000  # type: ignore[operator, arg-type]
            for a, b in pairwise(self._marks)
        ]
