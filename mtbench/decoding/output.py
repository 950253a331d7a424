"""The answer to a request, its cost, and where an answer ends: for our loop and for external engines."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mtbench.models.thinking import reasoning_letters
from mtbench.models.token_text import CONTEXT, exact_text, shown_text, special_ids

FinishReason = Literal["end", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request's answer and its cost. Counts end with the forward that committed the last kept token.

    Metrics that an external engine does not expose are None.
    """

    token_ids: list[int]  # with the end token, or the token that completes a stop string
    text: str  # shown: cut before the end token, or before the first character of the stop string
    reasoning: int = 0  # letters at the beginning of `text` that are reasoning, with its marks; all if it goes on
    special: list[tuple[int, str]] | None = None  # letters of `text` before each special token, and its text
    commits: list[int] | None = None  # tokens committed by each forward, zeros included
    positions_fed: int | None = None
    draft_forwards: int | None = None  # by models other than the target
    drafted: int | None = None  # tokens beyond each forward's first that could have been committed
    finish_reason: FinishReason
    surplus: int | None = None  # tokens that its last forward accepted after the answer's end
    counted: int | None = None  # forwards by an external engine's own count
    cached_tokens: int | None = None  # tokens of the prompt that an external engine had kept

    @property
    def exact(self) -> str:
        """The text with its special tokens."""
        return with_special(self.text, self.special or ())

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


def finish(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    end_ids: Collection[int],
    stop: Sequence[str],
    prompt: Sequence[int] = (),
) -> Generation:
    """Return an answer up to the first stop string, without its cost. `ids` are behind those of its `prompt`.

    Only the last of `ids` can be an end token. Without end token and stop string, the budget ended the answer.
    """
    stopped = cut_at_string(tokenizer, ids, stop, prompt)
    ended = stopped is None and ids[-1] in end_ids
    before = list(ids[: stopped[0] if stopped else len(ids) - ended])
    text = shown_text(tokenizer, before, prompt)
    reasoning = reasoning_letters(tokenizer, before, prompt, text)
    if stopped is not None:
        before = before[: stopped[1]]
        text = shown_text(tokenizer, before, prompt) + stopped[2]
    return Generation(
        token_ids=list(ids[: stopped[0] if stopped else None]),
        text=text,
        reasoning=min(reasoning, len(text)),
        special=_special_tokens(tokenizer, before, prompt),
        finish_reason="stop" if stopped else "end" if ended else "length",
    )


def cut_at_string(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str], prompt: Sequence[int]
) -> tuple[int, int, str] | None:
    """Find the first stop string in an answer's exact text; None: there is none.

    Return how many tokens the answer takes, how many of them end before the string, and the shown text behind these.
    """
    if not stop or first_of(exact_text(tokenizer, ids, prompt), stop) is None:
        return None
    low, high = 1, len(ids)
    while low < high:  # find the shortest prefix that holds a stop string
        middle = (low + high) // 2
        if first_of(exact_text(tokenizer, ids[:middle], prompt), stop) is not None:
            high = middle
        else:
            low = middle + 1
    text = exact_text(tokenizer, ids[:low], prompt)  # tokens after the stop must not influence where the text ends
    text, before = text[: min(text.find(s) for s in stop if s in text)], low - 1
    while not text.startswith(whole := exact_text(tokenizer, ids[:before], prompt)):
        before -= 1
    return low, before, "" if ids[before] in special_ids(tokenizer) else text[len(whole) :]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the index of the first token that differs; the shorter length if one is a prefix of the other."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def first_of(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the first of some strings in a text, and that string; None without any.

    >>> first_of("18 apples. Q: And", ["A:", "Q:"])
    (11, 'Q:')
    """
    return min(((text.find(string), string) for string in strings if string in text), default=None)


def with_special(text: str, special: Sequence[tuple[int, str]]) -> str:
    """Return a shown text with its special tokens, as in `Generation`."""
    for at, token in reversed(special):
        text = text[:at] + token + text[at:]
    return text


def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int]
) -> list[tuple[int, str]] | None:
    """Return the special tokens of an answer, each with its place in the shown text; None without any."""
    special, found, at, begin = special_ids(tokenizer), list[tuple[int, str]](), 0, 0
    for place, token in enumerate(ids):
        if token in special:
            at += len(shown_text(tokenizer, ids[begin:place], [*prompt[-CONTEXT:], *ids[:begin]]))
            begin = place + 1
            found.append((at, exact_text(tokenizer, [token])))
    return found or None
