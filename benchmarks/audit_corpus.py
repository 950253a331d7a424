"""Does `mtbench audit` name the cause? Planted faults of decoding, and pairs of honest outputs.

    python benchmarks/audit_corpus.py faults -o DIR [--real MODEL] [--data-dir DIR] [--only WORD] [--first]
    python benchmarks/audit_corpus.py honest -o DIR [--real MODEL] [--engines llamacpp,openvino,vllm]

Each fault is made while a run is made (audit_faults.py): a prompt, a model, the loop, its cache or a score is wrong.
The run without it is A, the one with it B. The class that a person expects was written down before the audit ran. A
fault is named right if the expected class has most of the differing answers, and no other class that counts as a fault
has any. `--first`: the first variant of each fault only. Without MODEL, a real chat model, its variants are left out.

Honest pairs differ by engine, batch size, number type, method or width alone; none may be called a fault.
The table is printed, and written to DIR/faults.json or DIR/honest.json.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import mtbench
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.models.loading import inspect

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import audit_honest
import audit_plants
from audit_maker import REAL, Maker, Plant
from planted_faults import both


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


def audit(maker: Maker, plant: Plant) -> dict[str, Any]:
    """Make A and B, audit them, and return a row of the table."""
    started = time.monotonic()
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
    row = {"fault": plant.fault, "variant": plant.variant, "expected": plant.expected, "form": plant.form}
    made, out = time.monotonic(), maker.folder / f"audit-{number}"
    shutil.rmtree(out, ignore_errors=True)
    try:
        found = mtbench.audit(a, b, out=out, device="cpu", **more).record
    except UserError as error:
        return {**row, "named": {}, "right": False, "sentence": f"refused: {error}"}
    named = Counter(finding["name"] for finding in found["findings"])
    wrong = [f for f in found["findings"] if f["fault"] and f["name"] != plant.expected]
    right = bool(named) and named[plant.expected] * 2 > named.total() and not wrong
    return {
        **row,
        "model": plant.model,
        "dtype": str(asked.dtype),
        "named": dict(named),
        "right": right,
        "no_effect": not named,
        "sentence": found["sentence"],
        "evidence": next((f["evidence"] for f in found["findings"] if f["name"] == named.most_common(1)[0][0]), ""),
        "made_s": round(made - started, 1),
        "audit_s": round(time.monotonic() - made, 1),
    }


def confusion(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the table: a line for each fault, and the variants named right."""
    table = Table("fault", "variant", "expected", "named", "", title="planted faults")
    for row in rows:
        named = ", ".join(f"{count} {name}" for name, count in row["named"].items()) or "(no difference)"
        mark = "right" if row["right"] else ("–" if row.get("no_effect") else "WRONG")
        table.add_row(row["fault"], row["variant"], row["expected"], named, mark)
    console.print(table)
    judged = [row for row in rows if not row.get("no_effect")]
    first = {row["fault"]: row for row in reversed(judged)}
    console.print(
        f"{sum(bool(row['right']) for row in first.values())} of {len(first)} faults right by their first variant, "
        f"{sum(bool(row['right']) for row in judged)} of {len(judged)} variants"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "honest"])
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--real", help="folder of a chat model")
    parser.add_argument("--data-dir", help="folder with gsm8k/; without it, the hub")
    parser.add_argument("--only", default="", help="faults, variants or runs whose name has this")
    parser.add_argument("--first", action="store_true", help="the first variant of each fault")
    parser.add_argument("--engines", default="", help="serving engines for honest pairs of the real model")
    given = parser.parse_args()
    machine.COMPUTING_SHARE = 0.0  # a busy machine is no reason to decode again: nothing is timed
    given.out.mkdir(parents=True, exist_ok=True)
    maker, console = Maker(given.out, given.real, given.data_dir), Console(width=150)
    make = honest_rows if given.what == "honest" else fault_rows
    file = given.out / f"{given.what}.json"
    rows = {key_of(row): row for row in (json.loads(file.read_text()) if file.exists() else [])}
    for row in make(maker, console, given):
        rows[key_of(row)] = row
        file.write_text(json.dumps([*rows.values()], indent=1))
    (confusion if given.what == "faults" else audit_honest.summary)([*rows.values()], console)


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what names a row, so that a later call replaces it."""
    return tuple(str(row.get(name)) for name in ("fault", "variant", "runs", "a", "b"))


def fault_rows(maker: Maker, console: Console, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant that is asked for."""
    chosen = [
        plant
        for plant in audit_plants.plants(maker)
        if given.only in f"{plant.fault}, {plant.variant}" and (given.real or plant.model != REAL)
    ]
    if given.first:
        chosen = list({plant.fault: plant for plant in reversed(chosen)}.values())[::-1]
    for plant in chosen:
        row = audit(maker, plant)
        console.print(f"{row['fault']} | {row['variant']}: {row['right']}, {row['sentence']}", soft_wrap=True)
        yield row


def honest_rows(maker: Maker, console: Console, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of honest outputs."""
    yield from audit_honest.honest(maker, console, [e for e in given.engines.split(",") if e], given.only)


if __name__ == "__main__":
    main()
