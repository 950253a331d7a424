"""Changes of the reference model, of a prompt, or of how tokens are chosen: what a side may have done.

A family is one change by values. `mtbench/experiments/audit/trials.py` tries them. R = rows, W = positions, V = slots.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.experiments.audit.cases import Known, Letter
from mtbench.experiments.audit.settings import PENALTIES, Setting, rounded, without
from mtbench.measure.lossless_check import Answer, first_difference
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.statistics import EXACT_EPSILON

TEMPLATE, CACHE, WEIGHTS, SAMPLING, ROUNDING = "template/tokenizer", "cache/position", "weights", "sampling", "rounding"
BACK = (0, 1, 4, 16)  # positions before the first one that is known to be wrong, from which a change may be there
BLOCK, MOST_BLOCKS, MOST_DONORS = 16, 8, 16  # tokens of a block of a prefix cache; blocks of how many other requests
FEW_DONORS = 3  # that differ soonest: all numbers of blocks are tried
FEW_IDS = 4  # tokens that are off for each id that is never chosen: fewer are explained by chance
ALL = "1 and each later"


class Probe(NamedTuple):
    """An answer that changes are tried on: its judged tokens are those from `first` on, and `wrong` is the first off.

    `pads`: tokens by which the longest prompt of its block is longer.
    """

    item: str
    answer: Answer
    first: int = 0
    wrong: int = 0
    pads: int = 0

    @property
    def prompt(self) -> Sequence[int]:
        return self.answer.prompt


Begin = Callable[[Probe], int]
Places = Callable[[AttentionMetadata, Probe, Sequence[int]], AttentionMetadata]  # of a forward; windows of the model
Part = tuple[int, int]  # begin and end
ByProbe = Callable[[Probe], Sequence[int]]


class Trial(NamedTuple):
    """A change, and the class that it stands for."""

    name: str
    exact: bool = True  # False: what a side does may be only similar
    model: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # of the weights, for a while
    cache: Callable[[KVCache, Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None  # in place of `update`
    places: Places | None = None  # of positions and of what a token attends to
    prompt: ByProbe | None = None
    setting: Setting | None = None
    dtype: str | None = None
    begin: Begin = lambda _: 0  # first position that is changed
    layer: int = 0  # first layer that is changed
    same: Callable[[Probe], Hashable] = lambda _: None  # trials with the same value of a probe are one; None: alone


class Family(NamedTuple):
    """A change by values. `step`: the least distance of values between which better ones are searched; 0: none."""

    text: str
    make: Callable[[Any], Trial]
    values: Sequence[Any]
    step: float = 0


def families(model: Any, known: Known, letter: Letter, chosen: Sequence[int], tokenizer: Any) -> list[Family]:
    """Return the changes that a side is tried with. chosen: the model's choices in place of tokens that are off."""
    side = known.side(letter)
    far = [(case.answer(letter).prompt or (), index) for case, index in known.pool(letter).far]
    fed, place = (min(size * len(prompt) + index for prompt, index in far) - 1 for size in (0, 1))
    every = range(len(layers_of(model)))
    behind = [*every[1:], ALL] if every else []
    wider = (1, -1) if windows_of(model) else ()
    coarse = ["bfloat16", "float16"] if side.dtype in EXACT_EPSILON else []
    of_logits = [*coarse, "float8_e5m2"]
    emitted = {token for case in known.cases for token in case.answer(letter).tokens}
    often = [i for i, count in Counter(chosen).most_common(2) if count >= FEW_IDS and i not in emitted]
    pads = {0, tokenizer.pad_token_id, tokenizer.eos_token_id} - {None}
    return [
        *_of_places(fed, place),
        Family("the sliding window {:+d}", lambda by: Trial(CACHE, places=_places(wider=by)), wider),
        *_of_rotary(model),
        *_of_parts({*tokenizer.all_special_ids}),
        *_of_prompts(known, letter),
        *(
            Family(f"padding with id {{}} {where} prompts is read{how}", partial(_padded, where, how), sorted(pads))
            for where in ("before", "in")
            for how in ("", ", and has positions")
        ),
        Family("keys and values in {}", _rounded_cache, ["8 bits", "4 bits", "8-bit floats"]),
        *(
            Family(f"layer {{}} reads the {what} of the layer before", partial(_other_layer, what), behind)
            for what in ("keys and values", "keys", "values")
        ),
        Family("weights in {}", lambda how: Trial(WEIGHTS, False, _rounded_weights(how)), [*COARSE]),
        Family("layer {} left out", _without_layer, every),
        Family("the model in {}", lambda kind: Trial(ROUNDING, False, dtype=kind), [] if side.ours else coarse),
        Family("logits in {}", lambda kind: Trial(ROUNDING, setting=rounded(getattr(torch, kind))), of_logits),
        *(Family(f"{what}={{:g}}", partial(_set, make), values, 0.01) for what, (make, values) in PENALTIES.items()),
        Family("id {} never chosen", lambda i: Trial(SAMPLING, setting=without([i])), often),
    ]


def layers_of(model: Any) -> Sequence[Any]:
    """Return the layers of a model; of one that calls them otherwise, none."""
    return getattr(model.base_model, "layers", ())


def windows_of(model: Any) -> list[int]:
    """Return the sliding windows of a model's layers."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "layer_types", None) else None
    return [window] if window else []


def _set(make: Callable[[float], Setting], value: float) -> Trial:
    return Trial(SAMPLING, setting=make(value))


# --- Positions, and what a token attends to ---------------------------------------------------------------------------


def _places(by: int = 0, begin: Begin = lambda _: 0, hides: Any = None, wider: int = 0) -> Places:
    """Return the change of positions from `begin` on, and of the slots that are not attended to.

    hides: which of them, of the slots of queries (R, W, 1), all slots (V,) and the probe. wider: the model's windows.
    """

    def change(metadata: AttentionMetadata, probe: Probe, windows: Sequence[int]) -> AttentionMetadata:
        masks = {window: metadata.mask(window and window + wider) for window in (None, *windows)}
        if hides is not None:
            slot = torch.arange(metadata.view, device=metadata.slots.device)
            hidden = hides(metadata.slots[:, :, None], slot, probe)
            masks = {window: mask & ~hidden for window, mask in masks.items()}
        positions = metadata.positions + by * (metadata.slots >= begin(probe))
        return replace(metadata, positions=positions, _masks=masks, _biases={})

    return change


def _of_places(fed: int, place: int) -> Iterator[Family]:
    """Yield shifts of positions and attention windows. The first token that is off: answer and text up to it."""

    def shifted(by: int, of_answer: bool, number: int) -> Trial:
        def begin(probe: Probe) -> int:
            return len(probe.prompt) * of_answer + number

        return Trial(CACHE, places=_places(by, begin), begin=begin)

    def windowed(first: int, size: int) -> Trial:
        hides: Any = lambda query, slot, _: (slot <= query - size) & (slot >= first)  # noqa: E731
        return Trial(CACHE, places=_places(hides=hides), begin=lambda _: size)

    for by in (1, -1, 2, -2, 3, -3):
        values = sorted({-1, 0, *(fed - back for back in BACK if fed > back)})
        yield Family(f"positions {by:+d} from new token {{}} on", partial(shifted, by, True), values, 1)
        values = sorted(place - back for back in BACK if place > back)
        yield Family(f"positions {by:+d} from position {{}} on", partial(shifted, by, False), values, 1)
    sizes = sorted({max(4, round(place * 0.8**n)) for n in range(11)}) if place > 4 else []
    for first in (0, 4):
        sees = f" and the first {first} tokens" if first else ""
        yield Family(f"a sliding window of {{}}{sees}", partial(windowed, first), sizes, 1)


def _of_rotary(model: Any) -> Iterator[Family]:
    """Yield other rotary angles: positions that are scaled, and other bases."""
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    own = getattr(rotary, "inv_freq", None)
    if own is None:
        return

    def angles(frequencies: Tensor) -> Trial:
        return Trial(CACHE, model=lambda _: replaced(rotary, "inv_freq", frequencies))

    place = torch.arange(len(own), device=own.device, dtype=own.dtype) / len(own)
    yield Family("positions times {}", lambda by: angles(own * by), (0.125, 0.25, 0.5, 2, 4, 8))
    yield Family("rotary angles of base {:,}", lambda base: angles(base**-place), (10_000, 100_000, 500_000, 1_000_000))


PARTS: dict[str, tuple[Callable[[int, Sequence[int]], Part], Sequence[int], int]] = {  # by number and turns
    "turn {} of the prompt": (lambda n, turns: (turns[n - 1], turns[n]), range(1, 6), 0),
    "turn {} of the prompt and the next": (lambda n, turns: (turns[n - 1], turns[n + 1]), range(1, 5), 0),
    "turn {} from the prompt's end": (lambda n, turns: (turns[-n - 2], turns[-n - 1]), range(1, 4), 0),
    "what is before the last message, from turn {} on,": (lambda n, turns: (turns[n - 1], turns[-3]), (1, 2), 0),
    "the prompt's first {} tokens": (lambda n, _: (0, n), (1, 4, 16, 48), 1),
    "the prompt's tokens from the second to number {}": (lambda n, _: (1, n), (4, 16, 48), 1),
    "16 tokens of the prompt behind the first {}": (lambda n, _: (n, n + 16), range(8, 65, 8), 1),
    "the prompt's last {} tokens": (lambda n, turns: (turns[-1] - n, turns[-1]), (1, 4, 16), 1),
}


def _of_parts(marks: set[int]) -> Iterator[Family]:
    """Yield parts of the prompt that are left out, or that later tokens do not attend to.

    A turn begins at the special token that is there most often; behind the last one the prompt ends.
    """

    def part(rule: Callable[[int, Sequence[int]], Part], number: int, probe: Probe) -> Part:
        often = Counter(i for i in probe.prompt if i in marks).most_common(1)
        turns = [place for place, i in enumerate(probe.prompt) if often and i == often[0][0]]
        try:
            begin, end = rule(number, [*turns, len(probe.prompt)])
        except IndexError:
            return 0, 0
        return (begin, end) if 0 <= begin < end <= len(probe.prompt) else (0, 0)

    def unread(rule: Any, number: int) -> Trial:
        def hides(query: Tensor, slot: Tensor, probe: Probe) -> Tensor:
            begin, end = part(rule, number, probe)
            return (query >= end) & (slot >= begin) & (slot < end)

        begin: Begin = lambda probe: part(rule, number, probe)[1] or len(probe.prompt)  # noqa: E731
        same: Any = lambda probe: ("unread", part(rule, number, probe))  # noqa: E731
        return Trial(CACHE, places=_places(hides=hides), begin=begin, same=same)

    def left_out(rule: Any, number: int) -> Trial:
        def prompt(probe: Probe) -> Sequence[int]:
            begin, end = part(rule, number, probe)
            return [*probe.prompt[:begin], *probe.prompt[end:]] or probe.prompt

        return Trial(TEMPLATE, prompt=prompt, same=lambda probe: tuple(prompt(probe)))

    for text, (rule, values, step) in PARTS.items():
        yield Family(f"{text} not read", partial(unread, rule), values, step)
        yield Family(f"{text} left out", partial(left_out, rule), values, step)


# --- Prompts ----------------------------------------------------------------------------------------------------------


def _of_prompts(known: Known, letter: Letter) -> Iterator[Family]:
    """Yield prompts that are not the stored ones: the first token twice, blocks of another request in the cache."""

    def begun_by(ids: Sequence[int], size: int) -> Trial:
        return Trial(CACHE, prompt=lambda probe: [*ids[:size], *probe.prompt[size:]])

    twice = Trial(TEMPLATE, prompt=lambda probe: [*probe.prompt[:1], *probe.prompt])
    yield Family("the prompts' first token {}", lambda _: twice, ["twice"])
    prompts = {case.item: tuple(case.answer(letter).prompt or ()) for case in known.cases}
    own, donors = prompts.pop(known.pool(letter).cases[0].item), dict[tuple[int, ...], str]()
    for item, ids in prompts.items():
        size = (first_difference(ids, own) // BLOCK + 1) * BLOCK
        if min(len(ids), len(own)) > size:
            donors.setdefault(ids[:size], item)
    for number, (begun, item) in enumerate(sorted(donors.items(), key=lambda of: len(of[0]))[:MOST_DONORS]):
        blocks = range(len(begun), max(len(begun), min(MOST_BLOCKS, len(prompts[item]) // BLOCK) * BLOCK) + 1, BLOCK)
        sizes = blocks if number < FEW_DONORS else {blocks[0], blocks[-1]}
        text = f"the first {{}} tokens of {item} in the cache"
        yield Family(text, partial(begun_by, prompts[item]), sorted(sizes), BLOCK)


def _padded(where: str, how: str, pad: int) -> Trial:
    """Return the trial of padding before prompts, or before their last token, that is attended to."""

    def begin(probe: Probe) -> int:
        return 0 if where == "before" else len(probe.prompt) - 1

    def prompt(probe: Probe) -> Sequence[int]:
        return [*probe.prompt[: begin(probe)], *[pad] * probe.pads, *probe.prompt[begin(probe) :]]

    def change(metadata: AttentionMetadata, probe: Probe, windows: Sequence[int]) -> AttentionMetadata:
        moved = _places(-probe.pads, begin)(metadata, probe, windows)
        return replace(moved, positions=moved.positions.maximum(metadata.positions.clamp(max=begin(probe))))

    return Trial(CACHE, prompt=prompt, places=None if how else change)


# --- Weights and caches -----------------------------------------------------------------------------------------------


def _integers(bits: int, group: int | None = None) -> Callable[[Tensor], Tensor]:
    """Round to integers, with the largest of each row, or of each `group` of a row, as the scale."""

    def rounding(weight: Tensor) -> Tensor:
        parts = weight.reshape(-1, weight.shape[1] if group is None or weight.shape[1] % group else group)
        scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        whole: Tensor = (parts / scale).round() * scale
        return whole.reshape(weight.shape)

    return rounding


def _floats(weight: Tensor) -> Tensor:
    """Round to float8_e4m3, with the largest of all as the scale."""
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    whole: Tensor = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return whole


COARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "8 bits": _integers(8),
    "8 bits with one scale for a matrix": lambda weight: _integers(8)(weight.reshape(1, -1)).reshape(weight.shape),
    "8-bit floats": _floats,
    "4 bits": _integers(4),
    "4 bits in groups of 32": _integers(4, 32),
}


def _rounded_weights(how: str) -> Callable[[Any], AbstractContextManager[None]]:
    """Round the weights of all linear layers but the head."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        with ExitStack() as stack:
            for module in linear:
                stack.enter_context(replaced(module.weight, "data", COARSE[how](module.weight.data)))
            yield

    return change


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute or method for a while."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def identity(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    """Do nothing, in place of a layer."""
    return hidden_states


def _without_layer(index: int) -> Trial:
    return Trial(WEIGHTS, model=lambda of: replaced(layers_of(of)[index], "forward", identity), layer=index)


def _rounded_cache(how: str) -> Trial:
    """Round the keys and values of each token and head; floats without a scale, as engines do."""

    def coarse(x: Tensor) -> Tensor:
        if how == "8-bit floats":
            return x.to(torch.float8_e4m3fn).to(x.dtype)
        return COARSE[how](x.reshape(-1, x.shape[-1])).reshape(x.shape)

    return Trial(CACHE, False, cache=lambda of, key, value, n: KVCache.update(of, coarse(key), coarse(value), n))


def _other_layer(what: str, index: int | str) -> Trial:
    """A layer, or each, reads what the layer before it has written."""

    def update(cache: KVCache, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        found = KVCache.update(cache, key, value, layer)
        other = cache.view(layer - 1) if layer and index in (layer, ALL) else found
        return other[0] if "keys" in what else found[0], other[1] if "values" in what else found[1]

    return Trial(CACHE, cache=update, layer=index - 1 if isinstance(index, int) else 0)
