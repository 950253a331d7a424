"""A request: one prompt to continue, the maximum number of tokens, and the strings that end it earlier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    # what it has of its own; external methods take none of these
    temperature: float | None = None  # None: the batch's
    ignore_eos: bool = False  # its end tokens do not end it
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method, those declared `per_request`


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the requests of a batch share, and whether some have values of their own."""

    ignore_eos: bool = False  # end tokens and stop strings are ignored
    temperature: float = 0.0  # 0: greedy
    own: bool = False  # requests have their own temperature, length or options


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to decode, and the settings that all of them share."""

    requests: Sequence[Request]
    ignore_eos: bool = False  # end tokens and stop strings are ignored
    temperature: float = 0.0  # 0: greedy

    @property
    def slots(self) -> int:
        """Maximum positions of a request: prompt and new tokens."""
        return max(len(request.prompt_ids) + request.max_new_tokens for request in self.requests)

    @property
    def most_new_tokens(self) -> int:
        return max(request.max_new_tokens for request in self.requests)

    @property
    def setting(self) -> Setting:
        own = any(r.temperature is not None or r.ignore_eos or r.options for r in self.requests)
        return Setting(ignore_eos=self.ignore_eos, temperature=self.temperature, own=own)

    @property
    def stops_early(self) -> bool:
        """Whether a stop string may end an answer."""
        return not self.ignore_eos and any(request.stop for request in self.requests)


def refuse_unknown_ids(requests: Sequence[Request], vocabulary: int, role: str) -> None:
    """Raise UserError if a prompt has a token id that is none of a checkpoint's."""
    largest = max(max(request.prompt_ids) for request in requests)
    if largest >= vocabulary:
        raise UserError(
            f"a prompt has the token id {largest}, and the {role!r} checkpoint has ids below {vocabulary:,}: the plan "
            "is for another checkpoint. Plan it again with `mtbench plan`."
        )
