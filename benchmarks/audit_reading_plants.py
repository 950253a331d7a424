"""More planted faults of `audit_corpus.py`: what a token reads, low temperatures, coarse caches, plans not kept.

The class that a person expects was written down before the audit ran. The variants alternate between models and number
types, and between all answers and one or two of 16.
"""

from collections.abc import Iterator
from typing import Any

import audit_faults as faults
import planted_faults as planted
import planted_reading as reading
from audit_maker import REAL, TINY, Maker, Plant, dialogues
from planted_faults import Fault, sampled, shifted_rope
from planted_reading import from_token, in_answers, other_layer, unread

CACHE, PROMPT, SAMPLING, STOP, WEIGHTS = "cache/position", "template/tokenizer", "sampling", "stop/budget", "weights"
T32, T16 = (TINY, {"dtype": "float32"}), (TINY, {"dtype": "bfloat16"})
R32, R16 = (REAL, {"dtype": "float32", "limit": 6}), (REAL, {"dtype": "bfloat16", "limit": 6})
B1, B8, ALL = {"batch_size": (1,)}, {"batch_size": (8,)}, {"limit": 16}
ARITHMETIC, MANY, MORE = {"suite": ("arithmetic",)}, {"max_new_tokens": 160}, {"max_new_tokens": 96}


def plants(maker: Maker) -> Iterator[Plant]:
    """Yield every fault with its variants."""
    tiny, real = ({"suite": (dialogues(maker.folder, of),), "max_new_tokens": 48} for of in (TINY, REAL))
    yield from _places(tiny, real | ALL)
    yield from _caches(real | ALL)
    yield from _parts(tiny, real)
    yield from _choices(real | ALL)
    yield from _plans()


def _plant(fault: str, expected: str, variant: str, made: Fault, of: Any, more: Any, **others: Any) -> Plant:
    """Return a plant. `of`: model and number type; `more`: of the request."""
    model, own = of
    text = f"{variant}, {model} model, {own['dtype']}"
    return Plant(fault, text, expected, made, model, {**own, **more}, **others)


def _places(tiny: Any, real: Any) -> Iterator[Plant]:
    name, ahead = "positions off from a token on", from_token(10, shifted_rope(1))
    late = in_answers({3, 11}, from_token(25, shifted_rope(3)))
    yield _plant(name, CACHE, "one ahead from the tenth", ahead, T32, ALL)
    yield _plant(name, CACHE, "one behind from the tenth", from_token(10, shifted_rope(-1)), T16, {"seed": 4, **B8})
    yield _plant(name, CACHE, "one ahead from the tenth", ahead, R16, {})
    yield _plant(name, CACHE, "two ahead from token 20", from_token(20, shifted_rope(2)), R32, {})
    yield _plant(name, CACHE, "three ahead from token 25, 2 answers", late, T32, ALL)
    yield _plant(name, CACHE, "one ahead from the tenth, 1 answer", in_answers({5}, ahead), R16, real)
    yield _plant(name, CACHE, "one ahead from token 30", from_token(30, shifted_rope(1)), T16, {"seed": 5, **B1})
    name, window = "a window where the model has none", reading.window
    yield _plant(name, CACHE, "of 16", window(16), T32, {"seed": 1})
    yield _plant(name, CACHE, "of 32", window(32), T16, ALL)
    yield _plant(name, CACHE, "of 48 from token 12 on", from_token(12, window(48)), T32, {"seed": 6, **B1})
    yield _plant(name, CACHE, "of 40 and the first 4", window(40, 4), T16, tiny)
    yield _plant(name, CACHE, "of 32", window(32), R32, {})
    yield _plant(name, CACHE, "of 64", window(64), R16, real)
    yield _plant(name, CACHE, "of 50, 2 answers", in_answers({2, 9}, window(50)), R16, real)


def _caches(real: Any) -> Iterator[Plant]:
    name = "another layer's cache"
    before, late = {n: n - 1 for n in range(1, 4)}, from_token(12, other_layer({3: 2}))
    yield _plant(name, CACHE, "keys of layer 1 in layer 2", other_layer({2: 1}, "keys"), T32, {"seed": 7})
    yield _plant(name, CACHE, "all of layer 0 in layer 1", other_layer({1: 0}), T16, ALL)
    yield _plant(name, CACHE, "each layer one before", other_layer(before, "values"), T32, B1)
    yield _plant(name, CACHE, "all of layer 9 in layer 10", other_layer({10: 9}), R16, {})
    yield _plant(name, CACHE, "values of layer 19 in layer 20", other_layer({20: 19}, "values"), R32, {})
    yield _plant(name, CACHE, "all of layer 2 in layer 3 from token 12", late, T16, {"seed": 8})
    some = in_answers({7}, other_layer({15: 14}))
    yield _plant(name, CACHE, "all of layer 14 in layer 15, 1 answer", some, R16, real)
    name, four, eight = "a coarse cache", reading.coarse_cache(4), reading.coarse_cache(8)
    yield _plant(name, CACHE, "4 bits", four, T32, ALL)
    yield _plant(name, CACHE, "4 bits", four, T16, {"seed": 9})
    yield _plant(name, CACHE, "4 bits", four, R16, {})
    yield _plant(name, CACHE, "4 bits", four, R32, {})
    yield _plant(name, CACHE, "8 bits", eight, T32, {"limit": 32})
    yield _plant(name, CACHE, "8 bits", eight, R32, real)
    yield _plant(name, CACHE, "8 bits", eight, R16, real)
    yield _plant(name, CACHE, "8-bit floats", reading.coarse_cache(), R32, {})
    yield _plant(name, CACHE, "4 bits, 2 answers", in_answers({1, 12}, four), T16, ALL)
    name = "coarse weights"
    yield _plant(name, WEIGHTS, "8 bits", faults.quantised(8), R16, real)
    yield _plant(name, WEIGHTS, "8 bits, one scale", faults.quantised(8, tensor=True), R16, {"limit": 12})
    yield _plant(name, WEIGHTS, "8-bit floats", faults.eight_bit_floats(), R32, {"limit": 12})
    yield _plant(name, WEIGHTS, "4 bits in groups of 32", faults.quantised(4, 32), T16, ALL)
    yield _plant(name, WEIGHTS, "layer 5 left out", planted.without_layers(5), R32, {})
    yield _plant(name, WEIGHTS, "layer 2 left out", planted.without_layers(2), T16, {"seed": 3})
    name = "another request's cache"
    yield _plant(name, CACHE, "from token 8 on, 2 answers", planted.swapped_caches(8, 1, 3), T16, {**ALL, **B8})
    yield _plant(name, CACHE, "from token 5 on, 2 answers", planted.swapped_caches(5), R32, {"limit": 8, **B8})


def _parts(tiny: Any, real: Any) -> Iterator[Plant]:
    name, slots = "a part of the prompt not read", reading.unread_slots
    two, one = in_answers({4, 13}, unread(1, 2)), in_answers({6}, unread(1))
    yield _plant(name, CACHE, "the system message", unread(0), T32, tiny)
    yield _plant(name, CACHE, "the system message", unread(0), R16, real)
    yield _plant(name, CACHE, "the first turn", unread(1, 2), T16, tiny | ALL)
    yield _plant(name, CACHE, "the first turn", unread(1, 2), R32, real)
    yield _plant(name, CACHE, "the answer of the first turn", unread(2), T32, tiny | B1)
    yield _plant(name, CACHE, "the question of the first turn", unread(1), R16, real | ALL)
    yield _plant(name, CACHE, "the first turn, 2 answers", two, T16, tiny | ALL)
    yield _plant(name, CACHE, "the question of the first turn, 1 answer", one, R32, real | ALL)
    yield _plant(name, CACHE, "slots 8 to 23", slots(8, 24), T32, {"seed": 10})
    yield _plant(name, CACHE, "slots 16 to 31", slots(16, 32), T16, {"seed": 11, **B8})
    name, gone = "a message that the server leaves out", reading.without_message(0)
    yield _plant(name, PROMPT, "the system message", gone, T16, tiny)
    yield _plant(name, PROMPT, "the system message", gone, R32, real)
    name, padded = "padding attended to", reading.padded
    yield _plant(name, CACHE, "before the prompt", padded(0), T32, ALL)
    yield _plant(name, CACHE, "before the prompt", padded(2), T16, {"seed": 12, **B8})
    yield _plant(name, CACHE, "before the prompt", padded(2), R16, real)
    yield _plant(name, CACHE, "before the prompt", padded(2), R32, {"limit": 8})
    yield _plant(name, CACHE, "behind the prompt", padded(0, behind=True), T32, {"seed": 13})


def _choices(real: Any) -> Iterator[Plant]:
    name = "drawn in some answers"
    yield _plant(name, SAMPLING, "temperature 1 in 2", in_answers({2, 14}, sampled(1.0)), T32, ALL)
    yield _plant(name, SAMPLING, "temperature 0.7 in 2", in_answers({0, 9}, sampled(0.7, seed=1)), R16, real)
    yield _plant(name, SAMPLING, "temperature 1 in 1", in_answers({8}, sampled(1.0, seed=2)), T16, ALL)
    yield _plant(name, SAMPLING, "from token 20 on", from_token(20, sampled(1.0, seed=3)), R32, {})
    name, never = "one token never chosen", reading.suppressed
    yield _plant(name, SAMPLING, "a full stop", never(17), T32, ALL)
    yield _plant(name, SAMPLING, "a digit", never(21), T16, {"seed": 14})
    yield _plant(name, SAMPLING, "a line break", never(198), R16, {})
    yield _plant(name, SAMPLING, "a comma", never(28), R32, {})
    yield _plant(name, SAMPLING, "' the', 2 answers", in_answers({1, 10}, never(260)), R16, real)


def _plans() -> Iterator[Plant]:
    """Yield faults against the plan, which must end with exit code 1."""
    broken: dict[str, Any] = {"fails": True}
    name = "a greedy plan drawn"
    yield _plant(name, SAMPLING, "temperature 0.3", sampled(0.3), T32, ALL, **broken)
    yield _plant(name, SAMPLING, "temperature 0.1", sampled(0.1, seed=1), T16, {"limit": 32}, **broken)
    yield _plant(name, SAMPLING, "temperature 0.3", sampled(0.3, seed=2), R16, {}, **broken)
    yield _plant(name, SAMPLING, "temperature 0.1", sampled(0.1, seed=3), R32, {"limit": 12}, **broken)
    yield _plant(
        name, SAMPLING, "top-k 40 at temperature 1", sampled(1.0, 40, seed=4), T32, {"seed": 1, **B1}, **broken
    )
    yield _plant(name, SAMPLING, "top-k 40 at temperature 1", sampled(1.0, 40, seed=5), R16, {}, **broken)
    name, short = "the plan's budget not reached", faults.short_budget
    yield _plant(name, STOP, "an end at 40 of 160", short(120), T32, MANY, **broken)
    yield _plant(name, STOP, "an end at 24 of 64", short(40), R16, {"max_new_tokens": 64}, **broken)
    yield _plant(
        name, STOP, "an end at 30 of 160, 2 answers", in_answers({3, 7}, short(130)), T16, MANY | ALL, **broken
    )
    name, ignored, stop = "a stop string ignored", reading.stopless(), faults.with_stop("econd")
    yield _plant(name, STOP, "all answers", ignored, T32, {}, always=stop, **broken)
    yield _plant(name, STOP, "2 answers", in_answers({1, 6}, ignored), T16, ALL, always=stop, **broken)
    yield _plant(name, STOP, "all answers", ignored, R16, ARITHMETIC, always=faults.with_stop("."), **broken)
    name, endless = "an end token ignored", faults.endless()
    yield _plant(name, STOP, "all answers", endless, T16, MORE, **broken)
    yield _plant(name, STOP, "2 answers", in_answers({2, 5}, endless), T32, MORE | ALL, **broken)
    yield _plant(name, STOP, "all answers", endless, R32, {**MORE, "limit": 4}, **broken)
