"""Estimate what trainings cost before they start: steps, tokens, FLOPs, memory, and time on this machine.

A fed token costs 2 FLOPs per parameter of the layers in the forward pass and twice that in the backward pass; a
prediction costs the same per parameter of the head; attention costs 4 FLOPs per channel and visible pair of tokens in
the forward pass (Kaplan et al., arXiv 2001.08361, table 1; Chowdhery et al., arXiv 2204.02311, appendix B). The numbers
of fed tokens, predictions and visible pairs are counted on the first conversations of the data, in the sequences that
the objective builds. Modules that the objective adds cost the same, by the positions that they read. Published shapes
and data sets of the hub are not downloaded: each of their conversations counts with the maximum length, so the figures
are upper bounds ("at most").
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
from mtbench.evaluation.suite import Source
from mtbench.hardware import probe
from mtbench.models.families import RANDOM, locate
from mtbench.models.loading import inspect, load_config
from mtbench.models.random_shapes import SHAPES
from mtbench.report.progress import clock
from mtbench.training.conversations import HUB, is_on_hub, nothing_left, read, read_conversations, tokenise
from mtbench.training.init_model import learn_tokenizer
from mtbench.training.linear_cross_entropy import CHUNK
from mtbench.training.objectives import AddedWork, Objective, Special
from mtbench.training.packing import AttentionMask, Example, pack
from mtbench.training.recipe_runner import cores, needs
from mtbench.training.recipes import Stage

SAMPLE = 200  # conversations per data source whose sequences are built and counted
TOKENIZER_SAMPLE = 1000  # conversations to learn a tokenizer from, if the recipe has not made its own yet
ROWS = {"allenai/Dolci-Instruct-SFT": 2_152_112}  # conversations of data sets of the hub, from their pages
ADAM_BYTES = 16  # per trained parameter in float32: itself, its gradient, two moments
PROBE_BYTES = 4 << 30  # memory of the matrix product that is timed
# Share of the measured peak that a training reaches. On a GPU these are targets: without and with a noisy copy of the
# text. On a CPU this was measured for the stage `ar` of the recipe `tiny` on one thread.
GPU_SHARE = {False: 0.35, True: 0.30}  # by `objective.needs_mask`
CPU_SHARE = 0.5


class Model(NamedTuple):
    """The size of a model in training."""

    shape: probe.Shape
    trained: int  # parameters
    frozen: int
    frozen_body: bool
    added: int  # parameters of modules that the objective adds, without embeddings and heads
    activations: int  # elements kept per token and layer


class Traffic(NamedTuple):
    """Work per conversation, on average over the sample."""

    fed: float  # tokens
    predicted: float
    pairs: float  # of a query and a key it attends to
    added: AddedWork
    longest: int  # fed tokens of the longest conversation


class Cost(NamedTuple):
    """The cost of one training."""

    steps: int
    conversations: int  # trained on, over all epochs
    fed: float  # tokens
    flop: float
    memory_bytes: float
    s: float
    at_most: bool  # an upper bound: the data is on the hub and was not read

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        return (
            f"{self.steps:,}",
            f"{self.conversations:,}",
            amount(self.fed),
            f"{self.flop:.1e}",
            f"{self.memory_bytes / 1e9:,.1f} GB",
            duration(self.s),
        )


class Machine(NamedTuple):
    """The device of a training: a GPU, or a number of CPU threads."""

    name: str
    gpu: bool
    flop_per_s: float  # measured by a large matrix product
    memory_bytes: int

    def share(self, objective: Objective) -> float:
        """Return the share of the peak that a training reaches."""
        return GPU_SHARE[objective.needs_mask] if self.gpu else CPU_SHARE


def this_machine(workers: int) -> Machine:
    """Measure this machine, in about a second; on a CPU, return the share of one worker."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        speed, _ = probe.matmul_rate(device, torch.bfloat16, memory=PROBE_BYTES)
        properties = torch.cuda.get_device_properties(device)
        return Machine(properties.name, True, speed, properties.total_memory)
    threads = max(1, cores() // workers)
    plural = "s" if threads > 1 else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(f"CPU, {threads} thread{plural} per stage", False, threads * core_rate(), memory)


def core_rate(size: int = 1024, laps: int = 20) -> float:
    """Return the FLOP/s of one core in products of random matrices, by CPU time: other processes do not count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(2, size, size)
        torch.mm(a, b)
        started_at = time.thread_time()
        for _ in range(laps):
            torch.mm(a, b)
        return 2 * size**3 * laps / (time.thread_time() - started_at)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `--dry-run` prints. A stage that trains nothing has no cost."""

    stages: Sequence[Stage]
    costs: Mapping[str, Cost | None]
    machine: Machine
    workers: int

    def table(self) -> Table:
        """Return a table with a row per stage."""
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
        """Return the assumptions of the figures, and the stages that do not fit into memory."""
        machine = self.machine
        costs = {name: cost for name, cost in self.costs.items() if cost is not None}
        shares = sorted({machine.share(stage.objective) for stage in self.stages if stage.objective})
        assumed = " to ".join(f"{share:.0%}" for share in shares)
        time_note = f"time: {machine.name}, {amount(machine.flop_per_s)}FLOP/s measured, of which {assumed} is assumed"
        if len(self.stages) > 1:
            time_note += f"; all stages, {self.workers} at once: {duration(self.span_s())}"
        notes = [
            time_note,
            "memory, about: weights, gradients and Adam's moments in float32 (16 bytes per parameter), and activations",
        ]
        if any(cost.at_most for cost in costs.values()):
            notes.append("at most: data on the hub was not fetched; each row counts with the maximum length")
        large = [name for name, cost in costs.items() if cost.memory_bytes > machine.memory_bytes]
        if large:
            notes.append(
                f"more than the {machine.memory_bytes / 1e9:,.0f} GB of this machine: {', '.join(large)}; shard them "
                "over several GPUs with `accelerate launch`, or lower `--rows`"
            )
        return notes

    def span_s(self) -> float:
        """Return the seconds from the first stage's start to the last one's end."""
        free_at = [0.0] * self.workers
        ended_at: dict[str, float] = {}
        for stage in self.stages:
            worker = min(range(self.workers), key=free_at.__getitem__)
            started_at = max([free_at[worker], *(ended_at[name] for name in needs(stage, self.stages))])
            cost = self.costs[stage.name]
            free_at[worker] = ended_at[stage.name] = started_at + (cost.s if cost else 0.0)
        return max(free_at)


def amount(count: float) -> str:
    """Return a count with three digits and a unit prefix.

    >>> amount(11_020_000_000), amount(2_340_000), amount(80)
    ('11 G', '2.34 M', '80')
    """
    for unit, size in ((" T", 1e12), (" G", 1e9), (" M", 1e6)):
        if count >= size:
            return f"{count / size:,.3g}{unit}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Return a time as text.

    >>> duration(90), duration(800_000)
    ('1:30', '9 days')
    """
    return f"{seconds / 86_400:,.0f} days" if seconds > 4 * 86_400 else clock(seconds)


def estimate(
    stages: Sequence[Stage], folder: Path, workers: int, *, data_dir: Path | None = None, offline: bool = False
) -> Estimate:
    """Estimate the cost of a recipe's stages, whose checkpoints are or will be in `folder`.

    Raises UserError if checkpoints or data cannot be read.
    """
    machine = this_machine(workers)
    estimator = _Estimator(stages, folder, data_dir, offline)
    costs = {stage.name: estimator.cost(stage, machine) for stage in stages}
    return Estimate(stages=stages, costs=costs, machine=machine, workers=workers)


@dataclass(frozen=True, eq=False)
class _Estimator:
    """Estimates stages from their models and data, as far as these exist."""

    stages: Sequence[Stage]
    folder: Path
    data_dir: Path | None
    offline: bool

    def cost(self, stage: Stage, machine: Machine) -> Cost | None:
        """Return the cost of a stage; None if it trains nothing."""
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
        """Return the configuration of a checkpoint, or of the stage that will make it."""
        stage = self._stage(source)
        if stage is None:
            published = Path(source).name.lower().removesuffix("-instruct")
            if published in SHAPES and not Path(source).is_dir():
                return load_config(RANDOM + published, offline=self.offline)
            return load_config(locate(source), offline=self.offline)
        if stage.base is None:
            return Qwen2Config(**stage.shape, tie_word_embeddings=True)
        return self._config(stage.base)

    def _tokenizer(self, source: str) -> Any:
        """Return the tokenizer of a checkpoint; if the checkpoint is not made yet, a similar one."""
        stage = self._stage(source)
        if stage is None:
            return inspect(source, offline=self.offline).tokenizer
        if (self.folder / source).is_dir():
            return inspect(str(self.folder / source)).tokenizer
        if stage.base is not None:
            return self._tokenizer(stage.base)
        conversations = (
            read_conversations(data, TOKENIZER_SAMPLE, 0, data_dir=self.data_dir, offline=self.offline)
            for data in stage.data
        )
        return learn_tokenizer(chain.from_iterable(conversations), stage.shape["vocab_size"])

    def _traffic(self, stage: Stage) -> tuple[int, Traffic, bool]:
        """Return how many conversations are trained on, the work of each, and whether that is an upper bound."""
        assert stage.objective is not None
        assert stage.base is not None
        max_length = stage.settings.max_length
        if any(map(is_on_hub, stage.data)):
            longest = Example(torch.zeros(max_length, dtype=torch.long), 1)
            return self._published_conversations(stage), traffic_of(stage.objective, [longest]), True
        count = stage.to_read()
        source = Source(data_dir=self.data_dir, offline=self.offline, seed=stage.settings.seed)
        sample = chain.from_iterable(islice(read(data, count, source), SAMPLE) for data in stage.data)
        examples, counts = tokenise(sample, self._tokenizer(stage.base), max_length)
        if not examples:
            raise nothing_left(stage.data, counts, max_length)
        found = sum(_number_of_rows(data, count, source) for data in stage.data) * len(examples) // counts.read
        return found - min(stage.settings.held_out, found // 10), traffic_of(stage.objective, examples), False

    def _published_conversations(self, stage: Stage) -> int:
        """Return how many conversations of data sets on the hub are trained on. Raises UserError if that is unknown."""
        on_hub = [data for data in stage.data if is_on_hub(data)]
        if stage.examples is not None:
            return stage.examples * len(on_hub)
        sizes = [_published_rows(data) for data in on_hub]
        found = sum(size or 0 for size in sizes)
        if None in sizes:
            raise UserError(f"the size of {', '.join(on_hub)} is not known without fetching it; give `--examples N`.")
        return found - min(stage.settings.held_out, found // 10)


def _published_rows(data: str) -> int | None:
    match = HUB.fullmatch(data)
    return None if match is None else ROWS.get(match["id"])


@cache
def _number_of_rows(data: str, count: int | None, source: Source) -> int:
    return sum(1 for _ in read(data, count, source))


@torch.no_grad()
def traffic_of(objective: Objective, examples: Iterable[Example]) -> Traffic:
    """Count the work of conversations in the sequences that the objective builds."""
    random = torch.Generator().manual_seed(0)
    sequences = [objective.build(example, Special(0, 0), random) for example in examples]
    parts = len(objective.parts)
    masks = (AttentionMask(pack([[sequence]], len(sequence.ids), parts)) for sequence in sequences)
    lengths = [len(sequence.ids) for sequence in sequences]
    added = [objective.added_work(sequence) for sequence in sequences]
    return Traffic(
        fed=sum(lengths) / len(sequences),
        predicted=sum(len(sequence.predictor) for sequence in sequences) / len(sequences),
        pairs=sum(int(mask.dense().sum()) for mask in masks) / len(sequences),
        added=AddedWork(*(sum(each) / len(sequences) for each in zip(*added, strict=True))),
        longest=max(lengths),
    )


def model_of(config: Any, objective: Objective | None) -> Model:
    """Return the size of a model, from its configuration and the objective's modules; None: nothing is trained."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        shape = probe.count(model)
        own = {id(p) for p in model.parameters()}
        body = model.base_model.layers
        if objective is None:
            model.requires_grad_(False)
        else:
            objective.attach(model, Special(0, 0))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = [p for p in model.parameters() if id(p) not in own and shape.vocabulary not in p.shape]
    queries, keys = shape.heads * shape.head_dim, shape.kv_bytes_per_token // (2 * shape.layers * model.dtype.itemsize)
    return Model(
        shape=shape,
        trained=trained,
        frozen=sum(p.numel() for p in model.parameters()) - trained,
        frozen_body=not any(p.requires_grad for p in body.parameters()),
        added=sum(p.numel() for p in added),
        activations=4 * config.hidden_size + 2 * queries + 2 * keys + 4 * config.intermediate_size,
    )


def flop_of(model: Model, teacher: Model | None, traffic: Traffic) -> float:
    """Return the FLOPs of one conversation. Frozen parameters have no backward pass."""

    def forward(shape: probe.Shape) -> tuple[float, float]:
        attention = 2 * shape.layers * shape.heads * shape.head_dim * traffic.pairs
        return shape.body * traffic.fed + attention, shape.head * traffic.predicted

    body, head = forward(model.shape)
    added = model.added * traffic.added.positions
    added += 2 * model.shape.heads * model.shape.head_dim * traffic.added.pairs
    flop = (2 if model.frozen_body else 6) * body + 6 * (added + head)
    return flop if teacher is None else flop + 2 * sum(forward(teacher.shape))


def memory_of(model: Model, teacher: Model | None, traffic: Traffic, stage: Stage, gpu: bool) -> float:
    """Return the bytes of weights and optimizer, of a forward pass's activations, and of the loss's chunk of logits."""
    settings, shape = stage.settings, model.shape
    frozen = model.frozen
    if teacher is not None:
        frozen += teacher.trained + teacher.frozen
    weights = ADAM_BYTES * model.trained + 4 * frozen
    element_bytes = 4
    if settings.uses_bfloat16(gpu):
        weights += 2 * (model.trained + frozen)
        element_bytes = 2
    length = settings.packed_length(gpu) or traffic.longest
    layers = 1 if model.frozen_body else shape.layers
    elements = layers * model.activations
    if settings.checkpointing:
        elements = model.activations + layers * shape.heads * shape.head_dim
    activations = settings.rows * length * elements * element_bytes
    if not gpu:  # a CPU computes every pair of tokens, visible or not
        activations += 2 * 4 * settings.rows * length**2 * shape.heads * layers
    predictions = settings.rows * length * traffic.predicted / traffic.fed
    loss = 12 * min(CHUNK, predictions * shape.vocabulary) + 4 * shape.head
    return weights + activations + loss
