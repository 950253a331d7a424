r"""Compare MARS with its rivals at equal training cost: train and measure all, write tables, a figure and all figures.

    python benchmarks/equal_cost.py --out OUT [--seeds 3]
    python benchmarks/equal_cost.py --out OUT --recipe equal-cost-135m --base smollm2-135m:ar --mask-token TOKEN \
        --data train.jsonl --seeds 1 --flops 2e13 --only ar,mars --run suite=prompts:test.jsonl metric=contains
    python benchmarks/equal_cost.py --out OUT --dry-run    # all of it, small, in minutes, to test the script

It needs mtbench installed. It trains by a recipe (mtbench/training/recipes.py): each objective for each seed to the
same FLOPs, from one base on one data set. For each seed a run measures accuracy and tokens per forward on many items;
another run, in which all arms decode the same blocks in random order, measures speed over plain decoding of the base.
That needs a quiet machine. The same command skips what is complete and resumes what is not.

OUT gets the checkpoints, a folder for each run, equal_cost.md, equal_cost.json and frontier.svg. Figures are means over
seeds. They have two intervals, which answer two questions and are never mixed:
- items: would other items say the same of these checkpoints? Percentile bootstrap over items, the same for all arms.
- seeds: would other trainings say the same on these items? t interval over the seeds' figures.
Speeds have an interval over blocks in the place of items: the geometric mean of the seeds' bounds, as if their errors
were one. A threshold is chosen on half of the items; what it gives is measured on the other half.
"""

import argparse
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mtbench
from mtbench import files
from mtbench.document import plots
from mtbench.document.formatting import NONE, interval, number
from mtbench.document.model import Figure
from mtbench.errors import UserError
from mtbench.statistics import t_quantile
from mtbench.training import recipe_runner
from mtbench.training.checkpoint import read_record
from mtbench.training.recipes import RECIPES, Stage, changed, seeded

LEVELS = [1 + step / 4 for step in range(1, 12)]  # tokens per forward at which accuracies are compared
MARGINS = (2, 5, 10)  # accepted losses of accuracy, in points
RESAMPLES = 2000
ACCURACY_RUN, SPEED_RUN = {"limit": "1024", "batch_size": "64"}, {"limit": "128", "batch_size": "1,8"}
ROLES = [stage.name for stage in RECIPES["equal-cost"]]
ACCURACY, PER_FORWARD = 0, 2  # rows of an arm's answers: above and below of a ratio of totals
Array = npt.NDArray[np.float64]
Key = tuple[str, float | None]  # objective, threshold; None: plain decoding
Found = dict[str, Any]


def trained(args: argparse.Namespace) -> list[Stage]:
    """Train what is missing; return the stages. Raises UserError if one failed."""
    stages = changed(RECIPES[args.recipe], args.base, tuple(args.data), flops=args.flops, mask_token=args.mask_token)
    if args.dry_run:
        stages = tuple(replace(s, examples=64, settings=replace(s.settings, flops=2e10, held_out=8)) for s in stages)
    chosen = [stage for stage in seeded(stages, args.seeds) if stage.name.rpartition("-")[0] in args.only.split(",")]
    folder, launch = args.out / "checkpoints", [sys.executable, "-m", "mtbench"]
    if not recipe_runner.run(chosen, folder, recipe_runner.default_workers(), launch, [], print):
        raise UserError(f"a training failed; see its log in {folder}. The same command trains what is missing.")
    return chosen


def measured(args: argparse.Namespace, stages: Sequence[Stage], name: str, **given: Any) -> mtbench.Results:
    """Run what a seed's run lacks. Raises UserError if time ends before all items; speeds may be of some blocks."""
    out, seed, taus = args.out / name, name.rpartition("-")[2], "|".join(f"{tau:g}" for tau in args.taus)
    own = [stage.name for stage in stages if stage.name.endswith(f"-{seed}")]
    methods = defaultdict(lambda: "mars:on={},tau={}", ar="ar:on={}", block_diffusion="block-diffusion:on={},tau={}")
    given |= {"method": ["ar", *(methods[role.rpartition("-")[0]].format(role, taus) for role in own)], "rounds": 1}
    given |= {"model": stages[0].base, "checkpoint": {role: str(args.out / "checkpoints" / role) for role in own}}
    given = {"resume": True} if (out / "plan.json").exists() else given
    if not (out / "results.json").exists() or '"partial"' in (out / "results.json").read_text():
        results = mtbench.run(out=out, progress=True, time_budget=args.time_budget, **given)
        if name.startswith("accuracy") and any(cell["status"] != "ok" for cell in results.record["cells"]):
            raise UserError(f"{out} has not all blocks yet; the same command resumes it.")
    return mtbench.read(out)


def key_of(cell: Mapping[str, Any]) -> Key:
    return cell["on"].rpartition("-")[0] or "base", cell["options"].get("tau")


def answers_of(runs: Sequence[mtbench.Results]) -> dict[Key, Array]:
    """Return each arm's answers in the seeds' runs, (4, seeds, items): score in percent, 1, tokens, forwards."""
    found = defaultdict(list)
    for run in runs:
        by_arm = dict(tuple(run.items().sort_values("item").assign(one=1.0).groupby("arm")))
        for cell in run.record["cells"]:
            found[key_of(cell)].append(by_arm[cell["arm"]][["score", "one", "tokens", "forwards"]].to_numpy(float).T)
    return {key: np.stack(of, 1) * np.array([100.0, 1, 1, 1])[:, None, None] for key, of in found.items()}


def ratio(answers: Array, weights: Array, what: int) -> Array:
    """Return the ratio of totals of each seed, (W, seeds), for weights of the items (W, items)."""
    return np.asarray((weights @ answers[what].T) / (weights @ answers[what + 1].T), float)


def estimate(values: Array) -> Found:
    """Return a mean over seeds with both intervals. values (1 + resamples, seeds): first those of all items."""
    mean, seeds = float(values[0].mean()), values.shape[1]
    reach = t_quantile(0.95, seeds - 1) * float(values[0].std(ddof=1)) / seeds**0.5 if seeds > 1 else None
    of_seeds = None if reach is None else [mean - reach, mean + reach]
    items = np.percentile(values[1:].mean(1), (2.5, 97.5)).tolist()
    return {"value": mean, "items": items, "seeds": of_seeds, "by_seed": values[0].tolist()}


def figures_of(key: Key, answers: Mapping[Key, Array], weights: Array, speeds: Mapping[Key, Found]) -> Found:
    """Return the figures of an arm; over_…: its accuracy less that of plain decoding of base, `ar`, own checkpoint."""
    plain: dict[str, Key] = {"base": ("base", None), "ar": ("ar", None), "own": (key[0], key[1] and 1.0)}
    points = {other: ratio(answers[other], weights, ACCURACY) for other in {key, *plain.values()} & answers.keys()}
    row: Found = {"objective": key[0], "tau": key[1], "accuracy": estimate(points[key])}
    row |= {f"over_{name}": estimate(points[key] - points[of]) for name, of in plain.items() if of in points}
    return row | {"tokens_per_forward": estimate(ratio(answers[key], weights, PER_FORWARD)), **speeds.get(key, {})}


def differences(answers: Mapping[Key, Array], weights: Array) -> Iterable[Found]:
    """Yield MARS less each rival by item and seed: at each threshold, and, interpolated, at tokens per forward."""
    taus = [tau for name, tau in answers if name == "mars"]
    for rival in dict.fromkeys(name for name, tau in answers if tau is not None and name != "mars" and taus):
        arms = [[answers[name, tau] for tau in taus] for name in ("mars", rival)]
        of = np.array([[[ratio(a, weights, what) for a in own] for own in arms] for what in (ACCURACY, PER_FORWARD)])
        for tau, points, speed in zip(taus, *(of[:, 0] - of[:, 1]), strict=True):
            yield {"rival": rival, "tau": tau, "accuracy": estimate(points), "tokens_per_forward": estimate(speed)}
        low, high = of[1, :, :, 0].min(1).max(), of[1, :, :, 0].max(1).min()  # what all seeds of both reach
        for level in (level for level in LEVELS if low <= level <= high):
            mine, other = (at_level(level, speeds, points) for points, speeds in zip(*of, strict=True))
            yield {"rival": rival, "at_tokens_per_forward": level, "accuracy": estimate(mine - other)}


def at_level(level: float, speeds: Array, points: Array) -> Array:
    """Return the accuracy (W, seeds) at so many tokens per forward, from those of the thresholds (taus, W, seeds)."""
    order = np.argsort(speeds, 0)
    x, y = (np.take_along_axis(of, order, 0).reshape(len(of), -1).T for of in (speeds, points))
    return np.array([np.interp(level, *of) for of in zip(x, y, strict=True)]).reshape(speeds.shape[1:])


def speeds_of(runs: Sequence[mtbench.Results]) -> dict[Key, Found]:
    """Return the speed of each arm over plain decoding of the base, by batch size: a geometric mean over seeds."""
    logs = defaultdict(list)
    for cell in (cell for run in runs for cell in run.record["cells"]):
        for speed in (s for s in cell["speedup"] if s["baseline"].startswith("ar@ar/") and s["value"]):
            with_ends = [speed[end] or np.nan for end in ("value", "ci_low", "ci_high")]
            logs[key_of(cell), f"speed_at_batch_{cell['batch_size']}"].append(np.log(with_ends))
    found: dict[Key, Found] = defaultdict(dict)
    for (key, name), of in logs.items():
        seeds, (_, *blocks) = estimate(np.array([of, of])[:, :, 0]), np.mean(of, 0)
        bounds = seeds | {"items": None if np.isnan(blocks).any() else blocks}
        found[key][name] = {part: None if log is None else np.exp(log).tolist() for part, log in bounds.items()}
    return found


def choices(answers: Mapping[Key, Array], weights: Array, speeds: Mapping[Key, Found]) -> Iterable[Found]:
    """Yield for each margin and objective its fastest threshold by even items, and what that gives on odd ones.

    The fastest of those that lose at most the margin against plain decoding of the base, or of its own checkpoint.
    """
    even = (np.arange(weights.shape[1]) % 2 == 0)[None].astype(float)
    seen = {key: [ratio(of, even, what).mean() for what in (PER_FORWARD, ACCURACY)] for key, of in answers.items()}
    names = dict.fromkeys(name for name, tau in answers if tau is not None)
    for margin, name, against in itertools.product(MARGINS, names, ("base", "own")):
        least = seen["base", None] if against == "base" else seen[max(key for key in seen if key[0] == name)]
        kept = [key for key in seen if key[0] == name and seen[key][1] >= least[1] - margin]
        best = max(kept, key=seen.__getitem__, default=None)
        row = figures_of(best, answers, weights * (1 - even), speeds) if best else {"objective": name, "tau": None}
        yield {"margin": margin, "against": against} | row


def table(rows: Sequence[Found]) -> str:
    """Return rows as a Markdown table; of an estimate its value, [over items or blocks] and {over seeds}."""
    columns = list(dict.fromkeys(column for row in rows for column in row))

    def text(cell: Any) -> str:
        if not isinstance(cell, dict):
            return NONE if cell is None else str(cell)
        items, seeds = (interval(cell[of]) or NONE for of in ("items", "seeds"))
        return f"{number(cell['value'])} {items} {{{seeds.strip('[]')}}}"

    lines = [columns, ["---"] * len(columns), *([text(row.get(column)) for column in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(found: Found) -> Figure:
    """Draw accuracy over tokens per forward, and over speed at each batch size."""
    title, about = "Accuracy and speed at equal training cost", "lines: 95% intervals over items; dots: single seeds"
    panels = [name for name in found["arms"][-1] if name.startswith(("tokens", "speed"))]
    names = list(dict.fromkeys(row["objective"] for row in found["arms"]))
    base = {"value": 1.0, "items": None, "by_seed": [1.0] * found["seeds"]}
    with plots.style():
        key = [plots.label(number, name) for number, name in enumerate(names, 1)]
        figure, _ = plots.canvas(title, about, 210, key, panels=len(panels), right=24)
        for axes, panel in zip(figure.axes, panels, strict=True):
            ends = []
            for place, name in enumerate(names):
                arms = [row for row in found["arms"] if row["objective"] == name]
                points = [(row.get(panel, base), row["accuracy"]) for row in arms]
                line = [[of["value"] for of in axis] for axis in zip(*points, strict=True)]
                color = {"mars": plots.ACCENT, "self_distill": plots.WARN}.get(name, plots.INK)
                axes.plot(*line, "osD^vP"[place], ls=plots.DASHES[place % 4], color=color, ms=5)
                for x, y in points:
                    plots.whisker(axes, x["value"], y["items"])
                    plots.whisker(axes, y["value"], x["items"], flat=True)
                    axes.plot(x["by_seed"], y["by_seed"], ".", color=plots.MUTED, ms=3)
                ends.append((line[0][-1], line[1][-1], str(place + 1), color))
            axes.set(xlabel=panel.replace("_", " "), ylabel="accuracy, %", ylim=axes.get_ylim())
            axes.grid()
            plots.label_ends(axes, ends)
        return plots.finish(figure, f"{found['seeds']} seeds", name="frontier", title=title, caption=about, alt=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("equal-cost"), help="folder of all files; default equal-cost")
    parser.add_argument("--recipe", default="equal-cost", choices=["equal-cost", "equal-cost-135m"])
    parser.add_argument("--base", help="checkpoint to start from; default: the recipe's")
    parser.add_argument("--data", action="append", default=[], help="data to train on; default: the recipe's")
    parser.add_argument("--mask-token", help="reserved token of --base, if it has no mask token")
    parser.add_argument("--flops", type=float, help="FLOPs of each training; default: the recipe's")
    parser.add_argument("--only", default=",".join(ROLES), help="objectives, by their roles; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--taus", type=float, nargs="+", default=[1, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5], help="thresholds")
    for name, about in {"run": "both runs", "accuracy": "that for accuracy", "speed": "that for speed"}.items():
        parser.add_argument(f"--{name}", nargs="+", default=[], help=f"NAME=VALUE of `mtbench.run` for {about}")
    parser.add_argument("--time-budget", help="end each run after this time, such as 140s")
    parser.add_argument("--dry-run", action="store_true", help="small trainings and runs, to test the script")
    args = parser.parse_args()
    if args.dry_run:
        args.seeds, args.taus = 2, [1, 0.5]
        args.accuracy, args.speed = ["limit=32", "batch_size=32"], ["limit=6", "batch_size=1"]
    accuracy, speed, both = (dict(o.split("=", 1) for o in of) for of in (args.accuracy, args.speed, args.run))
    try:
        stages, seeds = trained(args), range(1, args.seeds + 1)
        answers = answers_of([measured(args, stages, f"accuracy-{n}", **ACCURACY_RUN | both | accuracy) for n in seeds])
        timed = [measured(args, stages, f"speed-{n}", **SPEED_RUN | both | speed) for n in seeds]
    except UserError as error:
        parser.exit(1, f"{error}\n")
    items, random = answers["base", None].shape[2], np.random.default_rng(0)
    weights = np.vstack((np.ones(items), random.multinomial(items, [1 / items] * items, RESAMPLES)), dtype=float)
    speeds, trainings = speeds_of(timed), []
    for stage in stages:
        record = read_record(args.out / "checkpoints" / stage.name)
        counts = {"fed": record["tokens"]["fed"], "teacher_forwards": record["forwards"]["teacher"]}
        trainings.append({"name": stage.name, **counts, **{of: record[of] for of in ("steps", "flops", "train_s")}})
    flops = [training["flops"] for training in trainings]
    found = {"recipe": args.recipe, "items": items, "seeds": args.seeds, "flops_spread": max(flops) / min(flops) - 1}
    tables = {"trainings": trainings, "arms": [figures_of(key, answers, weights, speeds) for key in answers]}
    tables |= {"mars_less_rivals": [*differences(answers, weights)], "choices": [*choices(answers, weights, speeds)]}
    cells = [cell for run in timed for cell in run.record["cells"]]
    doubts = [why for cell in cells for why in (*cell["void"], *(["not all blocks ran"] * (cell["status"] != "ok")))]
    found |= tables | {"doubts": sorted({*doubts})}
    figure, text = draw(found), "\n".join(f"## {name}\n\n{table(rows)}" for name, rows in tables.items())
    files.write_json(args.out / "equal_cost.json", found)
    files.write_text(args.out / "equal_cost.md", text)
    files.write_text(args.out / "frontier.svg", figure.svg)
    print(text, *(f"speeds: {doubt}" for doubt in found["doubts"]), sep="\n")


if __name__ == "__main__":
    main()
