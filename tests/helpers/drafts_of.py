"""What a method drafts after given texts, without a model: for methods that draft from the text alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from mtbench.decoding.method import Method, ModelRunners, Rows


def drafts_of(method: Method, texts: Sequence[Sequence[int]], vocabulary: int) -> list[list[int]]:
    """Return the drafts that the method offers after each text. Texts are rows of one batch, with slots to spare."""
    known = torch.tensor([len(text) for text in texts])
    tokens = torch.zeros(len(texts), int(known.max()) + 3, dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    none = torch.zeros_like(known)
    rows = Rows(
        tokens=tokens,
        request=torch.arange(len(texts)),
        prompt_len=known,
        known=known,
        base=known,
        cached=known,
        limit=known + 1,
        done=none.bool(),
        seed=none,
        endless=none.bool(),
    )
    target = SimpleNamespace(checkpoint=SimpleNamespace(vocabulary=vocabulary))
    runners = cast("ModelRunners", SimpleNamespace(target=target))
    state: dict[str, Any] = dict(method.start(rows, runners))
    drafts = method.propose(state, rows, runners)
    assert isinstance(drafts, torch.Tensor)
    [count] = state.values()  # how many of the drafts are offered
    return [row[:offered] for row, offered in zip(drafts.tolist(), count.tolist(), strict=True)]
