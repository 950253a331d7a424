"""A request: one prompt to continue, the maximum number of tokens, and the strings that end it earlier."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mtbench.errors import UserError
from mtbench.sampling import Sampling


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
    # as in `Sampling`; None: the batch's
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    # external methods and serving engines take none of these
    ignore_eos: bool = False  # its end tokens do not end it
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method, those declared `per_request`

    @property
    def sampling(self) -> Sampling:
        """How its tokens are drawn; what is None has its default, which is greedy."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(self.temperature or 0.0, self.top_k or 0, top_p, self.min_p or 0.0)

    @property
    def slots(self) -> int:
        """The most tokens that it can have, with its prompt."""
        return len(self.prompt_ids) + self.max_new_tokens

    @property
    def unseen(self) -> "Request":
        """The request with its prompt rotated at random, but for the first token: no server has kept that prompt."""
        (first, *rest), at = self.prompt_ids, 1 + secrets.randbelow(max(1, len(self.prompt_ids) - 2))
        return replace(self, prompt_ids=[first, *rest[at:], *rest[:at]])


def in_batch(requests: Sequence[Request], *, sampling: Sampling, ignore_eos: bool) -> list[Request]:
    """Return requests with the batch's values: settings of the sampling for those without.

    `ignore_eos`: end tokens and stop strings are ignored.
    """
    settings = asdict(sampling)
    return [
        replace(
            request,
            **{name: value for name, value in settings.items() if getattr(request, name) is None},
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
