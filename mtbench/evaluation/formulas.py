"""Compare mathematical answers by their value, with Math-Verify (github.com/huggingface/Math-Verify, Apache-2.0).

An answer may be hostile: `9^{9^{9^9}}` takes all time and memory, in code that no exception interrupts. So Math-Verify
compares each pair in a process of its own. If that one exceeds a limit, the formulas are not equal.
"""

import json
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mtbench.errors import printable
from mtbench.evaluation.by_value import Case, first, last_box, last_line, plain, sentence, statements
from mtbench.programs.processes import launched

LIMIT_S = 2  # of processor time, for one comparison
MEMORY_BYTES = 2**31  # of address space
IGNORED = re.compile(r"\\(?:left|right|[$,;:! ])|\^\{?\\circ\}?|[°\s$€£]|^\*+|[*.]+$")  # where texts are compared
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
DELIMITER = re.compile(r"\$|(?<!\\)\\[(\[]")  # of a formula in a text
BASE = re.compile(r"_\{?(\d+)\}?$")
FIRST = (r"\frac{1}{2}\sqrt{2}x^2,\left(1,\pi\right]", r"\begin{pmatrix}0.5\\1\end{pmatrix}")  # to fill caches


def same_formulas(cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether the answer's formula equals the reference, but for a unit or base that one lacks.

    Raise RuntimeError if Math-Verify does not run.
    """
    pairs = [(case.reference, first(case.text, _formula) or "") for case in cases]
    if not any(answer for _, answer in pairs):
        return [False] * len(pairs)
    command = launched([sys.executable, "-P", "-m", __name__])
    process = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True)
    if len(process.stdout) != len(pairs):
        reason = printable(process.stderr.strip().rpartition("\n")[2])
        raise RuntimeError(f"Math-Verify does not run ({reason}); install mtbench's dependencies again")
    return [result == "1" for result in process.stdout]


def find_formula(text: str) -> str | None:
    """Return what lm-eval reads: a box, or else a text with one formula between dollars; None: neither."""
    return last_box(text) or (text if text.count("$") == 2 else None)


def _formula(text: str) -> str | None:
    stated = next(map(sentence, statements(text)), "")
    return last_box(text) or stated or last_line(text) or None


def main() -> None:
    """Read pairs from standard input and write 1 for each that is equal, else 0."""
    logging.disable()
    is_same(*FIRST)
    results = ""
    for pair in json.load(sys.stdin):
        process = os.fork()
        if not process:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
            if sys.platform == "linux":
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            os._exit(0 if is_same(*pair) else 1)
        results += "0" if os.waitpid(process, 0)[1] else "1"
    print(results, end="")


def is_same(reference: str, answer: str) -> bool:
    """Return whether two formulas in LaTeX have the same text or, by Math-Verify, the same value; without a limit."""
    from math_verify import LatexExtractionConfig, parse, verify

    formulas = [plain(formula) for formula in (reference, answer)]
    texts = {IGNORED.sub("", WORDS.sub(r"\1", formula)).casefold() for formula in formulas}
    bases = {found[1] for text in texts if (found := BASE.search(text))}
    if len(texts) == 1 or len(bases) == 2:
        return len(texts) == 1
    formulas = [re.sub(r"\s+", " ", formula.replace("\\$", "")).rstrip("\\. ") for formula in formulas]
    delimited = (formula if DELIMITER.search(formula) else f"${formula}$" for formula in formulas)
    options: Any = {"extraction_mode": "first_match", "parsing_timeout": None}
    gold, found = (parse(formula, [LatexExtractionConfig()], **options) for formula in delimited)
    return bool(verify(gold, found, float_rounding=12, allow_set_relation_comp=True, timeout_seconds=None))


if __name__ == "__main__":
    main()
