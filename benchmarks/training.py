"""What training costs: MARS beside AR on the same examples, beside a plain `transformers.Trainer`, beside the hardware.

    python benchmarks/training.py [--device cuda|cpu] [--json FILE] [--only PART] [--rounds 8]

It runs from a checkout, installed or not, on a machine with no network, lm-eval or datasets: weights of Qwen2.5-0.5B's
shape are random, so are conversations, of 512 tokens of which 60 % are answer. Parts are independent: what breaks in
one costs it alone, what is done is written at once.

    count      FLOPs, anywhere: matrix products by torch's own counter, attention by the tiles of 128 x 128 it works on
    memory     peak of a step in a process of its own; on a CPU with few layers
    recompile  nothing is compiled after warm-up, on a CPU by a compiler without a backend, on a toy
    same       on a GPU: FlexAttention's losses and gradients against the dense rule, in float32
    share      on a GPU: useful FLOPs per second over the measured matrix peak, some sizes of rows
    time       seconds of a step, MARS over AR in rounds next to each other; on a CPU forward and backward, few layers

FLOPs of attention, per pair of a query and a key: 4 d forward, and 10 d backward, which makes the scores anew; as
useful count 8 d of these. A tile that is worked on counts whole.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import random
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
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from mtbench import statistics
from mtbench.hardware import machine, probe
from mtbench.hardware.timer import Stopwatch
from mtbench.models import loading
from mtbench.models.attention import ATTENTION
from mtbench.statistics import INCONCLUSIVE, Ratio
from mtbench.training import linear_cross_entropy, loss
from mtbench.training.loss import attach_loss, hidden_states
from mtbench.training.objectives import Ar, Mars, Objective, Special, losses
from mtbench.training.packing import PADDING, AttentionMask, Example, Packed
from mtbench.training.schedule import Schedule
from mtbench.training.trainer import PACKED, ROWS, ObjectiveTrainer

WEIGHTS = "random:qwen2.5-0.5b"
WORDS = 4000  # token ids in use, so that a toy's head may be small
SPECIAL = Special(mask=WORDS, end=WORDS + 1)
TOKENS, SHARE = 512, 0.6  # of a conversation; of it that are answer
TILE = 128  # of FlexAttention, each way
FEW = 2  # layers on a CPU
STEPS, FEW_STEPS = 20, 6  # without recompilation, and on a CPU
SIZES = ((4, 4096), (8, 4096), (16, 4096), (4, 8192), (32, 2048))  # rows of a forward, tokens of a row
ARMS: dict[str, Objective] = {"ar": Ar(), "mars": Mars(), "mars anchored": Mars(layout="anchored")}
Batch = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Bar:
    """A figure that somebody asked for."""

    what: str
    asked: str
    found: float | None
    ci: tuple[float | None, float | None]
    verdict: str


class Bench:
    """What is found, written down at once."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.device = asked, torch.device(asked.device)
        self.on_gpu = self.device.type == "cuda"
        self.console = Console(width=130, highlight=False)
        self.bars: list[Bar] = []
        self.found: dict[str, Any] = {"bars": [], "errors": {}, "seconds": {}}

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def keep(self, name: str, value: Any) -> None:
        """Write a finding down."""
        self.found[name] = value
        if self.asked.json:
            self.asked.json.write_text(json.dumps(self.found, indent=1, default=str) + "\n")

    def bar(self, what: str, asked: float, found: Ratio | float | None, *, most: bool = True) -> None:
        """Hold a figure against what is asked, at most or at least: by its interval, a count by itself."""
        value, low, high = found[:3] if isinstance(found, Ratio) else (found, found, found)
        if value is None:
            verdict = "not measured"
        elif low is None or high is None:
            verdict = f"{INCONCLUSIVE}: no interval"
        elif most:
            verdict = "met" if high <= asked else "missed" if low > asked else INCONCLUSIVE
        else:
            verdict = "met" if low >= asked else "missed" if high < asked else INCONCLUSIVE
        ci = (low, high) if isinstance(found, Ratio) else (None, None)
        self.bars.append(Bar(what, f"{'≤' if most else '≥'} {asked:.4g}", value, ci, verdict))
        self.say("    " + "  ".join(filter(None, row(self.bars[-1]))))
        self.keep("bars", [dataclasses.asdict(bar) for bar in self.bars])


def row(bar: Bar) -> tuple[str, ...]:
    between = "" if bar.ci[0] is None else f"[{bar.ci[0]:.3f}, {bar.ci[1]:.3f}]"
    return bar.what, bar.asked, "–" if bar.found is None else f"{bar.found:.4g}", between, bar.verdict


# ---- what is trained, on what


def conversations(count: int, *, varied: bool = False, seed: int = 0) -> list[Example]:
    """So many conversations of random tokens; `varied` in length."""
    rng, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(TOKENS // 8, TOKENS) if varied else TOKENS for _ in range(count)]
    return [
        Example(torch.randint(WORDS, (length,), generator=chance), round((1 - SHARE) * length)) for length in lengths
    ]


def schedule(objective: Objective, examples: Sequence[Example], *, rows: int, packed: int, steps: int = 1) -> Schedule:
    """All examples in so many steps, as `mtbench train` lays them."""
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
    config = loading.load_config(WEIGHTS)
    if layers is not None:
        config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    return config


def random_model(config: Any, device: torch.device, attention: str = ATTENTION) -> Any:
    """Random weights in float32, to be trained."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).train()


class Training:
    """A model that learns an objective, as `mtbench.training.trainer.fit` has it, without the Trainer around it."""

    def __init__(self, objective: Objective, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.model = random_model(config, device)
        attach_loss(self.model, objective)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def compiled(self, **options: Any) -> "Training":
        for layer in self.model.base_model.layers:
            layer.compile(dynamic=False, **options)
        return self

    def differentiate(self, batch: Batch) -> None:
        there = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(**there)["loss"]
        loss.backward()

    def step(self, forwards: Sequence[Batch]) -> None:
        for batch in forwards:
            self.differentiate(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def freed() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- FLOPs


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward."""

    body: int
    head: int
    tiles: int  # attention, by tiles that are worked on
    dense: int  # attention, all pairs of a row
    useful: int  # products of tokens that are no padding, attention without the scores made anew

    @property
    def packed(self) -> int:
        return self.body + self.head + self.tiles

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def parameters(config: Any) -> tuple[int, int]:
    """Entries of the matrices in layers, and of the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim == 2)
    return body, model.get_output_embeddings().weight.numel()


def cost(batch: Packed, config: Any) -> Cost:
    """Products as 6 FLOPs per entry and token or prediction, padding included; attention as said above."""
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
    first, *others = (cost(Packed(**batch), config) for batch in forwards)
    return sum(others, first)


def counted(objective: Objective, batch: Batch, config: Any) -> int:
    """FLOPs of all matrix products of a forward and backward, as torch counts them on tensors without content."""
    with (fake := FakeTensorMode()):
        model = random_model(config, torch.device("cpu"))
        fed = Packed(**{name: fake.from_tensor(tensor) for name, tensor in batch.items()})
        with FlopCounterMode(display=False) as counter:
            losses(objective, model, hidden_states(model, fed), fed).total.backward()
    per_operation = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in per_operation.items() if str(operation) in ("aten.mm", "aten.addmm"))


def count(bench: Bench) -> None:
    """FLOPs of a MARS step over an AR step on the same examples, all layers."""
    config, examples, found = shape(), conversations(40), {}
    for packed, name in ((4096, "rows of 4096"), (0, "a row each")):
        costs: dict[str, Cost] = {}
        for arm, objective in ARMS.items():
            forwards = batches(schedule(objective, examples, rows=1, packed=packed))
            costs[arm] = of_arm = cost_of(forwards, config)
            product = sum(counted(objective, batch, config) for batch in forwards[:1])
            expected = (one := cost_of(forwards[:1], config)).body + one.head
            fed = sum(batch["ids"].numel() for batch in forwards)
            text = sum(int((batch["document"] != PADDING).sum()) for batch in forwards)
            over, base = of_arm, costs["ar"]
            figures = {
                **dataclasses.asdict(of_arm),
                "fed": fed,
                "padding": 1 - text / fed,
                "counted_over_6n": product / expected,
                "body_ratio": over.body / base.body,
                "head_ratio": over.head / base.head,
                "attention_ratio": over.tiles / base.tiles,
                "ratio": over.packed / base.packed,
                "ratio_without_padding": over.useful / base.useful,
            }
            found[f"{arm}, {name}"] = figures
            self_check = figures["counted_over_6n"] - 1
            bench.say(
                f"  {arm}, {name}: body {over.body / 1e12:.1f}, head {over.head / 1e12:.1f}, attention "
                f"{over.tiles / 1e12:.2f} TFLOP (dense {over.dense / 1e12:.2f}); over AR body "
                f"{figures['body_ratio']:.3f}, head {figures['head_ratio']:.3f}, attention "
                f"{figures['attention_ratio']:.2f}; padding {figures['padding']:.1%}; "
                f"torch counts {self_check:+.1e} on 6 N"
            )
            bench.keep("count", found)
            if arm != "ar":
                bench.bar(f"FLOPs, {arm} over AR, 0.5B, {name}", 1.75, figures["ratio"])
                bench.say(f"      without padding {figures['ratio_without_padding']:.3f}")


# ---- memory


def peak_of(arm: str, device: str, conversations_: int, layers: int | None) -> int:
    """Bytes that two steps of a Trainer take at most, beyond what stood before: in a fresh process."""
    there, folder = torch.device(device), tempfile.mkdtemp()
    on_gpu, examples = there.type == "cuda", conversations(2 * conversations_)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=2,  # the second has the optimizer's state beside it
        per_device_train_batch_size=conversations_ if arm == "plain" else 1,
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
        trainer = Trainer(
            model=random_model(shape(layers), there, "sdpa"), args=args, train_dataset=examples, data_collator=padded
        )
    else:
        packed = PACKED if on_gpu else 0
        rows = len(Schedule._rows(one := schedule(ARMS[arm], examples, rows=1, packed=packed, steps=2), 0))
        plan = dataclasses.replace(one, rows=rows)
        model = random_model(shape(layers), there)
        attach_loss(model, ARMS[arm])
        if on_gpu:
            for layer in model.base_model.layers:
                layer.compile(dynamic=False)
        trainer = ObjectiveTrainer(model=model, args=args, train_dataset=plan, data_collator=lambda items: items[0])
        trainer.watch(plan, {}, None)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.train()
        return torch.cuda.max_memory_allocated() - before
    before = int(psutil.Process().memory_info().rss)
    trainer.train()
    return resident_peak() - before


def padded(items: Sequence[Example]) -> Batch:
    """Padded on the right, labels on the answer: what one would write without thinking."""
    longest = max(len(ids) for ids, _ in items)

    def column(of: Callable[[Example], Tensor], fill: int) -> Tensor:
        return torch.stack([torch.nn.functional.pad(of(i), (0, longest - len(i.ids)), value=fill) for i in items])

    return {
        "input_ids": column(lambda i: i.ids, 0),
        "attention_mask": column(lambda i: torch.ones_like(i.ids), 0),
        "labels": column(lambda i: torch.where(torch.arange(len(i.ids)) < i.prompt, -100, i.ids), -100),
    }


def resident_peak() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory(bench: Bench) -> None:
    """Peak memory of a step beside that of a plain Trainer's AR step on the same batch."""
    count_, layers = (10, None) if bench.on_gpu else (2, FEW)
    peaks: dict[str, int] = {}
    for arm in ("plain", *ARMS):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            peaks[arm] = pool.submit(peak_of, arm, bench.device.type, count_, layers).result()
        bench.say(f"  {arm}: {peaks[arm] / 2**30:.2f} GiB")
        bench.keep("memory", {"conversations": count_, "layers": layers, "bytes": peaks})
        if arm != "plain":
            of = "all layers" if bench.on_gpu else f"{FEW} layers"
            bench.bar(f"peak memory, {arm} over a plain Trainer's AR, {of}", 1.0, peaks[arm] / peaks["plain"])


# ---- compiled layers


def recompile(bench: Bench) -> None:
    """Graphs that are compiled after two steps of warm-up, in steps of other data."""
    options: dict[str, Any]
    config, options, packed, rows, steps = shape(), {}, PACKED, ROWS, STEPS
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if not bench.on_gpu:
        config = shape(FEW)
        config.vocab_size, config.hidden_size, config.intermediate_size = WORDS + 2, 64, 64
        config.num_attention_heads, config.num_key_value_heads = 4, 2
        options, packed, rows, steps = {"backend": "aot_eager", "fullgraph": True}, 1024, 1, FEW_STEPS
        # FlexAttention refuses gradients on a CPU, for want of a kernel; its unfused definition has them.
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
            freed()


class Tiled(AttentionMask):
    """Sight in tiles, on a CPU too."""

    def prepare(self, sliding_windows: Any, group: int, dtype: torch.dtype) -> "Tiled":
        self._seen = {window: self.blocks(window) for window in sliding_windows}
        return self


class Dense(AttentionMask):
    """Sight pair by pair, on a GPU too."""

    def prepare(self, sliding_windows: Any, group: int, dtype: torch.dtype) -> "Dense":
        self._seen = {window: self.bias(group, window, dtype) for window in sliding_windows}
        return self


def same(bench: Bench) -> None:
    """FlexAttention in compiled layers against the dense rule in plain ones: loss and gradients, float32."""
    found = {}
    for arm, objective in ARMS.items():
        [batch] = batches(schedule(objective, conversations(4, varied=True), rows=2, packed=1024))[:1]
        told = []
        for kind in (Dense, AttentionMask):
            torch._dynamo.reset()
            training = Training(objective, shape(4), bench.device, torch.float32)
            if kind is AttentionMask:
                training.compiled()
            with patch.object(loss, "AttentionMask", kind):
                training.differentiate(batch)
            told.append([p.grad.double() for p in training.model.parameters()])
            del training
            freed()
        errors = [float((got - want).norm() / want.norm()) for want, got in zip(*told, strict=True)]
        found[arm] = {"worst": max(errors), "median": sorted(errors)[len(errors) // 2]}
        bench.keep("same", found)
        bench.bar(f"gradients, {arm}, tiled over dense, worst relative error", 1e-3, max(errors))


# ---- time


def peak_rate(bench: Bench) -> float:
    """FLOP/s of the machine's matrix products, bfloat16."""
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
        for rows, packed in SIZES if arm != "mars anchored" else SIZES[1:2]:
            for chunk in (1 << 26, 1 << 28) if (rows, packed) == SIZES[1] else (1 << 26,):
                name = f"{arm}, {rows} x {packed}" + (
                    "" if chunk == 1 << 26 else f", chunks of 2^{chunk.bit_length() - 1}"
                )
                torch._dynamo.reset()
                freed()
                try:
                    with patch.object(linear_cross_entropy, "CHUNK", chunk):
                        one = speed(ARMS[arm], config, bench.device, rows, packed)
                except torch.OutOfMemoryError:
                    found[name] = "out of memory"
                    bench.say(f"  {name}: out of memory")
                    continue
                found[name] = one
                one["share"] = one["useful_flop_per_s"] / peak
                best = max(best or 0.0, one["share"])
                bench.keep("share", found)
                bench.say(
                    f"  {name}: {one['share']:.1%} of the peak, {one['tokens_per_s']:.0f} tokens/s, padding "
                    f"{one['padding']:.1%}, {one['peak_bytes'] / 2**30:.1f} GiB, compiled in {one['warm_s']:.0f} s"
                )
        if asked is not None:
            bench.bar(f"useful share of the matrix peak, {arm}, packed, best size", asked, best, most=False)


def speed(objective: Objective, config: Any, device: torch.device, rows: int, packed: int) -> dict[str, float]:
    """Of one size: the median of some steps."""
    data = conversations(4 * rows * packed // TOKENS, varied=True)
    forwards = batches(schedule(objective, data, rows=rows, packed=packed))[:2]
    training, stopwatch = Training(objective, config, device, torch.bfloat16).compiled(), Stopwatch(device)
    torch.cuda.reset_peak_memory_stats()
    began = stopwatch.now()
    training.step(forwards)
    training.step(forwards)
    warm_s = stopwatch.now() - began
    taken = []
    for _ in range(5):
        began = stopwatch.now()
        training.step(forwards)
        taken.append(stopwatch.now() - began)
    seconds = sorted(taken)[len(taken) // 2]
    fed = sum(b["ids"].numel() for b in forwards)
    text = sum(int((b["document"] != PADDING).sum()) for b in forwards)
    return {
        "seconds": seconds,
        "useful_flop_per_s": cost_of(forwards, config).useful / seconds,
        "tokens_per_s": text / seconds,
        "padding": 1 - text / fed,
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
        "warm_s": warm_s,
    }


def race(arms: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm, by round; inside a round in random order."""
    stopwatch, chance = Stopwatch(device), random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-1, rounds):  # the first one warms up
        for name in chance.sample(list(arms), len(arms)):
            began = stopwatch.now()
            arms[name]()
            if number >= 0:
                taken[name].append(stopwatch.now() - began)
    return taken


def over(taken: dict[str, list[float]], arm: str, factor: float = 1.0) -> Ratio:
    """How much longer an arm takes than AR, by `factor`."""
    return statistics.ratio_of_totals([[t * factor for t in taken[arm]]], [taken["ar"]], unit="round")


def time_gpu(bench: Bench) -> None:
    """Whole steps on the same 384 conversations, all layers, compiled, packed."""
    config, examples = shape(), conversations(384)
    torch._dynamo.reset()
    steps: dict[str, Callable[[], None]] = {}
    ratios: dict[str, float] = {}
    for arm, objective in ARMS.items():
        forwards = batches(schedule(objective, examples, rows=ROWS, packed=PACKED))
        ratios[arm] = float(cost_of(forwards, config).packed)
        training = Training(objective, config, bench.device, torch.bfloat16).compiled()
        steps[arm] = partial(training.step, forwards)
    taken = race(steps, bench.device, bench.asked.rounds)
    bench.keep("time", {"seconds": taken, "counted": {arm: ratios[arm] / ratios["ar"] for arm in ARMS}})
    for arm in ("mars", "mars anchored"):
        bench.say(f"  {arm}: counted {ratios[arm] / ratios['ar']:.3f}, idle rows and padding included")
        bench.bar(f"seconds of a step, {arm} over AR, packed", 1.8, over(taken, arm))


def time_cpu(bench: Bench) -> None:
    """Forward and backward of one conversation, few layers, against the counted ratio (attention dense)."""
    config, examples = shape(FEW), conversations(1)
    passes: dict[str, Callable[[], None]] = {}
    flops: dict[str, int] = {}
    training = Training(Ar(), config, bench.device, torch.float32)  # one model: they learn by the same forward
    for arm in ("ar", "mars"):
        [batch] = batches(schedule(ARMS[arm], examples, rows=1, packed=0))
        of_arm = cost_of([batch], config)
        flops[arm] = of_arm.body + of_arm.head + of_arm.dense
        passes[arm] = partial(_pass, training, batch, ARMS[arm])
    taken = race(passes, bench.device, bench.asked.rounds)
    ratio = flops["mars"] / flops["ar"]
    measured = over(taken, "mars")
    load = psutil.getloadavg()[0]
    bench.keep("time", {"seconds": taken, "counted": ratio, "measured": measured._asdict(), "load": load})
    rate = flops["ar"] * len(taken["ar"]) / sum(taken["ar"])
    bench.say(
        f"  counted {ratio:.3f}; AR at {rate / 1e9:.0f} GFLOP/s; {torch.get_num_threads()} threads, load {load:.1f}"
    )
    bench.say(f"  seconds over AR {measured.value:.3f}")
    bench.bar("seconds of MARS over AR, by the counted ratio, CPU", 1.08, over(taken, "mars", 1 / ratio))


def _pass(training: Training, batch: Batch, objective: Objective) -> None:
    fed = Packed(**batch)
    losses(objective, training.model, hidden_states(training.model, fed), fed).total.backward()
    training.model.zero_grad(set_to_none=False)


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bench], None]]] = {
    "count": (("cpu", "cuda"), count),
    "same": (("cuda",), same),
    "recompile": (("cpu", "cuda"), recompile),
    "memory": (("cpu", "cuda"), memory),
    "share": (("cuda",), share),
    "time": (("cpu", "cuda"), lambda bench: (time_gpu if bench.on_gpu else time_cpu)(bench)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part; repeats")
    parser.add_argument("--rounds", type=int, default=8, help="of `time`; at least 5 for an interval")
    bench = Bench(parser.parse_args())
    bench.found["environment"] = machine.environment(sys.argv) | {"cuda": torch.version.cuda}
    for name, (devices, part) in PARTS.items():
        if bench.device.type not in devices or (bench.asked.only and name not in bench.asked.only):
            continue
        bench.say(f"{name}: {part.__doc__ or ''}")
        began = time.monotonic()
        try:
            part(bench)
        except Exception as error:
            bench.found["errors"][name] = traceback.format_exc()
            bench.say(f"  failed: {type(error).__name__}: {error}")
        freed()
        bench.found["seconds"][name] = time.monotonic() - began
        bench.keep("done", [*bench.found["seconds"]])
        bench.say(f"  {bench.found['seconds'][name]:.0f} s")
    table = Table("what", "asked", "found", "95 % interval", "", title=f"random Qwen2.5-0.5B, {bench.device.type}")
    for bar in bench.bars:
        table.add_row(*row(bar))
    bench.console.print(table)
    if bench.found["errors"]:
        raise SystemExit(f"failed: {', '.join(bench.found['errors'])}")


if __name__ == "__main__":
    main()
