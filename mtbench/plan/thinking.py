"""The tokens between which a model thinks, found in its tokenizer when a run is planned."""

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from mtbench.records import Record, TokenId

MARKS = (  # tokens that open, and that close, as in vLLM 0.32; texts such as Olmo 3's are split in several ways
    (("<|open|>", "think", "<|sep|>"), ("<|close|>", "think", "<|sep|>")),  # Kimi K3
    (("<|channel|>", "analysis", "<|message|>"), ("<|end|>",)),  # GPT-OSS
    (("<|channel>",), ("<channel|>",)),  # Gemma 4
    (("[THINK]",), ("[/THINK]",)),  # Mistral
    (("<seed:think>",), ("</seed:think>",)),  # Seed-OSS
    (("<|START_THINKING|>",), ("<|END_THINKING|>",)),  # Command A
    (("<think>",), ("</think>",)),  # Qwen3, DeepSeek-R1, GLM-4.5, Kimi K2, MiniMax-M2
)


class Thinking(Record):
    """How the answers of a suite mark what is thinking."""

    opening: list[TokenId] = Field(min_length=1, description="token ids that open it, in this order")
    closing: list[TokenId] = Field(min_length=1, description="token ids that close it, in this order")
    opened: bool = Field(description="true: the chat template opens it at the end of every prompt")

    @classmethod
    def find(cls, vocabulary: Mapping[str, int], prompts: Iterable[Sequence[int]]) -> "Thinking | None":
        """Return a vocabulary's marks, or None. The last 8 ids of `prompts` are a template's, not a user's."""
        for opening, closing in MARKS:
            if vocabulary.keys() >= {*opening, *closing}:
                opens, closes = ([vocabulary[token] for token in mark] for mark in (opening, closing))
                marks, ends = cls(opening=opens, closing=closes, opened=False), [ids[-8:] for ids in prompts]
                return marks.changed(opened=all(len(end) - 1 in marks.places(end) for end in ends))
        return None

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
