"""Logits of whole texts by transformers' modules, many texts in a forward: the judge of answers.

`tree_logits` is for models that mtbench's loop decodes, `WholeTexts` for others. A forward over prompt and answer
undoes no token. So `WholeTexts` needs no cache, and each class's own attention or recurrence is right: hybrids, any
rope type, and quantised folders whose package is installed. Ids that the tokenizer lacks have a logit like any other.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mtbench.errors import NotNumbersError, UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.configuration import downloaded, load_config, refuse_unreadable, rope_types
from mtbench.models.families import locate
from mtbench.models.loading import DTYPES, loaded_model
from mtbench.models.runner import ModelRunner
from mtbench.sampling import numbers

FED_AT_ONCE = 1024  # tokens of one forward: seconds on a slow CPU, and the time budget is looked at between two
LOGITS_AT_ONCE = 1 << 27  # numbers
MASKED_AT_ONCE = 1 << 22  # positions fed times slots in view
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


@torch.inference_mode()
def tree_logits(
    runner: ModelRunner, texts: Sequence[Sequence[int]], judged: Sequence[int], width: int = FED_AT_ONCE
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the logits of the last `judged` tokens: number of a text, of one of these tokens, logits (n, V) from it on.

    The texts are a tree of tokens, each behind its parent, so tokens with which texts begin alike are fed once.
    `width`: positions of one forward that has logits. Raises UserError for logits that are no numbers.
    """
    nodes, device = dict[tuple[int, int], int](), runner.device  # by parent and token

    def path(text: Sequence[int]) -> Tensor:
        parents = [-1]
        for token in text:
            parents.append(nodes.setdefault((parents[-1], token), len(nodes)))
        return torch.tensor(parents[1:], dtype=torch.long, device=device)

    for text, n in zip(texts, judged, strict=True):
        path(text[: len(text) - n - 1])  # these need no logits, so they come first
    paths = [path(text[:-1]) for text in texts]
    ends = [of[len(of) - n :] for of, n in zip(paths, judged, strict=True)]
    count, first = len(nodes), min((int(end[0]) for end in ends if len(end)), default=len(nodes))
    ids, slots = (torch.tensor([of], device=device) for of in ([token for _, token in nodes], range(count)))
    positions = torch.empty_like(slots)
    for of in paths:
        positions[0, of] = slots[0, : len(of)]
    most = max(1, min(FED_AT_ONCE, MASKED_AT_ONCE // count, LOGITS_AT_ONCE // runner.vocabulary))
    runner.reserve(1, count)
    for begin, end in pairwise([*range(0, first, most), *range(first, count, min(width, most)), count]):
        sees = torch.zeros(end - begin, end, dtype=torch.bool, device=device)
        for of in paths:
            before, own = of[of < end], of[(begin <= of) & (of < end), None]
            sees[own - begin, before] = before <= own
        places = slots[:, begin:end], positions[:, begin:end], slots[0, :1]
        metadata = AttentionMetadata(*places, view=end, sees=sees, offset=positions[0, :end])
        logits = runner.forward(ids[:, begin:end], metadata, end - begin if begin >= first else 1).logits[0]
        if not numbers(logits).all():
            raise NotNumbersError("the judge's logits", runner.model.dtype)
        for n, of in enumerate(ends if begin >= first else ()):
            here = ((begin <= of) & (of < end)).nonzero()[:, 0]
            if len(here):
                found = logits[of[here] - begin]
                yield n, int(here[0]), found if found.dtype == torch.float64 else found.float()
