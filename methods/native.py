"""A serving engine's own drafting, by its name (`mtbench ls engines NAME`). Sizes beside `ahead` are its options."""

from dataclasses import dataclass

from mtbench.decoding.method import Method, Window
from mtbench.decoding.registry import METHODS
from mtbench.options import option


@METHODS.register("native")
@dataclass(frozen=True, kw_only=True)
class Native(Method):
    """A serving engine drafts by a method of its own; the target accepts what it would have chosen itself."""

    drafts: str | None = option(None, "the engine's name of the method; it has to be given")
    draft: str | None = option(None, "role of the checkpoint that drafts, if there is one", role=True)
    ahead: int = option(8, "K: most tokens drafted for each forward", low=1)

    title = "Native"
    roles = ("ar",)
    served_only = True
    claims = "lossless"

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)
