"""Training: from an objective, conversations and a base checkpoint to a trained checkpoint with its training record.

All checks that need no weights come first (`check`), for a dry run too. An interrupted training
continues from its last complete checkpoint when the same request is made again, with the same losses as without the
interruption.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mtbench import files
from mtbench.errors import UserError
from mtbench.files import refuse_existing
from mtbench.models.architectures import attention_of
from mtbench.models.attention import ATTENTION
from mtbench.models.chat_template import Options
from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.configuration import downloaded
from mtbench.models.families import existing, locate
from mtbench.models.loading import Inspected, inspect, refuse_undecodable
from mtbench.records import flat
from mtbench.training.checkpoint import write_checkpoint, write_copy, write_draft, write_errors
from mtbench.training.conversations import Data, prepare
from mtbench.training.loss import plain_attention_mask
from mtbench.training.mask_token import grow_embedding, refuse_mask_in_text, with_mask
from mtbench.training.objectives import Model, Objective, Special
from mtbench.training.processes import fsdp_format, processes, refuse_other_launch
from mtbench.training.recipes import Stage
from mtbench.training.trainer import Progress, Trained, TrainingJob, fit

FREE = ("settings.rows", "settings.pack", "settings.checkpointing")  # may change on resuming: they change no loss


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(Stage):
    """The objective, the data and the output folder. `base` and `teacher` are checkpoints."""

    name: str = ""
    objective: Objective
    base: str
    out: Path
    grow_vocabulary: bool = False  # or add a row for one to its embedding
    chat_template_kwargs: Options = field(default_factory=dict)
    data_dir: Path | None = None
    offline: bool = False

    @property
    def teacher_source(self) -> str | None:
        """The checkpoint that teaches: the named one, or for some objectives the base as it was."""
        return self.teacher or (self.base if self.objective.taught_by_base else None)

    @property
    def resume_folder(self) -> Path:
        """The folder beside `out` that holds what is needed to resume; it is removed at the end."""
        return self.out.with_name(self.out.name + ".training")


class Checked(NamedTuple):
    """The findings of `check`."""

    base: Inspected
    teacher: Inspected | None
    data: Data
    record: dict[str, Any]  # of the request, for the training record


def train(request: TrainingRequest, progress: Progress | None = None, report_to: str = "none") -> Path:
    """Train as requested and return the folder of the trained checkpoint, which is complete or absent.

    If the training is interrupted, the same request continues it. Raises UserError as `check` does, for a model whose
    logits are not one matrix product, and as `fit` does.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    checked = check(request)
    group = processes()
    if progress and group.is_main_process:
        progress.note(checked.data.summary)
    objective, tokenizer = request.objective, checked.base.tokenizer
    model = _load(checked.base)
    teacher = None if checked.teacher is None else _load(checked.teacher)
    if request.grow_vocabulary and checked.base.mask_id is not None:
        for each in (model,) if teacher is None else (model, teacher):
            grow_embedding(each, checked.base.mask_id)
    special = _attach(request, checked, model, progress if group.is_main_process else None)
    if group.is_main_process:
        files.write_json(request.resume_folder / "request.json", checked.record)
    group.wait_for_everyone()
    job = TrainingJob(
        model=model,
        objective=objective,
        data=checked.data,
        settings=request.settings,
        special=special,
        resume_folder=request.resume_folder,
        request=checked.record,
        teacher=teacher,
        progress=progress,
        report_to=report_to,
    )
    trained = _fit(job, is_main=group.is_main_process)
    if trained is None:  # the main process writes the checkpoint
        return request.out
    if trained.gathered_weights is not None:
        model = _whole(model, objective, special, trained.gathered_weights)
    config = objective.checkpoint_config(model)
    added, record = objective.detach(model), {**checked.record, **trained.figures}
    if objective.stored == "alone":
        write_draft(request.out, config, added, request.settings.dtype, record)
    elif objective.stored == "inside":
        base = downloaded(checked.base.source, offline=request.offline)
        write_copy(request.out, base, config, added, request.settings.dtype, record)
    else:
        write_checkpoint(
            request.out,
            model,
            tokenizer,
            request.settings.dtype,
            record,
            {f"{objective.name}.safetensors": added} if added else {},
        )
    with write_errors(request.resume_folder):
        shutil.rmtree(request.resume_folder)
    return request.out


def _fit(job: TrainingJob, *, is_main: bool) -> Trained | None:
    """Train; if that ends before there is anything to resume, remove the folder for it."""
    try:
        return fit(job)
    except UserError:
        if is_main and not any(job.resume_folder.glob("checkpoint-*")):
            shutil.rmtree(job.resume_folder)
        raise


def _attach(request: TrainingRequest, checked: Checked, model: Model, progress: Progress | None) -> Special:
    objective, base, parts = request.objective, checked.base, checked.data.split(request.settings.held_out)
    special = Special(base.mask_id if objective.needs_mask else None, base.tokenizer.eos_token_id, parts[0])
    objective.attach(model, special)
    if progress and (note := objective.note(model, parts)):
        progress.note(note)
    return special


def _whole(model: Model, objective: Objective, special: Special, weights: Mapping[str, Tensor]) -> Model:
    """Return a copy of a model of which each process holds a part, with all its weights."""
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model.config)
        objective.attach(whole, special)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    whole.generation_config = model.generation_config
    return whole


def check(request: TrainingRequest) -> Checked:
    """Raise UserError for every fault that shows without loading weights.

    That is: a launch other than DDP or FSDP2, an existing `out`, options that contradict one another, checkpoints that
    cannot be trained, conversations that cannot be read, and an interrupted training that was requested otherwise.
    Nothing is written.
    """
    refuse_other_launch()
    refuse_existing(request.out)
    _check_options(request)
    objective, settings = request.objective, request.settings
    given = request.mask_token is not None or request.grow_vocabulary
    needs_mask = objective.needs_mask and not given
    base = inspect(locate(existing(request.base)), offline=request.offline, needs_mask=needs_mask)
    refuse_undecodable(base)
    _refuse_other_layout(base, objective)
    if objective.needs_mask:
        base = with_mask(base, request.mask_token, grow=request.grow_vocabulary)
    teacher = None
    if request.teacher_source is not None:
        teacher = inspect(locate(existing(request.teacher_source)), offline=request.offline)
        refuse_undecodable(teacher)
        _refuse_other_vocabulary(base, teacher)
    data = prepare(
        request.data,
        request.to_read(),
        base.tokenizer,
        max_length=settings.max_length,
        seed=settings.seed,
        options=request.chat_template_kwargs,
        data_dir=request.data_dir,
        offline=request.offline,
    )
    if objective.needs_mask:
        refuse_mask_in_text(base, data.examples.ids)
    if (largest := int(data.examples.ids.max())) >= base.vocabulary and not request.grow_vocabulary:
        raise UserError(
            f"the data have the token id {largest}, and {base.source!r} has {base.vocabulary} rows; give another base."
        )
    if settings.patience is not None and not data.split(settings.held_out)[1]:
        raise UserError(
            "--patience needs held-out conversations; raise `--held-out`, or give ten conversations or more."
        )
    record = _request_record(request, base, teacher, data)
    _refuse_other_request(request.resume_folder, record)
    return Checked(base, teacher, data, record)


def _check_options(request: TrainingRequest) -> None:
    objective, settings = request.objective, request.settings
    if not objective.needs_mask and (request.mask_token is not None or request.grow_vocabulary):
        raise UserError(f"{objective.name} feeds no mask token; leave out --mask-token and --grow-vocabulary.")
    if objective.freezes_model and request.grow_vocabulary:
        raise UserError(
            f"{objective.name} leaves the model as it is, and --grow-vocabulary would change it; name a reserved token "
            "with --mask-token."
        )
    if objective.needs_teacher and request.teacher_source is None:
        raise UserError(f"{objective.name} needs `--teacher CHECKPOINT` to distil from")
    if request.teacher is not None and not objective.needs_teacher:
        raise UserError(
            f"{objective.name} with these options uses no teacher; leave out `--teacher`, or give `--distil logits` "
            "(objective draft)"
        )
    if settings.flops is not None and objective.freezes_model:
        raise UserError(
            f"--flops: {objective.name} trains modules beside a frozen model, whose FLOPs are not counted; give "
            "`--epochs` instead."
        )
    longest = objective.max_fed_tokens(settings.max_length, 0)
    if settings.pack and settings.pack < longest:
        raise UserError(
            f"a row of {settings.pack} tokens cannot hold a conversation of {settings.max_length}, for which "
            f"{objective.name} feeds up to {longest}; give `--pack {longest}` or a smaller `--max-length`"
        )


def _refuse_other_layout(base: Inspected, objective: Objective) -> None:
    """Raise UserError for a model without our attention or the list `base_model.layers`, or unfit for the objective."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base.config)
    reason = "" if hasattr(model.base_model, "layers") else "it has no `base_model.layers`"
    if reason := attention_of(base.config)[1] or reason:
        raise UserError(
            f"checkpoint {base.source!r} ({base.config.model_type}) cannot be trained by mtbench: {reason}; give "
            "another `--base`."
        )
    with torch.device("meta"):
        objective.attach(model, Special(0, 0))


def _refuse_other_vocabulary(base: Inspected, teacher: Inspected) -> None:
    known = teacher.tokenizer.get_vocab()
    different = [token for token, number in base.tokenizer.get_vocab().items() if known.get(token, number) != number]
    rows, teacher_rows = (found.config.get_text_config().vocab_size for found in (base, teacher))
    if different:
        reason = f"gives {different[0]!r} another id"
    elif teacher_rows < rows:
        reason = f"has {teacher_rows} ids, fewer than the {rows} of the base"
    else:
        return
    raise UserError(f"the teacher's tokenizer {reason}; distil from a model with the same tokenizer")


def _request_record(request: TrainingRequest, base: Inspected, teacher: Inspected | None, data: Data) -> dict[str, Any]:
    return {
        "objective": request.objective.name,
        "feeds_masks": request.objective.needs_mask,
        "options": asdict(request.objective),
        "settings": asdict(request.settings),
        "data": {**data.description, "sha256": data.examples.sha256},
        "chat_template_kwargs": dict(request.chat_template_kwargs),
        "mask_token": base.tokenizer.mask_token if request.objective.needs_mask else None,
        "base": base.source,
        "base_sha256": weights_sha256(Path(base.source)),
        "base_revision": getattr(base.config, "_commit_hash", None),  # on the hub
        "teacher": None if teacher is None else teacher.source,
        "teacher_sha256": None if teacher is None else weights_sha256(Path(teacher.source)),
        "fsdp": fsdp_format(),
    }


def _refuse_other_request(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise UserError if `folder` holds an interrupted training of another request, naming the first difference.

    Options in `FREE` may differ.
    """
    file = folder / "request.json"
    if not file.is_file():
        return
    before, now = flat(json.loads(file.read_text())), flat(json.loads(json.dumps(record)))
    for name in before | now:
        if before.get(name) != now.get(name) and name not in FREE:
            raise UserError(
                f"{folder} holds an interrupted training whose {name} was {json.dumps(before.get(name))}, not "
                f"{json.dumps(now.get(name))}; repeat its command to resume it, or remove the folder to start again"
            )


def _load(found: Inspected) -> Model:
    """Load a model in float32. Raises UserError if its logits are not one matrix product."""
    model = AutoModelForCausalLM.from_pretrained(
        found.source,
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=found.offline,
    )
    _refuse_other_head(model, found.source)
    return model


def _refuse_other_head(model: Model, source: str) -> None:
    """Raise UserError if the logits are not the last hidden states times a matrix, as in Gemma 2 and Cohere."""
    ids = torch.arange(4)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, metadata=plain_attention_mask(model, ids)).logits
        hidden = model.base_model(
            input_ids=ids, use_cache=False, metadata=plain_attention_mask(model, ids)
        ).last_hidden_state
        product = hidden @ model.get_output_embeddings().weight.T
    if not torch.allclose(logits, product, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"checkpoint {source!r} computes its logits by more than one matrix product ({model.config.model_type}), "
            "which mtbench cannot train; give another `--base`."
        )
