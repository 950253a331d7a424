"""The cost of training: MARS against AR on the same examples, a plain `transformers.Trainer`, and the GPU's peak.

    python benchmarks/training.py [--device cuda|cpu] [--json FILE] [--only PART] [--rounds 8]

It runs from a checkout, installed or not, without network, lm-eval or datasets. Weights of Qwen2.5-0.5B's shape and
conversations are random; a conversation has 512 tokens, 60 % of them in the answer. An error in one part does not stop
the others, and results are written after every measurement.

    count      FLOPs, on any machine: matrix products by torch's counter, attention by its 128 x 128 tiles
    memory     peak memory of a step in a separate process; on a CPU with few layers
    recompile  no graph is compiled after warm-up; on a CPU with a small model and a compiler without code generation
    same       on a GPU: FlexAttention's gradients against those of the dense mask, in float32
    share      on a GPU: useful FLOPs per second over the measured matrix product peak, for several row sizes
    time       seconds of a step, MARS over AR, in alternation; on a CPU forward and backward of few layers

FLOPs of attention, per pair of a query and a key: 4 d forward and 10 d backward, which recomputes the scores; 8 d of
the backward FLOPs count as useful. A tile that is not skipped counts in full.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checkout  # noqa: F401
import psutil  # type: ignore[import-untyped]
import torch
from bars import Bar, verdict_of
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from mtbench import statistics
from mtbench.hardware import machine, probe
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models import loading
from mtbench.models.attention import ATTENTION
from mtbench.statistics import INCONCLUSIVE, Ratio
from mtbench.training import linear_cross_entropy, loss
from mtbench.training.loss import attach_loss, target_states
from mtbench.training.objectives import Ar, Mars, Objective, Special
from mtbench.training.packing import PADDING, AttentionMask, Example, Packed
from mtbench.training.schedule import Schedule
from mtbench.training.trainer import PACKED, ROWS, ObjectiveTrainer

WEIGHTS = "random:qwen2.5-0.5b"
WORDS = 4000  # token ids in use, so that a small model can have a small head
SPECIAL = Special(mask=WORDS, end=WORDS + 1)
TOKENS, ANSWER_SHARE = 512, 0.6  # of a conversation
TILE = 128  # queries and keys of a tile of FlexAttention
CPU_LAYERS = 2
STEPS, CPU_STEPS = 20, 6  # of the part `recompile`, after warm-up
SIZES = ((4, 4096), (8, 4096), (16, 4096), (4, 8192), (32, 2048))  # rows of a forward pass, tokens of a row
CHUNK, LARGE_CHUNK = 1 << 26, 1 << 28  # logits at a time in the cross-entropy
ARMS: dict[str, Objective] = {"ar": Ar(), "mars": Mars(), "mars anchored": Mars(layout="anchored")}
Batch = dict[str, Tensor]


class Bench:
    """Runs measurements, shows them, and writes each to the JSON file at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.console = Console(width=130, highlight=False)
        self.bars: list[Bar] = []
        self.found: dict[str, Any] = {"bars": [], "errors": {}, "seconds": {}}

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def keep(self, name: str, value: Any) -> None:
        """Store a result and write all results to the file."""
        self.found[name] = value
        if self.args.json:
            self.args.json.write_text(json.dumps(self.found, indent=1, default=str) + "\n")

    def bar(self, what: str, asked: float, found: Ratio | float | None, *, most: bool = True) -> None:
        """Compare a measurement with the required maximum or minimum; the interval of a ratio decides."""
        if isinstance(found, Ratio):
            value, low, high = found.value, found.ci_low, found.ci_high
            ci = (low, high)
        else:
            value = low = high = found
            ci = (None, None)
        if value is None:
            verdict = "not measured"
        elif low is None or high is None:
            verdict = f"{INCONCLUSIVE}: no interval"
        else:
            verdict = verdict_of(low, high, asked, most=most)
        self.bars.append(Bar(what, f"{'≤' if most else '≥'} {asked:.4g}", value, ci, "", verdict))
        self.say("    " + "  ".join(filter(None, self.bars[-1].row())))
        self.keep("bars", [dataclasses.asdict(bar) for bar in self.bars])


# ---- models and data


def conversations(count: int, *, varied: bool = False, seed: int = 0) -> list[Example]:
    """Return conversations of random tokens; `varied`: of random lengths."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(TOKENS // 8, TOKENS) if varied else TOKENS for _ in range(count)]
    return [
        Example(torch.randint(WORDS, (length,), generator=generator), round((1 - ANSWER_SHARE) * length))
        for length in lengths
    ]


def schedule(objective: Objective, examples: Sequence[Example], *, rows: int, packed: int, steps: int = 1) -> Schedule:
    """Return all examples in `steps` steps, packed as in `mtbench train`."""
    return Schedule(
        examples=examples,
        objective=objective,
        special=SPECIAL,
        batch_size=len(examples) // steps,
        epochs=1,
        seed=0,
        rows=rows,
        packed=packed,
    )


def batches(plan: Schedule) -> list[Batch]:
    return [plan[number] for number in range(len(plan))]


def shape(layers: int | None = None) -> Any:
    """Return the configuration, with `layers` layers if given."""
    config = loading.load_config(WEIGHTS)
    if layers is not None:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return config


def random_model(config: Any, device: torch.device, attention: str = ATTENTION) -> Any:
    """Return a model of random weights in float32, in training mode."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).train()


class Training:
    """A model with an objective's loss and an optimizer, as in `mtbench.training.trainer.fit`, without a Trainer."""

    def __init__(self, objective: Objective, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.model = random_model(config, device)
        attach_loss(self.model, objective)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def compiled(self, **options: Any) -> "Training":
        """Compile the layers."""
        for layer in self.model.base_model.layers:
            layer.compile(dynamic=False, **options)
        return self

    def differentiate(self, batch: Batch) -> None:
        """Run forward and backward."""
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**inputs)["loss"]
        loss.backward()

    def step(self, forwards: Sequence[Batch]) -> None:
        """Run an optimizer step over several forward passes."""
        for batch in forwards:
            self.differentiate(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- FLOPs


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward."""

    body: int
    head: int
    tiles: int  # attention, by tiles that are not skipped
    dense: int  # attention, all pairs of a row
    useful: int  # all but padding and the recomputed scores of attention

    @property
    def packed(self) -> int:
        """FLOPs of a packed batch."""
        return self.body + self.head + self.tiles

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def parameters(config: Any) -> tuple[int, int]:
    """Return the number of parameters in the layers' matrices and in the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim == 2)
    return body, model.get_output_embeddings().weight.numel()


def cost(batch: Packed, config: Any) -> Cost:
    """Return the FLOPs of a batch: 6 per parameter and token or prediction, with padding; attention: see the module."""
    body, head = parameters(config)
    size = config.hidden_size // config.num_attention_heads
    heads = config.num_hidden_layers * config.num_attention_heads
    fed, predicted = batch.ids.numel(), len(batch.predictor)
    worked = AttentionMask(batch).blocks().to_dense().squeeze(1).bool()  # (R, T / TILE, T / TILE)
    text = torch.nn.functional.pad(batch.document, (0, -batch.document.shape[1] % TILE), value=PADDING) != PADDING
    needed = worked & text.unflatten(1, (-1, TILE)).any(2)[:, :, None]
    per_tile = TILE**2 * size * heads
    return Cost(
        body=6 * body * fed,
        head=6 * head * predicted,
        tiles=14 * per_tile * int(worked.sum()),
        dense=14 * size * heads * batch.ids.shape[0] * batch.ids.shape[1] ** 2,
        useful=6 * body * int((batch.document != PADDING).sum())
        + 6 * head * predicted
        + 12 * per_tile * int(needed.sum()),
    )


def cost_of(forwards: Sequence[Batch], config: Any) -> Cost:
    """Return the FLOPs of several forward passes."""
    first, *others = (cost(Packed(**batch), config) for batch in forwards)
    return sum(others, first)


def counted_by_torch(objective: Objective, batch: Batch, config: Any) -> int:
    """Return torch's count of the FLOPs of all matrix products in forward and backward, on tensors without data."""
    with (fake := FakeTensorMode()):
        model = random_model(config, torch.device("cpu"))
        fed = Packed(**{name: fake.from_tensor(tensor) for name, tensor in batch.items()})
        with FlopCounterMode(display=False) as counter:
            objective.losses(model, target_states(model, fed), fed).total.backward()
    per_operation = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in per_operation.items() if str(operation) in ("aten.mm", "aten.addmm"))


def lengths_of(forwards: Sequence[Batch]) -> tuple[int, float]:
    """Return the number of positions fed and the share of padding."""
    fed = sum(batch["ids"].numel() for batch in forwards)
    text = sum(int((batch["document"] != PADDING).sum()) for batch in forwards)
    return fed, 1 - text / fed


def count(bench: Bench) -> None:
    """FLOPs of a MARS step over an AR step on the same examples, all layers."""
    config, examples, found = shape(), conversations(40), {}
    for packed, name in ((4096, "rows of 4096"), (0, "a row each")):
        costs: dict[str, Cost] = {}
        for arm, objective in ARMS.items():
            forwards = batches(schedule(objective, examples, rows=1, packed=packed))
            costs[arm] = arm_cost = cost_of(forwards, config)
            first = cost_of(forwards[:1], config)
            counted = counted_by_torch(objective, forwards[0], config)
            fed, padding = lengths_of(forwards)
            baseline = costs["ar"]
            figures = {
                **dataclasses.asdict(arm_cost),
                "fed": fed,
                "padding": padding,
                "counted_over_6n": counted / (first.body + first.head),
                "body_ratio": arm_cost.body / baseline.body,
                "head_ratio": arm_cost.head / baseline.head,
                "attention_ratio": arm_cost.tiles / baseline.tiles,
                "ratio": arm_cost.packed / baseline.packed,
                "ratio_without_padding": arm_cost.useful / baseline.useful,
            }
            found[f"{arm}, {name}"] = figures
            bench.say(
                f"  {arm}, {name}: body {arm_cost.body / 1e12:.1f}, head {arm_cost.head / 1e12:.1f}, attention "
                f"{arm_cost.tiles / 1e12:.2f} TFLOP (dense {arm_cost.dense / 1e12:.2f}); over AR body "
                f"{figures['body_ratio']:.3f}, head {figures['head_ratio']:.3f}, attention "
                f"{figures['attention_ratio']:.2f}; padding {padding:.1%}; "
                f"torch's count {figures['counted_over_6n'] - 1:+.1e} from 6 N"
            )
            bench.keep("count", found)
            if arm != "ar":
                bench.bar(f"FLOPs, {arm} over AR, 0.5B, {name}", 1.75, figures["ratio"])
                bench.say(f"      without padding {figures['ratio_without_padding']:.3f}")


# ---- memory


def peak_of(arm: str, device_name: str, batch_size: int, layers: int | None) -> int:
    """Return the peak bytes of two steps of a Trainer, beyond those used before. Call it in a new process."""
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    trainer = trainer_of(arm, device, batch_size, layers)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    before = int(psutil.Process().memory_info().rss)
    trainer.train()
    return resident_peak() - before


def trainer_of(arm: str, device: torch.device, batch_size: int, layers: int | None) -> Trainer:
    """Return the Trainer of an arm, or transformers' own with next-token loss for the arm `plain`."""
    on_gpu, examples = device.type == "cuda", conversations(2 * batch_size)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=2,  # in the second, the optimizer's state takes memory too
        per_device_train_batch_size=batch_size if arm == "plain" else 1,
        optim="adamw_torch_fused",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=100,
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu,
    )
    args._n_gpu = min(args.n_gpu, 1)
    if arm == "plain":
        model = random_model(shape(layers), device, "sdpa")
        return Trainer(model=model, args=args, train_dataset=examples, data_collator=padded)
    plan = schedule(ARMS[arm], examples, rows=1, packed=PACKED if on_gpu else 0, steps=2)
    plan = dataclasses.replace(plan, rows=len(Schedule._rows(plan, 0)))
    model = random_model(shape(layers), device)
    attach_loss(model, ARMS[arm])
    if on_gpu:
        for layer in model.base_model.layers:
            layer.compile(dynamic=False)
    trainer = ObjectiveTrainer(model=model, args=args, train_dataset=plan, data_collator=lambda items: items[0])
    trainer.watch(plan, {}, None)
    return trainer


def padded(items: Sequence[Example]) -> Batch:
    """Return the conversations padded on the right, with labels on the answers: the usual simple collator."""
    longest = max(len(ids) for ids, _ in items)

    def column(value: Callable[[Example], Tensor], fill: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(value(i), (0, longest - len(i.ids)), value=fill) for i in items])

    return {
        "input_ids": column(lambda i: i.ids, 0),
        "attention_mask": column(lambda i: torch.ones_like(i.ids), 0),
        "labels": column(lambda i: torch.where(torch.arange(len(i.ids)) < i.prompt, -100, i.ids), -100),
    }


def resident_peak() -> int:
    """Return the peak resident bytes of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory(bench: Bench) -> None:
    """Peak memory of a step against that of a plain Trainer's AR step on the same batch."""
    batch_size, layers = (10, None) if bench.on_gpu else (2, CPU_LAYERS)
    peaks: dict[str, int] = {}
    for arm in ("plain", *ARMS):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks[arm] = pool.submit(peak_of, arm, bench.device.type, batch_size, layers).result()
        bench.say(f"  {arm}: {peaks[arm] / 2**30:.2f} GiB")
        bench.keep("memory", {"conversations": batch_size, "layers": layers, "bytes": peaks})
        if arm != "plain":
            depth = "all layers" if bench.on_gpu else f"{CPU_LAYERS} layers"
            bench.bar(f"peak memory, {arm} over a plain Trainer's AR, {depth}", 1.0, peaks[arm] / peaks["plain"])


# ---- compiled layers


def recompile(bench: Bench) -> None:
    """Number of graphs compiled after two warm-up steps, in steps on other data."""
    options: dict[str, Any]
    config, options, packed, rows, steps = shape(), {}, PACKED, ROWS, STEPS
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not bench.on_gpu:
        config = shape(CPU_LAYERS)
        config.vocab_size, config.hidden_size, config.intermediate_size = WORDS + 2, 64, 64
        config.num_attention_heads, config.num_key_value_heads = 4, 2
        options, packed, rows, steps = {"backend": "aot_eager", "fullgraph": True}, 1024, 1, CPU_STEPS
        # FlexAttention has no backward kernel for a CPU and rejects gradients there; its unfused definition has them.
        context = contextlib.ExitStack()
        context.enter_context(patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None))
        context.enter_context(patch.object(loss, "AttentionMask", Tiled))
    found: dict[str, Any] = {}
    with context:
        for arm, objective in ARMS.items():
            torch._dynamo.reset()
            counters.clear()
            training = Training(objective, config, bench.device, torch.bfloat16 if bench.on_gpu else torch.float32)
            training.compiled(**options)
            data = conversations((2 + steps) * rows * packed // 200, varied=True, seed=1)
            forwards = batches(schedule(objective, data, rows=rows, packed=packed))[: 2 + steps]
            warmed = 0
            for number, batch in enumerate(forwards):
                training.step([batch])
                if number == 1:
                    warmed = counters["stats"]["unique_graphs"]
            late = counters["stats"]["unique_graphs"] - warmed
            found[arm] = {
                "warm-up": warmed,
                "later": late,
                "steps": len(forwards) - 2,
                "graph_breaks": dict(counters["graph_break"]),
            }
            bench.keep("recompile", found)
            bench.say(f"  {arm}: {found[arm]}")
            bench.bar(f"graphs compiled after warm-up, {arm}, {len(forwards) - 2} steps", 0, float(late))
            del training
            free_memory()


class Tiled(AttentionMask):
    """The attention mask in tiles, also on a CPU."""

    def prepare(self, sliding_windows: Any, group: int, dtype: torch.dtype) -> "Tiled":
        self._seen = {window: self.blocks(window) for window in sliding_windows}
        return self


class Dense(AttentionMask):
    """The attention mask pair by pair, also on a GPU."""

    def prepare(self, sliding_windows: Any, group: int, dtype: torch.dtype) -> "Dense":
        self._seen = {window: self.bias(group, window, dtype) for window in sliding_windows}
        return self


def same(bench: Bench) -> None:
    """FlexAttention in compiled layers against the dense mask in uncompiled ones: gradients in float32."""
    found = {}
    for arm, objective in ARMS.items():
        [batch] = batches(schedule(objective, conversations(4, varied=True), rows=2, packed=1024))[:1]
        gradients = []
        for kind in (Dense, AttentionMask):
            torch._dynamo.reset()
            training = Training(objective, shape(4), bench.device, torch.float32)
            if kind is AttentionMask:
                training.compiled()
            with patch.object(loss, "AttentionMask", kind):
                training.differentiate(batch)
            gradients.append([p.grad.double() for p in training.model.parameters()])
            del training
            free_memory()
        errors = [float((tiled - dense).norm() / dense.norm()) for dense, tiled in zip(*gradients, strict=True)]
        found[arm] = {"worst": max(errors), "median": sorted(errors)[len(errors) // 2]}
        bench.keep("same", found)
        bench.bar(f"gradients, {arm}, tiled over dense, worst relative error", 1e-3, max(errors))


# ---- time


def peak_rate(bench: Bench) -> float:
    """Return the measured FLOP/s of matrix products in bfloat16."""
    rate, size = probe.matmul_rate(bench.device, torch.bfloat16, memory=torch.cuda.mem_get_info()[0] // 2)
    bench.keep("matrix_peak", {"flop_per_s": rate, "size": size})
    bench.say(f"  matrix peak: {rate / 1e12:.0f} TFLOP/s at {size}")
    return rate


def share(bench: Bench) -> None:
    """Useful FLOPs per second over the matrix peak, of steps of two forwards, compiled, bfloat16."""
    config, peak = shape(), peak_rate(bench)
    found: dict[str, Any] = {}
    for arm, asked in (("ar", 0.35), ("mars", 0.30), ("mars anchored", None)):
        best: float | None = None
        sizes = SIZES if arm != "mars anchored" else SIZES[1:2]
        runs = [(rows, packed, CHUNK) for rows, packed in sizes] + [(*SIZES[1], LARGE_CHUNK)]
        for rows, packed, chunk in runs:
            name = f"{arm}, {rows} x {packed}"
            if chunk != CHUNK:
                name += f", chunks of 2^{chunk.bit_length() - 1}"
            torch._dynamo.reset()
            free_memory()
            try:
                with patch.object(linear_cross_entropy, "CHUNK", chunk):
                    figures = speed(ARMS[arm], config, bench.device, rows, packed)
            except torch.OutOfMemoryError:
                found[name] = "out of memory"
                bench.say(f"  {name}: out of memory")
                continue
            found[name] = figures
            figures["share"] = figures["useful_flop_per_s"] / peak
            best = max(best or 0.0, figures["share"])
            bench.keep("share", found)
            bench.say(
                f"  {name}: {figures['share']:.1%} of the peak, {figures['tokens_per_s']:.0f} tokens/s, padding "
                f"{figures['padding']:.1%}, {figures['peak_bytes'] / 2**30:.1f} GiB, "
                f"compiled in {figures['warm_s']:.0f} s"
            )
        if asked is not None:
            bench.bar(f"useful share of the matrix peak, {arm}, packed, best size", asked, best, most=False)


def speed(objective: Objective, config: Any, device: torch.device, rows: int, packed: int) -> dict[str, float]:
    """Return the figures of one size; times are the median of five steps."""
    data = conversations(4 * rows * packed // TOKENS, varied=True)
    forwards = batches(schedule(objective, data, rows=rows, packed=packed))[:2]
    training, stopwatch = Training(objective, config, device, torch.bfloat16).compiled(), Stopwatch(device)
    torch.cuda.reset_peak_memory_stats()
    started_at = stopwatch.now()
    training.step(forwards)
    training.step(forwards)
    warm_s = stopwatch.now() - started_at
    taken = []
    for _ in range(5):
        started_at = stopwatch.now()
        training.step(forwards)
        taken.append(stopwatch.now() - started_at)
    seconds = sorted(taken)[len(taken) // 2]
    fed, padding = lengths_of(forwards)
    return {
        "seconds": seconds,
        "useful_flop_per_s": cost_of(forwards, config).useful / seconds,
        "tokens_per_s": (1 - padding) * fed / seconds,
        "padding": padding,
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
        "warm_s": warm_s,
    }


def race(arms: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every arm by round; in a round, arms run in random order."""
    stopwatch, shuffler = Stopwatch(device), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(-1, rounds):  # the first one warms up
        for name in shuffler.sample(list(arms), len(arms)):
            started_at = stopwatch.now()
            arms[name]()
            if round_ >= 0:
                taken[name].append(stopwatch.now() - started_at)
    return taken


def over(taken: dict[str, list[float]], arm: str, factor: float = 1.0) -> Ratio:
    """Return the arm's seconds over AR's, times `factor`."""
    return statistics.ratio_of_totals([[t * factor for t in taken[arm]]], [taken["ar"]], unit="round")


def time_gpu(bench: Bench) -> None:
    """Whole steps on the same 384 conversations, all layers, compiled, packed."""
    config, examples = shape(), conversations(384)
    torch._dynamo.reset()
    steps: dict[str, Callable[[], None]] = {}
    flops: dict[str, int] = {}
    for arm, objective in ARMS.items():
        forwards = batches(schedule(objective, examples, rows=ROWS, packed=PACKED))
        flops[arm] = cost_of(forwards, config).packed
        training = Training(objective, config, bench.device, torch.bfloat16).compiled()
        steps[arm] = partial(training.step, forwards)
    taken = race(steps, bench.device, bench.args.rounds)
    bench.keep("time", {"seconds": taken, "counted": {arm: flops[arm] / flops["ar"] for arm in ARMS}})
    for arm in ("mars", "mars anchored"):
        bench.say(f"  {arm}: FLOP ratio {flops[arm] / flops['ar']:.3f}, with idle rows and padding")
        bench.bar(f"seconds of a step, {arm} over AR, packed", 1.8, over(taken, arm))


def time_cpu(bench: Bench) -> None:
    """Forward and backward of one conversation, few layers, against the FLOP ratio (attention dense)."""
    config, examples = shape(CPU_LAYERS), conversations(1)
    passes: dict[str, Callable[[], None]] = {}
    flops: dict[str, int] = {}
    training = Training(
        Ar(), config, bench.device, torch.float32
    )  # both arms share the model; they differ in loss and data
    for arm in ("ar", "mars"):
        [batch] = batches(schedule(ARMS[arm], examples, rows=1, packed=0))
        arm_cost = cost_of([batch], config)
        flops[arm] = arm_cost.body + arm_cost.head + arm_cost.dense
        passes[arm] = partial(_pass, training, batch, ARMS[arm])
    taken = race(passes, bench.device, bench.args.rounds)
    ratio = flops["mars"] / flops["ar"]
    measured = over(taken, "mars")
    load = os.getloadavg()[0]
    bench.keep("time", {"seconds": taken, "counted": ratio, "measured": measured._asdict(), "load": load})
    rate = flops["ar"] * len(taken["ar"]) / sum(taken["ar"])
    bench.say(
        f"  FLOP ratio {ratio:.3f}; AR at {rate / 1e9:.0f} GFLOP/s; {torch.get_num_threads()} threads, load {load:.1f}"
    )
    bench.say(f"  seconds over AR {measured.value:.3f}")
    bench.bar("seconds of MARS over AR, over the FLOP ratio, CPU", 1.08, over(taken, "mars", 1 / ratio))


def _pass(training: Training, batch: Batch, objective: Objective) -> None:
    """Run forward and backward of an objective."""
    fed = Packed(**batch)
    objective.losses(training.model, target_states(training.model, fed), fed).total.backward()
    training.model.zero_grad(set_to_none=False)


def time_steps(bench: Bench) -> None:
    """Seconds of a step, MARS over AR."""
    if bench.on_gpu:
        time_gpu(bench)
    else:
        time_cpu(bench)


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bench], None]]] = {  # name -> its devices, its function
    "count": (("cpu", "cuda"), count),
    "same": (("cuda",), same),
    "recompile": (("cpu", "cuda"), recompile),
    "memory": (("cpu", "cuda"), memory),
    "share": (("cuda",), share),
    "time": (("cpu", "cuda"), time_steps),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=8, help="of the part `time`; at least 5 for an interval")
    bench = Bench(parser.parse_args())
    bench.found["environment"] = machine.environment(sys.argv) | {"cuda": torch.version.cuda}
    for name, (devices, part) in PARTS.items():
        if bench.device.type not in devices or (bench.args.only and name not in bench.args.only):
            continue
        bench.say(f"{name}: {part.__doc__ or ''}")
        started_at = time.monotonic()
        try:
            part(bench)
        except Exception as error:
            bench.found["errors"][name] = traceback.format_exc()
            bench.say(f"  failed: {type(error).__name__}: {error}")
        free_memory()
        bench.found["seconds"][name] = time.monotonic() - started_at
        bench.keep("done", [*bench.found["seconds"]])
        bench.say(f"  {bench.found['seconds'][name]:.0f} s")
    table = Table("what", "asked", "found", "95 % interval", "", title=f"random Qwen2.5-0.5B, {bench.device.type}")
    for bar in bench.bars:
        what, asked, found, interval, _, verdict = bar.row()
        table.add_row(what, asked, found, interval, verdict)
    bench.console.print(table)
    if bench.found["errors"]:
        raise SystemExit(f"failed: {', '.join(bench.found['errors'])}")


if __name__ == "__main__":
    main()
