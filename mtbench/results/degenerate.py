"""Degenerate answers: those that the budget cut while the model repeated itself.

A loop is easy to guess, so it inflates acceptance and tokens per forward, and nobody wants its tokens. An answer is
degenerate if its finish reason is `length` and its last 64 tokens repeat with a period of at most 16 tokens, so that
the period is there at least four times, token by token. Numbered lists and tables do not repeat in this sense: each of
their lines differs. Loops of whole sentences are often longer than 16 tokens and are not counted, so the share is a
lower bound. An answer of fewer than 64 tokens is never degenerate.

The rule needs only token ids and the finish reason, so it holds for external engines too.
"""

from collections.abc import Sequence

from mtbench.plan.formats import GenerationLine
from mtbench.results.figure_formats import Degenerate
from mtbench.results.samples import CellData, add

LAST_TOKENS = 64
LONGEST_PERIOD = 16
FLAGGED_SHARE = 0.05  # of the answers, above which a cell is flagged


def repeats(token_ids: Sequence[int]) -> bool:
    """Return whether the last 64 tokens repeat with a period of at most 16 tokens."""
    last = token_ids[-LAST_TOKENS:]
    if len(last) < LAST_TOKENS:
        return False
    return any(last[period:] == last[:-period] for period in range(1, LONGEST_PERIOD + 1))


def is_degenerate(line: GenerationLine) -> bool:
    """Return whether the budget cut an answer that repeats itself."""
    return line.finish_reason == "length" and repeats(line.token_ids)


def of_cell(data: CellData) -> Degenerate | None:
    """Return a cell's degenerate answers, and the figures of its other answers.

    None without answers, and for a simulated cell: its text has no meaning.
    """
    if not data.lines or data.cell.simulated is not None:
        return None
    others = [line for line in data.lines.values() if not is_degenerate(line)]
    answers = len(data.lines) - len(others)
    forwards = add(line.forwards for line in others)
    return Degenerate(
        answers=answers,
        share=answers / len(data.lines),
        tokens_per_forward=sum(len(line.token_ids) for line in others) / forwards if forwards else None,
    )


def flags(found: Degenerate | None, tokens_per_forward: float | None) -> list[str]:
    """Return the flag of a cell with many degenerate answers. tokens_per_forward: of all its answers."""
    if found is None or found.share <= FLAGGED_SHARE:
        return []
    flag = f"{found.share:.0%} of the answers end in a loop"
    if tokens_per_forward is None or found.tokens_per_forward is None:
        return [flag]
    whole, others = f"{tokens_per_forward:.2f}", f"{found.tokens_per_forward:.2f}"
    return [flag if whole == others else f"{flag} ({whole} tokens per forward, {others} without them)"]
