"""Compare mathematical answers by their value, with Math-Verify (github.com/huggingface/Math-Verify, Apache-2.0).

An answer may be hostile: `9^{9^{9^9}}` takes all time and memory, in code that no exception interrupts. So Math-Verify
compares each pair in a process of its own. If that one exceeds a limit, the formulas are not equal.
"""

import json
import logging
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence

from mtbench.errors import printable
from mtbench.evaluation import by_value
from mtbench.evaluation.by_value import Case, last_box, plain
from mtbench.programs.processes import launched

LIMIT_S = 1.5  # of processor time, for one comparison
MEMORY_BYTES = 2**31  # of address space
IGNORED = re.compile(r"\\(?:left|right|[$,;:! ])|\^\{?\\circ\}?|[°\s$€£*]|\.$")  # where texts are compared
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
TUPLE = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
BASE = re.compile(r"_\{?(\d+)\}?$")
FIRST = (r"\frac{1}{2}\sqrt{2}x^2,\left(1,\pi\right]", r"\begin{pmatrix}0.5\\1\end{pmatrix}")  # to fill caches
PRECISION = 12  # decimal places of numbers that are not exact


def same_formulas(cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether the formula that an answer gives as its result equals the reference."""
    return equal([(case.reference, by_value.first(case.text, _formula) or "") for case in cases])


def has_formula(text: str) -> bool:
    """Return whether an answer has a box, or else one formula between dollars, which lm-eval reads."""
    return last_box(text) is not None or text.count("$") == 2


def _formula(text: str) -> str | None:
    stated = next(map(by_value.sentence, by_value.statements(text)), "")
    return last_box(text) or stated or by_value.last_line(text) or None


def equal(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each pair whether the reference and the answer, two formulas in LaTeX, have the same value.

    Sets are equal in any order, tuples and intervals in one order. A unit, a degree sign or a base that only one of the
    two has does not count. Raise RuntimeError if Math-Verify does not run.
    """
    known = [_compare_text(*pair) for pair in pairs]
    results = iter(_verify([pair for pair, found in zip(pairs, known, strict=True) if found is None]))
    return [next(results) if found is None else found for found in known]


def _compare_text(reference: str, answer: str) -> bool | None:
    """Return whether two formulas are equal; None: their texts do not tell."""
    texts = [IGNORED.sub("", WORDS.sub(r"\1", plain(formula))).casefold() for formula in (reference, answer)]
    if not texts[1] or len(answer) > by_value.LONGEST:
        return False
    if all(re.fullmatch(by_value.NUMBER, text) for text in texts):
        return by_value.last_number(texts[0]) == by_value.last_number(texts[1])
    bases = {found[1] for text in texts if (found := BASE.search(text))}
    sets = any("\\{" in text for text in texts) and any(TUPLE.fullmatch(text) for text in texts)
    if texts[0] == texts[1] or len(bases) > 1 or sets or any(":" in text for text in texts):  # 11:30 is no division
        return texts[0] == texts[1]
    return None


def _verify(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each pair whether Math-Verify finds its formulas equal."""
    if not pairs:
        return []
    command = launched([sys.executable, "-P", "-m", __name__])
    process = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True)
    if len(process.stdout) != len(pairs):
        reason = printable(process.stderr.strip().rpartition("\n")[2])
        raise RuntimeError(f"Math-Verify does not run ({reason}); install mtbench's dependencies again")
    return [result == "1" for result in process.stdout]


def main() -> None:
    """Read pairs from standard input and write 1 or 0 for each. A process that a limit ends has a successor."""
    logging.disable()
    pairs = json.load(sys.stdin)
    results = mmap.mmap(-1, len(pairs))  # shared; zero: not compared yet
    is_same(*FIRST)
    while (start := results.find(b"\0")) >= 0:
        if process := os.fork():
            if os.waitpid(process, 0)[1]:
                results[results.find(b"\0")] = ord("0")
            continue
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        for place in range(start, len(pairs)):
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # its signal ends the process in whatever it does
            results[place] = ord("1" if is_same(*pairs[place]) else "0")
        os._exit(0)
    os.write(1, results[:])


def is_same(reference: str, answer: str) -> bool:
    """Return whether Math-Verify finds two formulas equal; nothing limits the time that it takes."""
    from math_verify import LatexExtractionConfig, parse, verify

    formulas = [re.sub(r"\s+", " ", plain(text).replace("\\$", "")).rstrip("\\. ") for text in (reference, answer)]
    if any(TUPLE.fullmatch(IGNORED.sub("", one)) for one in formulas):  # then a list is one, too: its order counts
        formulas = [f"({one})" if "," in one and not re.search(r"[(\[]|\\\{", one) else one for one in formulas]
    formulas = [one if re.search(r"\$|(?<!\\)\\[(\[]", one) else f"${one}$" for one in formulas]
    gold, found = (
        parse(formula, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=None)
        for formula in formulas
    )
    return bool(verify(gold, found, float_rounding=PRECISION, allow_set_relation_comp=True, timeout_seconds=None))


if __name__ == "__main__":
    main()
