"""Honest programs, in the style of generated answers with their tests: what passes in `code_eval` passes here.

`code_eval` (of Hugging Face's evaluate) removes functions that start or end processes and that delete or rename files;
most programs in honest.txt need none of those. The last ones, from "two seconds" on, need them or more time.
"""

import pytest
from confinement import confined, programs

from mtbench.evaluation.sandbox import Outcome, run_all

pytestmark = pytest.mark.whole


PROGRAMS = programs("honest.txt")
FAILURES = {
    "a wrong answer": ("assert 1 + 1 == 3", "AssertionError"),
    "an exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "an unused test": ("import os\nos._exit(0)", "ended before its last line"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run all honest programs at once."""
    return dict(zip(PROGRAMS, run_all(list(PROGRAMS.values())), strict=True))


@confined
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_honest_program_passes(name: str, outcomes: dict[str, Outcome]) -> None:
    """It has packages, threads, memory, files and children; what it closes or locks does not change its result."""
    assert outcomes[name] == Outcome(True)


@confined
@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_does_not_reach_its_end_fails(name: str) -> None:
    """The reason says how it ended."""
    program, reason = FAILURES[name]

    assert run_all([program]) == [Outcome(False, reason)]
