"""The table of acceptance: how many guesses the target accepted, ours and by the formulas of other projects."""

from collections.abc import Callable, Mapping, Sequence

from mtbench.document import Entry, Table
from mtbench.document.formatting import NONE, count, listed, number, percent
from mtbench.report.arm_table import Column, failure, table_of
from mtbench.results.acceptance import OWNERS
from mtbench.results.figure_formats import AcceptanceFigures
from mtbench.results.format import ResultCell

POSITIONS_SHOWN = 6


def guesses(found: AcceptanceFigures | None) -> bool:
    """Return whether an arm with this acceptance guesses. Where `offered` is null, only the length is known."""
    return found is not None and found.length is not None and found.offered != 0


def acceptance_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the acceptance of the arms that guess, ours and by the formulas of other projects."""
    figures: dict[str, AcceptanceFigures] = {}
    for cell in cells:
        found = cell.acceptance
        if found is not None and guesses(found):
            figures[cell.arm] = found
    columns = [
        Column(
            "acceptance length",
            "tokens per forward that committed any; it includes the model's own token",
            lambda cell: _acceptance_entry(cell, figures[cell.arm].length, "acceptance_length", number),
        ),
        Column(
            "acceptance rate, %",
            "accepted guesses over offered guesses",
            lambda cell: _acceptance_entry(cell, figures[cell.arm].rate, "acceptance_rate", percent),
        ),
        Column("offered", "guesses offered", lambda cell: Entry(count(figures[cell.arm].offered))),
        Column(
            "per position, %",
            "share of these forwards that accepted at least 1, 2, … guesses",
            lambda cell: _positions_entry(figures[cell.arm].per_position),
        ),
        *(_owner_column(owner, figures) for owner in OWNERS),
    ]

    def notes(cell: ResultCell) -> list[tuple[str, str]]:
        who = figures[cell.arm].reported_by
        return failure(cell) + ([("flag", f"Counted by {who}.")] if who else [])

    return table_of(columns, [cell for cell in cells if cell.arm in figures], numbers, notes)


def _owner_column(owner: str, figures: Mapping[str, AcceptanceFigures]) -> Column:
    """Return the column of acceptance as one other project computes it."""
    name, formula = OWNERS[owner]
    return Column(
        name,
        f"as the owner computes it: {formula}",
        lambda cell: Entry(number(getattr(figures[cell.arm].derived, owner))),
    )


def _acceptance_entry(
    cell: ResultCell, figure: float | None, name: str, written: Callable[[float | None], str]
) -> Entry:
    return Entry(written(figure), detail=without_loops(cell, figure, name, written))


def without_loops(
    cell: ResultCell, figure: float | None, name: str, written: Callable[[float | None], str]
) -> str | None:
    """Return a figure of the answers that do not end in a loop; None if no answer does, or if it is written alike.

    figure: that of all answers; name: the field of Degenerate.
    """
    found = cell.degenerate
    others = written(getattr(found, name)) if found is not None and found.answers else NONE
    return None if others in (NONE, written(figure)) else f"{others} without loops"


def _positions_entry(shares: Sequence[float] | None) -> Entry:
    shown = [percent(share, 0) for share in (shares or ())[:POSITIONS_SHOWN]]
    if shares and len(shares) > POSITIONS_SHOWN:
        shown.append("…")
    return Entry(listed(shown) or NONE)
