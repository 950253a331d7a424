"""Estimate what trainings cost, before they start: steps, tokens, FLOPs, memory of the weights, time on this machine.

Each conversation counts with the maximum length, so nothing is tokenised or fetched. A fed token costs 6 FLOPs per
trained parameter and 2 per frozen one (Kaplan et al., arXiv 2001.08361, table 1); attention is left out. The time is
the FLOPs over a share of the speed of a large matrix product, which is measured here: half, as the largest trainings
report of their devices (46 % of the peak: Chowdhery et al., arXiv 2204.02311, table 3).
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from mtbench.errors import UserError
from mtbench.evaluation.suite import Source
from mtbench.hardware import probe
from mtbench.models.families import RANDOM, locate
from mtbench.models.loading import load_config
from mtbench.models.random_shapes import SHAPES
from mtbench.report.progress import clock
from mtbench.training.conversations import HUB, is_on_hub, read
from mtbench.training.objectives import Objective, Special
from mtbench.training.recipes import Stage

ROWS = {"allenai/Dolci-Instruct-SFT": 2_152_112}  # conversations of data sets of the hub, from their pages
ADAM_BYTES = 16  # per trained parameter in float32: itself, its gradient, two moments
PROBE_BYTES = 4 << 30  # memory of the matrix product that is timed
SHARE = 0.5  # of the speed of that product
NOTES = (
    "at most: each conversation counts with the maximum length; FLOPs without those of attention",
    "memory: weights, gradients and Adam's moments; activations come on top",
    f"time: at {SHARE:.0%} of the speed of a large matrix product on this machine, which was measured",
)


class Cost(NamedTuple):
    """The cost of one training, at most."""

    steps: int
    conversations: int  # trained on, over all epochs
    tokens: int  # fed
    flop: float
    memory_bytes: int  # without activations
    s: float


def estimate(stages: Sequence[Stage], *, data_dir: Path | None = None, offline: bool = False) -> dict[str, Cost | None]:
    """Return the cost of each stage of a recipe; None for a stage that trains nothing.

    Raises UserError if configurations or data cannot be read.
    """
    made = {stage.name: stage for stage in stages}
    speed = flop_per_s()
    return {stage.name: _cost(stage, made, speed, data_dir, offline) for stage in stages}


def flop_per_s() -> float:
    """Measure the speed of a large matrix product in the precision of a training, in about a second."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    return probe.matmul_rate(torch.device(device), dtype, memory=PROBE_BYTES)[0]


def table(costs: dict[str, Cost | None]) -> Table:
    """Return a table with a row per stage."""
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows.add_column("stage", no_wrap=True)
    for column in ("steps", "examples", "tokens fed", "FLOPs", "memory", "time"):
        rows.add_column(column, justify="right", no_wrap=True)
    for name, cost in costs.items():
        cells = ["untrained"]
        if cost is not None:
            counts = [f"{cost.steps:,}", f"{cost.conversations:,}", f"{cost.tokens:.2e}", f"{cost.flop:.1e}"]
            time = f"{cost.s / 86_400:,.0f} days" if cost.s > 4 * 86_400 else clock(cost.s)
            cells = [*counts, f"{cost.memory_bytes / 1e9:,.1f} GB", time]
        rows.add_row(escape(name), *cells)
    return rows


def _cost(stage: Stage, made: dict[str, Stage], speed: float, data_dir: Path | None, offline: bool) -> Cost | None:
    if stage.objective is None or stage.base is None:
        return None
    settings = stage.settings
    trained, frozen = parameters(_config(stage.base, made, offline), stage.objective)
    if stage.teacher is not None:
        frozen += sum(parameters(_config(stage.teacher, made, offline), None))
    conversations = math.ceil(_conversations(stage, data_dir, offline) * settings.epochs)
    tokens = conversations * stage.objective.max_fed_tokens(settings.max_length, 0)
    flop = tokens * (6 * trained + 2 * frozen)
    copies = 2 * (trained + frozen) if settings.uses_bfloat16(torch.cuda.is_available()) else 0
    return Cost(
        steps=math.ceil(conversations / settings.batch_size),
        conversations=conversations,
        tokens=tokens,
        flop=flop,
        memory_bytes=ADAM_BYTES * trained + 4 * frozen + copies,
        s=flop / (SHARE * speed),
    )


def parameters(config: Any, objective: Objective | None) -> tuple[int, int]:
    """Return how many parameters an objective trains and how many stay frozen; None trains nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if objective is None:
            model.requires_grad_(False)
        else:
            objective.attach(model, Special(0, 0))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in model.parameters()) - trained


def _config(source: str, made: dict[str, Stage], offline: bool) -> Any:
    """Return the configuration of a checkpoint, or of the stage that will make it."""
    if source in made:
        stage = made[source]
        if stage.base is None:
            return Qwen2Config(**stage.shape, tie_word_embeddings=True)
        return _config(stage.base, made, offline)
    published = Path(source).name.lower().removesuffix("-instruct")
    if published in SHAPES and not Path(source).is_dir():
        return load_config(RANDOM + published, offline=offline)
    return load_config(locate(source), offline=offline)


def _conversations(stage: Stage, data_dir: Path | None, offline: bool) -> int:
    """Return how many conversations are trained on. Raises UserError if the size of data on the hub is unknown."""
    if stage.examples is not None and any(map(is_on_hub, stage.data)):
        return stage.examples * len(stage.data)
    source = Source(data_dir=data_dir, offline=offline, seed=stage.settings.seed)
    found = sum(_size(data, stage.to_read(), source) for data in stage.data)
    return found - min(stage.settings.held_out, found // 10)


@cache
def _size(data: str, count: int | None, source: Source) -> int:
    if not is_on_hub(data):
        return sum(1 for _ in read(data, count, source))
    match = HUB.fullmatch(data)
    if match is None or match["id"] not in ROWS:
        raise UserError(f"the size of {data} is not known without fetching it; give `--examples N`.")
    return ROWS[match["id"]]
