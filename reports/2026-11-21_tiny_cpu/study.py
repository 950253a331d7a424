"""The training runs of this report: the arms of the recipe `tiny` with more seeds, and every checkpoint's scores.

    mtbench train --recipe tiny -o FOLDER
    python study.py FOLDER [WORKERS]    # after an interruption, the same command continues

Checkpoints of further seeds are in FOLDER/<arm>.<seed>, scores in FOLDER/scores/<arm>.<seed>.json: for each way of
decoding a checkpoint, the correctness, tokens and forward passes of 2,048 held-out problems.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from mtbench.training.objectives import Mars
from mtbench.training.recipes import RECIPES, Stage

ITEMS = 2048
TAUS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)  # the paper's table 8
WIDE_TAUS = (0.95, 0.8, 0.5)  # for wider windows, which take several times as long
UNSCORED = ("init", "draft_init", "sums", "medusa")
FIRST = 43  # the recipe's seed
FIVE, THREE = range(43, 48), range(43, 46)
SEEDS = {
    "ar_long": FIVE,
    "mars": FIVE,
    "mars_anchored": FIVE,
    "mars_no_sft": THREE,
    "mars_no_sft_weighted": THREE,
    "mars_anchored_no_sft": range(FIRST, FIRST + 1),
    "block_diffusion": THREE,
}
SWEPT = {
    "mars": TAUS,
    "mars_no_sft": TAUS,
    "mars_anchored": TAUS,
    "mars_b8": WIDE_TAUS,
    "mars_b16": WIDE_TAUS,
    "mars_no_sft_b8": WIDE_TAUS,
    "mars_no_sft_b16": WIDE_TAUS,
}


def stages() -> Iterator[tuple[Stage, int]]:
    """Yield the stages to train in addition to the recipe, the most important first."""
    recipe = {stage.name: stage for stage in RECIPES["tiny"]}
    others = {
        "mars_no_sft_weighted": Mars(block_size=4, ar_weight=0.0, timestep_weight=True),  # as in the released code
        "mars_anchored_no_sft": Mars(block_size=4, ar_weight=0.0, layout="anchored"),
    }
    for arm, objective in others.items():
        recipe[arm] = replace(recipe["mars_no_sft"], name=arm, objective=objective)
    for seed in FIVE:
        for arm, seeds in SEEDS.items():
            if seed in seeds and (seed != FIRST or arm in others):
                yield replace(recipe[arm], settings=replace(recipe[arm].settings, seed=seed)), seed


def make(root: Path, stage: Stage, seed: int, out: Path) -> str:
    """Train and score one stage, unless it is done; return the name of its file of scores."""
    import torch

    torch.set_num_threads(1)
    if not out.is_dir():
        train_stage(root, stage, out)
    scores = root / "scores" / f"{stage.name}.{seed}.json"
    if not scores.is_file():
        scores.parent.mkdir(exist_ok=True)
        partial = scores.with_suffix(".partial")
        partial.write_text(json.dumps(score(out, stage.name, seed), indent=1) + "\n")
        partial.rename(scores)
    return scores.name


def train_stage(root: Path, stage: Stage, out: Path) -> None:
    """Train a stage from its base checkpoint in `root`."""
    from mtbench.training.train import train

    assert stage.objective is not None
    train(stage.objective, str(root / str(stage.base)), stage.data, stage.to_read(), stage.settings, out)


def score(checkpoint: Path, name: str, seed: int) -> dict[str, object]:
    """Decode the suite's first problems by `ar` and every threshold of the checkpoint's method; return the scores."""
    from mtbench.decoding.engines import ENGINES
    from mtbench.decoding.loop import decode
    from mtbench.decoding.method import ModelRunners
    from mtbench.decoding.registry import METHODS
    from mtbench.models.loading import load
    from mtbench.runs.plan import RunRequest
    from mtbench.runs.planner import make_plan, open_suite
    from mtbench.runs.requests import requests_of

    request = RunRequest(limit=ITEMS, batch_size=(1,), method=("ar",))
    plan = make_plan(request)
    suite, items = open_suite("arithmetic", plan.request), plan.suites[0].items
    order = sorted(range(len(items)), key=lambda i: len(items[i].prompt_ids))
    engine = ENGINES["graph"]()
    runner = engine.runner(load(str(checkpoint)))
    record = json.loads((checkpoint / "mtbench_training.json").read_text())
    block = record["options"].get("block_size", 0)
    if name == "block_diffusion":
        kind = METHODS["block-diffusion"]
        ways = {"1.0": kind(block_size=block), "0.95": kind(block_size=block, tau=0.95)}
    else:
        ways = {"1.0": METHODS["ar"]()}  # MARS at tau = 1 gives the same tokens
        if block:
            taus = SWEPT.get(name, TAUS[:1]) if seed == FIRST else TAUS[:1]
            ways |= {str(tau): METHODS["mars"](block_size=block, tau=tau) for tau in taus}
    results = {}
    for tau, method in ways.items():
        requests = requests_of(plan, plan.suites[0], order)
        answers, timing = decode(method, ModelRunners("it", {"it": runner}), requests, rows=256, make=engine.batch)
        by_item = dict(zip(order, answers, strict=True))
        scores = suite.score({items[i].item: answer.text for i, answer in by_item.items()})
        results[tau] = {
            "right": "".join(str(int(scores[item.item])) for item in items),
            "accuracy": sum(scores.values()) / len(scores),
            "tokens": [len(by_item[i].token_ids) for i in range(len(items))],
            "forwards": [by_item[i].forwards for i in range(len(items))],
            "wall_s": round(timing.wall_s, 1),
        }
    return {"arm": name, "seed": seed, "block_size": block, "tau": results, "evaluation": record.get("evaluation")}


def main(root: Path, workers: int = 2) -> None:
    """Score the recipe's checkpoints, train and score further seeds; `workers` processes of one thread each."""
    made = [(stage, stage.settings.seed, root / stage.name) for stage in RECIPES["tiny"] if stage.name not in UNSCORED]
    jobs = [job for job in made if job[2].is_dir()]
    jobs += [(stage, seed, root / f"{stage.name}.{seed}") for stage, seed in stages()]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(make, root, *job) for job in jobs]):
            print(future.result(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
