"""The text of an answer while it grows: complete characters only, and no beginning of a stop string.

Some tokens are parts of a character, and some tokenizers write a token differently at the beginning of a text. So new
tokens are decoded together with those before them, and the text of these is cut off (as in text-generation-inference).
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mtbench.decoding.output import text_of

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet


class TextStream:
    """The pieces of one answer's text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._before: list[int] = []  # tokens that new ones are decoded with
        self._new: list[int] = []  # tokens whose text is not complete
        self._held = ""  # text that may begin a stop string
        self.stopped = False  # a stop string is complete: `add` returns nothing more

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._new += ids
        before = text_of(self._tokenizer, self._before)
        text = text_of(self._tokenizer, self._before + self._new)
        if self.stopped or text.endswith(INCOMPLETE) or len(text) <= len(before):
            return ""
        self._before, self._new = self._new, []
        return self._release(text[len(before) :])

    def _release(self, piece: str) -> str:
        text = self._held + piece
        self.stopped = any(s in text for s in self._stop)
        end = min((text.find(s) for s in self._stop if s in text), default=len(text) - self._begun(text))
        self._held = text[end:]
        return text[:end]

    def _begun(self, text: str) -> int:
        """Return how many characters at the end of the text may begin a stop string."""
        return max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
