"""The marks between which a model reasons: token ids where the tokenizer has tokens for them, else texts."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from mtbench.models.token_text import exact_text, shown_text
from mtbench.records import Record, TokenId

MARKS = (  # tokens that open, and that close, as in vLLM 0.32; texts such as Olmo 3's are split in several ways
    (("<|open|>", "think", "<|sep|>"), ("<|close|>", "think", "<|sep|>")),  # Kimi K3
    (("<|channel|>", "analysis", "<|message|>"), ("<|channel|>", "final", "<|message|>")),  # GPT-OSS
    (("<|channel>",), ("<channel|>",)),  # Gemma 4
    (("[THINK]",), ("[/THINK]",)),  # Mistral
    (("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    (("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Command A
    (("<think>",), ("</think>",)),  # Qwen3, DeepSeek-R1, GLM-4.5, Kimi K2, MiniMax-M2
)
TEXTS = [("".join(opening), "".join(closing)) for opening, closing in MARKS]
LAST = 8  # tokens of a prompt that are the template's, not a user's


class Thinking(Record):
    """How the answers of a suite mark what is thinking."""

    opening: list[TokenId] = Field(min_length=1, description="token ids that open it, in this order")
    closing: list[TokenId] = Field(min_length=1, description="token ids that close it, in this order")
    opened: bool = Field(description="true: the chat template opens it at the end of every prompt")

    @classmethod
    def find(cls, vocabulary: Mapping[str, int], prompts: Iterable[Sequence[int]]) -> "Thinking | None":
        """Return a vocabulary's marks, or None. `opened` is that of all prompts."""
        for opening, closing in MARKS:
            if vocabulary.keys() >= {*opening, *closing}:
                opens, closes = ([vocabulary[token] for token in mark] for mark in (opening, closing))
                marks = cls(opening=opens, closing=closes, opened=False)
                return marks.changed(opened=all(map(marks.opens, prompts)))
        return None

    def opens(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside of the marks."""
        end = prompt[-LAST:]
        return len(end) - 1 in self.changed(opened=False).places(end)

    def places(self, token_ids: Sequence[int]) -> set[int]:
        """Return the indices of an answer's tokens that are thinking: those from an opening to the next closing."""
        inside, found = self.opened, set[int]()
        for place in range(len(token_ids)):
            mark = self.closing if inside else self.opening
            if [*token_ids[place : place + len(mark)]] == mark:
                inside = not inside
            if inside:
                found.add(place)
        return found

    def reasoning(self, token_ids: Sequence[int]) -> int:
        """Return how many of an answer's first tokens are reasoning: up to the last closing, or all if it goes on."""
        if len(token_ids) - 1 in self.places(token_ids):
            return len(token_ids)
        size = len(self.closing)
        return max((n + size for n in range(len(token_ids)) if [*token_ids[n : n + size]] == self.closing), default=0)


@lru_cache(maxsize=8)
def _marks(tokenizer: PreTrainedTokenizerBase) -> Thinking | None:
    return Thinking.find(tokenizer.get_vocab(), ())


def reasoning_letters(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: Sequence[int], text: str) -> int:
    """Return how many of the first letters of `text`, of the tokens `ids` behind a prompt, are reasoning and marks."""
    if (marks := _marks(tokenizer)) is None:
        return reasoning_in(text, exact_text(tokenizer, prompt[-2 * LAST :]))
    count = marks.changed(opened=marks.opens(prompt)).reasoning(ids)
    return len(shown_text(tokenizer, ids[:count], prompt))


def reasoning_in(text: str, prompt: str = "") -> int:
    r"""Return how many of the first letters of a text are reasoning, by marks that are texts. `prompt`: its end.

    >>> reasoning_in("<think>\n2 + 2\n</think>4"), reasoning_in("<think>\n2"), reasoning_in("4")
    (22, 9, 0)
    """
    ended = max(text.rfind(closing) + len(closing) if closing in text else 0 for _, closing in TEXTS)
    rest, asked = text[ended:].lstrip(), "" if ended else prompt.rstrip()
    goes_on = any(rest.startswith(opening) or asked.endswith(opening) for opening, _ in TEXTS)
    return len(text) if goes_on else ended
