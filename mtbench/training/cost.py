"""What trainings will cost, before any of them: steps, tokens, FLOPs, memory, and time on the machine at hand.

A token costs 2 FLOPs per parameter of the layers forwards and twice that backwards, a prediction the same for the
head's parameters; attention costs 4 FLOPs per channel and visible pair of tokens forwards (Kaplan et al., arXiv
2001.08361, table 1; Chowdhery et al., arXiv 2204.02311, appendix B). How many tokens are fed, what is predicted and
who sees whom is counted on the first conversations of the data, as the objective lays them. Of published shapes and
data sets nothing is downloaded; there every conversation counts with the greatest length, so the figures are "at most".
"""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
from mtbench.hardware import probe
from mtbench.models.families import RANDOM, locate
from mtbench.models.loading import inspect, load_config
from mtbench.models.random_shapes import SHAPES
from mtbench.report.progress import clock
from mtbench.training.conversations import HUB, read, read_conversations, tokenise
from mtbench.training.init_model import learn_tokenizer
from mtbench.training.linear_cross_entropy import CHUNK
from mtbench.training.objectives import Objective, Special
from mtbench.training.packing import AttentionMask, Example, pack
from mtbench.training.recipe_runner import cores, needs
from mtbench.training.recipes import Stage
from mtbench.training.trainer import PACKED

SAMPLE = 200  # conversations that are laid
WORDS = 1000  # conversations that a tokenizer is learned from, where the recipe's is not there yet
ROWS = {"allenai/Dolci-Instruct-SFT": 2_152_112}  # conversations of data sets of the hub, from their pages
ADAM_BYTES = 16  # per trained parameter in float32: itself, its gradient, two moments
PROBE_BYTES = 4 << 30  # for the product that is timed
# Share of the measured peak that a training reaches. On a GPU what we aim at: with the dense rows of plain text, and
# with the blocks of a noisy copy. On a CPU what the stage `ar` of `tiny` was measured to reach on one thread.
GPU_SHARE = {False: 0.35, True: 0.30}
CPU_SHARE = 0.5


class Model(NamedTuple):
    """What a training of a model computes and keeps."""

    shape: probe.Shape
    trained: int  # parameters
    frozen: int
    frozen_body: bool
    kept: int  # elements of activations per token and layer


class Traffic(NamedTuple):
    """What goes through a model for one conversation, on average."""

    fed: float
    predicted: float
    pairs: float  # of tokens, of which one sees the other
    longest: int  # conversation of those looked at, in fed tokens


class Cost(NamedTuple):
    """Of one training."""

    steps: int
    conversations: int  # trained on, over all epochs
    fed: float  # tokens
    flop: float
    memory_bytes: float
    s: float
    at_most: bool  # the data was not looked at

    def cells(self) -> tuple[str, ...]:
        """For people."""
        return (
            f"{self.steps:,}",
            f"{self.conversations:,}",
            amount(self.fed),
            f"{self.flop:.1e}",
            f"{self.memory_bytes / 1e9:,.1f} GB",
            duration(self.s),
        )


class Machine(NamedTuple):
    """What trains: a GPU, or so many threads of a CPU."""

    name: str
    gpu: bool
    flop_per_s: float  # measured by a product of large matrices
    memory_bytes: int

    def share(self, objective: Objective) -> float:
        """Of the peak, that a training reaches."""
        return GPU_SHARE[objective.needs_mask] if self.gpu else CPU_SHARE


def this_machine(workers: int) -> Machine:
    """Measured in a second; on a CPU what each of the workers has of it."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        speed, _ = probe.matmul_rate(device, torch.bfloat16, memory=PROBE_BYTES)
        about = torch.cuda.get_device_properties(device)
        return Machine(about.name, True, speed, about.total_memory)
    threads = max(1, cores() // workers)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(f"CPU, {threads} thread{'s' * (threads > 1)} a stage", False, threads * core_rate(), memory)


def core_rate(size: int = 1024, laps: int = 20) -> float:
    """FLOP/s of a core by a product of random matrices; in its own time, whatever else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(2, size, size)
        torch.mm(a, b)
        began = time.thread_time()
        for _ in range(laps):
            torch.mm(a, b)
        return 2 * size**3 * laps / (time.thread_time() - began)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `--dry-run` prints. An untrained stage costs nothing worth saying."""

    stages: Sequence[Stage]
    costs: Mapping[str, Cost | None]
    machine: Machine
    workers: int

    def table(self) -> Table:
        """A row per stage."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("stage", no_wrap=True)
        for column in ("steps", "examples", "tokens fed", "FLOPs", "memory", "time"):
            table.add_column(column, justify="right", no_wrap=True)
        for stage in self.stages:
            cost = self.costs[stage.name]
            cells = ("untrained",) if cost is None else cost.cells()
            table.add_row(escape(stage.name), *cells)
        return table

    def notes(self) -> list[str]:
        """What the figures rest on, and what does not fit."""
        machine, known = self.machine, [(s, self.costs[s.name]) for s in self.stages]
        shares = {machine.share(s.objective) for s in self.stages if s.objective}
        notes = [
            f"time: {machine.name}, {amount(machine.flop_per_s)}FLOP/s measured, of which "
            f"{' to '.join(f'{share:.0%}' for share in sorted(shares))} is assumed"
            + ("" if len(self.stages) == 1 else f"; all stages, {self.workers} at once: {duration(self.span_s())}"),
            "memory, about: weights, gradients and Adam's moments in float32 (16 bytes per parameter), and activations",
        ]
        if any(cost.at_most for _, cost in known if cost):
            notes.append("at most: of data on the hub nothing was fetched; each row counts with the greatest length")
        if large := [s.name for s, cost in known if cost and cost.memory_bytes > machine.memory_bytes]:
            notes.append(
                f"more than the {machine.memory_bytes / 1e9:,.0f} GB of this machine: {', '.join(large)}; shard them "
                "over several GPUs with `accelerate launch`, or lower `--rows`"
            )
        return notes

    def span_s(self) -> float:
        """Seconds from the first stage's start to the last one's end."""
        free = [0.0] * self.workers
        ended: dict[str, float] = {}
        for stage in self.stages:
            worker = min(range(self.workers), key=free.__getitem__)
            begun = max([free[worker], *(ended[name] for name in needs(stage, self.stages))])
            cost = self.costs[stage.name]
            free[worker] = ended[stage.name] = begun + (cost.s if cost else 0.0)
        return max(free)


def amount(count: float) -> str:
    """To three digits.

    >>> amount(11_020_000_000), amount(2_340_000), amount(80)
    ('11 G', '2.34 M', '80')
    """
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6)):
        if count >= size:
            return f"{count / size:,.3g}{unit}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """
    >>> duration(90), duration(800_000)
    ('1:30', '9 days')
    """
    return f"{seconds / 86_400:,.0f} days" if seconds > 4 * 86_400 else clock(seconds)


def estimate(
    stages: Sequence[Stage], folder: Path, workers: int, *, data_dir: Path | None = None, offline: bool = False
) -> Estimate:
    """Of a recipe's stages, whose checkpoints stand or will stand in `folder`. Raises UserError as training would."""
    machine = this_machine(workers)
    look = HostSnapshot(stages, folder, data_dir, offline)
    costs = {stage.name: look.cost(stage, machine) for stage in stages}
    return Estimate(stages=stages, costs=costs, machine=machine, workers=workers)


@dataclass(frozen=True, eq=False)
class HostSnapshot:
    """At models and data of a recipe, as far as they are there."""

    stages: Sequence[Stage]
    folder: Path
    data_dir: Path | None
    offline: bool

    def cost(self, stage: Stage, machine: Machine) -> Cost | None:
        """Of a stage; None if it trains nothing."""
        if stage.objective is None or stage.base is None:
            return None
        settings = stage.settings
        model = model_of(self._config(stage.base), stage.objective)
        teacher = None if stage.teacher is None else model_of(self._config(stage.teacher), None)
        count, traffic, at_most = self._traffic(stage)
        conversations = math.ceil(count * settings.epochs)
        flop = conversations * flop_of(model, teacher, traffic)
        return Cost(
            steps=math.ceil(conversations / settings.batch_size),
            conversations=conversations,
            fed=conversations * traffic.fed,
            flop=flop,
            memory_bytes=memory_of(model, teacher, traffic, stage, machine.gpu),
            s=flop / (machine.flop_per_s * machine.share(stage.objective)),
            at_most=at_most,
        )

    def _stage(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    def _config(self, source: str) -> Any:
        """Of a checkpoint, be it there or still to be made."""
        stage = self._stage(source)
        if stage is None:
            published = Path(source).name.lower().removesuffix("-instruct")
            here = RANDOM + published if published in SHAPES and not Path(source).is_dir() else locate(source)
            return load_config(here, offline=self.offline)
        if stage.base is None:
            return Qwen2Config(**stage.shape, tie_word_embeddings=True)
        return self._config(stage.base)

    def _tokenizer(self, source: str) -> Any:
        """Of a checkpoint; where it is still to be made, one like it."""
        stage = self._stage(source)
        if stage is None:
            return inspect(source, offline=self.offline).tokenizer
        if (self.folder / source).is_dir():
            return inspect(str(self.folder / source)).tokenizer
        if stage.base is not None:
            return self._tokenizer(stage.base)
        texts = (
            read_conversations(data, WORDS, 0, data_dir=self.data_dir, offline=self.offline) for data in stage.data
        )
        return learn_tokenizer(chain.from_iterable(texts), stage.shape["vocab_size"])

    def _traffic(self, stage: Stage) -> tuple[int, Traffic, bool]:
        """How many conversations are trained on, what each is on average, and whether that is an upper bound."""
        assert stage.objective is not None
        assert stage.base is not None
        length = stage.settings.max_length
        if known := [_published_rows(data) for data in stage.data if _is_far(data)]:
            if stage.examples is None and None in known:
                raise UserError(
                    f"how many conversations {', '.join(filter(_is_far, stage.data))} holds is not known without "
                    "fetching it; say `--examples N`."
                )
            found = sum(stage.examples or row or 0 for row in known)
            aside = 0 if stage.examples else min(stage.settings.held_out, found // 10)
            return found - aside, traffic_of(stage.objective, [Example(torch.zeros(length, dtype=torch.long), 1)]), True
        read_all = stage.to_read()
        source = Source(data_dir=self.data_dir, offline=self.offline, seed=stage.settings.seed)
        sample = chain.from_iterable(islice(read(data, read_all, source), SAMPLE) for data in stage.data)
        examples, counts = tokenise(sample, self._tokenizer(stage.base), length)
        if not examples:
            raise UserError(f"{', '.join(stage.data)}: {counts.summary(length)}")
        found = sum(_rows(data, read_all, source) for data in stage.data) * len(examples) // counts.read
        trained = found - min(stage.settings.held_out, found // 10)
        return trained, traffic_of(stage.objective, examples), False


def _is_far(data: str) -> bool:
    """On the hub: neither a suite nor a file."""
    return data.partition(":")[0] not in list(SUITES) and not Path(data).expanduser().exists() and bool(_hub(data))


def _hub(data: str) -> Any:
    return HUB.fullmatch(data)


def _published_rows(data: str) -> int | None:
    return ROWS.get(_hub(data)["id"])


@cache
def _rows(data: str, count: int | None, source: Source) -> int:
    return sum(1 for _ in read(data, count, source))


@torch.no_grad()
def traffic_of(objective: Objective, examples: Iterable[Example]) -> Traffic:
    """What the objective makes of conversations, counted."""
    random = torch.Generator().manual_seed(0)
    laid = [objective.build(example, Special(0, 0), random) for example in examples]
    pairs = [int(AttentionMask(pack([[one]], len(one.ids), len(objective.parts))).dense().sum()) for one in laid]
    return Traffic(
        fed=sum(len(one.ids) for one in laid) / len(laid),
        predicted=sum(len(one.at) for one in laid) / len(laid),
        pairs=sum(pairs) / len(laid),
        longest=max(len(one.ids) for one in laid),
    )


def model_of(config: Any, objective: Objective | None) -> Model:
    """From its configuration alone, with what the objective adds to it; without one nothing is trained."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        shape = probe.count(model)
        body = model.base_model.layers
        if objective is None:
            model.requires_grad_(False)
        else:
            objective.attach(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    queries, keys = shape.heads * shape.head_dim, shape.kv_bytes_per_token // (2 * shape.layers * model.dtype.itemsize)
    return Model(
        shape=shape,
        trained=trained,
        frozen=sum(p.numel() for p in model.parameters()) - trained,
        frozen_body=not any(p.requires_grad for p in body.parameters()),
        kept=4 * config.hidden_size + 2 * queries + 2 * keys + 4 * config.intermediate_size,
    )


def flop_of(model: Model, teacher: Model | None, traffic: Traffic) -> float:
    """Of one conversation. What is frozen only goes forwards."""

    def once(shape: probe.Shape) -> tuple[float, float]:
        attention = 2 * shape.layers * shape.heads * shape.head_dim * traffic.pairs
        return shape.body * traffic.fed + attention, shape.head * traffic.predicted

    body, head = once(model.shape)
    flop = (2 if model.frozen_body else 6) * body + 6 * head
    return flop if teacher is None else flop + 2 * sum(once(teacher.shape))


def memory_of(model: Model, teacher: Model | None, traffic: Traffic, stage: Stage, gpu: bool) -> float:
    """Weights and what goes with them, activations of a forward, the loss's chunk of logits."""
    settings, shape = stage.settings, model.shape
    half = settings.precision == "bfloat16" or (settings.precision == "auto" and gpu)
    element, frozen = 2 if half else 4, model.frozen + (teacher.trained + teacher.frozen if teacher else 0)
    weights = ADAM_BYTES * model.trained + 4 * frozen + (2 * (model.trained + frozen) if half else 0)
    packed = (PACKED if gpu else 0) if settings.pack is None else settings.pack
    length = packed or traffic.longest
    layers = 1 if model.frozen_body else shape.layers
    kept = layers * model.kept
    if settings.checkpointing:
        kept = model.kept + layers * shape.heads * shape.head_dim
    activations = settings.rows * length * kept * element
    if not gpu:  # every pair of tokens, visible or not
        activations += 2 * 4 * settings.rows * length**2 * shape.heads * layers
    predictions = settings.rows * length * traffic.predicted / traffic.fed
    loss = 12 * min(CHUNK, predictions * shape.vocabulary) + 4 * shape.head
    return weights + activations + loss
