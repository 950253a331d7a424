"""Kill mtbench at random points, let the machine fail under it, and count what it survives: `make faults`.

Each trial disturbs one command (tools/fault_stages.py) in a child (helpers/fork_server.py), resumes it to the end, and
compares what it left with what the undisturbed command left: figures, answers, timing lines, scores, weights.

A kill is SIGKILL, at a time drawn over the duration of the command (`clock`), before its n-th change of the disk
(`change`), or at a flush after it, when only a part of the new data is on the disk (`torn`). FAULTS has the others.
"""

import argparse
import errno
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fault_stages import STAGES, Lab, Stage
from fork_server import Disk, Ended, Words, run_child

# --- Faults -------------------------------------------------------------------------------------------------------

Fault = Callable[[Ended, random.Random], dict[str, Any]]  # the undisturbed end -> arguments of run_child


def at_change(strike: Callable[[Disk, str], None], *, from_first: bool = False) -> Fault:
    """Strike before a drawn change of the disk, or the first one, and before all later ones."""

    def fault(end: Ended, chance: random.Random) -> dict[str, Any]:
        number = 1 if from_first else chance.randint(1, end.changes)

        def act(disk: Disk, what: str) -> None:
            if disk.count >= number:
                strike(disk, what)

        return {"act": act}

    return fault


def at_moment(strike: Callable[[int, random.Random], None]) -> Fault:
    """Strike the process at a time drawn over the duration of the command."""

    def fault(end: Ended, chance: random.Random) -> dict[str, Any]:
        moment_s = chance.uniform(0, end.wall_s)

        def disturb(pid: int, handle: int) -> bool:
            if select.select([handle], [], [], moment_s)[0]:
                return False  # it was faster
            strike(pid, chance)
            return True

        return {"disturb": disturb}

    return fault


def die(disk: Disk, what: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_torn(disk: Disk, what: str) -> None:
    if what.startswith("flush"):
        disk.tear(what)
        die(disk, what)


def full(disk: Disk, what: str) -> None:
    """Nothing can be added; removing works."""
    if what.startswith(("open", "flush", "os.mkdir", "os.rename")):
        disk.struck = True
        if what.startswith("flush"):
            disk.tear(what)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(disk: Disk, what: str) -> None:
    disk.struck = True
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def limited(resource_: int, least: int, most: int) -> Fault:
    """A limit of the process, in bytes, above what it uses when it starts."""

    def fault(end: Ended, chance: random.Random) -> dict[str, Any]:
        bytes_ = chance.randint(least, most)

        def prepare() -> None:
            used = 0
            if resource_ == resource.RLIMIT_AS:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource_, (used + bytes_, resource.RLIM_INFINITY))

        return {"prepare": prepare}

    return fault


def signals(*numbers: int) -> Fault:
    """Send these signals, the later ones within 50 ms."""

    def strike(pid: int, chance: random.Random) -> None:
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(chance.uniform(0, 0.05))

    return at_moment(strike)


def stop(pid: int, chance: random.Random) -> None:
    """For half a second."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)


def to_a_worker(number: int) -> Fault:
    """Send a signal to one of the workers; one that is stopped continues after a second."""

    def strike(pid: int, chance: random.Random) -> None:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, chance.sample(children, min(1, len(children)))):
            os.kill(child, number)
            if number == signal.SIGSTOP:
                time.sleep(1)
                os.kill(child, signal.SIGCONT)

    return at_moment(strike)


def clock_jumps(end: Ended, chance: random.Random) -> dict[str, Any]:
    """The time of day steps by up to a year, back and forth, at every look."""

    def prepare() -> None:
        now = time.time
        time.time = lambda: now() + chance.uniform(-1, 1) * 3e7

    return {"prepare": prepare}


RESUME = (
    r"interrupted; (complete results are kept; resume with `.+`|.+; resume with the same command|nothing was started)"
)
KILLS: dict[str, Fault] = {"clock": signals(signal.SIGKILL), "change": at_change(die), "torn": at_change(die_torn)}


class Documented(NamedTuple):
    """A fault, where it strikes, and how a command ends by it: its exit code and its last line."""

    fault: Fault
    code: int
    last: str
    stages: Words


DISK = r"error: cannot write .+"
ALL = ("plan", "generate", "score", "report", "run", "train")
FAULTS = {
    "full disk": Documented(at_change(full), 2, DISK, ALL),
    "full disk, in a file": Documented(limited(resource.RLIMIT_FSIZE, 5_000, 50_000), 2, DISK, ALL),
    "read-only": Documented(at_change(read_only), 2, r"error: cannot .+", ALL),
    "read-only from the start": Documented(at_change(read_only, from_first=True), 2, r"error: cannot .+", ALL),
    "memory": Documented(limited(resource.RLIMIT_AS, 0, 1 << 22), 2, r"error: out of memory .+", ALL),
    "SIGTERM": Documented(signals(signal.SIGTERM), 130, RESUME, [*ALL, "workers"]),
    "SIGHUP": Documented(signals(signal.SIGHUP), 130, RESUME, ALL),
    "SIGINT": Documented(signals(signal.SIGINT), 130, RESUME, ALL),
    "SIGINT twice": Documented(signals(signal.SIGINT, signal.SIGINT), 130, RESUME, [*ALL, "workers"]),
    "worker killed": Documented(to_a_worker(signal.SIGKILL), 2, r"error: worker .+ while it loaded .+", ["workers"]),
    "worker stopped": Documented(to_a_worker(signal.SIGSTOP), 0, r".*", ["workers"]),
    "stopped": Documented(at_moment(stop), 0, r".*", ALL),
    "clock jumps": Documented(clock_jumps, 0, r".*", ALL),
}


# --- Trials -------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What struck a stage."""

    stage: str
    faults: list[str]
    why: str  # it did not survive; "": it did
    seed: str


def kill_trial(lab: Lab, stage: Stage, seed: str, kinds: Sequence[str] = tuple(KILLS)) -> Trial:
    """Kill a stage up to ten times, then resume it to the end."""
    lab.prepare(stage)
    chance, folder, faults = random.Random(seed), lab.fill(stage, seed), list[str]()
    words: Words | None = stage.first
    code = -signal.SIGKILL
    for kind in chance.choices(kinds, k=chance.randint(1, 10)):
        if words is None or code != -signal.SIGKILL:
            break
        code = run_child(words, folder, **KILLS[kind](lab.ends[stage.name], chance)).code
        if code == -signal.SIGKILL:  # else it was faster
            faults.append(kind)
            words = stage.again(folder)
    why = difference(stage, folder, lab.outcomes[stage.name])
    return Trial(stage.name, faults, why if code <= 0 else f"exit code {code} after a kill", seed)


def fault_trial(lab: Lab, name: str, stage: Stage, seed: str) -> Trial:
    """Strike a stage once; see how it ends, then resume it to the end."""
    lab.prepare(stage)
    documented, folder = FAULTS[name], lab.fill(stage, seed)
    arguments = documented.fault(lab.ends[stage.name], random.Random(seed))
    end = run_child(stage.first, folder, **arguments)
    last = (end.text.splitlines() or [""])[-1]
    as_documented = end.code == 0 or (end.code == documented.code and re.fullmatch(documented.last, last))
    struck = end.struck or end.code != 0 or (documented.code == 0 and "prepare" in arguments)
    why = difference(stage, folder, lab.outcomes[stage.name])
    if not as_documented or "Traceback" in end.text:
        why = f"exit code {end.code}: {last}"
    return Trial(stage.name, [name] if struck else [], why, seed)


def difference(stage: Stage, folder: Path, expected: Any) -> str:
    """Resume to the end; return what is different then, or nothing."""
    words = stage.again(folder)
    if words is not None:
        end = run_child(words, folder)
        if end.code:
            return f"resumed: exit code {end.code}: {end.text.splitlines()[-1:]}"
    found = stage.outcome(folder)
    if found != expected:
        return f"changed: {', '.join(changed(expected, found))}"
    shutil.rmtree(folder)
    return ""


def changed(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Yield where two outcomes differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from changed(one.get(key), other.get(key), f"{at}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from changed(a, b, f"{at}[{i}]")
    elif one != other:
        yield f"{at}: {str(one)[:80]} -> {str(other)[:80]}"


def trials(lab: Lab, kills: int, others: int, seed: int, stages: Words) -> Iterator[Trial]:
    """Yield trials until so many kills and other faults have struck."""
    struck: Counter[str] = Counter()
    number = 0
    while struck.total() < kills:
        name = min(stages, key=lambda name: struck[name] / STAGES[name].share)
        trial = kill_trial(lab, STAGES[name], f"{name}-{seed}-{number}")
        number, struck[name] = number + 1, struck[name] + len(trial.faults)
        yield trial
    places = [(fault, stage) for fault in FAULTS for stage in FAULTS[fault].stages if stage in stages]
    random.Random(seed).shuffle(places)
    done = 0
    while done < others:
        fault, stage = places[number % len(places)]
        trial = fault_trial(lab, fault, STAGES[stage], f"{stage}-{seed}-{number}")
        number, done = number + 1, done + len(trial.faults)
        yield trial


def counts(found: Sequence[Trial]) -> dict[str, dict[str, list[int]]]:
    """Return by fault and stage how many struck, and how many of them were survived: [survived, struck]."""
    counted: dict[str, dict[str, list[int]]] = {}
    for name in [*KILLS, *FAULTS, "all"]:
        for stage in [*STAGES, "all"]:
            whys = [t.why for t in found for f in t.faults if stage in (t.stage, "all") and name in (f, "all")]
            if whys:
                counted.setdefault(name, {})[stage] = [whys.count(""), len(whys)]
    return counted


def table(counted: dict[str, dict[str, list[int]]]) -> str:
    rows = ["survived of tried".ljust(26) + "".join(name.rjust(11) for name in [*STAGES, "all"])]
    for name, of in counted.items():
        cells = ["/".join(map(str, of[stage])) if stage in of else "–" for stage in [*STAGES, "all"]]
        rows.append(name.ljust(26) + "".join(cell.rjust(11) for cell in cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--others", type=int, default=200, help="other faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this one; repeatable")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="where the results go")
    options = parser.parse_args()
    lab, found = Lab(Path(tempfile.mkdtemp(prefix="faults-"))), list[Trial]()
    for trial in trials(lab, options.kills, options.others, options.seed, options.stage or [*STAGES]):
        found.append(trial)
        print("NOT SURVIVED" if trial.why else "survived", trial.seed, *trial.faults, trial.why, flush=True)
        result = {"counts": counts(found), "trials": [trial._asdict() for trial in found]}
        options.out.write_text(json.dumps(result, indent=1))
    print(table(counts(found)))
    lost = [trial for trial in found if trial.why]
    print(f"kept for a look: {lab.folder}" if lost else "every figure and row was as without the fault")
    if not lost:
        shutil.rmtree(lab.folder)
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
