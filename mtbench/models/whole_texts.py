"""Logits of whole texts by transformers' modules: the judge of answers that mtbench's loop cannot decode.

A forward over prompt and answer undoes no token. So it needs no cache, and each class's own attention or recurrence is
right: hybrids, any rope type, and quantised folders whose package is installed. Ids that the tokenizer lacks have a
logit like any other.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtbench.errors import NotNumbersError, UserError
from mtbench.models.configuration import downloaded, load_config, refuse_unreadable, rope_types
from mtbench.models.families import locate
from mtbench.models.loading import DTYPES, loaded_model
from mtbench.sampling import numbers

FED_AT_ONCE = (
    1024  # tokens of one forward: on a slow CPU it takes seconds, and the time budget is looked at between two
)
LOGITS_AT_ONCE = 1 << 27  # numbers
ALONE = {"dynamic", "longrope"}  # rope types whose angles depend on the longest text of a forward


class WholeTexts:
    """A model that reads whole texts. Raises UserError for one that transformers cannot load."""

    def __init__(self, source: str, dtype: str, device: str, *, offline: bool = False) -> None:
        folder = str(downloaded(locate(source), offline=offline))
        config = load_config(folder, offline=offline)
        refuse_unreadable(folder, config, offline=offline)
        self.model = loaded_model(folder, config, None, dtype=DTYPES[dtype], device=device, offline=offline).eval()
        self.device = self.model.device
        self.vocabulary: int = config.get_text_config().vocab_size  # V
        self.packed = getattr(config, "quantization_config", None) is not None
        self.alone = bool(rope_types(config) & ALONE)

    def groups(self, before: Sequence[int], judged: Sequence[int]) -> list[list[int]]:
        """Return the numbers of texts that one forward reads together; similar lengths are together.

        Of each text: its tokens before those that are judged, and how many these are.
        """
        groups = list[list[int]]()
        for i in sorted(range(len(before)), key=lambda i: before[i] + judged[i]):
            group, length = [*(groups[-1] if groups else ()), i], before[i] + judged[i]
            logits = len(group) * (length - min(before[j] for j in group)) * self.vocabulary
            if not groups or self.alone or len(group) * length > FED_AT_ONCE or logits > LOGITS_AT_ONCE:
                groups.append([i])
            else:
                groups[-1].append(i)
        return groups

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], judged: Sequence[int]) -> list[Tensor]:
        """Return the logits of the last `judged` tokens of each text, (judged, V), by one forward.

        Texts are padded on the right. Raises UserError for ids that the model does not have and for logits that are no
        numbers.
        """
        if (largest := max(max(text) for text in texts)) >= self.vocabulary:
            raise UserError(f"the answers have id {largest}, and the model has {self.vocabulary} ids.")
        longest = max(map(len, texts))
        first = min(len(text) - n for text, n in zip(texts, judged, strict=True)) - 1
        found: Tensor = self.model(
            input_ids=self._padded([[*text] for text in texts]),
            attention_mask=self._padded([[1] * len(text) for text in texts]),
            use_cache=False,
            logits_to_keep=longest - first,
        ).logits
        ends = [len(text) - 1 - first for text in texts]
        cut = [row[end - n : end] for row, end, n in zip(found, ends, judged, strict=True)]
        if not all(numbers(of).all() for of in cut):
            raise NotNumbersError("the judge's logits", self.model.dtype)
        return [of if of.dtype == torch.float64 else of.float() for of in cut]

    def _padded(self, rows: Sequence[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=self.device)
