"""Training: an objective, conversations and a checkpoint in; a checkpoint that tells how it was made out.

What cannot be trained is refused before anything is written, and nothing is lost: the same command goes on from the
last complete checkpoint, with the same losses as if it had never stopped.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mtbench.errors import UserError
from mtbench.models.attention import ATTENTION
from mtbench.models.families import locate
from mtbench.models.loading import MASK, inspect
from mtbench.training.checkpoint import refuse_existing, weights_sha256, write_checkpoint
from mtbench.training.conversations import prepare
from mtbench.training.loss import plain_attention_mask
from mtbench.training.objectives import Model, Objective, Special
from mtbench.training.trainer import Progress, Settings, fit

FREE = ("settings.rows", "settings.pack", "settings.checkpointing")  # may change when a training goes on: same losses


def train(
    objective: Objective,
    base: str,
    data: Sequence[str],
    count: int | None,
    settings: Settings,
    out: Path,
    *,
    teacher: str | None = None,
    data_dir: Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    report_to: str = "none",
) -> Path:
    """Train the checkpoint `base` on `count` conversations of `data` (None: all) and write the result to `out`.

    `out` must not exist yet; the checkpoint there is complete or absent. What is needed to go on lies beside it in
    `<out>.training` until then, and the same call goes on from there.
    """
    refuse_existing(out)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if objective.needs_teacher != (teacher is not None):
        raise UserError(
            f"{objective.name} needs `--teacher CHECKPOINT` to distil from"
            if objective.needs_teacher
            else f"{objective.name} as asked learns from no teacher; leave out `--teacher`, or say `--distil logits`"
        )
    largest = objective.size(settings.max_length, 0)
    if 0 < (settings.pack or 0) < largest:
        raise UserError(
            f"a row of {settings.pack} tokens cannot hold a conversation of {settings.max_length}, for which "
            f"{objective.name} feeds up to {largest}; give `--pack {largest}` or a smaller `--max-length`"
        )
    base, teacher = locate(base), teacher and locate(teacher)
    found = inspect(base, offline=offline, needs_mask=objective.needs_mask)
    tokenizer = found.tokenizer
    if objective.needs_mask and tokenizer.mask_token_id != found.mask_id:
        tokenizer.add_special_tokens({"mask_token": MASK})
    processes = PartialState(cpu=not torch.cuda.is_available())  # those of `accelerate launch`
    with processes.main_process_first():  # the others find its tokens
        prepared = prepare(
            data,
            count,
            tokenizer,
            max_length=settings.max_length,
            seed=settings.seed,
            data_dir=data_dir,
            offline=offline,
        )
    if progress and processes.is_main_process:
        progress.note(prepared.summary)
    model = _load(base, offline)
    _refuse_odd_head(model, base)
    if not hasattr(model.base_model, "layers"):
        raise UserError(f"checkpoint {base!r} keeps its layers elsewhere than mtbench trains; give another `--base`.")
    guide = None if teacher is None else _load(teacher, offline)
    if teacher is not None:
        _refuse_odd_head(guide, teacher)
        _refuse_other_words(model, tokenizer, guide, inspect(teacher, offline=offline).tokenizer)
    objective.attach(model)
    request = {
        "objective": objective.name,
        "feeds_masks": objective.needs_mask,
        "options": asdict(objective),
        "settings": asdict(settings),
        "data": {**prepared.description, "sha256": prepared.sha256},
        "base": base,
        "base_sha256": weights_sha256(Path(base)),
        "base_revision": getattr(model.config, "_commit_hash", None),  # of the hub
        "teacher": teacher,
        "teacher_sha256": teacher and weights_sha256(Path(teacher)),
    }
    kept = out.with_name(out.name + ".training")
    if processes.is_main_process:
        _same_request(kept, request)
    processes.wait_for_everyone()
    special = Special(found.mask_id if objective.needs_mask else None, tokenizer.eos_token_id)
    trained = fit(model, objective, prepared, settings, special, kept, request, guide, progress, report_to)
    if trained is None:  # another process writes
        return out
    figures, whole = trained
    heads = objective.detach(model)
    beside = {f"{objective.name}.safetensors": heads} if heads else {}
    write_checkpoint(out, model, tokenizer, settings.dtype, {**request, **figures}, beside, whole)
    shutil.rmtree(kept)
    return out


def _load(source: str, offline: bool) -> Model:
    return AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=offline,
    )


def _refuse_odd_head(model: Model, source: str) -> None:
    """Raise UserError for a model whose logits are not its last hidden states times a matrix: Gemma 2, Cohere …"""
    ids = torch.arange(4)[None]
    with torch.no_grad():
        told = model(input_ids=ids, use_cache=False, metadata=plain_attention_mask(model, ids)).logits
        hidden = model.base_model(
            input_ids=ids, use_cache=False, metadata=plain_attention_mask(model, ids)
        ).last_hidden_state
        ours = hidden @ model.get_output_embeddings().weight.T
    if not torch.allclose(told, ours, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"checkpoint {source!r} does more to its logits than one matrix ({model.config.model_type}), "
            "which mtbench cannot train; give another `--base`."
        )


def _refuse_other_words(model: Model, tokenizer: Any, teacher: Model, teachers: Any) -> None:
    """Raise UserError unless model and teacher mean the same by a token id."""
    theirs = teachers.get_vocab()
    strange = [word for word, token in tokenizer.get_vocab().items() if theirs.get(word, token) != token]
    rows, known = (len(m.get_output_embeddings().weight) for m in (model, teacher))
    if strange or known < rows:
        why = f"gives {strange[0]!r} another id" if strange else f"has {known} ids, fewer than the {rows} of the base"
        raise UserError(f"the teacher's tokenizer {why}; distil from a model with the same tokenizer")


def _same_request(kept: Path, request: Mapping[str, Any]) -> None:
    """Write down what is asked, or hold it to what an interrupted training was asked. Raises UserError."""
    file = kept / "request.json"
    asked = _flat(json.loads(json.dumps(request)))
    if file.is_file():
        before = _flat(json.loads(file.read_text()))
        for name in before | asked:
            if before.get(name) != asked.get(name) and name not in FREE:
                raise UserError(
                    f"{kept} holds an interrupted training whose {name} was {json.dumps(before.get(name))}, not "
                    f"{json.dumps(asked.get(name))}; repeat its command to go on, or remove the folder to start anew"
                )
    kept.mkdir(parents=True, exist_ok=True)
    partial = kept / f"request.{os.getpid()}.partial"
    partial.write_text(json.dumps(request, indent=1) + "\n")
    partial.replace(file)


def _flat(request: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries of entries by their whole name."""
    flat: dict[str, Any] = {}
    for name, value in request.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
