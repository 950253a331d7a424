"""Faults planted in the source of kernels and launchers, each with the checks (helpers/kernel_checks.py) to find it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import kernel_checks
import torch

from mtbench import kernels
from mtbench.models import fused_decoder
from mtbench.models.fused_decoder import Decoder

KERNELS = Path(kernels.__file__).parent
SOURCES = {"fused_decoder": Path(fused_decoder.__file__), "kernels": Path(kernels.__file__)}


class Fault(NamedTuple):
    """A text of a file, which occurs once, replaced by another one."""

    name: str
    file: str
    text: str
    fault: str
    checks: tuple[str, ...]


def _product(name: str, text: str, fault: str, *checks: str) -> Fault:
    return Fault(name, "triton_products", text, fault, checks)


def _rotary(name: str, text: str, fault: str, *checks: str) -> Fault:
    return Fault(name, "triton_kernels", text, fault, checks)


def _attention(name: str, text: str, fault: str) -> Fault:
    return Fault(name, "triton_attention", text, fault, ("attend",))


def _decoder(name: str, text: str, fault: str) -> Fault:
    return Fault(name, "fused_decoder", text, fault, ())


def _definition(name: str, text: str, fault: str) -> Fault:
    return Fault(name, "kernels", text, fault, ())


FAULTS = [
    _product(
        "a sum that depends on who arrives last",
        "total = _sum_of_parts(",
        "total = 1e-6 * total + _sum_of_parts(",
        "arrival_order",
    ),
    _product("the sum without its first part", "range(leader, last", "range(leader + 1, last", "norm_product"),
    _product("the last program but one finishes", "== others", "== others - 1", "norm_product"),
    _product("counters are not reset", "tl.store(counter, 0)", "tl.store(counter, others + 1)", "arrival_order"),
    _product("two programs share a place", "+ (share == leader)", "", "norm_product"),
    _product(
        "a tile's last step is missing",
        "(end - group * steps, steps)",
        "(end - group * steps, steps - 1)",
        "norm_product",
    ),
    _product("inputs behind the end are read", "column < INPUTS - step * STEP", "column < STEP", "norm_product"),
    _product(
        "the last output is missing", "inside = output < OUTPUTS", "inside = output < OUTPUTS - 1", "norm_product"
    ),
    _product("the last position is missing", "live = position < count", "live = position < count - 1", "norm_product"),
    _product("a norm without eps", "/ INPUTS + eps)", "/ INPUTS)", "norm_product"),
    _product("a norm without its power of two", "INPUTS + eps) * power", "INPUTS + eps)", "norm_product"),
    _product("a part of the squares is missing", "mask=(part < SQUARES)", "mask=(part < SQUARES - 1)", "norm_product"),
    _product("no bias", "        total += tl.load(bias", "        total += 0 * tl.load(bias", "norm_product"),
    _product("gate and up exchanged", "gate, up = tl.split", "up, gate = tl.split", "norm_swiglu"),
    _product("up is read a row early", "index // rows * OUTPUTS", "index // rows * (OUTPUTS - 1)", "norm_swiglu"),
    _product(
        "the residual is added twice", "total += tl.load(out + first", "total += 2 * tl.load(out + first", "add_product"
    ),
    _product("no residual", "total += tl.load(out + first", "total += 0 * tl.load(out + first", "add_product"),
    _product(
        "squares of rows that do not exist", "tl.where(inside, result.to(tl.float32), 0.0)", "total", "add_product"
    ),
    _product("no weight of the next norm", "(wide * factor[:, None])", "(wide + 0 * factor[:, None])", "add_product"),
    _product(
        "no power of the next norm",
        "other=0.0).to(tl.float32) / next_power",
        "other=0.0).to(tl.float32)",
        "large_values",
    ),
    _product(
        "squares of another tile", "next_squares + tile * count", "next_squares + tile // 2 * count", "add_product"
    ),
    _product(
        "shares depend on the positions",
        "divided, parts = plan(*weight.shape, multiprocessors(x.device)),",
        "divided, parts = Plan(*weight.shape, 128, 2 + count % 3),",
        "row_alone",
    ),
    _product(
        "both halves have the first one's rows", "tile = group * HALVES + half", "tile = group * HALVES", "add_product"
    ),
    _product(
        "halves share a place",
        "(share == leader)) * HALVES + half",
        "(share == leader)) * HALVES",
        "norm_product",
    ),
    _product(
        "the parts of the first half",
        "== leader)) * HALVES + half\n            exists",
        "== leader)) * HALVES\n            exists",
        "norm_product",
    ),
    _product("a part more than there are", "exists = part <= last", "exists = part <= last + 1", "many_positions"),
    _product(
        "positions of the next slice", "inside = tl.program_id(1) * SLICE", "inside = 0 * SLICE", "many_positions"
    ),
    _product("a whole group is finished twice", "if last > leader:", "if last >= leader:", "many_positions"),
    _product(
        "squares of one half twice", "sum_pairwise(halves[1], PART)", "sum_pairwise(halves[0], PART)", "many_positions"
    ),
    _rotary("the next position's angle", "tl.load(positions + place)", "(tl.load(positions + place) + 1)", "rotate"),
    _rotary("the other direction", "a * cos_a + b * sin_a", "a * cos_a - b * sin_a", "rotate"),
    _rotary("halves are not exchanged", "b * cos_b + a * sin_b", "b * cos_b + b * sin_b", "rotate"),
    _rotary("keys and values one slot early", "tl.load(index + place)", "(tl.load(index + place) - 1)", "rotate"),
    _rotary("a rotated half of values", "tl.store(value, a.to", "tl.store(value, (-b).to", "rotate"),
    _rotary("queries' norm for keys", "tl.where(is_query, query_a, key_a)", "query_a", "rotate"),
    _rotary("a head's norm over one half", "tl.sum(a * a, 1) + tl.sum(b * b, 1)", "2 * tl.sum(a * a, 1)", "rotate"),
    _rotary("a head's norm without eps", "/ SIZE + eps)", "/ SIZE)", "rotate"),
    _rotary(
        "key heads in another order",
        "keys + at + (head - HEADS)",
        "keys + at + (HEADS + KEY_HEADS - 1 - head)",
        "rotate",
    ),
    _rotary("the end of a half is missing", "inside = (i < half) & (head", "inside = (i < half - 1) & (head", "rotate"),
    _rotary("the embedding of another id", "tl.load(ids + position) * SIZE", "tl.load(ids) * SIZE", "embed"),
    _rotary("the first squares are of x∘g", "position, tl.sum(wide * wide", "position, tl.sum(wide * factor", "embed"),
    _attention("slots behind the length", "inside = start + slot < visible", "inside = start + slot < view"),
    _attention("no mask", "seen & inside[:, None], inner", "inside[:, None], inner"),
    _attention("the last block is missing", "tl.minimum(first + each, blocks)", "tl.minimum(first + each, blocks - 1)"),
    _attention("masses are not rescaled", "tl.fma(block_mass, new, mass * old)", "tl.fma(block_mass, new, mass)"),
    _attention("keys of the first head", "key += row * k_row + key_head * k_head", "key += row * k_row"),
    _attention(
        "the mask of the first query", "place.to(tl.int64)[None, :] * m_width", "0 * place.to(tl.int64)[None, :]"
    ),
    _attention("the parts of another row", "at = (row * parts + part) * HEADS", "at = (row + part) * HEADS"),
    _attention("exponentials to another base", "weight = tl.exp2(score", "weight = tl.exp(score"),
]

LAUNCH = "        hopper.gdc_launch_dependents()\n"
WAIT = "        hopper.gdc_wait()\n" + LAUNCH
RELAXED = _product("a relaxed atomic", 'sem="acq_rel"', 'sem="relaxed"', "norm_product")
NO_BARRIER = _product("no barrier before the arrival", "tl.debug_barrier()", "pass", "norm_product")
ORDER_FAULTS = [  # in what orders threads, programs and kernels; the checks are cases of kernels/test_memory_order.py
    RELAXED,
    NO_BARRIER,
    _product("an atomic that only releases", 'sem="acq_rel"', 'sem="release"', "norm_product"),
    _product("an atomic that only acquires", 'sem="acq_rel"', 'sem="acquire"', "norm_product"),
    _product("an atomic for one multiprocessor", 'scope="gpu"', 'scope="cta"', "norm_product"),
    _product("no reset of the counter", "tl.store(counter, 0)", "pass", "norm_product"),
    _product(
        "the last program finishes",
        "== others",
        ">= 0\n                complete = share == leader + others",
        "add_product",
    ),
    _product(
        "no wait in a product",
        "        hopper.gdc_wait()\n" + LAUNCH + "    factor",
        LAUNCH + "    factor",
        "add_product",
    ),
    _product(
        "no wait before parts are added",
        "        hopper.gdc_wait()\n" + LAUNCH + "    steps",
        LAUNCH + "    steps",
        "many_positions",
    ),
    _product("inputs are prefetched", "_prefetch(lines", "_prefetch(x)\n            _prefetch(lines", "norm_swiglu"),
    _product(
        "a read before the wait",
        "hopper.gdc_wait()\n" + LAUNCH + "    factor",
        "tl.load(x, volatile=True)\n        hopper.gdc_wait()\n" + LAUNCH + "    factor",
        "norm_swiglu",
    ),
    _product(
        "a tile begins a program early",
        "leader = group * steps // SHARE\n            others",
        "leader = group * steps // SHARE - 1\n            others",
        "add_product",
    ),
    _product(
        "parts of another kind are added apart",
        "leader = group * steps // SHARE\n    last",
        "leader = group * steps // SHARE + 1\n    last",
        "many_positions",
    ),
    _product("another place is read", "2 * part + (part == leader)", "2 * part + (part != leader)", "norm_swiglu"),
    _rotary("no wait in the rotary embedding", "        hopper.gdc_wait()\n", "", "rotate"),
    Fault("no wait in attention", "triton_attention", WAIT + "    tile =", "        pass\n    tile =", ("attend",)),
    Fault(
        "no wait before blocks are combined",
        "triton_attention",
        WAIT + "    row =",
        "        pass\n    row =",
        ("attend",),
    ),
]

DECODER_FAULTS = [
    _decoder("the norm of another layer", "self.norms[2 * i : 2 * i + 3]", "self.norms[:3]"),
    _decoder("no bias of the output projection", "layer.out, layer.out_bias, mlp", "layer.out, None, mlp"),
    _decoder("the first positions are judged", "[:, width - judged :].flatten(0, 1)", "[:, :judged].flatten(0, 1)"),
    _decoder("no sliding window", "metadata.mask(sliding_window),", "metadata.mask(None),"),
    _decoder("keys of the first layer", "*cache.view(i),\n", "*cache.view(0),\n"),
    _decoder("slots are taken for positions", "positions.flatten()\n        x, ", "slots.flatten()\n        x, "),
    _definition("the definition rotates the other way", "t.roll(size // 2, -1) * sin", "t.roll(size // 2, -1) * -sin"),
    _definition("the definition has no eps", "norm.eps) * norm.power", "0) * norm.power"),
    _definition("the definition replaces the residual", "wide = _wide(residual) + _product", "wide = _product"),
    _definition("the definition has no norm of keys", "keepdim=True) + eps) * key_norm", "keepdim=True) + eps)"),
]


def finds(fault: Fault, folder: Path) -> bool:
    """Return whether a check fails with the fault. Needs Triton's interpreter."""
    run = planted_operations(fault, folder)
    for name in fault.checks:
        try:
            getattr(kernel_checks, f"check_{name}")(run, torch.float32)
        except AssertionError:
            return True
        finally:
            sys.modules["mtbench.kernels.triton_device"].counters.clear()  # a fault may leave them above zero
    return False


def planted_operations(fault: Fault, folder: Path) -> kernels.Operations:
    """Return the kernels with the fault."""
    from mtbench.kernels import triton_kernels

    module = _planted(fault, folder)
    return kernels.Operations(
        *(getattr(module, name, getattr(triton_kernels, name)) for name in kernels.Operations._fields)
    )


def decoder_finds(fault: Fault, folder: Path) -> bool:
    """Return whether the plain decoder differs from transformers with the fault, in one of the architectures."""
    module = _planted(fault, folder)
    decoder = module.Decoder if fault.file == "fused_decoder" else Decoder
    operations = kernels.PLAIN if fault.file == "fused_decoder" else module.PLAIN
    for config in kernel_checks.LAYERS.values():
        try:
            kernel_checks.check_decoder(operations, torch.float64, config, decoder)
        except AssertionError:
            return True
    return False


def planted_file(fault: Fault, folder: Path) -> Path:
    """Write the faulty module to a file in the folder, and return the file."""
    path = folder / f"{fault.file}.py"
    source = SOURCES.get(fault.file, KERNELS / path.name).read_text()
    assert source.count(fault.text) == 1, f"the text of {fault.name!r} occurs {source.count(fault.text)} times"
    path.write_text(source.replace(fault.text, fault.fault))
    return path


def _planted(fault: Fault, folder: Path) -> ModuleType:
    """Return the faulty module, in a file: Triton reads the source of kernels there."""
    path = planted_file(fault, folder)
    spec = importlib.util.spec_from_file_location(f"planted_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
