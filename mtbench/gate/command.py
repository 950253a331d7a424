"""What `mtbench gate` does with its options: make or read the request, run the stages, write the outputs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtbench.errors import UserError
from mtbench.gate.builds import resolve
from mtbench.gate.format import Gate, GateRequest
from mtbench.gate.stages import FILE, GateRun, read_gate


def new_request(directory: Path, *, base: str, head: str | None, margin: float, **options: Any) -> GateRequest:
    """Return the request of a gate in a new directory. Raises UserError if something is there, or for a bad margin."""
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{str(directory)!r} exists and is never overwritten; choose another `-o DIR`, or go on with `mtbench gate "
            f"-o {directory} --resume`."
        )
    if not 0 < margin < 1:
        raise UserError(f"--margin {margin:g} is not allowed; 0.02 means a slowdown of 2 %.")
    return GateRequest(base=base, head=head, margin=margin, **options)


def stored_request(directory: Path) -> GateRequest:
    """Return the request of the gate in a directory. Raises UserError if there is none."""
    if not (directory / FILE).is_file():
        raise UserError(
            f"{str(directory)!r} holds no {FILE}; start a gate with `mtbench gate --base ENV -o {directory}`."
        )
    return read_gate(directory).request


def run(directory: Path, request: GateRequest, note: Callable[[str], None], budget_s: float | None) -> Gate:
    base, head = resolve(request.base, note), resolve(request.head, note)
    deadline = float("inf") if budget_s is None else time.monotonic() + budget_s
    directory.mkdir(parents=True, exist_ok=True)
    return GateRun(directory, request, base, head, note, deadline).run()


def shown(gate: Gate) -> Sequence[Any]:
    return [f"{gate.word}: {gate.reason}"]
