"""A request: one prompt to continue, the maximum number of tokens, and the strings that end it earlier."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtbench.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. Every batch, engine and external method decodes a list of these."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop: Sequence[str] = ()  # strings that end the answer
    seed: int = 0  # its random numbers depend only on this seed and the position
    item: int = 0  # number of the suite's item; simulated acceptance has one script per item
    # of serving engines
    cache: str | None = None  # it may use cached prompts of requests with this text, which has no `/`; None: of none
    begins: bool = True  # it is the first of these
    json_schema: Mapping[str, Any] | None = None  # its answer must meet
    # external methods take none of these, and serving engines the first request's temperature
    temperature: float | None = None  # 0: greedy; None: the batch's
    ignore_eos: bool = False  # its end tokens do not end it
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method, those declared `per_request`

    @property
    def slots(self) -> int:
        """The most tokens that it can have, with its prompt."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def unseen(self) -> "Request":
        """The request with its prompt rotated at random, but for the first token: no server has kept that prompt."""
        (first, *rest), at = self.prompt_ids, 1 + secrets.randbelow(max(1, len(self.prompt_ids) - 2))
        return replace(self, prompt_ids=[first, *rest[at:], *rest[:at]])


def in_batch(requests: Sequence[Request], *, temperature: float, ignore_eos: bool) -> list[Request]:
    """Return requests with the batch's values: a temperature for those without one.

    `ignore_eos`: end tokens and stop strings are ignored.
    """
    return [
        replace(
            request,
            temperature=temperature if request.temperature is None else request.temperature,
            ignore_eos=ignore_eos or request.ignore_eos,
            stop=() if ignore_eos else request.stop,
        )
        for request in requests
    ]


def refuse_unknown_ids(requests: Sequence[Request], vocabulary: int, role: str) -> None:
    """Raise UserError if a prompt has a token id that is none of a checkpoint's."""
    largest = max(max(request.prompt_ids) for request in requests)
    if largest >= vocabulary:
        raise UserError(
            f"a prompt has the token id {largest}, and the {role!r} checkpoint has ids below {vocabulary:,}: the plan "
            "is for another checkpoint. Plan it again with `mtbench plan`."
        )
