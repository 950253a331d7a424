"""Logits of whole texts by transformers' modules, many texts in a forward: the judge of answers.

`TextTree` is for models that mtbench's loop decodes: tokens with which texts begin alike are fed once.

`WholeTexts` is for others. A forward over prompt and answer undoes no token. So it needs no cache, and each class's own
attention or recurrence is right: hybrids, any rope type, and quantised folders whose package is installed. Ids that the
tokenizer lacks have a logit like any other.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mtbench.errors import NotNumbersError, UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.configuration import downloaded, load_config, refuse_unreadable, rope_types
from mtbench.models.families import locate
from mtbench.models.loading import DTYPES, loaded_model
from mtbench.models.runner import ModelRunner
from mtbench.sampling import numbers

FED_AT_ONCE = (
    1024  # tokens of one forward: on a slow CPU it takes seconds, and the time budget is looked at between two
)
LOGITS_AT_ONCE = 1 << 27  # numbers
MASKED_AT_ONCE = 1 << 22  # positions fed times slots in view
ROOT = -1  # the parent of a first token
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


class TextTree:
    """Texts as a tree of tokens: a node for each token, behind its parent; common beginnings are there once."""

    def __init__(self) -> None:
        self.ids, self.parents, self.positions = list[int](), list[int](), list[int]()
        self._nodes = dict[tuple[int, int], int]()  # by parent and token

    def add(self, text: Sequence[int]) -> list[int]:
        """Add a text; return the nodes of its tokens, which ascend."""
        path, parent = list[int](), ROOT
        for position, token in enumerate(text):
            node = self._nodes.setdefault((parent, token), len(self.ids))
            if node == len(self.ids):
                self.ids.append(token)
                self.parents.append(parent)
                self.positions.append(position)
            path.append(parent := node)
        return path

    @torch.inference_mode()
    def logits(self, runner: ModelRunner, first: int, width: int = FED_AT_ONCE) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits behind the nodes from `first` on: a node, logits (n, V) from it on, n ≤ `width`.

        Raises UserError for logits that are no numbers.
        """
        count, device = len(self.ids), runner.device
        ids, positions, slots = (torch.tensor([of], device=device) for of in (self.ids, self.positions, range(count)))
        most = max(1, min(FED_AT_ONCE, MASKED_AT_ONCE // count, LOGITS_AT_ONCE // runner.vocabulary))
        runner.reserve(1, count)
        for begin, end in pairwise([*range(0, first, most), *range(first, count, min(width, most)), count]):
            fed, sees = slice(begin, end), self._sees(begin, end).to(device)
            places = slots[:, fed], positions[:, fed], torch.zeros_like(slots[0, :1])
            metadata = AttentionMetadata(*places, view=end, sees=sees, offset=positions[0, :end])
            logits = runner.forward(ids[:, fed], metadata, end - begin if begin >= first else 1).logits[0]
            if not numbers(logits).all():
                raise NotNumbersError("the judge's logits", runner.model.dtype)
            if begin >= first:
                yield begin, logits if logits.dtype == torch.float64 else logits.float()

    def _sees(self, begin: int, end: int) -> Tensor:
        """Return which nodes are ancestors of each node from `begin` to `end`, or itself, (end − begin, end) bool."""
        sees = np.zeros((end - begin, end), bool)
        for node in range(begin, end):
            row, parent = sees[node - begin], self.parents[node]
            if parent >= begin:
                row[:] = sees[parent - begin]
            while ROOT < parent < begin:
                row[parent], parent = True, self.parents[parent]
            row[node] = True
        return torch.from_numpy(sees)
