"""Outside engines: methods whose loop is not ours. They get checkpoints, prompts and budgets, and give back tokens.

What they hide (forwards, commits, the parts of their time) is None, never 0. What can be done for them is done by the
code that does it for our loop: where an answer ends, its text, and the clock, from an idle device to an idle device.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from mtbench.decoding.method import Method, Window
from mtbench.decoding.output import Generation, Timing, finish
from mtbench.hardware.timer import Stopwatch
from mtbench.models.loading import Checkpoint, Inspected

_stock: WeakKeyDictionary[Checkpoint, PreTrainedModel] = WeakKeyDictionary()


class Answers(NamedTuple):
    """What an outside engine gave back for a batch of prompts; None for what it does not reveal."""

    token_ids: list[list[int]]  # per prompt; whatever stands behind its end token or beyond its budget is cut off
    ttft_s: float | None = None  # from the call until each prompt had a token
    counted: int | None = None  # tokens by the engine's own count


class Outside(Method):
    """A method that is an engine of its own. It has no engine of ours, and static batches only."""

    outside: ClassVar[bool] = True

    def window(self) -> Window:
        raise NotImplementedError(f"{self.name} has a loop of its own")

    @property
    def host(self) -> str | None:
        """The other machine that does its work, which `--offline` forbids; None: this one."""
        return None

    def counters(self) -> Mapping[str, int]:
        """What the engine has counted since it began: of `drafts`, `drafted`, `accepted` those it reveals.

        Read before and after a batch, outside the clock.
        """
        return {}

    def generate(
        self,
        checkpoints: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        fixed_length: bool,
        stop: Sequence[Sequence[str]],
        room: int,
    ) -> Answers:
        """Each prompt's answer with its end token, of at most `max_new_tokens` of its own.

        checkpoints: role -> Checkpoint, the target's first; of a `weightless` method what is `Inspected` of them.
        Greedy, never one of the target's `suppressed`. With `fixed_length` end tokens mean nothing. A prompt's `stop`
        strings need not be cut at; they are there to stop early by. `room`: positions that no call of the run will
        exceed, or 0; an engine that prepares itself for a shape prepares itself for that one.
        """
        raise NotImplementedError


def run_outside(
    method: Outside,
    checkpoints: Mapping[str, Checkpoint | Inspected],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    stop: Sequence[Sequence[str]] | None = None,
    fixed_length: bool = False,
    room: int = 0,
) -> tuple[list[Generation], Timing]:
    """What `mtbench.decoding.loop.decode` does, by the method's own loop.

    `checkpoints`: by role, the target's first.
    """
    target = next(iter(checkpoints.values()))
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    stops: Sequence[Sequence[str]] = [()] * len(prompts) if fixed_length or not stop else stop
    end_ids = () if fixed_length else target.end_ids
    stopwatch = Stopwatch(target.model.device if isinstance(target, Checkpoint) else torch.device("cpu"))
    before = method.counters()
    began = stopwatch.now()
    answers = method.generate(checkpoints, prompts, budgets, fixed_length=fixed_length, stop=stops, room=room)
    wall_s = stopwatch.now() - began
    after = method.counters()
    generations = []
    for ids, budget, strings in zip(answers.token_ids, budgets, stops, strict=True):
        token_ids, text, reason = finish(target.tokenizer, until_end(ids, budget, end_ids), end_ids, strings)
        generations.append(
            Generation(
                token_ids=token_ids,
                text=text,
                commits=None,
                positions_fed=None,
                draft_forwards=None,
                drafted=None,
                finish_reason=reason,
            )
        )
    return generations, Timing(
        rows=len(prompts),
        items=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        tokens=sum(len(g.token_ids) for g in generations),
        row_forwards=None,
        batch_forwards=None,
        wall_s=wall_s,
        prefill_s=None,
        decode_s=None,
        device_s=None,
        ttft_s=answers.ttft_s,
        step_s=None,
        draft_s=None,
        head_s=None,
        preparation_s=0.0,
        kv_bytes=None,
        miscounted=0,
        counted=answers.counted,
        **{name: after[name] - count for name, count in before.items() if name in after},
    )


def stock(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's model as transformers has it: the same weights, its own settings, nothing of ours attached."""
    model = checkpoint.model
    if checkpoint not in _stock:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, shared)
        for module in twin.modules():
            module._forward_hooks.clear()
        squashed = getattr(twin.config, "attn_logit_softcapping", None)  # Gemma 2: fused attention would leave it out
        twin.set_attn_implementation("eager" if squashed else "sdpa")
        twin.generation_config = GenerationConfig()  # what the checkpoint's own one says never applies
        _stock[checkpoint] = twin
    for ours, theirs in zip(model.modules(), _stock[checkpoint].modules(), strict=True):
        theirs._parameters.update(ours._parameters)  # an engine of ours may have laid its weights out anew since
    return _stock[checkpoint]


def until_end(ids: Sequence[int], budget: int, end_ids: Collection[int]) -> list[int]:
    """At most `budget` of the tokens, up to and with the first that ends an answer."""
    kept = list(ids[:budget])
    return kept[: next((i for i, token in enumerate(kept, start=1) if token in end_ids), len(kept))]
