"""Triton's interpreter with the programs of a launch side by side, and memory that promises no more than a GPU's.

Triton's own interpreter runs programs one after the other, and each sees all that those before it stored. `Adversary`
runs them as greenlets. At every access to memory a seed may choose another program; the same seed makes the same run.

The memory is that of PTX (PTX ISA, "Memory Consistency Model"; Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis of
the NVIDIA PTX Memory Consistency Model", ASPLOS 2019), for whole programs:

- The stores of a launch form a list, which is the coherence order. A load gets, at each address, the last store that
  its program sees. If the program sees none, it gets what was there before the launch.
- A program sees its own stores. Without synchronisation it may see another program's store at any time, or never; what
  it has seen once it sees from then on.
- An atomic operation reads the last store, and its own follows at once. One that releases hands on what its program
  sees; through the atomic operations on the same address, the next one that acquires takes it.
- A release covers only what came before the program's last barrier (`tl.debug_barrier`). One thread executes the atomic
  operation; without a barrier the others may not have stored yet.
- An atomic operation that is relaxed, or whose scope is the CTA, neither hands on nor takes. (PTX guarantees no more.)
- After a launch, all its stores are in memory.
- Programmatic dependent launch: before `griddepcontrol.wait` the kernel before may still write anything but constants.
  So a program may read or prefetch constants only, and write nothing. It has to wait before it ends or lets the kernel
  after it start, which waits for this kernel only and relies on all others being done.

An access outside the tensors of the launch is an error, too. Not modelled: threads of one program that exchange values
through global memory; accesses of different sizes to the same bytes; cache operators such as `.cg`, which do not change
what PTX guarantees. Whether the compiler keeps the order of the source is a question to the machine code
(tests/kernels/test_machine_code.py).
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from greenlet import getcurrent, greenlet
from torch import Tensor
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir
from triton.language.extra import cuda
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

Array = np.ndarray[Any, Any]
RELEASES = {ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
ACQUIRES = {ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
UNWAITED = "before it has waited for the kernel before"


@dataclass(frozen=True, eq=False)
class Store:
    """What one operation of a program stored."""

    addresses: Array  # in ascending order
    values: Array
    hands_on: frozenset["Store"] = frozenset()  # what one who acquires from it sees

    def find(self, addresses: Array) -> tuple[Array, Array]:
        """Return which of the addresses it stored to, and the values of those."""
        place = np.searchsorted(self.addresses, addresses).clip(max=len(self.addresses) - 1)
        found = self.addresses[place] == addresses
        return found, self.values[place[found]]


@dataclass(eq=False)
class Program:
    """One program of a launch."""

    index: tuple[int, ...]
    task: greenlet
    waited: bool  # for the kernel before
    sees: set[Store] = field(default_factory=set)
    settled: set[Store] = field(default_factory=set)  # of these, what a barrier or an acquire made certain for all


class Adversary:
    """The order of programs, and what they see: a function of the seed.

    Programs begin in an order of priority (the first seed: the last program first), and the first one that has not
    ended runs. An access may make its program the last one: a program may stop in the middle until all others have
    ended. (Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.)
    """

    def __init__(self, seed: int, constants: Sequence[Tensor]) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.constants = constants
        self.yields = (0.0, 0.5, 0.1)[seed % 3]  # how likely an access changes the order
        self.glimpses = (0.0, 0.0, 0.5, 1.0)[seed % 4]  # how likely a store is seen that need not be
        self.arrivals: dict[int, int] = {}  # atomic operations by address, over all launches
        self.violation = ""  # why a launch ended with an InterpreterError
        self.stores: list[Store] = []
        self.running: list[Program] = []
        self.tensors: Sequence[Tensor] = ()

    @property
    def program(self) -> Program:
        return self.running[0]

    def launch(self, function: Callable[[], None], grid: Sequence[int], tensors: Sequence[Tensor], early: bool) -> None:
        """Run a program for each index of the grid. `early`: by a dependent launch."""
        self.stores, self.tensors = [], tensors
        self.running = [Program(index, greenlet(function), not early) for index in product(*map(range, grid))]
        self.running.reverse()
        if self.seed:
            self.random.shuffle(self.running)
        interpreter.interpreter_builder.set_grid_dim(*grid)
        while self.running:
            program = self.program
            interpreter.interpreter_builder.set_grid_idx(*program.index)
            program.task.switch()
            if program.task.dead:
                if not program.waited:
                    self.fail(f"ends {UNWAITED}")
                self.running.remove(program)
        for store in self.stores:
            memory.store(store.addresses, store.values, np.ones_like(store.addresses, dtype=bool))

    def access(self, addresses: Array, itemsize: int, verb: str) -> None:
        """Let another program run, perhaps. Then check that this one may access the addresses."""
        if self.random.random() < self.yields:
            self.running.append(self.running.pop(0))
            getcurrent().parent.switch()
        waited, reads = self.program.waited, verb in ("loads", "prefetches")
        allowed = self.tensors if waited else self.constants if reads else ()
        storages = [tensor.untyped_storage() for tensor in allowed]
        first, last = int(addresses.min()), int(addresses.max()) + itemsize
        if not any(s.data_ptr() <= first and last <= s.data_ptr() + s.nbytes() for s in storages):
            self.fail(f"{verb} {'outside the tensors of its launch' if waited else UNWAITED}")

    def fail(self, what: str) -> NoReturn:
        self.violation = f"program {self.program.index} {what}"
        raise InterpreterError(self.violation)

    # ---- what the interpreter calls, in place of its own

    def load(self, pointers: Any, mask: Any, other: Any, *_: Any) -> Any:
        kind = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        masked = mask.data.astype(bool)  # a broadcast number is an integer
        addresses = pointers.data[masked]
        values = np.zeros(pointers.data.shape, dtype) if other is None else np.array(other.data, dtype)
        if addresses.size:
            self.access(addresses, dtype.itemsize, "loads")
            loaded = memory.load(addresses, np.ones(addresses.shape, bool), np.zeros(addresses.shape, dtype), dtype)
            for store in self.seen_of(addresses):
                found, latest = store.find(addresses)
                loaded[found] = latest
            values[masked] = loaded
        return interpreter.TensorHandle(values, kind)

    def seen_of(self, addresses: Array) -> Iterator[Store]:
        """Yield the stores near these addresses that the program sees, in order."""
        first, last = addresses.min(), addresses.max()
        for store in self.stores:
            if store.addresses[0] <= last and first <= store.addresses[-1]:
                if store not in self.program.sees and self.random.random() < self.glimpses:
                    self.program.sees.add(store)
                if store in self.program.sees:
                    yield store

    def store(self, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        masked = mask.data.astype(bool)
        addresses, place = np.unique(pointers.data[masked], return_index=True)
        values = value.data[masked][place]
        if addresses.size:
            self.access(addresses, values.itemsize, "stores")
            self.add(Store(addresses, values))

    def add(self, store: Store) -> None:
        self.stores.append(store)
        self.program.sees.add(store)

    def atomic(self, operation: Any, pointer: Any, value: Any, mask: Any, semantics: Any, scope: Any) -> Any:
        if operation != ir.ATOMIC_OP.ADD or pointer.data.size != 1 or not mask.data.all():
            raise NotImplementedError("an atomic operation other than the addition of one integer")
        address, before = pointer.data.reshape(1), np.zeros(1, value.data.dtype)
        self.access(address, before.itemsize, "adds")
        self.arrivals[int(address[0])] = self.arrivals.get(int(address[0]), 0) + 1
        before, handed_on = memory.load(address, np.ones(1, bool), before, before.dtype), frozenset[Store]()
        for store in self.stores:
            found, latest = store.find(address)
            if found[0]:
                before, handed_on = latest, store.hands_on
        wide = scope != ir.MEM_SYNC_SCOPE.CTA
        if wide and semantics in ACQUIRES:
            self.program.sees |= handed_on
            self.program.settled |= handed_on
        if wide and semantics in RELEASES:
            handed_on |= self.program.settled
        self.add(Store(address, before + value.data.reshape(1), handed_on))
        return interpreter.TensorHandle(before.reshape(pointer.data.shape), value.dtype)

    def barrier(self) -> None:
        self.program.settled |= self.program.sees

    def assembly(self, code: str, _constraints: str, values: Sequence[Any], types: Sequence[Any], *_: Any) -> Any:
        if "prefetch.global" in code:
            self.access(values[0].data.astype(np.uint64), 1, "prefetches")
        elif "griddepcontrol.wait" in code:
            self.program.waited = True
        elif "griddepcontrol.launch_dependents" in code:
            if not self.program.waited:
                self.fail(f"lets the next kernel start {UNWAITED}")
        else:
            raise NotImplementedError(f"inline assembly {code!r}")
        shape = values[0].data.shape if values else (1,)
        return SimpleNamespace(
            get_result=lambda _: interpreter.TensorHandle(np.zeros(shape, np.int32), types[0].scalar)
        )


@contextmanager
def adversary(seed: int, *constants: Tensor) -> Iterator[Adversary]:
    """Run all kernels under an adversary, as on a GPU with dependent launches.

    `constants`: the tensors that no kernel writes, such as weights.
    """
    chosen, builder = Adversary(seed, constants), interpreter.interpreter_builder
    calls = {"create_masked_load": chosen.load, "create_masked_store": chosen.store, "create_barrier": chosen.barrier}
    calls |= {"create_atomic_rmw": chosen.atomic, "create_inline_asm": chosen.assembly}
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(builder, name, call)
        for name in ("gdc_wait", "gdc_launch_dependents"):
            patch.setattr(cuda, name, partial(getattr(cuda, name), _semantic=interpreter.interpreter_semantic))
        for module in [module for module in sys.modules.values() if "dependent_launch" in vars(module)]:
            patch.setattr(module, "dependent_launch", lambda _: True)
        launch = lambda executor, *args, **options: _launch(chosen, executor, *args, **options)  # noqa: E731
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield chosen


def _launch(chosen: Adversary, executor: Any, *args: Any, launch_pdl: bool = False, **options: Any) -> None:
    """Launch a kernel; stands in for `GridExecutor.__call__`."""
    known = {name: value for name, value in options.items() if name in executor.arg_names}
    given = inspect.getcallargs(executor.fn, *args, **known)
    values = [one for value in given.values() for one in (value if isinstance(value, tuple) else (value,))]
    tensors = [value for value in values if isinstance(value, Tensor)]
    scope = interpreter._patch_lang(executor.fn)
    try:
        for name in set(given) - set(executor.constexprs):
            given[name] = interpreter._implicit_cvt(given[name])
        chosen.launch(partial(executor.fn, **given), (*executor.grid, 1, 1)[:3], tensors, launch_pdl)
    finally:
        scope.restore()
