"""Does `mtbench audit` name the cause? Planted faults of decoding, and pairs of honest outputs.

    python benchmarks/audit_corpus.py faults -o DIR [--real MODEL] [--data-dir DIR] [--set kept-back] [--jobs 2]
    python benchmarks/audit_corpus.py honest -o DIR [--real MODEL] [--engines llamacpp,openvino,vllm]
    python benchmarks/audit_corpus.py runs|matrix -o DIR

Each fault is made while a run is made (audit_faults.py): a prompt, a model, the loop, its cache or a score is wrong.
The run without it is A, the one with it B. The class that a person expects was written down before the audit ran.
Without MODEL, a folder of a chat model, its variants are left out. `--set kept-back`: the plants of a person who had
not read the classes. Runs are made once (`runs` makes them alone); a later call audits them again.

Honest pairs differ by engine, batch size, number type, method or width alone; none may be called a fault.
Tables are printed, and rows written to DIR/makers.json, DIR/kept-back.json and DIR/honest.json. `matrix` prints the
confusion matrix of what is there (audit_matrix.py), and writes DIR/matrix.json.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

import mtbench
from mtbench.errors import UserError
from mtbench.files import write_json
from mtbench.hardware import machine
from mtbench.models.loading import inspect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import audit_honest
import audit_matrix
from audit_maker import REAL, Maker, Plant
from planted_faults import both

SETS = {"makers": "audit_plants", "kept-back": "audit_kept_back"}  # modules that yield plants


def cell_of(run: Path) -> dict[str, Any]:
    """Return the only cell of a run, as its plan has it."""
    [cell] = json.loads((run / "plan.json").read_text())["cells"]
    return dict(cell)


def samples(run: Path, folder: Path) -> Path:
    """Write the answers of a run as lm-eval's `--log_samples` does: texts, no tokens."""
    plan = json.loads((run / "plan.json").read_text())
    cell, suite = cell_of(run), plan["suites"][0]
    tokenizer = inspect(cell["checkpoints"][cell["on"]], offline=True).tokenizer
    prompts = {item["item"]: tokenizer.decode(item["prompt_ids"]) for item in suite["items"]}
    scores = json.loads((run / "scores.json").read_text()).get(cell["cell"], {})
    lines = []
    for text in (run / f"generations/{cell['cell']}.jsonl").read_text().splitlines():
        line = json.loads(text)
        number = next(n for n, item in enumerate(suite["items"]) if item["item"] == line["item"])
        lines.append(
            {
                "doc_id": number,
                "arguments": {"gen_args_0": {"arg_0": prompts[line["item"]], "arg_1": {"until": []}}},
                "resps": [[line["text"]]],
                "filtered_resps": [line["text"]],
                "filter": suite["task"].get("filter", "none"),
                "metrics": ["exact_match"] if line["item"] in scores else [],
                "exact_match": scores.get(line["item"]),
            }
        )
    lines.sort(key=lambda line: int(line["doc_id"]))
    task = str(suite["items"][0]["item"]).partition("/")[0]
    file = folder / f"samples_{task}_2026.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if (shots := suite["task"].get("num_fewshot")) is not None:
        (folder / "results_2026.json").write_text(json.dumps({"n-shot": {task: shots}}))
    return file


def runs_of(maker: Maker, plant: Plant) -> tuple[str, str, str, dict[str, Any]]:
    """Make A and B if they are not there; return their number, both, and options of their audit."""
    number = hashlib.sha256(f"{plant.fault}, {plant.variant}".encode()).hexdigest()[:8]
    asked = maker.request(plant.model, plant.request, plant.arms[:1])
    others = maker.request(plant.model, {**plant.request, **plant.other}, [plant.arms[1]])
    always = "" if plant.always is nullcontext else number
    key = f"a-{hashlib.sha256((asked.model_dump_json() + always).encode()).hexdigest()[:12]}"
    run_a = maker.run(asked, key, plant.always)
    run_b = maker.run(others, f"b-{number}", both(plant.always, plant.made))
    a, b = (f"{run}:{cell_of(run)['cell']}" for run in (run_a, run_b))
    more: dict[str, Any] = {"ran_in": str(asked.dtype)}
    if plant.form != "runs":
        b = str(samples(run_b, maker.folder / f"texts-{number}/b"))
    if plant.form == "texts":
        a = str(samples(run_a, maker.folder / f"texts-{number}/a"))
        more["model"] = maker.real if plant.model == REAL else "embedded:tiny/ar"
    return number, a, b, more


def audit(maker: Maker, plant: Plant, folder: Path) -> dict[str, Any]:
    """Make A and B, audit them in a folder, and return a row of the table."""
    started = time.monotonic()
    number, a, b, more = runs_of(maker, plant)
    made, out = time.monotonic(), folder / f"audit-{number}"
    row = {name: getattr(plant, name) for name in ("fault", "variant", "expected", "form", "fails")}
    row |= {"model": "real" if plant.model == REAL else "tiny", "dtype": more["ran_in"], "audit": out.name}
    shutil.rmtree(out, ignore_errors=True)
    try:
        found = mtbench.audit(a, b, out=out, device="cpu", **more).record
    except UserError as error:
        return {**row, "named": {}, "faults": [], "refused": str(error), "verdict": audit_matrix.WRONG}
    row |= {"made_s": round(made - started, 1), "audit_s": round(time.monotonic() - made, 1)}
    return row | audit_matrix.judged(row, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "faults", "honest", "matrix"])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, help="folder of the runs; default: DIR")
    parser.add_argument("--real", help="folder of a chat model")
    parser.add_argument("--data-dir", help="folder with gsm8k/; without it, the hub")
    parser.add_argument("--set", default="makers", choices=SETS, help="the faults")
    parser.add_argument("--only", default="", help="faults, variants or runs whose name has this")
    parser.add_argument("--new", action="store_true", help="only faults that have no row yet")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--engines", default="", help="serving engines for honest pairs of the real model")
    given, console = parser.parse_args(), Console(width=150)
    given.runs = given.runs or given.out
    for folder in (given.out, given.runs):
        folder.mkdir(parents=True, exist_ok=True)
    if given.what == "runs":
        maker, plants = maker_of(given)
        for plant in plants:
            runs_of(maker, plant)
    elif given.what != "matrix":
        file = given.out / f"{'honest' if given.what == 'honest' else given.set}.json"
        rows = {key_of(row): row for row in (json.loads(file.read_text()) if file.exists() else [])}
        for row in honest_rows(given, console) if given.what == "honest" else fault_rows(given, console, rows):
            rows[key_of(row)] = row
            write_json(file, [*rows.values()])
        audit_honest.summary([*rows.values()], console) if given.what == "honest" else None
    audit_matrix.show(given.out, SETS, console)


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names a row, so that a later call replaces it."""
    return tuple(str(row.get(name)) for name in ("fault", "variant", "runs", "a", "b"))


def maker_of(given: argparse.Namespace) -> tuple[Maker, list[Plant]]:
    """Return the maker, and the plants that are asked for."""
    machine.COMPUTING_SHARE = 0.0  # a busy machine is no reason to decode again: nothing is timed
    maker = Maker(given.runs, given.real, given.data_dir)
    plants = import_module(SETS[given.set]).plants(maker)
    asked = [p for p in plants if given.only in f"{p.fault}, {p.variant}" and (given.real or p.model != REAL)]
    return maker, asked


def row_of(given: argparse.Namespace, number: int) -> dict[str, Any]:
    """Return the row of a plant. Plants are functions, so a process makes its own."""
    maker, asked = maker_of(given)
    return audit(maker, asked[number], given.out)


def fault_rows(given: argparse.Namespace, console: Console, there: Container[Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant that is asked for, as they are audited. `there`: keys of rows."""
    keys = [key_of(plant._asdict()) for plant in maker_of(given)[1]]
    due = [number for number, key in enumerate(keys) if not (given.new and key in there)]
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        for row in pool.map(partial(row_of, given), due):
            console.print(f"{row['fault']} | {row['variant']}: {row['verdict']}, {row['named']}", soft_wrap=True)
            yield row


def honest_rows(given: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of honest outputs."""
    engines = [engine for engine in given.engines.split(",") if engine]
    yield from audit_honest.honest(maker_of(given)[0], given.out, console, engines, given.only)


if __name__ == "__main__":
    main()
