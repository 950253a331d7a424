"""Trainings of models of width 16 that take a fraction of a second: their requests, and what they wrote."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from mtbench.errors import UserError
from mtbench.models.attention import ATTENTION
from mtbench.models.families import RECORD
from mtbench.training.conversations import prepare
from mtbench.training.objectives import Mars, Objective, Special
from mtbench.training.packing import Example, TrainingSequence
from mtbench.training.schedule import Schedule
from mtbench.training.train import TrainingRequest, check, train
from mtbench.training.trainer import Progress, Settings

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
USUAL = Settings(
    learning_rate=1e-2, epochs=2, batch_size=4, warmup=0.2, max_length=48, dtype="float32", rows=3, save_steps=2
)
VOCAB, MASK, END = 23, 20, 21  # of narrow models
SPECIAL = Special(mask=MASK, end=END)
COUNT, HELD_OUT, STEPS = 16, 1, 8  # 15 conversations twice, in steps of 4
MARS = Mars(block_size=4, timestep_weight=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread, so that sums always have the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def conversation(n: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"{n}?" + " more" * (n % 3)},
        {"role": "assistant", "content": " ".join(str(n + i) for i in range(1 + n % 5))},
    ]


def narrow_model(vocabulary: int, layers: int = 1, seed: int = 0, attention: str = ATTENTION) -> Any:
    """A random Qwen2 of width 16, far from uniform, so that the context matters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config)


def conversations(seed: int) -> list[Example]:
    """Prompts of one to three turns, an answer each; lengths that no block size divides."""
    rng = Random(seed)
    examples = []
    for turns, answer in ((1, 7), (2, 1), (3, 12), (1, 18)):
        prompt = sum(rng.randint(1, 6) for _ in range(turns))
        examples.append(Example(torch.tensor([rng.randrange(20) for _ in range(prompt + answer)]), prompt))
    return examples


def sequences_of(objective: Objective, seed: int) -> list[TrainingSequence]:
    return [objective.build(e, SPECIAL, torch.Generator().manual_seed(i)) for i, e in enumerate(conversations(seed))]


def exact(model: Any) -> Any:
    """The model in float64, its norms too: transformers' compute in float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.double()


def requested(
    objective: Objective, base: str, rows: str, settings: Settings, out: Path, **more: Any
) -> TrainingRequest:
    return TrainingRequest(objective=objective, base=base, data=(rows,), settings=settings, out=out, **more)


def run(
    objective: Objective,
    base: str,
    rows: str,
    settings: Settings,
    out: Path,
    progress: Progress | None = None,
    teacher: str | None = None,
) -> Path:
    return train(requested(objective, base, rows, settings, out, teacher=teacher), progress)


def record(folder: Path) -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return entries


def losses_of(folder: Path) -> list[float]:
    return [point["loss"] for point in record(folder)["curve"]]


def resume_folder(out: Path) -> Path:
    return out.with_name(out.name + ".training")


def last_checkpoint(out: Path) -> Path | None:
    return max(
        resume_folder(out).glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]), default=None
    )


def assert_same_training(out: Path, undisturbed: Path) -> None:
    """Equal to the bit, and no other file is left."""
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    ours, theirs = record(out), record(undisturbed)
    for name in ("curve", "tokens", "steps", "evaluation", "settings", "data"):
        assert ours[name] == theirs[name], name
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def assert_complete(folder: Path) -> None:
    """A checkpoint that loads, with finite weights and its record."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    expected = {
        "objective",
        "options",
        "settings",
        "data",
        "base",
        "base_sha256",
        "steps",
        "tokens",
        "curve",
        "versions",
    }
    assert expected <= record(folder).keys()


def plan(base: str, rows: str, objective: Objective, settings: Settings = USUAL) -> Schedule:
    """The schedule that the training must have had."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    examples = prepare(rows, None, tokenizer, max_length=settings.max_length, seed=settings.seed).examples
    return Schedule(
        examples=examples.take(torch.arange(len(examples) - HELD_OUT)),
        objective=objective,
        special=Special(tokenizer.mask_token_id, tokenizer.eos_token_id),
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        rows=settings.rows,
        packed=0,
    )


class Killed(Exception):
    """Stands for a power cut."""


class Watch:
    """Records the progress of a training; raises at a step."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.started_at: tuple[int, int] | None = None
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.ended = False

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, steps: int, done: int) -> None:
        self.started_at = (steps, done)

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None:
        if step == self.kill_at:
            raise Killed
        self.steps.append(step)

    def end(self) -> None:
        self.ended = True


def broken_after(function: Any, times: int) -> Any:
    """Return the function, which raises after this many calls."""
    calls = iter(range(times))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return function(*args, **kwargs)

    return broken


def broken_by(error: Exception) -> Any:
    def broken(*_: Any) -> Any:
        raise error

    return broken


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


def saved(folder: Path, base: str, config: Any) -> str:
    """A random model with the base's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def both_refuse(request: TrainingRequest, reason: str) -> None:
    """`train` and `check`, which the dry run calls, refuse with the same line."""
    for refuse in (train, check):
        with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*$"):
            refuse(request)
