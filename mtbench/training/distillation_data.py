"""A model's own answers as conversations to train on: what a draft learns from in sequence-level distillation
(Kim and Rush, arXiv 1606.07947). Greedy, by the method that others are compared with."""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.evaluation.suite import Messages
from mtbench.models.loading import Checkpoint, load
from mtbench.training.checkpoint import refuse_existing

ROWS = 64  # of a batch


def write_answers(
    teacher: str, conversations: Iterable[Messages], out: Path, *, max_new_tokens: int, offline: bool = False
) -> tuple[int, int]:
    """Write the conversations to `out`, a JSONL of `messages`, with the teacher's last turn in place of theirs.

    An answer that its budget cut short is left out: nobody should learn to stop there. Returns how many are written and
    how many left out. Raises UserError if there is something at `out`.
    """
    refuse_existing(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    checkpoint = load(teacher, dtype=dtype, device=device, offline=offline)
    partial = out.with_name(out.name + ".partial")
    written = left_out = 0
    with partial.open("w", encoding="utf-8") as file:
        for turns in answered(checkpoint, conversations, max_new_tokens):
            if turns is None:
                left_out += 1
                continue
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
            written += 1
    os.replace(partial, out)
    return written, left_out


def answered(
    checkpoint: Checkpoint, conversations: Iterable[Messages], max_new_tokens: int
) -> Iterator[Messages | None]:
    """The conversations as the checkpoint would have ended them; None for one it did not end."""
    engine = ENGINES["graph"]()
    runners = ModelRunners("teacher", {"teacher": engine.runner(checkpoint)})
    reference = next(METHODS[name] for name in METHODS if METHODS[name].reference and not METHODS[name].outside)()
    stream = iter(conversations)
    while batch := list(islice(stream, ROWS)):
        asked = [list(turns[:-1]) for turns in batch]
        texts = [
            checkpoint.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            for turns in asked
        ]
        prompts = checkpoint.tokenizer(texts, add_special_tokens=False).input_ids
        requests = [Request(prompt_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        answers, _ = decode(reference, runners, requests, make=engine.batch)
        for turns, answer in zip(asked, answers, strict=True):
            ended = answer.finish_reason == "end"
            yield [*turns, {"role": "assistant", "content": answer.text}] if ended else None
