"""The trainer: `transformers.Trainer` over a schedule, with the objective's loss.

The base class provides accelerate, mixed precision, optimizer and checkpoints. Added here: the loss is divided by the
divisor of the whole step, a loss or gradient that is NaN or infinite ends the training, and a checkpoint is complete or
absent. The defaults of `Settings` are those of the MARS paper (arXiv 2604.07023, appendix A).
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainingArguments

from mtbench.errors import UserError, is_out_of_memory
from mtbench.models.auto import fastest_for
from mtbench.options import option
from mtbench.options.common import TRAINING
from mtbench.training.checkpoint import write_errors, write_record
from mtbench.training.conversations import Data
from mtbench.training.cost import Cost, cost_of
from mtbench.training.evaluation import evaluate
from mtbench.training.loss import attach_loss
from mtbench.training.objectives import Model, Objective, Special
from mtbench.training.packing import PADDING, Packed
from mtbench.training.schedule import Schedule

MAX_LOG_STEPS = 20  # steps between two points of a curve, at most
MIN_POINTS = 50  # points of a curve, at least, if a training has as many steps
COUNTED = ("fed", "predicted", "pairs", "forwards")  # of a training: tokens, predictions, query-key pairs, passes
PACKED = 4096  # tokens of a packed row
ROWS = 8  # rows of a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. A step takes `batch_size` conversations; the paper's is 384 of at most 512 tokens."""

    panel: ClassVar[str] = TRAINING  # of its options, in `--help`

    learning_rate: float = option(5e-6, "peak learning rate of AdamW; a cosine decays it to 0", low=0, high=1)
    epochs: float = option(5.0, "passes over the data", low=0.001, high=1000)
    flops: float | None = option(
        None, "train on as many conversations as so many FLOPs pay for, in the place of --epochs", low=1
    )
    minutes: float | None = option(
        None, "end after so many minutes, if the passes take longer; the learning rate is 0 by then", low=0.01, high=1e6
    )
    batch_size: int = option(384, "conversations per step", low=1)
    warmup: float = option(0.03, "share of the steps in which the learning rate rises", low=0, high=1)
    max_length: int = option(512, "tokens of a conversation; longer answers are cut on the right", low=2)
    seed: int = option(42, "random seed for data order, masks and drawn data", low=0, high=(1 << 32) - 1)
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "dtype of the saved weights")
    rows: int = option(ROWS, "rows of a forward pass; a step takes as many forward passes as it needs", low=1)
    pack: int | None = option(
        None, f"tokens of a row that holds several conversations; 0: one per row; default {PACKED} on a GPU", low=0
    )
    checkpointing: bool = option(False, "recompute activations in the backward pass to save memory")
    save_steps: int | None = option(None, "steps between resumable checkpoints; default: ten checkpoints in all", low=1)
    held_out: int = option(512, "conversations for evaluation, from the end of each --data; at most a tenth", low=0)
    patience: int | None = option(
        None,
        "early stopping: resumable checkpoints without a lower held-out loss; the best one's weights are kept",
        low=1,
    )

    def packed_length(self, on_gpu: bool, longest: int = 0) -> int:
        """Return the tokens of a packed row, by default enough for `longest`; 0: one conversation per row."""
        if self.pack is not None:
            return self.pack
        return max(PACKED, longest) if on_gpu else 0


class Progress(Protocol):
    """Shows the progress of a training."""

    def note(self, text: str) -> None: ...

    def begin(self, steps: int, done: int) -> None: ...

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The work of `fit`. `resume_folder` holds the resumable checkpoints; each carries `request` in its record."""

    model: Model
    objective: Objective
    data: Data
    settings: Settings
    special: Special
    resume_folder: Path
    request: Mapping[str, Any]
    teacher: Model | None = None
    progress: Progress | None = None
    report_to: str = "none"

    def schedule(self, **changes: Any) -> Schedule:
        """Return a schedule with the job's objective and row sizes."""
        longest = self.objective.max_fed_tokens(self.settings.max_length, 0)
        return Schedule(
            objective=self.objective,
            special=self.special,
            rows=self.settings.rows,
            packed=self.settings.packed_length(torch.cuda.is_available(), longest),
            **changes,
        )


class Trained(NamedTuple):
    """The result of a training."""

    figures: dict[str, Any]  # for the training record
    gathered_weights: Mapping[str, Tensor] | None  # if each process holds only a part of the weights


def fit(job: TrainingJob) -> Trained | None:
    """Train `job.model` in place; continue from the last checkpoint in `job.resume_folder`.

    Returns None in all processes but the main one. Raises UserError if memory runs out, or if a loss or gradient is NaN
    or infinite.
    """
    on_gpu = torch.cuda.is_available()
    args = _training_arguments(job, on_gpu)
    if job.settings.minutes is not None and args.world_size > 1:  # they would end at different steps
        raise UserError(f"--minutes is for one process, here are {args.world_size}; give `--epochs` alone.")
    training_examples, held_out_examples = job.data.split(job.settings.held_out)
    schedule = job.schedule(
        examples=training_examples,
        batch_size=job.settings.batch_size,
        epochs=job.settings.epochs,
        seed=job.settings.seed,
        processes=args.world_size,
    )
    cost = cost_of(job.objective, job.model, job.teacher)
    if job.settings.flops is not None:
        if cost is None:
            raise UserError(
                "--flops: the FLOPs of this model are not counted (experts, or layers of several sizes); "
                "give `--epochs` instead."
            )
        schedule = replace(schedule, epochs=cost.epochs(job.settings.flops, schedule))
    _set_steps(args, schedule, job.settings)
    attach_loss(job.model, job.objective, None if job.teacher is None else job.teacher.to(args.device))
    if on_gpu and schedule.packed:  # all rows have one length, so nothing is compiled twice
        for layer in job.model.base_model.layers:
            layer.compile(dynamic=False)
    trainer = ObjectiveTrainer(
        model=job.model, args=args, train_dataset=schedule, data_collator=itemgetter(0), callbacks=[]
    )
    if trainer.is_fsdp_enabled:  # it would round the weights of predictions and the loss to bfloat16, too
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = None
    held_out = None
    if held_out_examples:
        held_out = job.schedule(examples=held_out_examples, batch_size=len(held_out_examples), epochs=1, seed=0)
    trainer.watch(schedule, held_out, job, cost)
    _run(trainer, job, schedule)
    trainer.load_best()
    figures = trainer.figures()
    if held_out is not None:
        figures["evaluation"] = trainer.evaluation()
    del job.model.forward
    gathered = None
    if trainer.is_fsdp_enabled:  # collective: every process takes part
        gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return Trained(figures, gathered) if trainer.is_world_process_zero() else None


def _training_arguments(job: TrainingJob, on_gpu: bool) -> TrainingArguments:
    settings = job.settings
    in_bfloat16 = fastest_for(job.model.num_parameters(), "cuda" if on_gpu else "cpu") == "bfloat16"
    args = TrainingArguments(
        output_dir=str(job.resume_folder),
        per_device_train_batch_size=1,  # an item of the schedule is the batch of a forward pass
        train_sampling_strategy="sequential",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        bf16=in_bfloat16,  # of the arithmetic (autocast); weights and optimizer stay in float32
        gradient_checkpointing=settings.checkpointing or None,  # False, too, gives a deprecation warning
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=job.report_to,
        use_cache=True,  # the value that the saved config gets; training itself passes use_cache=False
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        dataloader_num_workers=2 if on_gpu else 0,
    )
    args._n_gpu = min(args.n_gpu, 1)  # with several GPUs start several processes; DataParallel is never used
    return args


def _set_steps(args: TrainingArguments, schedule: Schedule, settings: Settings) -> None:
    """Set the numbers of steps, and the intervals of warm-up, logging and saving, which follow from the schedule."""
    args.max_steps = schedule.steps
    args.warmup_steps = math.ceil(settings.warmup * schedule.steps)
    args.gradient_accumulation_steps = schedule.forwards // args.world_size
    args.logging_steps = min(MAX_LOG_STEPS, max(1, schedule.steps // MIN_POINTS))
    tenth = math.ceil(schedule.steps / 10 / args.logging_steps) * args.logging_steps
    args.save_steps = settings.save_steps or tenth


def _run(trainer: "ObjectiveTrainer", job: TrainingJob, schedule: Schedule) -> None:
    """Train from the last checkpoint to the end. Raises UserError if memory runs out."""
    shutil.rmtree(job.resume_folder / "writing", ignore_errors=True)
    checkpoint = max(job.resume_folder.glob("checkpoint-*"), key=_step_of, default=None)
    progress = job.progress if trainer.is_world_process_zero() else None
    if progress:
        progress.begin(schedule.steps, 0 if checkpoint is None else _step_of(checkpoint))
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with {job.settings.rows} rows a forward; halve `--rows` or `--pack`, or add "
            "`--checkpointing`: the losses stay the same. A smaller `--max-length` helps, too."
        ) from None
    finally:
        if progress:
            progress.end()


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


class ObjectiveTrainer(Trainer):  # type: ignore[misc] # transformers is not type-checked here
    """A Trainer that logs a loss with its parts, stops at NaN or infinity, and leaves only complete checkpoints."""

    def watch(self, schedule: Schedule, held_out: Schedule | None, job: TrainingJob, cost: Cost | None) -> None:
        """Set up logging and early stopping. Called once, before training."""
        self.model_accepts_loss_kwargs = False  # the schedule has divided the loss already; see compute_loss
        self.remove_callback(PrinterCallback)
        settings, self.request, self.progress = job.settings, job.request, job.progress
        self.schedule, self.held_out, self.patience = schedule, held_out, settings.patience
        self.cost, self.teaches = cost, job.teacher is not None
        self.unlogged: list[Tensor] = []  # per forward pass of this process: loss parts, what COUNTED names
        self.rates: list[float] = []  # learning rate of each step since the last log
        self.norms: list[Any] = []  # gradient norm of each step since the last log
        self.logged_at = self.started_at = time.perf_counter()
        self.limit_s = None if settings.minutes is None else 60 * settings.minutes
        self.warmup = settings.warmup
        self.first_step_s: float | None = None  # of this process, with what it compiles and reads
        self.tenths = 0  # of the time, that were over at the last step
        self.saved_step = -1

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the schedule of the learning rate. With a limited time it follows the steps or the time."""
        if self.limit_s is None:
            return super().create_scheduler(num_training_steps, optimizer)

        def rate(step: int) -> float:
            done = min(1.0, max(step / num_training_steps, self._time_share()))
            if done < self.warmup or self.warmup == 1:
                return done / self.warmup
            return 0.5 + 0.5 * math.cos(math.pi * (done - self.warmup) / (1 - self.warmup))

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rate)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _time_share(self) -> float:
        """Return how much of the limited time is over; 0 until the end of this process's first step."""
        if self.limit_s is None or self.first_step_s is None:
            return 0.0
        elapsed_s = self._last_point["train_s"] + time.perf_counter() - self.logged_at
        return float((elapsed_s - self.first_step_s) / max(1e-3, self.limit_s - self.first_step_s))

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Tensor:
        """Return the batch's part of the step's loss, times the forward passes over which the Trainer takes a mean."""
        with self.accelerator.autocast():  # accelerate does it itself, except for a model in parts
            output = model(**inputs)
        batch = Packed(**inputs)
        fed = (batch.document != PADDING).sum()
        counts = torch.stack([fed, fed.new_tensor(len(batch.predictor)), batch.pairs, fed.new_tensor(1)])
        self.unlogged.append(torch.cat([output["parts"].double(), counts.double()]))
        loss: Tensor = output["loss"] * self.schedule.forwards
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        """Keep learning rate and gradient norm. Called once per step, before the weights change."""
        self.rates.append(self._get_learning_rate())
        self.norms.append(super()._clip_grad_norm(model))
        return self.norms[-1]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before every save, so that a checkpoint has its whole curve and its loss was checked.

        A limited time is saved by tenths, and ends the training. So does a held-out loss that no longer falls.
        """
        if self.limit_s is not None:
            self.first_step_s = self.first_step_s or time.perf_counter() - self.started_at
            tenths = int(10 * self._time_share())
            self.control.should_save |= tenths > self.tenths
            self.control.should_training_stop |= tenths >= 10
            self.tenths = tenths
        self.control.should_log |= self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.control.should_training_stop |= self.patience is not None and self._best[1] >= self.patience

    def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        """Add a point to the curve: means over the steps since the last one.

        Raises UserError if a loss or gradient is NaN or infinite.
        """
        if not self.unlogged:
            return
        of_a_step = self.schedule.forwards // self.schedule.processes
        mine = torch.stack(self.unlogged).unflatten(0, (-1, of_a_step)).sum(1)  # (steps, P + 4)
        steps = self.accelerator.reduce(mine, "sum").cpu()
        self.unlogged.clear()
        names = self.schedule.objective.parts
        norms = torch.tensor([float(norm or 0) for norm in self.norms])
        self._stop_at_nonfinite(steps[:, : len(names)].sum(1), norms)
        point = self._point(steps, names)
        tokens = point["fed"] - self._last_point["fed"]
        seconds, self.logged_at = time.perf_counter() - self.logged_at, time.perf_counter()
        point["train_s"] = round(self._last_point["train_s"] + seconds, 3)
        self.rates.clear()
        self.norms.clear()
        super().log(point)
        if self.progress and self.is_world_process_zero():
            shown = ["loss", *names] if len(names) > 1 else ["loss"]
            self.progress.step(self.state.global_step, {name: point[name] for name in shown}, tokens / seconds)

    @property
    def _last_point(self) -> Mapping[str, Any]:
        """The last point of the curve, with the totals so far; zeros before the first."""
        if self.state.log_history:
            point: Mapping[str, Any] = self.state.log_history[-1]
            return point
        return {**dict.fromkeys(COUNTED, 0), "train_s": 0.0}

    def _point(self, steps: Tensor, names: Sequence[str]) -> dict[str, Any]:
        """Return a point of the curve but for its time, from the sums of each step (steps, P + 4)."""
        parts = steps[:, : len(names)].mean(0).tolist()
        counts = zip(COUNTED, steps[:, len(names) :].sum(0).long().tolist(), strict=True)
        return {
            "loss": round(sum(parts), 6),
            **{name: round(value, 6) for name, value in zip(names, parts, strict=True)},
            "learning_rate": self.rates[-1],
            **{name: self._last_point.get(name, 0) + number for name, number in counts},
        }

    def _stop_at_nonfinite(self, losses: Tensor, norms: Tensor) -> None:
        """Raise UserError at the first step whose loss (steps,) or gradient norm (steps,) is not finite."""
        finite = losses.isfinite() & norms.isfinite()
        if finite.all():
            return
        index = int((~finite).nonzero()[0])
        name, value = ("gradient", norms[index]) if losses[index].isfinite() else ("loss", losses[index])
        step = self.state.global_step - len(losses) + index + 1
        raise UserError(
            f"the {name} of step {step} is {value.item()}, at a learning rate of {self.rates[index]:.2g}; "
            "lower `--learning-rate`, or check the data"
        )

    def evaluation(self) -> dict[str, Any]:
        """Return loss, accuracy and calibration on the held-out conversations, of which there are some."""
        assert self.held_out is not None
        self.model_wrapped.eval()
        with self.accelerator.autocast():
            return evaluate(self.model_wrapped, self.held_out, self.args.device)

    @property
    def _best(self) -> tuple[int, int]:
        """The step of the lowest held-out loss (without any, the last one), and the number of evaluations after it.

        They follow from the curve, so a resumed training keeps the same weights.
        """
        losses = [(point["held_out"], point["step"]) for point in self.state.log_history if "held_out" in point]
        _, best = min(losses, default=(0.0, self.state.global_step))
        return best, sum(step > best for _, step in losses)

    def load_best(self) -> None:
        """Load the weights of the lowest held-out loss, if others followed."""
        if (best := self._best[0]) != self.state.global_step:
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / f"checkpoint-{best}")
            self._load_best_model()
            if self.progress and self.is_world_process_zero():
                self.progress.note(f"the weights of step {best} are kept: the held-out loss was lowest there")

    def figures(self) -> dict[str, Any]:
        """Return the figures of the training so far, for its record."""
        last, done = self._last_point, self.state.global_step
        columns = ("step", "loss", *self.schedule.objective.parts, "learning_rate", "held_out")
        conversations = 0
        if done:
            conversations = (done - 1) * self.schedule.batch_size + len(self.schedule.conversations(done - 1))
        return {
            "steps": done,
            "tokens": {"fed": last["fed"], "predicted": last["predicted"], "conversations": conversations},
            **self._cost_so_far(),
            "train_s": last["train_s"],
            "tokens_per_s": round(last["fed"] / last["train_s"], 1) if last["train_s"] else None,
            "curve": [{name: point[name] for name in columns if name in point} for point in self.state.log_history],
        }

    def _cost_so_far(self) -> dict[str, Any]:
        """Return forward passes and FLOPs; None if an older release, which did not count them, began the training."""
        if any("fed" in point and "pairs" not in point for point in self.state.log_history):
            return {"forwards": None, "flops": None}
        fed, predicted, pairs, forwards = (self._last_point[name] for name in COUNTED)
        return {
            "forwards": {"student": forwards, "teacher": forwards * self.teaches},
            "flops": self.cost and self.cost.flops(fed, predicted, pairs),
        }

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint to the folder `writing`, rename it, then remove those before but for the best.

        transformers may call this twice after the last step of an epoch.
        """
        if self.state.global_step == self.saved_step:
            return
        if self.patience is not None:
            loss = torch.tensor(self.evaluation()["loss"], device=self.args.device)
            self.state.log_history[-1]["held_out"] = round(self.accelerator.reduce(loss, "mean").item(), 5)
        resume_folder = Path(self.args.output_dir)
        self.args.output_dir = str(resume_folder / "writing")
        try:
            with write_errors(resume_folder):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(resume_folder)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            with write_errors(resume_folder):
                self._keep_checkpoint(resume_folder)
        self.accelerator.wait_for_everyone()

    def _keep_checkpoint(self, resume_folder: Path) -> None:
        previous = list(resume_folder.glob("checkpoint-*"))
        written = resume_folder / "writing" / f"checkpoint-{self.state.global_step}"
        write_record(written, {**self.request, **self.figures()})
        written.rename(resume_folder / written.name)
        for folder in previous:
            if _step_of(folder) != self._best[0]:
                shutil.rmtree(folder)
        self.saved_step = self.state.global_step
