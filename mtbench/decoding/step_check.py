"""The check of a step's kernels on the device that runs them, against their definitions.

Cursors, ids, masks, choices and moved values must be equal. The kernels of a forward pass are checked by its logits
(mtbench/models/self_check.py).
"""

import dataclasses
from functools import cache
from itertools import product

import torch
from torch import Tensor

from mtbench import kernels
from mtbench.decoding.host_sync import CommitLog, Shape
from mtbench.decoding.method import Commit, Rows, Window, block_start
from mtbench.decoding.step import feed, write
from mtbench.errors import first_line

ROWS, SLOTS, PENDING, VIEW = 7, 96, 3, 90  # of a case
CHANGED = ("tokens", "known", "base", "cached", "limit", "done")  # tensors of `Rows` that a commit changes


def check_kernels(device: torch.device) -> None:
    """Switch our kernels off if those of a step do not give the results of their definitions on this device."""
    if kernels.ours(torch.empty(0, dtype=torch.long, device=device)) and (fault := _fault(device)):
        kernels.switch_off(fault)


@cache
def _fault(device: torch.device) -> str | None:
    """Return what is wrong, or None. The cases: no guess, a chain, a tree, one by row; blocks; random rows.

    The choice of tokens and the moves in a cache belong to a step, too. Raises UserError if the GPU computes nothing
    more.
    """
    wrong = "a kernel that {} does not give what its definition gives"
    try:
        for seed, ((guesses, tree), block) in enumerate(product(((0, False), (6, False), (6, True)), (1, 4))):
            if case_differs(device, seed, guesses, tree=tree, block=block):
                return wrong.format("feeds or commits")
        if _choices_differ(device):
            return wrong.format("chooses tokens")
        if _moves_differ(device):
            return wrong.format("moves slots of a cache")
    except Exception as error:  # a compiler or driver may be broken
        kernels.refuse_lost_device(error)
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _choices_differ(device: torch.device) -> bool:
    """Return whether the kernel chooses other tokens than its definition, or gives other figures of the logits.

    Greedy and sampled. The logits are numbers that differ from each other in their type, so that no choice is a tie.
    """
    seed, position = torch.arange(3, device=device), torch.arange(6, device=device).view(3, 2)
    temperature = torch.tensor([0.0, 0.7, 1.3], dtype=torch.double, device=device)
    for dtype, prime in ((torch.float32, 3001), (torch.bfloat16, 251)):
        token = torch.arange(prime - 1, device=device)
        logits = ((token * 7919 + 1009 * position[..., None]) % prime / 16).to(dtype)
        for each in (None, temperature):
            found = kernels.choose_logsumexp(logits, each, seed, position)
            with kernels.plain():
                expected = kernels.choose_logsumexp(logits, each, seed, position)
            if not torch.equal(found[0], expected[0]) or not all(map(torch.allclose, found[1:], expected[1:])):
                return True
    return False


def _moves_differ(device: torch.device) -> bool:
    stores = [torch.arange(3.0 * 20 * 32, device=device).view(60, 2, 16) + shift for shift in (0, 1)]
    if (mover := kernels.slot_mover(stores)) is None:
        return False
    expected = [store.clone() for store in stores]
    row, target = torch.arange(3, device=device)[:, None], torch.tensor([[4, 5, 6]], device=device).expand(3, -1)
    source = target + row + torch.tensor([0, 1, 3], device=device)
    for store in expected:
        by_row = store.view(3, 20, 2, 16)
        by_row[row, target] = by_row[row, source]
    mover(source, target, 20)
    return not all(torch.equal(a, b) for a, b in zip(stores, expected, strict=True))


def case_differs(device: torch.device, seed: int, guesses: int, *, tree: bool, block: int) -> bool:
    """Return whether the kernels give other results than the definitions for random rows."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(device)

    count = ROWS
    known = 20 + integers(20, count)
    base = block_start(known, block)
    each = (count,) if seed % 2 else ()  # of odd seeds each row has a tree of its own
    offset = integers(guesses, *each, guesses) if tree else None
    sees = integers(2, *each, guesses, guesses).bool() if tree else None
    window = Window(PENDING, guesses, guesses + 1, sees, offset)
    guess, places = integers(50, count, guesses), base[:, None] + torch.arange(guesses, device=device)
    nothing = torch.zeros_like(known)
    rows = Rows(
        tokens=integers(50, count, SLOTS),
        request=nothing,
        prompt_len=nothing,
        known=known,
        base=base,
        cached=base - 1 - integers(PENDING, count),
        limit=known + integers(2 * guesses + 2, count),
        done=integers(2, count).bool(),
        seed=nothing,
        endless=integers(2, count).bool(),
    )
    path = integers(guesses, count, 2) if tree else None
    offered = integers(guesses + 1, count) if seed % 2 else None
    numbers = integers(guesses + 2, count), integers(guesses + 1, count)
    commit = Commit(integers(50, count, guesses + 1), *numbers, path=path, offered=offered)
    ends, windows = torch.arange(50, device=device) < 9, (None, 5)

    def results() -> list[Tensor]:
        own = dataclasses.replace(rows, **{name: getattr(rows, name).clone() for name in CHANGED})
        own_log = CommitLog(count, 4, device)
        ids, metadata = feed(own, guess, places, window, Shape(0, PENDING, VIEW), block, windows)
        masks = [metadata.mask(each) for each in windows]  # before the commit moves `base`
        moved = write(own, commit, window, ends, own_log, block)
        logs = own_log.forwards, own_log.commits, own_log.offered, own_log.accepted
        changed = [getattr(own, name) for name in CHANGED]
        return [ids, metadata.slots, metadata.positions, metadata.length, *masks, *logs, *moved, *changed]

    found = results()
    with kernels.plain():
        expected = results()
    return not all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
