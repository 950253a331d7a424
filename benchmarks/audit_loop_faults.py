"""Faults of the decode loop for `audit_corpus.py`: windows, caches, rows, drafts."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from planted_faults import Fault, around, both
from torch import Tensor
from transformers import DynamicCache

from mtbench.decoding.external import Answers, ExternalEngine, stock, target_of
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Commit, Rows, TargetOutput
from mtbench.decoding.registry import METHODS
from mtbench.decoding.run_state import WorkloadRun
from mtbench.decoding.verification import VerifiedMethod
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.options import option

# --- Positions and caches ---------------------------------------------------------------------------------------------


def unmoved_path() -> Fault:
    """The keys and values of a tree's accepted path are not moved into place."""
    return lambda: patch.object(KVCache, "move", lambda *_: None)


def wider_window(by: int) -> Fault:
    """The sliding window is off by some positions."""

    return around(AttentionMetadata, "mask")(
        lambda old, self, window=None: old(self, None if window is None else window + by)
    )


def foreign_prefix(ids: Sequence[int], start: int = 0) -> Fault:
    """The prefill takes keys and values of other tokens from a prefix cache, at slots from `start` on."""

    @around(ModelRunner, "feed")
    def feed(old: Any, self: Any, tokens: Tensor, metadata: Any) -> None:
        other = tokens.clone()
        other[:, start : start + len(ids)] = torch.tensor(ids)
        old(self, other, metadata)

    return feed


def swapped_logits(at: int, until: int = 1 << 30) -> Fault:
    """In some steps two rows have each other's logits."""

    @around(Batch, "step")
    def step(old: Any, self: Any, shape: Any, **more: Any) -> None:
        self.stepped = getattr(self, "stepped", 0) + 1
        self.target.swap = at <= self.stepped < until and self.width > 1
        old(self, shape, **more)
        self.target.swap = False

    @around(ModelRunner, "forward")
    def forward(old: Any, self: Any, ids: Tensor, metadata: Any, judged: int) -> Forwarded:
        out: Forwarded = old(self, ids, metadata, judged)
        return out._replace(logits=out.logits[[1, 0, *range(2, len(ids))]]) if getattr(self, "swap", False) else out

    return both(step, forward)


def swapped_answers(behind: int = 0) -> Fault:
    """Two requests of a batch get each other's answers, from a token on."""

    @around(WorkloadRun, "generations")
    def generations(old: Any, self: Any, checkpoint: Checkpoint) -> Any:
        if len(self.answers) > 1:
            one, two = self.answers[0], self.answers[1]
            self.answers[0] = two._replace(token_ids=one.token_ids[:behind] + two.token_ids[behind:])
            self.answers[1] = one._replace(token_ids=two.token_ids[:behind] + one.token_ids[behind:])
        return old(self, checkpoint)

    return generations


# --- Drafts -----------------------------------------------------------------------------------------------------------


def accepting(rule: Callable[[TargetOutput], Tensor]) -> Fault:
    """Drafts where `rule` holds, (R, G), are accepted, whatever the target chooses."""

    def taken(output: TargetOutput, there: Tensor | None) -> tuple[Tensor, Tensor]:
        guess, drafts = output.guess, output.guess.shape[1]
        good = output.agrees(guess) | rule(output)
        if there is not None:
            good &= torch.arange(drafts) < there[:, None]
        accepted = good.long().cumprod(1).sum(1)
        padded = torch.cat((guess, guess[:, :1]), 1)
        return torch.where(torch.arange(drafts + 1) < accepted[:, None], padded, output.choice), accepted

    @around(METHODS["prompt-lookup"], "accept")
    def looked_up(old: Any, self: Any, state: Any, rows: Rows, output: TargetOutput) -> Commit:
        tokens, accepted = taken(output, state["copied"])
        return Commit(tokens, accepted + 1, kept=accepted, offered=state["copied"].clone())

    verified = around(VerifiedMethod, "verified")(lambda _, *given: taken(given[-1], None))
    return both(verified, looked_up)


def tolerant(share: float) -> Fault:
    """A draft is accepted if its probability is at least a share of the largest."""

    def rule(output: TargetOutput) -> Tensor:
        p = output.logits[:, :-1].float().softmax(-1)
        return p.gather(2, output.guess.clamp(min=0)[..., None])[..., 0] >= share * p.amax(-1)

    return accepting(rule)


def unchecked(every: int, phase: int = 0) -> Fault:
    """In one of `every` steps all drafts are accepted."""
    count = iter(range(1 << 40))

    def rule(output: TargetOutput) -> Tensor:
        return torch.full_like(output.guess, next(count) % every == phase, dtype=torch.bool)

    return accepting(rule)


def claims_lossless() -> Fault:
    """MARS with any threshold says that it is lossless."""
    return lambda: patch.object(METHODS["mars"], "claims", "lossless")


@dataclass(frozen=True, kw_only=True)
class CorpusLookup(ExternalEngine):
    """Prompt lookup with transformers' cache. Without `crop` the cache keeps rejected drafts, and so do positions."""

    ahead: int = option(4, "tokens copied", low=1)
    crop: bool = option(True, "remove rejected drafts from the cache")

    title = "Lookup of the corpus"
    roles = ("ar",)
    claims = "lossless"

    def generate(self, checkpoints: Any, requests: Any, *, ignore_eos: bool, room: int) -> Answers:
        checkpoint = target_of(checkpoints)
        return Answers([self._answer(checkpoint, r.prompt_ids, r.max_new_tokens) for r in requests])

    @torch.inference_mode()
    def _answer(self, checkpoint: Checkpoint, prompt: Sequence[int], budget: int) -> list[int]:
        model, tokens, cache, cached = stock(checkpoint), list(prompt), DynamicCache(), 0
        while len(tokens) - len(prompt) < budget and not set(tokens[len(prompt) :]) & set(checkpoint.end_ids):
            place = next((i for i in range(len(tokens) - 2, 0, -1) if tokens[i - 1 : i + 1] == tokens[-2:]), None)
            drafts = [] if place is None else tokens[place + 1 : place + 1 + self.ahead]
            fed = torch.tensor([tokens[cached:] + drafts])
            logits = model(fed, past_key_values=cache, logits_to_keep=len(drafts) + 1).logits[0]
            logits[:, checkpoint.suppressed] = float("-inf")
            choice = logits.argmax(-1).tolist()
            good = next((i for i, draft in enumerate(drafts) if draft != choice[i]), len(drafts))
            tokens += choice[: good + 1]
            cached = len(tokens) - 1
            if self.crop and (rejected := cache.get_seq_length() - cached):
                cache.crop(-rejected)
        return tokens[len(prompt) :]


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def windowed(source: Path, folder: Path, window: int, layers: Sequence[int]) -> Path:
    """Write a copy of a checkpoint some of whose layers have a sliding window."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention" if n in layers else "full_attention" for n in range(config["num_hidden_layers"])]
    config |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
