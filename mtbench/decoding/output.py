"""What decoding a request gave and what it cost, and where an answer ends: for our loop and outside engines alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["end", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's answer and what it cost. Counts end with the forward that committed the last kept token.

    What an outside engine does not reveal is None.
    """

    token_ids: list[int]  # with the end token, or the token that completes a stop string
    text: str  # cut before the end token, or before the first character of the stop string
    commits: list[int] | None  # tokens committed by each forward, zeros included
    positions_fed: int | None
    draft_forwards: int | None  # by lanes other than the target's
    drafted: int | None  # tokens beyond each forward's first that its forwards could have committed
    finish_reason: FinishReason
    surplus: int | None = None  # tokens that its last forward accepted behind its end

    @property
    def forwards(self) -> int | None:
        return None if self.commits is None else len(self.commits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One block of requests, from an idle device to an idle device. What an outside engine does not reveal is None."""

    rows: int  # slots: requests decoded side by side
    items: int  # requests; more than `rows` where finished rows are refilled
    prompt_tokens: int
    tokens: int
    row_forwards: int | None
    batch_forwards: int | None
    wall_s: float
    prefill_s: float | None
    decode_s: float | None
    device_s: float | None  # of decode_s; None where a step is many launches, whose gaps a GPU's events do not show
    ttft_s: float | None  # on the device: the host sees tokens some steps later
    step_s: list[float] | None  # per forward, from the end of the one before, on the device
    draft_s: float | None  # of device_s, in forwards of lanes other than the target's
    head_s: float | None  # of device_s, in what a method computes beside its models
    preparation_s: float  # capture and compilation that fell into it; 0 once a shape is warm
    kv_bytes: int | None  # keys and values that these rows need
    miscounted: int  # forwards seen by the models' hooks less forwards counted by the lanes
    # what only an outside engine can tell of itself
    counted: int | None = None  # tokens by its own count
    drafts: int | None = None  # times it drafted
    drafted: int | None = None  # tokens of those drafts
    accepted: int | None = None  # of these


def said(line: Mapping[str, Any]) -> list[int] | None:
    """What a later turn finds of a stored answer: its tokens but for the end token; None if they are hidden."""
    ids: list[int] | None = line["token_ids"]
    return ids if ids is None or line["finish_reason"] != "end" else ids[:-1]


def finish(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_ids: Sequence[int], stop: Sequence[str]
) -> tuple[list[int], str, FinishReason]:
    """An answer that stands for itself: its tokens up to the first stop string, its text, why it ended.

    `ids` holds no end token before its last place; with none of `end_ids` there and no stop string it was cut by its
    budget.
    """
    length, text, found = cut_at_string(tokenizer, ids, stop)
    kept = list(ids[:length])
    if found:
        return kept, text, "stop"
    ended = kept[-1] in end_ids
    return kept, text_of(tokenizer, kept[:-1] if ended else kept), "end" if ended else "length"


def cut_at_string(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str, bool]:
    """How many tokens there are up to the one that completes a stop string, the text before it, and whether one is."""
    text = text_of(tokenizer, ids) if stop else ""
    if not any(s in text for s in stop):
        return len(ids), text, False
    low, high = 1, len(ids)
    while low < high:  # the shortest prefix that holds a stop string
        middle = (low + high) // 2
        if any(s in text_of(tokenizer, ids[:middle]) for s in stop):
            high = middle
        else:
            low = middle + 1
    text = text_of(tokenizer, ids[:low])  # what was said behind the stop must not decide where the text ends
    return low, text[: min(place for s in stop if (place := text.find(s)) >= 0)], True


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of some tokens, without special ones."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
