"""Time, with the device in step: synchronise, read the clock, synchronise."""

import time
from itertools import pairwise

import torch


class Stopwatch:
    """`now` is the wall clock with nothing left running on the device; `lap` marks a moment without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self) -> None:
        """A moment: on a GPU when the device gets there."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Seconds between one mark and the next. On a GPU call it only when the device is idle."""
        return [
            b - a if isinstance(a, float) else a.elapsed_time(b) / 1000  # type: ignore[operator, arg-type]
            for a, b in pairwise(self._marks)
        ]
