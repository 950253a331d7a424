"""What the gates of a folder said: how often a build failed against itself, and how the machine drifts."""

from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from mtbench.gate.format import Gate
from mtbench.gate.stages import FILE, UNFINISHED, read_gate
from mtbench.statistics import Proportion, wilson


class History(NamedTuple):
    """The finished gates of a folder, oldest first."""

    gates: list[tuple[Path, Gate]]

    @property
    def false_alarms(self) -> Proportion:
        """The share of FAIL among gates of one build with itself: the real error level of FAIL."""
        words = [gate.word for _, gate in self.gates if gate.same_build and gate.reason != UNFINISHED]
        return wilson(words.count("FAIL"), len(words))

    def drift(self) -> dict[str, list[tuple[str, float]]]:
        """Return by cell when each gate began and base's time in it over that in the first gate of the same machine."""
        first: dict[tuple[str, str], float] = {}
        found: dict[str, list[tuple[str, float]]] = {}
        for _, gate in self.gates:
            for cell in gate.timed:
                if cell.base_s and min(cell.base_s) > 0:
                    base_s = geometric_mean(cell.base_s)
                    start = first.setdefault((gate.key.model_dump_json(), cell.cell), base_s)
                    found.setdefault(cell.cell, []).append((gate.started, base_s / start))
        return found


def read(folder: Path) -> History:
    """Return the gates in `folder` and its folders. Raises UserError for a malformed gate.json."""
    gates = [(path.parent, read_gate(path.parent)) for path in sorted(folder.rglob(FILE))]
    return History(sorted(gates, key=lambda entry: entry[1].started))
