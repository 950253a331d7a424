"""Time, with the device in step: synchronise, read the clock, synchronise."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """`now` is the wall clock with nothing left running on the device; `device_s` the time spent in forwards.

    On a CPU the time inside the model stands for device time. On a GPU it is measured by events, without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward."""
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def device_s(self) -> float:
        """Seconds in forwards so far. On a GPU call it only when the device is idle."""
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
        self._events.clear()
        return self._seconds
