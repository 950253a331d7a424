"""The answer to a request, its cost, and where an answer ends: for our loop and for external engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["end", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's answer and its cost. Counts end with the forward that committed the last kept token.

    Metrics that an external engine does not expose are None.
    """

    token_ids: list[int]  # with the end token, or the token that completes a stop string
    text: str  # cut before the end token, or before the first character of the stop string
    commits: list[int] | None = None  # tokens committed by each forward, zeros included
    positions_fed: int | None = None
    draft_forwards: int | None = None  # by models other than the target
    drafted: int | None = None  # tokens beyond each forward's first that could have been committed
    finish_reason: FinishReason
    surplus: int | None = None  # tokens that its last forward accepted after the answer's end
    counted: int | None = None  # forwards by an external engine's own count
    cached_tokens: int | None = None  # tokens of the prompt that an external engine had kept

    @property
    def forwards(self) -> int | None:
        return self.counted if self.commits is None else len(self.commits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of a block of requests, from an idle device to an idle device.

    Metrics that an external engine does not expose are None.
    """

    rows: int  # requests decoded at the same time
    items: int  # requests; more than `rows` if finished rows are refilled
    prompt_tokens: int
    tokens: int
    row_forwards: int | None = None
    batch_forwards: int | None = None
    wall_s: float
    prefill_s: float | None = None
    decode_s: float | None = None
    device_s: float | None = (
        None  # part of decode_s; None if a step has many launches: CUDA events do not show the gaps
    )
    ttft_s: float | None = None  # on the device: the host sees tokens some steps later
    step_s: list[float] | None = None  # per forward, from the end of the previous one, on the device
    draft_s: float | None = None  # part of device_s: forwards of models other than the target
    head_s: float | None = None  # part of device_s: computations of the method outside its models
    preparation_s: float = 0.0  # capture and compilation inside the block; 0 after a shape was captured
    kv_bytes: int | None = None  # keys and values that these rows need
    miscounted: int = 0  # forwards counted by hooks on the models minus forwards counted by the runners
    # of external engines only
    counted: int | None = None  # tokens by its own count
    cached_tokens: int | None = None  # of the prompts, that it had kept
    drafts: int | None = None  # number of drafts
    drafted: int | None = None  # tokens of those drafts
    accepted: int | None = None  # tokens of these that were accepted
    histogram: list[int] | None = None  # entry n: drafts of which n tokens were accepted
    reported_by: str | None = None  # who reports this per request; None: counters of the whole engine, if any
    dropped: str | None = None  # why its time is not used


def finish(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_ids: Sequence[int], stop: Sequence[str]
) -> tuple[list[int], str, FinishReason]:
    """Return an answer's tokens up to the first stop string, its text and its finish reason.

    Only the last of `ids` can be an end token. Without end token and stop string, the budget ended the answer.
    """
    length, text, found = cut_at_string(tokenizer, ids, stop)
    kept = list(ids[:length])
    if found:
        return kept, text, "stop"
    ended = kept[-1] in end_ids
    return kept, text_of(tokenizer, kept[:-1] if ended else kept), "end" if ended else "length"


def cut_at_string(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str, bool]:
    """Cut an answer at the first stop string: return the tokens it needs, the text before it, whether there is one."""
    text = text_of(tokenizer, ids) if stop else ""
    if not any(s in text for s in stop):
        return len(ids), text, False
    low, high = 1, len(ids)
    while low < high:  # find the shortest prefix that holds a stop string
        middle = (low + high) // 2
        if any(s in text_of(tokenizer, ids[:middle]) for s in stop):
            high = middle
        else:
            low = middle + 1
    text = text_of(tokenizer, ids[:low])  # tokens after the stop must not influence where the text ends
    return low, text[: min(text.find(s) for s in stop if s in text)], True


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of some tokens, without special ones."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
