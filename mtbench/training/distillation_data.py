"""A teacher's own answers as conversations to train a draft on: sequence-level distillation.

Kim and Rush, arXiv 1606.07947. The answers are decoded greedily by the reference method.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from mtbench import files
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.evaluation.suite import Messages
from mtbench.models import chat_template
from mtbench.models.loading import Checkpoint, load
from mtbench.training.checkpoint import refuse_existing

BATCH_SIZE = 64


def write_answers(
    teacher: str, conversations: Iterable[Messages], out: Path, *, max_new_tokens: int, offline: bool = False
) -> tuple[int, int]:
    """Write the conversations to `out`, a JSONL of `messages`, with the teacher's answer as the last turn.

    An answer that reached `max_new_tokens` is left out, because a draft would learn to stop there. Returns how many
    conversations are written and how many left out. Raises UserError if `out` exists.
    """
    refuse_existing(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    checkpoint = load(teacher, dtype=dtype, device=device, offline=offline)
    written = left_out = 0
    with files.atomic_write(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for turns in answered(checkpoint, conversations, max_new_tokens):
            if turns is None:
                left_out += 1
                continue
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
            written += 1
    return written, left_out


def answered(
    checkpoint: Checkpoint, conversations: Iterable[Messages], max_new_tokens: int
) -> Iterator[Messages | None]:
    """Yield the conversations with the checkpoint's answers; None for one whose answer reached `max_new_tokens`."""
    engine = ENGINES["graph"]()
    runners = ModelRunners("teacher", {"teacher": engine.runner(checkpoint)})
    methods = [METHODS[name] for name in METHODS]
    reference = next(method for method in methods if method.reference and not method.outside)()
    stream = iter(conversations)
    while batch := list(islice(stream, BATCH_SIZE)):
        questions = [list(turns[:-1]) for turns in batch]
        texts = [chat_template.render(checkpoint.tokenizer, turns, answer_follows=True) for turns in questions]
        prompts = checkpoint.tokenizer(texts, add_special_tokens=False).input_ids
        requests = [Request(prompt_ids=prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
        answers, _ = decode(reference, runners, requests, make=engine.batch)
        for turns, answer in zip(questions, answers, strict=True):
            if answer.finish_reason == "end":
                yield [*turns, {"role": "assistant", "content": answer.text}]
            else:
                yield None
