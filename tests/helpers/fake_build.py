"""A build for the gate's tests that answers in milliseconds: `plan` copies a prepared plan, `generate` makes up lines.

`build(folder, plan, **faults)` writes a `bin/python` that runs this file. Faults:
    slower        factor on every time
    slower_in     cells to which this factor applies; default: all
    noise         standard deviation of the log time that a process draws, and a tenth of it per sample
    tokens        cells whose first answer has another token
    forwards      cells whose first answer takes one more forward
    memory        factor on the peak memory
    drops_in      pairs, such as "fresh/0001", in which all samples are dropped
    crash         stage that dies: "exact", "timed"; "timed once": only the first time
    commit        that it was installed from
    plan_code     Python that `plan` runs at its end, with `out`, its run directory
    releases      releases of a serving engine, as MTBENCH_ENGINE_RELEASE names them -> more faults
    turn_code     Python that `generate` runs at its turn, with `block`
Every call is appended to `calls` in the folder, with the run directory.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import stat
import sys
from pathlib import Path
from typing import Any


def build(folder: Path, plan: Path, **faults: Any) -> Path:
    """Write an environment whose mtbench has these faults. `plan`: a run directory with the plan it makes."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps({"plan": str(plan), **faults}))
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{__file__}" "{folder}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    if "commit" in faults:
        (folder / "mtbench-build").write_text(faults["commit"])
    return folder


def calls(folder: Path) -> list[list[str]]:
    """The calls of a build in order, each with its words."""
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def main(folder: Path, words: list[str]) -> None:
    faults = json.loads((folder / "faults.json").read_text())
    faults |= faults.get("releases", {}).get(os.environ.get("MTBENCH_ENGINE_RELEASE"), {})
    if words[0].endswith("build_probe.py"):
        answer = {"mtbench": "0.1.0", "folder": str(folder), "prefix": str(folder)}
        answer["code"] = hashlib.sha256(str(folder).encode()).hexdigest()
        print(json.dumps({**answer, "packages": {"torch": "2.0"}}))
        return
    with (folder / "calls").open("a") as file:
        file.write(json.dumps(words[2:]) + "\n")
    {"plan": plan, "generate": generate}[words[2]](folder, faults, words[3:])


def plan(folder: Path, faults: dict[str, Any], words: list[str]) -> None:
    out = Path(words[words.index("-o") + 1])
    asked = [value for name, value in itertools.pairwise(words) if name == "--method"]
    source = Path(faults["plan"])
    stored = json.loads((source / "plan.json").read_text())
    if asked:
        stored["cells"] = [cell for cell in stored["cells"] if any(cell["method"] == arm for arm in asked)]
    names = [cell["cell"] for cell in stored["cells"]]
    for group in stored["groups"]:
        group["cells"] = [name for name in group["cells"] if name in names]
    out.mkdir(parents=True)
    (out / "plan.json").write_text(json.dumps(stored))
    (out / "environment.json").write_text((source / "environment.json").read_text())
    exec(faults.get("plan_code", ""), {"out": out})


def generate(folder: Path, faults: dict[str, Any], words: list[str]) -> None:
    run, timed = Path(words[0]), "--timed-only" in words
    crash, stage, died = faults.get("crash"), "timed" if timed else "exact", folder / "died"
    if crash == stage or (crash == f"{stage} once" and not died.exists()):
        died.touch()
        print("Fatal error: planted", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    stored = json.loads((run / "plan.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    session = {"device": "cpu", "dtype": "float32", **{key: environment[key] for key in ("processor", "packages")}}
    (run / "environment.json").write_text(json.dumps({**environment, "sessions": [session]}))
    chance = random.Random("/".join(run.parts[-3:]) if timed else "exact")
    noise = faults.get("noise", 0.0)
    of_process = 2.718281828 ** chance.gauss(0, noise)
    lost = [f"{pair}.partial" for pair in faults.get("drops_in", [])]
    for name in ("generations", "timings"):
        (run / name).mkdir()
    for group in stored["groups"]:
        items = next(s["items"] for s in stored["suites"] if s["suite"] == group["suite"])
        for round_, blocks in enumerate(group["rounds"], start=1):
            for block in range(blocks):
                if "--turns" in words:
                    take_turn(folder, faults, block)
                for cell in group["cells"]:
                    slower = faults.get("slower", 1.0) if timed and cell in faults.get("slower_in", [cell]) else 1.0
                    wall_s = of_process * slower * (1 + block / 10) * 2.718281828 ** chance.gauss(0, noise / 10)
                    dropped = "planted" if "/".join(run.parts[-3:-1]) in lost and timed else None
                    append(
                        run / f"timings/{cell}.jsonl",
                        timing(round_, block, len(group["blocks"][block]), wall_s, dropped),
                    )
                    for place, number in enumerate(group["blocks"][block] if round_ == 1 else []):
                        first = block == 0 and place == 0
                        tokens = [9 if first and cell in faults.get("tokens", []) else 5, 6, 7]
                        more = int(first and cell in faults.get("forwards", []))
                        append(run / f"generations/{cell}.jsonl", answer(items[number], block, tokens, more))
    (run / "memory.json").write_text(
        json.dumps({cell["cell"]: round(1e8 * faults.get("memory", 1.0)) for cell in stored["cells"]})
    )


def take_turn(folder: Path, faults: dict[str, Any], block: int) -> None:
    """Wait for the turn, and write down that this block has had it."""
    print("ready", flush=True)
    exec(faults.get("turn_code", ""), {"block": block})
    sys.stdin.readline()
    with (folder.parent / "turns").open("a") as file:
        file.write(f"{folder.name} {block}\n")


def timing(round_: int, block: int, items: int, wall_s: float, dropped: str | None) -> dict[str, Any]:
    hidden = "draft_s head_s ttft_s step_s counted drafts drafted accepted clock_mhz temperature_c power_w throttle"
    return {
        **dict.fromkeys([*hidden.split(), "shared", "identical", "cpu_s"]),
        "session": 1,
        "round": round_,
        "block": block,
        "order": 0,
        "rows": items,
        "items": items,
        "prompt_tokens": 9,
        "tokens": 3 * items,
        "row_forwards": 2 * items,
        "batch_forwards": 2,
        "wall_s": wall_s,
        "prefill_s": wall_s / 10,
        "decode_s": wall_s * 0.9,
        "device_s": wall_s / 2,
        "preparation_s": 0.0,
        "kv_bytes": 1000,
        "miscounted": 0,
        "dropped": dropped,
    }


def answer(item: dict[str, Any], block: int, tokens: list[int], more: int) -> dict[str, Any]:
    return {
        "item": item["item"],
        "prompt_ids": item["prompt_ids"],
        "prompt_tokens": len(item["prompt_ids"]),
        "token_ids": tokens,
        "text": "a",
        "forwards": 2 + more,
        "commits": [2, *[0] * more, 1],
        "positions_fed": 8,
        "draft_forwards": 0,
        "drafted": 3,
        "surplus": 0,
        "finish_reason": "end",
        "block": block,
    }


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
