"""Stored runs of one version of mtbench, and what that version made of them: tests/frozen/.

    frozen/<experiment>/stored.tar.xz   what an experiment measured: plan, environment, lines
    frozen/<experiment>/expected/       what is computed from it: results as JSON, and what people read as text

`python tests/helpers/freeze.py` makes all stored runs again, with today's code. With `texts`, it only writes the texts
again, for a change of words; a JSON file of `expected` never changes without its reason in the commit.
"""

import contextlib
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fake_build
import fake_gate
import made_loads
import pytest
import stages
import whole

import mtbench
from mtbench.document.html_page import write
from mtbench.experiments.choose import experiment as racing
from mtbench.experiments.gate import experiment as gate_experiment
from mtbench.experiments.gate.pairs import PairRunner
from mtbench.experiments.gate.plans import Planned
from mtbench.experiments.gate.stages import UNFINISHED, conclude, read_gate
from mtbench.experiments.gate.timed import TimedStage
from mtbench.experiments.load.document import document as load_document
from mtbench.experiments.load.format import LoadPlan
from mtbench.experiments.load.runner import PLAN
from mtbench.experiments.load.summary import summarise
from mtbench.hardware import machine
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.results import flags

FOLDER = Path(__file__).parents[1] / "frozen"


def report(folder: Path) -> None:
    stages.report(RunDirectory(folder))


def race(folder: Path) -> None:
    with Run.locked(RunDirectory(folder)) as run:
        racing.report(run)


def gate(folder: Path) -> None:
    """Decide the times again from the complete pairs; the findings of the stages before are taken as they are."""
    stored = read_gate(folder)
    before = stored.changed(
        word="INCONCLUSIVE",
        reason=UNFINISHED,
        pairs=0,
        confirmation_pairs=0,
        timed=[],
        all_cells=None,
        findings=[finding for finding in stored.findings if finding.stage != "timed"],
    )
    planned = Planned.read(folder / "plans" / "base"), Planned.read(folder / "plans" / "head")
    runner = PairRunner(stored.request, (None, None), planned, print)  # type: ignore[arg-type]  # it runs no pair
    cells = [cell for cell in planned[0].plan.cells if cell.cell in stored.compared]
    gate_experiment.write(folder, conclude(TimedStage(folder, runner, before.looks, float("inf")).run(before, cells)))


def load(folder: Path) -> None:
    run = RunDirectory(folder)
    planned = run.read(PLAN, LoadPlan)
    found = summarise(run, planned)
    run.write_json("load.json", dump(found))
    write(folder, "load", load_document(found))


def measure_run(folder: Path) -> None:
    """Static batches and refill, plain decoding on two checkpoints, a lossy method and one that copies."""
    methods = ["ar", "ar:on=mars", "mars:tau=0.95", "prompt-lookup"]
    mtbench.run(method=methods, batch_size=[2, 3], batching=["static", "refill"], limit=24, rounds=1, out=folder)


def measure_choose(folder: Path) -> None:
    candidates = ["mars:tau=0.9", "mars-selfspec", "lookahead"]
    mtbench.choose(method=candidates, batch_size=2, limit=32, out=folder)


def measure_gate(folder: Path) -> None:
    """Two made-up builds, of which one is 5 % slower."""
    with tempfile.TemporaryDirectory() as name:
        builds = Path(name)
        plan = whole.start(builds / "plan", RunRequest(limit=4, batch_size=(1,), method=("ar", "mars"))).path
        base, head = (
            fake_build.build(builds / side, plan, noise=0.003, **faults)
            for side, faults in {"base": {}, "head": {"slower": 1.05}}.items()
        )
        found = fake_gate.a_gate(folder, base, head).run()
        gate_experiment.write(folder, found)
        for file in folder.rglob("*.json"):
            file.write_text(file.read_text().replace(name, "/builds").replace(str(folder.parent), "/runs"))


def measure_load(folder: Path) -> None:
    """Two made-up servers; one is wrong on every second item."""
    known = {item.prompt: n for n, item in enumerate(_load_plan(folder, {"x": "http://h/v1"}).items)}
    shutil.rmtree(folder)

    def half(prompt: str) -> tuple[int, str]:
        return 200, f"The answer is {known.get(prompt, 0) % 2}."

    with made_loads.answering(lambda _: (200, "The answer is 1.")) as one, made_loads.answering(half) as other:
        planned = _load_plan(folder, {"one": one.url, "other": other.url})
        ended = made_loads.load_run(RunDirectory(folder), planned)
        ended.send(made_loads.PYTHON)
        ended.score()


def _load_plan(folder: Path, url: dict[str, str]) -> LoadPlan:
    return made_loads.begun(folder, made_loads.request(url=url, requests=8, rounds=3))[1]


MEASURES = {"run": measure_run, "choose": measure_choose, "gate": measure_gate, "load": measure_load}
EXPERIMENTS: Mapping[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {  # what computes which files
    "run": (report, ("results.json", "report.md")),
    "choose": (race, ("results.json", "decision.json", "eliminated.jsonl", "report.md")),
    "gate": (gate, ("gate.json", "gate.md")),
    "load": (load, ("load.json", "load.md")),
}


def rebuilt(experiment: str, folder: Path) -> dict[str, str]:
    """Unpack a stored experiment into a folder and compute its files: name in `expected` -> text."""
    unpack(experiment, folder)
    compute, names = EXPERIMENTS[experiment]
    compute(folder)
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def unpack(experiment: str, folder: Path) -> None:
    """Write what an experiment stored into a new folder."""
    with tarfile.open(FOLDER / experiment / "stored.tar.xz") as archive:
        archive.extractall(folder, filter="data")


@contextlib.contextmanager
def loaded_machine() -> Iterator[None]:
    """Times are kept though other processes ran beside them, as in the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "PROCESSOR_SHARE", 0.0)
        patch.setattr(machine, "COMPUTING_SHARE", 0.0)
        patch.setattr(machine, "THROTTLED_SHARE", float("inf"))
        yield


def clean(folder: Path) -> None:
    """Delete what is computed, and the traces of the machine that no test reads."""
    for name in ("figures", "tables", "tokenizer", "work", "expected"):
        for found in [*folder.rglob(name)]:
            shutil.rmtree(found)
    computed = {name for _, names in EXPERIMENTS.values() for name in names} - {"gate.json", "eliminated.jsonl"}
    for file in [*folder.rglob("*")]:
        if (
            file.name in computed
            or file.suffix in {".xml", ".lock", ".html"}
            or file.name == ".lock"
            or file.match("be*.json")
        ):
            file.unlink()
        elif file.name == "environment.json":
            text = re.sub(r'"[^"]*/(?:bin/mtbench|__main__\.py|freeze\.py)"', '"mtbench"', file.read_text())
            file.write_text(text.replace(str(folder), "DIR"))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    return entry.replace(uid=0, gid=0, uname="", gname="", mtime=0, deep=False)


def main(asked: list[str]) -> None:
    """Make the stored runs and what is expected of them; `texts`: only the texts that are expected."""
    for experiment in EXPERIMENTS:
        expected = FOLDER / experiment / "expected"
        if asked != ["texts"]:
            shutil.rmtree(FOLDER / experiment, ignore_errors=True)
            with tempfile.TemporaryDirectory() as name:
                MEASURES[experiment](Path(name) / "DIR")
                clean(Path(name) / "DIR")
                expected.mkdir(parents=True)
                with tarfile.open(FOLDER / experiment / "stored.tar.xz", "w:xz") as archive:
                    archive.add(Path(name) / "DIR", arcname=".", filter=_anonymous)
        with loaded_machine(), tempfile.TemporaryDirectory() as name:
            for file, text in rebuilt(experiment, Path(name) / "DIR").items():
                if asked != ["texts"] or not file.endswith((".json", ".jsonl")):
                    (expected / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
