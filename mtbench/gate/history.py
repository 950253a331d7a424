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

    def drift(self) -> dict[tuple[str, str], list[tuple[str, float]]]:
        """Return by machine, plan and mode, and by cell, when each gate began and base's time over the first gate's.

        Base may be another build each time, so the change may be the builds'.
        """
        times: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for _, gate in self.gates:
            for cell in gate.timed:
                if cell.base_s and min(cell.base_s) > 0:
                    place = (f"{gate.key.model_dump_json()} {gate.request.live}", cell.cell)
                    times.setdefault(place, []).append((gate.started, geometric_mean(cell.base_s)))
        return {place: [(began, base_s / of[0][1]) for began, base_s in of] for place, of in times.items()}


def read(folder: Path) -> History:
    """Return the finished gates in `folder` and its folders. Raises UserError for a malformed gate.json."""
    gates = [(path.parent, read_gate(path.parent)) for path in sorted(folder.rglob(FILE))]
    finished = [entry for entry in gates if entry[1].reason != UNFINISHED]
    return History(sorted(finished, key=lambda entry: entry[1].started))
