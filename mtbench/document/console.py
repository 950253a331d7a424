"""The terminal. It gets no control character but rich's own: names, paths and model output are untrusted input."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from mtbench.errors import printable


class Terminal(Console):
    """A rich console that shows control characters as escapes."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`; all text passes through here before it is laid out."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)

    def say(self, text: Any) -> None:
        """Print one line of plain text, unwrapped."""
        self.print(str(text), markup=False, highlight=False, soft_wrap=True)
