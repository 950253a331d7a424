"""The trainer: `transformers.Trainer` over a schedule, with the objective's loss.

It does what every training needs (accelerate, mixed precision, optimizer, checkpoints). Ours is that a step's loss is
divided by what its whole batch shares, that a loss which is no number ends the training, and that a checkpoint is
complete or absent. The defaults of `Settings` are those of the MARS paper (arXiv 2604.07023, appendix A).
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainingArguments

from mtbench.errors import UserError
from mtbench.options import option
from mtbench.training.checkpoint import write_record
from mtbench.training.conversations import Data
from mtbench.training.evaluation import evaluate
from mtbench.training.loss import attach_loss
from mtbench.training.objectives import Model, Objective, Special
from mtbench.training.packing import PADDING
from mtbench.training.schedule import Schedule

SELDOM = 20  # steps between two points of a curve, at most
LOGGED = 50  # points of a curve, at least, where a training has as many steps
PACKED = 4096  # tokens of a packed row
ROWS = 8  # of a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. A step takes `batch_size` conversations; the paper's is 384 of at most 512 tokens."""

    learning_rate: float = option(5e-6, "of AdamW, at its peak; a cosine leads to 0", low=0, high=1)
    epochs: float = option(5.0, "passes over the data", low=0.001, high=1000)
    batch_size: int = option(384, "conversations per step", low=1)
    warmup: float = option(0.03, "share of the steps in which the rate rises", low=0, high=1)
    max_length: int = option(512, "tokens of a conversation; longer answers are cut on the right", low=2)
    seed: int = option(42, "of order, masks and drawn data", low=0, high=(1 << 32) - 1)
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "of the saved weights; they are trained in float32")
    precision: Literal["auto", "float32", "bfloat16"] = option("auto", "of the arithmetic; auto: bfloat16 on a GPU")
    rows: int = option(ROWS, "of a forward; a step is as many forwards as it takes", low=1)
    pack: int | None = option(
        None, f"tokens of a row of several conversations, 0: one a row; unless said {PACKED} on a GPU", low=0
    )
    checkpointing: bool = option(False, "compute activations again in the backward pass, do not keep them")
    save_steps: int | None = option(None, "between resumable checkpoints; unless said ten in all", low=1)
    held_out: int = option(512, "conversations only evaluated on, from the end of each --data; at most a tenth", low=0)


class Progress(Protocol):
    """Who watches a training."""

    def note(self, text: str) -> None: ...

    def begin(self, steps: int, done: int) -> None: ...

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None: ...

    def end(self) -> None: ...


def fit(
    model: Model,
    objective: Objective,
    data: Data,
    settings: Settings,
    special: Special,
    kept: Path,
    request: Mapping[str, Any],
    teacher: Model | None = None,
    progress: Progress | None = None,
    report_to: str = "none",
) -> tuple[dict[str, Any], Mapping[str, Tensor] | None] | None:
    """Train `model` in place, going on from what is in `kept`.

    For the main process: the figures of the record, and the weights where processes hold parts of them.
    """
    on_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(kept),
        per_device_train_batch_size=1,  # of the schedule's forwards
        train_sampling_strategy="sequential",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        bf16=settings.precision == "bfloat16" or (settings.precision == "auto" and on_gpu),
        gradient_checkpointing=settings.checkpointing or None,  # said at all, its newest name is asked for
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=report_to,
        use_cache=True,  # what the checkpoint's config will say; training asks for none
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=2 if on_gpu else 0,
    )
    args._n_gpu = min(args.n_gpu, 1)  # several GPUs are several processes, never one with replicas
    learned, apart = data.split(settings.held_out)
    largest = objective.size(settings.max_length, 0)
    packed = (max(PACKED, largest) if on_gpu else 0) if settings.pack is None else settings.pack
    plan = partial(Schedule, objective=objective, special=special, rows=settings.rows, packed=packed)
    schedule = plan(
        examples=learned,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        seed=settings.seed,
        processes=args.world_size,
    )
    args.max_steps = schedule.steps
    args.warmup_steps = math.ceil(settings.warmup * schedule.steps)
    args.gradient_accumulation_steps = schedule.forwards // args.world_size
    args.logging_steps = min(SELDOM, max(1, schedule.steps // LOGGED))
    tenth = math.ceil(schedule.steps / 10 / args.logging_steps) * args.logging_steps
    args.save_steps = settings.save_steps or tenth
    attach_loss(model, objective, teacher and teacher.to(args.device))
    if on_gpu and packed:  # rows of one length: nothing is compiled twice
        for layer in model.base_model.layers:
            layer.compile(dynamic=False)
    trainer = ObjectiveTrainer(
        model=model, args=args, train_dataset=schedule, data_collator=itemgetter(0), callbacks=[]
    )
    trainer.watch(schedule, request, progress)
    shutil.rmtree(kept / "writing", ignore_errors=True)
    last = _last_checkpoint(kept)
    watched = progress if trainer.is_world_process_zero() else None
    if watched:
        watched.begin(schedule.steps, 0 if last is None else int(Path(last).name.partition("-")[2]))
    try:
        trainer.train(resume_from_checkpoint=last)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        less = _less(settings, packed, largest)
        raise UserError(f"out of memory with {settings.rows} rows a forward; {less}") from None
    finally:
        if watched:
            watched.end()
    figures = trainer.figures()
    if apart:
        aside = plan(examples=apart, batch_size=len(apart), epochs=1, seed=0)
        trainer.model_wrapped.eval()
        figures["evaluation"] = evaluate(trainer.model_wrapped, aside, args.device)
    del model.forward
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None  # all processes give theirs
    return (figures, whole) if trainer.is_world_process_zero() else None


def _less(settings: Settings, packed: int, largest: int) -> str:
    """What to halve. A packed row must still hold the largest conversation."""
    if settings.rows > 1:
        return f"halve them with `--rows {settings.rows // 2}`: the same losses, in more forwards a step"
    if packed // 2 >= largest:
        return f"halve the row with `--pack {packed // 2}`"
    return f"{'' if settings.checkpointing else 'add `--checkpointing`, or '}halve `--max-length {settings.max_length}`"


def _some(numbers: Sequence[int], most: int = 16) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def _last_checkpoint(kept: Path) -> str | None:
    found = sorted(kept.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))
    return str(found[-1]) if found else None


class ObjectiveTrainer(Trainer):  # type: ignore[misc] # transformers is not type-checked here
    """A Trainer that logs a loss with its parts, stops when it is no number, and leaves only complete checkpoints."""

    def watch(self, schedule: Schedule, request: Mapping[str, Any], progress: Progress | None) -> None:
        """Called once, before training."""
        self.model_accepts_loss_kwargs = False  # the schedule has divided the loss; see compute_loss
        self.remove_callback(PrinterCallback)
        self.schedule, self.request, self.progress = schedule, request, progress
        self.unlogged: list[Tensor] = []  # per forward of this process: parts of the loss, tokens fed and predicted
        self.rates: list[float] = []  # per step since the last log
        self.norms: list[Any] = []  # of the gradient, likewise
        self.logged_at = time.perf_counter()

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Tensor:
        """The batch's part of the step's loss, made good for the mean that is taken over forwards and processes."""
        told = model(**inputs)
        fed = (inputs["document"] != PADDING).sum()
        predicted = fed.new_tensor(len(inputs["at"]))
        self.unlogged.append(torch.cat([told["parts"], torch.stack([fed, predicted]).to(told["parts"].dtype)]))
        loss: Tensor = told["loss"] * self.schedule.forwards
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Once a step, before the weights change."""
        self.rates.append(self._get_learning_rate())
        self.norms.append(super()._clip_grad_norm(model))
        return self.norms[-1]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Before it is saved, a training is logged: its curve is whole, and its loss a number."""
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        """A point of the curve: means over the steps since the last one. Raises UserError where a loss is no number."""
        if not self.unlogged:
            return
        # The forwards of a step take turns over the processes.
        told = self.accelerator.gather(torch.stack(self.unlogged)).unflatten(0, (self.schedule.processes, -1))
        each = told.transpose(0, 1).reshape(-1, self.schedule.forwards, told.shape[-1]).double().cpu()
        steps = each.sum(1)  # (steps, P + 2)
        self.unlogged.clear()
        names = self.schedule.objective.parts
        norms = torch.tensor([float(norm or 0) for norm in self.norms])
        self._stop_where_lost(each[:, :, : len(names)].sum(2), norms, self.rates)
        parts = steps[:, : len(names)].mean(0).tolist()
        fed, predicted = steps[:, len(names) :].sum(0).long().tolist()
        before = self.state.log_history[-1] if self.state.log_history else {"fed": 0, "predicted": 0, "train_s": 0.0}
        took, self.logged_at = time.perf_counter() - self.logged_at, time.perf_counter()
        point = {
            "loss": round(sum(parts), 6),
            **{name: round(value, 6) for name, value in zip(names, parts, strict=True)},
            "learning_rate": self.rates[-1],
            "fed": before["fed"] + fed,
            "predicted": before["predicted"] + predicted,
            "train_s": round(before["train_s"] + took, 3),
        }
        self.rates.clear()
        self.norms.clear()
        super().log(point)
        if self.progress and self.is_world_process_zero():
            shown = {name: point[name] for name in ("loss", *(names if len(names) > 1 else ()))}
            self.progress.step(self.state.global_step, shown, fed / took)

    def _stop_where_lost(self, losses: Tensor, norms: Tensor, rates: Sequence[float]) -> None:
        """Raise UserError at the first step whose loss (steps, forwards) or gradient norm (steps,) is no number."""
        sound = losses.isfinite().all(1) & norms.isfinite()
        if sound.all():
            return
        lost = int((~sound).nonzero()[0])
        what, value, forward = "gradient", norms[lost], None
        if not losses[lost].isfinite().all():
            forward = int((~losses[lost].isfinite()).nonzero()[0])
            what, value = "loss", losses[lost, forward]
        step = self.state.global_step - len(losses) + lost
        rows = self.schedule.conversations(step, forward)
        raise UserError(
            f"the {what} of step {step + 1} is {value.item()}, at a learning rate of {rates[lost]:.2g}, "
            f"on conversations {_some(rows)}; lower `--learning-rate`, or look at those"
        )

    def figures(self) -> dict[str, Any]:
        """What the record says of the training so far."""
        history = [dict(point) for point in self.state.log_history]
        last = history[-1] if history else {"fed": 0, "predicted": 0, "train_s": 0.0}
        done = self.state.global_step
        conversations = sum(len(self.schedule.conversations(step)) for step in (done - 1,)) if done else 0
        return {
            "steps": done,
            "tokens": {
                "fed": last["fed"],
                "predicted": last["predicted"],
                "conversations": conversations + max(0, done - 1) * self.schedule.batch_size,
            },
            "train_s": last["train_s"],
            "tokens_per_s": round(last["fed"] / last["train_s"], 1) if last["train_s"] else None,
            "curve": [
                {name: point[name] for name in ("step", "loss", *self.schedule.objective.parts, "learning_rate")}
                for point in history
            ],
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written aside, then renamed; the one before goes when the new one is there."""
        kept = Path(self.args.output_dir)
        self.args.output_dir = str(kept / "writing")
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(kept)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            before = list(kept.glob("checkpoint-*"))
            new = kept / "writing" / f"checkpoint-{self.state.global_step}"
            write_record(new, {**self.request, **self.figures()})
            new.rename(kept / new.name)
            for folder in before:
                shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()
