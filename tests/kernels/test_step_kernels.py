"""The kernels that feed and commit a step against their definitions: random rows, every method, planted faults.

test_kernels.py starts the process of Triton's interpreter in which the kernels run.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import MANY, ar, decode_prompts, on, outcomes, requests_for
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE, Fault, interpreted, of_integers, planted_step, running
from method_cases import CASES, HEADS, Case, models
from small import small_checkpoint
from thinned import one_in

from mtbench import kernels
from mtbench.decoding import step, step_check
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.registry import METHODS
from mtbench.models.runner import ModelRunner

READ_LAG: Callable[..., Batch] = lambda *arguments: Batch(*arguments, tight=False)  # noqa: E731
OTHERS = [
    Case("plain", "mars", {"tau": 0.15, "block_size": "auto"}),
    Case("plain", "mars", {"tau": 0.3, "cache": "block", "cache_block": 5}),
    Case("plain", "block-diffusion", {"block_size": 3, "tau": 0.3}),
    Case("headed", "medusa", {"heads": HEADS, "tree": "2x2"}),
]
FIRST = {case.name: case for case in CASES if case.name != "medusa"}  # one of each
DEVICE_OF = torch.device(DEVICE)


@interpreted
@settings(deadline=None, max_examples=2)
@example(seed=3, guesses=6, tree=True, block=1)
@given(st.integers(0, 10_000), st.integers(0, 9), st.booleans(), st.sampled_from([1, 2, 4]))
def test_a_step_is_fed_and_committed_as_defined(seed: int, guesses: int, tree: bool, block: int) -> None:
    """Random cursors, ends, budgets, offers, paths and trees, with and without a sliding window."""
    with running(of_integers):
        assert not step_check.case_differs(DEVICE_OF, seed, guesses, tree=tree and guesses > 0, block=block)


@interpreted
@pytest.mark.parametrize("case", [*OTHERS, *one_in(6, FIRST.values())], ids=str)
def test_each_method_decodes_the_same_by_the_kernels(case: Case, tmp_path: Path) -> None:
    """In rows that are refilled, some sampled, with end tokens inside of drafts: also counts and reasons."""
    runners, method = models(case.models, tmp_path), case.method
    prompts = [[*range(1, 9), *prompt] for prompt in MANY[:3]]  # blocks need some tokens
    asked = [
        replace(request, temperature=temperature)
        for request, temperature in zip(requests_for(prompts, [5, 8, 6]), (0.0, 1.3, None), strict=True)
    ]
    want, _ = decode(method, runners, asked, rows=2, make=READ_LAG)
    with running(of_integers):
        got, timing = decode(method, runners, asked, rows=2, make=READ_LAG)
    assert outcomes(got) == outcomes(want)
    assert [g.drafted for g in got] == [g.drafted for g in want]
    assert timing.miscounted == 0


FAULTS = {  # a text of the kernels, and what it is replaced by
    "a commit writes past the budget": ("tl.minimum(accepted, last - before)", "accepted"),
    "a commit ignores an end token in the middle of a draft": ("column, TOKENS), 0)", "TOKENS, TOKENS), 0)"),
    "an endless row ends": ("& (tl.load(endless + row) == 0)", ""),
    "the end of a row is not noted": ("first_end < committed, after", "first_end < 0, after"),
    "tokens go a place further": ("slots + before + column", "slots + before + column + 1"),
    "guesses that were rejected stay cached": ("start + tl.load(kept + row)", "after"),
    "a row with nothing to commit offers": ("tl.where(accepted > 0, most, 0)", "most"),
    "the log does not move": ("tl.minimum(forward + 1, forwards - 1)", "forward"),
    "a block is left early": ("after // BLOCK * BLOCK", "after"),
    "a path from the root": ("start + tl.load(path", "tl.load(path"),
    "pending tokens a place early": ("start + column - PENDING", "start + column - PENDING - 1"),
    "a guess is masked as a known token": ("tl.where(is_draft & is_guess, tree", "tl.where(is_draft & False, tree"),
    "tokens see those behind": ("position // BLOCK\n", "position // BLOCK + 1\n"),
    "no sliding window": ("if WINDOW > 0", "if WINDOW < 0"),
    "a row reads the tree of the first": ("sees + row * sees_row", "sees + 0 * sees_row"),
    "a row reads the depths of the first": ("offset += row * offset_row", "offset += 0 * offset_row"),
    "positions are slots in a tree": ("start + tl.load(offset + number", "slot + 0 * tl.load(offset + number"),
}


@interpreted
@pytest.mark.parametrize("name", one_in(5, FAULTS))
def test_a_fault_planted_in_a_step_is_found_before_the_first_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check on the device, which switches the kernels off. Fewer rows find each fault, too."""
    monkeypatch.setattr(step_check, "ROWS", 4)
    step_check._fault.cache_clear()
    with planted_step(Fault(name, "mtbench.decoding.triton_step", *FAULTS[name]), tmp_path):
        step_check.check_kernels(DEVICE_OF)
        assert kernels.off() == "a kernel that feeds or commits does not give what its definition gives"
    step_check._fault.cache_clear()


@interpreted
def test_right_kernels_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check, "ROWS", 4)
    step_check._fault.cache_clear()
    with running(of_integers):
        step_check.check_kernels(DEVICE_OF)
        assert kernels.off() is None


def test_without_our_kernels_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, and where they are switched off, plain decoding needs no Triton."""
    monkeypatch.setattr(step, "_triton", lambda: pytest.fail("a kernel runs on a CPU"))
    step_check.check_kernels(torch.device("cpu"))
    runner = ModelRunner(small_checkpoint())
    assert decode_prompts(ar(), on(runner), MANY[:2], 4, make=READ_LAG)[0]


def test_only_a_method_with_cursors_of_its_own_moves_them() -> None:
    """The kernel moves the others'."""
    for method in (METHODS["ar"](), METHODS["mars"](), METHODS["block-diffusion"]()):
        assert not method.own_cursors
    assert METHODS["mars"](cache="block").own_cursors

    ar_class: Any = METHODS["ar"]

    class Own(ar_class):  # type: ignore[misc]
        def base(self, state: Any, rows: Any) -> Any:
            return rows.known

    assert Own().own_cursors
