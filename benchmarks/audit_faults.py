"""Faults for `audit_corpus.py`: prompts, models, choices, ends and scores.

Tests have a few of the same kind (tests/helpers/planted_faults.py). Faults of the decode loop: audit_loop_faults.py.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from planted_faults import Fault, around, both, chosen, weights
from torch import Tensor

from mtbench.decoding import output as answers
from mtbench.decoding import run_state
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Rows
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt
from mtbench.models import chat_template
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.models.token_text import exact_text
from mtbench.plan import prompts

arithmetic: Any = import_module("mtbench.suites.arithmetic")
HONEST_RULE = arithmetic.ANSWER.pattern


# --- Prompts ----------------------------------------------------------------------------------------------------------


def template(change: Callable[[str], str]) -> Fault:
    """The chat template writes another text."""
    return around(chat_template, "render")(lambda old, *a, **k: change(old(*a, **k)))


def added_token(*words: str) -> Fault:
    """The tokenizer has added tokens, which it looks for before it merges pieces."""

    @around(prompts, "_token_ids")
    def token_ids(old: Any, texts: Any, checkpoint: Any) -> Any:
        tokenizer = copy.deepcopy(checkpoint.tokenizer)
        tokenizer.add_tokens(list(words))
        return old(texts, replace(checkpoint, tokenizer=tokenizer))

    return token_ids


def shots(count: int) -> Fault:
    """GSM8K with another number of examples."""
    return lambda: patch.object(SUITES["gsm8k"], "num_fewshot", count)


def with_stop(*strings: str) -> Fault:
    """No fault: the suite's prompts have stop strings."""

    @around(arithmetic.Arithmetic, "prompts")
    def texts(old: Any, self: Any, template: Any, limit: int | None) -> list[Prompt]:
        return [replace(prompt, stop=strings) for prompt in old(self, template, limit)]

    return texts


# --- Models -----------------------------------------------------------------------------------------------------------


def _linears(checkpoint: Checkpoint) -> list[Tensor]:
    modules = checkpoint.model.base_model.layers.modules()
    return [module.weight for module in modules if isinstance(module, torch.nn.Linear)]


def quantised(bits: int, group: int | None = None, *, tensor: bool = False) -> Fault:
    """Weights rounded to integers: by output channel, by groups of a channel, or with one scale for a tensor."""
    most = 2 ** (bits - 1) - 1

    def change(checkpoint: Checkpoint) -> None:
        for weight in _linears(checkpoint):
            wide = weight.data.float()
            parts = wide.reshape(1, -1) if tensor else wide.reshape(-1, group or wide.shape[1])
            scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-12) / most
            weight.data = ((parts / scale).round() * scale).reshape(wide.shape).to(weight.dtype)

    return weights(change)


def eight_bit_floats() -> Fault:
    """Weights rounded to float8_e4m3."""

    def change(checkpoint: Checkpoint) -> None:
        for weight in _linears(checkpoint):
            scale = weight.data.float().abs().amax() / 448
            weight.data = ((weight.data / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)

    return weights(change)


# --- Choices, ends, scores --------------------------------------------------------------------------------------------


def penalised(repetition: float = 1.0, presence: float = 0.0, *, prompt: bool = True) -> Fault:
    """Tokens of the text so far are penalised."""

    def pick(rows: Rows, logits: Tensor, _: Tensor) -> Tensor:
        place = torch.arange(rows.tokens.shape[1])
        there = place < rows.known[:, None]
        if not prompt:
            there &= place >= rows.prompt_len[:, None]
        seen = torch.zeros(logits.shape[0], logits.shape[2]).scatter_add_(1, rows.tokens, there.float()) > 0
        changed = torch.where(logits > 0, logits / repetition, logits * repetition) - presence
        return torch.where(seen[:, None], changed, logits).argmax(-1)

    return chosen(pick)


def coarse_logits(dtype: torch.dtype = torch.bfloat16) -> Fault:
    """Logits are rounded to a coarser type."""

    @around(ModelRunner, "forward")
    def forward(old: Any, self: Any, *given: Any, **more: Any) -> Forwarded:
        out: Forwarded = old(self, *given, **more)
        return out._replace(logits=out.logits.to(dtype).to(out.logits.dtype))

    return forward


def endless() -> Fault:
    """End tokens end nothing."""

    @around(Batch, "open")
    def begin(old: Any, self: Any, run: Any) -> None:
        self.ends.zero_()
        old(self, run)

    return begin


def short_budget(by: int) -> Fault:
    """The budget is some tokens short, and nothing records it."""

    @around(Batch, "_write")
    def write(old: Any, self: Any, taken: Any, at: Tensor) -> None:
        old(self, taken, at)
        limit, least = self.rows.limit[at], self.rows.prompt_len[at] + 1
        self.rows.limit[at] = limit.minimum((limit - by).maximum(least))

    return write


def stops_between_tokens() -> Fault:
    """A stop string is found only if a token ends right behind it and one begins right before it."""

    def at_tokens(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> int | None:
        texts = [exact_text(tokenizer, [i]) for i in ids]
        for end in range(1, len(ids) + 1):
            if any("".join(texts[begin:end]) in stop for begin in range(max(0, end - 8), end)):
                return end
        return None

    @around(answers, "cut_at_string")
    def cut(old: Any, tokenizer: Any, ids: Sequence[int], stop: Sequence[str], prompt: Sequence[int]) -> Any:
        return (len(ids), None) if at_tokens(tokenizer, ids, stop) is None else old(tokenizer, ids, stop, prompt)

    @around(run_state, "contains")
    def found(_: Any, tokenizer: Any, ids: Sequence[int], stop: Sequence[str], begin: int) -> bool:
        return at_tokens(tokenizer, ids[begin:], stop) is not None

    return both(found, cut)


def extraction(pattern: str, *, stated: bool = True) -> Fault:
    """Arithmetic's answers are read by another rule. `stated`: the plan names the rule."""

    @around(arithmetic.Arithmetic, "__init__")
    def init(old: Any, self: Any, *given: Any) -> None:
        old(self, *given)
        self.task = {**self.task, "filter": pattern if stated else HONEST_RULE}

    return both(lambda: patch.object(arithmetic, "ANSWER", re.compile(pattern)), init)
