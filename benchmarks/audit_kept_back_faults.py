"""The patches of audit_kept_back.py. They were written without reading how the audit decides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from planted_faults import Fault, both, chosen, replaced, stores, weights
from torch import Tensor

from mtbench import sampling
from mtbench.decoding import loop
from mtbench.decoding.method import NONE, Commit, Rows
from mtbench.decoding.registry import METHODS
from mtbench.measure import model_pool
from mtbench.models import chat_template
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.models.runner import ModelRunner


def around(owner: Any, name: str, call: Callable[..., Any]) -> Fault:
    """A function is replaced by `call` of it and its arguments."""
    return lambda: replaced(owner, name, lambda old: lambda *given, **more: call(old, *given, **more))


def masks(change: Callable[[Tensor, Tensor, Tensor], Tensor], *, prompts: bool = False) -> Fault:
    """The mask (R, W, V) of decode steps or of prefills is changed, given mask, query positions and slots."""

    def mask(old: Any, self: AttentionMetadata, window: int | None = None) -> Tensor:
        right: Tensor = old(self, window)
        other = (self.slots.shape[1] > 1) != prompts
        return right if other else change(right, self.positions[:, :, None], torch.arange(self.view))

    def bias(_: Any, self: AttentionMetadata, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
        return self._additive(window, dtype).repeat(1, 1, group, 1)  # without the short cut of a single row

    return both(around(AttentionMetadata, "mask", mask), around(AttentionMetadata, "bias", bias))


def positions(change: Callable[[Tensor], Tensor], *, prompts: bool = False) -> Fault:
    """Rotary positions (R, W) of decode steps, or of prompts too, are others; masks and slots are right."""

    def forward(old: Any, self: Any, ids: Tensor, metadata: AttentionMetadata, judged: int) -> Any:
        right = {window: metadata.mask(window) for window in {None, *self.sliding_windows}}
        if prompts or ids.shape[1] == 1:
            metadata = replace(metadata, positions=change(metadata.positions), _masks=right, _biases={})
        return old(self, ids, metadata, judged)

    return around(ModelRunner, "forward", forward)


def views(change: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Fault:
    """A layer attends to other keys and values (R, K, V, d) than were written."""
    return around(KVCache, "view", lambda old, self, layer: change(layer, *old(self, layer)))


def by_row(cache: KVCache) -> list[Tensor]:
    """Return all keys and values as (R, S, K, d)."""
    return [cache._by_row(store) for store in stores(cache)]


def prefilled(change: Callable[[Rows, list[Tensor], Tensor], Any]) -> Fault:
    """Cached prompts are changed, given rows, all keys and values by row, and the numbers of the rows."""

    def prefill(old: Any, rows: Rows, runners: Any, method: Any, at: Tensor, arange: Tensor) -> None:
        old(rows, runners, method, at, arange)
        change(rows, by_row(runners.target.cache), at)

    return around(loop, "prefill", prefill)


def requests(change: Callable[[Any, int], Mapping[str, Any]]) -> Fault:
    """An engine decodes other requests than it was sent. `change`: of a request and the batch's longest prompt."""

    def decode(old: Any, method: Any, runners: Any, sent: Sequence[Any], **more: Any) -> Any:
        longest = max(len(request.prompt_ids) for request in sent)
        return old(method, runners, [replace(r, **change(r, longest)) for r in sent], **more)

    return around(model_pool, "decode", decode)


def reads(change: Callable[[list[int], int], list[int]]) -> Fault:
    return requests(lambda r, longest: {"prompt_ids": change(list(r.prompt_ids), longest)})


def texts(change: Callable[[str], str], ids: Callable[[list[int]], list[int]] = list) -> Fault:
    """A tokenizer reads other texts, or gives other ids."""

    def tokenise(old: Any, tokenizer: Any, given: Sequence[str], **more: Any) -> list[list[int]]:
        return [ids(one) for one in old(tokenizer, [change(text) for text in given], **more)]

    return around(chat_template, "tokenise", tokenise)


def scores(change: Callable[[Rows, Tensor], Tensor]) -> Fault:
    """The largest of changed logits (R, n, V) is chosen."""
    return chosen(lambda rows, logits, _: change(rows, logits.float()).argmax(-1))


def accepting(method: str, rule: Callable[[Rows, Any, Tensor], Tensor], *, last: bool = False) -> Fault:
    """Drafts (R, K) pass by another rule. `last`: the token behind them is that of the last column."""

    def accept(_: Any, __: Any, state: Any, rows: Rows, output: Any) -> Commit:
        guess, column = output.guess, torch.arange(output.guess.shape[1])
        drafts = guess.masked_fill(column >= state["copied"][:, None], NONE) if "copied" in state else guess
        passed = sampling.prefix_length(rule(rows, output, drafts) & (drafts != NONE))
        tokens = output.choice.clone()
        if last:
            tokens.scatter_(1, passed[:, None], tokens[:, -1:])
        tokens[:, :-1] = torch.where(column < passed[:, None], guess, tokens[:, :-1])
        return Commit(tokens, passed + 1, kept=passed)

    return around(METHODS[method], "accept", accept)


def age(rows: Rows) -> Tensor:
    """Return how many new tokens each row has, (R,)."""
    return rows.known - rows.prompt_len


def matrices(
    change: Callable[[Tensor], Tensor], names: str = "proj.weight", layers: Sequence[int] = range(99)
) -> Fault:
    """Parameters of layers whose names contain `names` are others."""

    def apply(checkpoint: Any) -> None:
        for name, weight in checkpoint.model.base_model.layers.named_parameters():
            if names in name and int(name.split(".")[0]) in layers:
                weight.copy_(change(weight))

    return weights(apply)


def fp8(x: Tensor, kind: torch.dtype = torch.float8_e4m3fn, scale: float | None = None) -> Tensor:
    by = x.abs().amax().float() / 448 if scale is None else scale
    return ((x.float() / by).clamp(-448, 448).to(kind).float() * by).to(x.dtype)


def int4(x: Tensor) -> Tensor:
    """Round the last dimension to 4 bits, symmetrically, with a scale of its own."""
    by = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 7
    return (x / by).round() * by


def adapter(x: Tensor, share: float) -> Tensor:
    """Add a matrix of rank 8, whose norm is a share of the weight's."""
    chance = torch.Generator().manual_seed(8)
    low = torch.randn(len(x), 8, generator=chance) @ torch.randn(8, x.shape[1], generator=chance)
    added: Tensor = low * (share * x.float().norm() / low.norm())
    return x + added.to(x.dtype)


def epsilon(value: float) -> Fault:
    """All norms have another epsilon."""

    def apply(checkpoint: Any) -> None:
        for module in checkpoint.model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = value

    return weights(apply)


def rope(change: Callable[[Tensor], Tensor]) -> Fault:
    """The rotary frequencies (d/2,), the fastest first, are others."""

    def apply(checkpoint: Any) -> None:
        frequencies = checkpoint.model.base_model.rotary_emb.inv_freq
        frequencies.copy_(change(frequencies))

    return weights(apply)


def overwritten(new: int, row: int, begin: int, *, zero: bool) -> Fault:
    """When a row has so many new tokens, a block of its cache is lost, or is that of the row before."""

    def step(old: Any, self: Any, shape: Any, **more: Any) -> None:
        old(self, shape, **more)
        if row < self.width and int(age(self.rows)[row]) == new:
            for store in by_row(self.target.cache):
                store[row, begin : begin + 16] = 0 if zero else store[row - 1, begin : begin + 16]

    return around(loop.Batch, "step", step)


def penalised(rows: Rows, logits: Tensor, *, by: float = 1.0, presence: float = 0.0, ngram: int = 0) -> Tensor:
    """Penalise tokens of text (`by`) or answer (`presence`), or forbid that n tokens of the text occur twice."""
    logits = logits.clone()
    for row, known in enumerate(rows.known.tolist()):
        text = rows.tokens[row, int(rows.prompt_len[row]) if presence else 0 : known]
        ids, values = text.unique(), logits[row, 0, text.unique()]
        logits[row, 0, ids] = torch.where(values > 0, values / by, values * by) - presence
        for end in range(ngram - 1, len(text)) if ngram else ():
            if text[end - ngram + 1 : end].equal(text[len(text) - ngram + 1 :]):
                logits[row, 0, text[end]] = float("-inf")
    return logits


def xtc(_: Rows, logits: Tensor) -> Tensor:
    """Of the tokens of at least 10 % only the least likely stays (llama.cpp's XTC at probability 1)."""
    p = logits.softmax(-1)
    return logits.masked_fill(p > torch.where(p >= 0.1, p, 2).amin(-1, keepdim=True), float("-inf"))


def drawn(rows: Rows, logits: Tensor, *, temperature: float, min_p: float, chance: torch.Generator) -> Tensor:
    p = (logits / temperature).softmax(-1)
    noise = -torch.log(-torch.log(torch.rand(p.shape, generator=chance)))
    return torch.where(p >= min_p * p.amax(-1, keepdim=True), p, 0).log() + noise


def in_row(row: int, change: Callable[[Rows, Tensor], Tensor], new: int | None = None) -> Fault:
    """Only one request of a batch is chosen for so, or only its token of that number."""

    def one(rows: Rows, logits: Tensor) -> Tensor:
        here = (rows.request == row) & ((age(rows) == new) if new is not None else (age(rows) >= 0))
        return torch.where(here[:, None, None], change(rows, logits), logits)

    return scores(one)


def ends(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Fault:
    return weights(lambda c: object.__setattr__(c, "end_ids", change(c.end_ids)))


def ends_last(_: Any, tokens: Tensor, count: Tensor, room: Tensor, ends: Tensor, endless: Tensor) -> Any:
    """Only the last token of a step can end an answer, not one inside an accepted draft (ipex-llm#11896)."""
    kept = torch.minimum(count, room)
    last = tokens.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    return kept, ends[last] & ~endless & (kept > 0)
