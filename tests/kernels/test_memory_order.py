# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The kernels in any order of programs, with memory that promises no more than a GPU's (helpers/weak_memory.py).

The programs of a product exchange partial sums while they run, and a kernel starts before its predecessor has ended.
Both rest on few instructions: a barrier, an atomic operation that releases and acquires, a wait. With one of them
missing, results are mostly right, on a GPU too. Here every such fault is found. Runs in the interpreter's process.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from kernel_checks import divided, entering, made_norm, noise
from planted_kernels import ORDER_FAULTS, Fault, planted_operations
from torch import Tensor

from mtbench import kernels
from mtbench.kernels import Norm, Operations

INTERPRETING = "TRITON_INTERPRET" in os.environ
pytestmark = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
SEEDS = range(8)
Run = Callable[[Operations], Sequence[Tensor]]  # an operation on the same inputs each time; returns all that it writes
float32 = partial(noise, dtype=torch.float32)

if INTERPRETING:
    import triton
    import triton.language as tl
    from triton.runtime.errors import InterpreterError
    from weak_memory import adversary

    from mtbench.kernels import triton_attention, triton_device, triton_kernels

    KERNELS = Operations(*(getattr(triton_kernels, name) for name in Operations._fields))
    triton_attention.AHEAD = 2  # unrolled loads are slow in the interpreter
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN

    @triton.jit
    def _message(data, flag, got, WRITE: tl.constexpr, READ: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr):
        """The first program writes data, then a flag. The second one reads the flag, then the data."""
        if tl.program_id(0) == 0:
            tl.store(data, 1)
            if BARRIER:
                tl.debug_barrier()
            tl.atomic_add(flag, 2, sem=WRITE, scope=SCOPE)
        else:
            arrived = tl.atomic_add(flag, 0, sem=READ, scope=SCOPE)
            tl.store(got, arrived + tl.load(data))


@pytest.mark.parametrize(
    ("write", "read", "scope", "barrier", "safe"),
    [
        ("release", "acquire", "gpu", True, True),
        ("acq_rel", "acq_rel", "sys", True, True),
        ("release", "acquire", "gpu", False, False),
        ("release", "acquire", "cta", True, False),
        ("relaxed", "acquire", "gpu", True, False),
        ("release", "relaxed", "gpu", True, False),
        ("acquire", "release", "gpu", True, False),
    ],
)
def test_message_passing(write: str, read: str, scope: str, barrier: bool, safe: bool) -> None:
    """The litmus test of the memory model: the flag with old data is seen where one link is missing, and only there."""
    seen, possible = set(), {0, 1, 2 + 1} if safe else {0, 1, 2 + 1, 2}
    for seed in range(40):
        data, flag, got = torch.zeros(3, 1, dtype=torch.int32)
        with adversary(seed):
            _message[2,](data, flag, got, WRITE=write, READ=read, SCOPE=scope, BARRIER=barrier)
        seen.add(int(got))
    assert seen == possible


def norm_product() -> tuple[Run, Sequence[Tensor]]:
    """Return a run, and the tensors that no kernel writes. Three positions, three tiles, each in three parts."""
    x, norm = float32(3, 600), made_norm(600, torch.float32)
    weight, bias = float32(260, 600, seed=1), float32(260, seed=2)
    return lambda run: [run.norm_product(entering(x, norm), norm, weight, bias)], [weight, bias]


def norm_swiglu() -> tuple[Run, Sequence[Tensor]]:
    """33 positions: two tiles of positions in one launch."""
    x, norm, weight = float32(33, 280), made_norm(280, torch.float32), float32(400, 280, seed=1) / 17
    return lambda run: [run.norm_swiglu(entering(x, norm), norm, weight)], [weight]


def add_product() -> tuple[Run, Sequence[Tensor]]:
    """It reads and writes the residual."""
    x, weight, norm = float32(17, 600), float32(260, 600, seed=1), made_norm(260, torch.float32)

    def call(run: Operations) -> Sequence[Tensor]:
        residual = float32(17, 260, seed=3)
        return [residual, *run.add_product(residual, x, weight, None, norm)]

    return call, [weight, norm.weight]


def empty_half() -> tuple[Run, Sequence[Tensor]]:
    """The last group's second half has no outputs: it reads no weight behind the end."""
    x, norm, weight = float32(2, 280), made_norm(280, torch.float32), float32(384, 280, seed=1)
    return lambda run: [run.norm_product(entering(x, norm), norm, weight)], [weight]


def many_positions() -> tuple[Run, Sequence[Tensor]]:
    """A tile of 256 rows; a second kernel adds its parts."""
    x, weight, norm = (noise(*shape, dtype=torch.float16) for shape in ((65, 400), (260, 400), (260,)))

    def call(run: Operations) -> Sequence[Tensor]:
        residual = noise(65, 260, dtype=torch.float16, seed=3)
        return [residual, *run.add_product(residual, x, weight, None, Norm(norm, 1e-6, 8.0))]

    return call, [weight, norm]


def rotate() -> tuple[Run, Sequence[Tensor]]:
    """The rotary embedding with cache writes."""
    qkv, weights, tables = float32(3, 8 * 16), float32(2, 16), float32(2, 14, 1, 16)

    def call(run: Operations) -> Sequence[Tensor]:
        keys, values = float32(2, 10, 2, 16, seed=1)
        positions, index = torch.tensor([5, 0, 11]), torch.tensor([9, 2, 4])
        return [run.rotate(qkv, positions, *tables, keys, values, index, *weights, eps=1e-6), keys, values]

    return call, [weights, tables]


def attend() -> tuple[Run, Sequence[Tensor]]:
    """Two rows over blocks of keys, which a second kernel combines."""
    query, (key, value) = float32(2, 2, 1, 16), float32(2, 2, 1, 270, 16)
    mask, length = float32(2, 1, 270) > -1, torch.tensor([270, 140])
    return lambda run: [run.attend(query, key, value, mask, length, 0.25)], []


CASES = {
    case.__name__: case for case in (norm_product, norm_swiglu, add_product, empty_half, many_positions, rotate, attend)
}
LONG = {"many_positions", "norm_swiglu"}
PLANS = {
    "norm_swiglu": (256, 3),
    "many_positions": (256, 3),
    "empty_half": (256, 9),
}  # rows of a group and steps of a share


@cache
def expected(case: str) -> Sequence[Tensor]:
    """Return what the kernels give in the interpreter's own order."""
    with divided(KERNELS, *PLANS.get(case, (128, 4))):
        return CASES[case]()[0](KERNELS)


def wrong(run: Operations, case: str, seed: int) -> tuple[str, set[int]]:
    """Return what an adversary breaks, "" if nothing, and how many programs shared a tile."""
    call, constants = CASES[case]()
    with adversary(seed, *constants) as chosen, divided(run, *PLANS.get(case, (128, 4))):
        try:
            found = call(run)
        except InterpreterError:
            if not chosen.violation:
                raise
    fault = chosen.violation
    if not fault and not kernels.at_rest():
        fault = "counters are not zero"
    triton_device.counters.clear()  # those of a faulty product
    if not fault and not all(torch.equal(*pair) for pair in zip(found, expected(case), strict=True)):
        fault = "results differ"
    return fault, set(chosen.arrivals.values())


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 80), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]
)
def test_no_order_of_programs_and_stores_changes_a_bit(case: str, seeds: Sequence[int]) -> None:
    """Against the interpreter's own order. The counters are zero after it."""
    found = {seed: wrong(KERNELS, case, seed) for seed in seeds}
    assert {seed: fault for seed, (fault, _) in found.items() if fault} == {}
    if case in ("norm_product", "norm_swiglu", "add_product"):
        shared = set.union(*(parts for _, parts in found.values()))
        assert shared
        assert shared <= {2, 3, 4, 5}


@pytest.mark.parametrize("fault", ORDER_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_order_is_found(fault: Fault, tmp_path: Path) -> None:
    run = planted_operations(fault, tmp_path)
    [case] = fault.checks
    assert any(wrong(run, case, seed)[0] for seed in SEEDS)
