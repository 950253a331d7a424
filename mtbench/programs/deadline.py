"""A limit of time for code that may never end: an untrusted template, schema or pattern."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTimeError(BaseException):
    """The time is over. Code that catches exceptions does not catch it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError after some seconds. Only the main thread can be interrupted: others have no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
