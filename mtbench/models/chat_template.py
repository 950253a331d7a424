"""Render conversations by a checkpoint's chat template, a program in Jinja's sandbox that a stranger may have written.

The sandbox bounds what a template may touch, not how long it runs. Here it has a few seconds.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from mtbench.errors import UserError, first_line

LONGEST_S = 5.0


class _OutOfTimeError(BaseException):
    """The template took too long. A template cannot catch it."""


def render(tokenizer: Any, messages: Sequence[Any], *, answer_follows: bool = False) -> str:
    """Return the conversation as the tokenizer's template writes it, with the beginning of an answer if one follows.

    Raises jinja2.TemplateError if the template refuses the conversation, and UserError if it fails or takes too long.
    """
    try:
        with _deadline(LONGEST_S):
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer_follows)
    except (UserError, TemplateError):
        raise
    except _OutOfTimeError:
        raise _failed(tokenizer, f"takes more than {LONGEST_S:g} s") from None
    except Exception as error:  # a template may raise any
        raise _failed(tokenizer, f"fails: {type(error).__name__}: {first_line(error)}") from None
    return str(text)


def _failed(tokenizer: Any, reason: str) -> UserError:
    return UserError(
        f"the chat template of checkpoint {tokenizer.name_or_path!r} {reason}; give another checkpoint or correct its "
        "template."
    )


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise _OutOfTimeError after some seconds. Only the main thread can be interrupted: others have no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _OutOfTimeError

    started_at = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining_s:  # somebody else's alarm
            left_s = max(remaining_s - (time.monotonic() - started_at), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
