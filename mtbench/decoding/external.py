"""External engines: methods with their own decode loop. They get checkpoints and requests, and return tokens.

Metrics that they do not expose (forwards, commits, the parts of their time) are None, never 0. The code of our loop
decides where an answer ends and makes its text. The wall time is measured from an idle device to an idle device.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StaticCache

from mtbench.decoding.method import Method, Window
from mtbench.decoding.output import Generation, Timing, finish
from mtbench.decoding.request import Request, in_batch, refuse_unknown_ids
from mtbench.errors import NotNumbersError
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models.attention import OWN
from mtbench.models.loading import Checkpoint, Inspected
from mtbench.sampling import GREEDY, Sampling, numbers

_stock: WeakKeyDictionary[Checkpoint, PreTrainedModel] = WeakKeyDictionary()
_static_caches: WeakKeyDictionary[PreTrainedModel, dict[tuple[int, int], StaticCache]] = WeakKeyDictionary()


class Speculation(NamedTuple):
    """An engine's counts of its speculation, over the requests of a batch."""

    drafts: int | None  # verified drafts; None: not reported
    drafted: int | None  # tokens of these drafts; None: not reported
    accepted: int  # tokens of these that were accepted
    histogram: list[int] | None  # entry n: drafts of which n tokens were accepted; None: not reported
    reported_by: str  # who reports it, and how

    @staticmethod
    def total(requests: Sequence["Speculation | None"]) -> "Speculation | None":
        """Return the sums over the requests; None if the engine reported nothing of one of them."""
        known = [speculation for speculation in requests if speculation is not None]
        if not known or len(known) < len(requests):
            return None
        histograms = [speculation.histogram for speculation in known if speculation.histogram is not None]
        histogram = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
        drafts, drafted = [s.drafts for s in known], [s.drafted for s in known]
        return Speculation(
            drafts=None if None in drafts else sum(filter(None, drafts)),
            drafted=None if None in drafted else sum(filter(None, drafted)),
            accepted=sum(speculation.accepted for speculation in known),
            histogram=histogram if len(histograms) == len(known) else None,
            reported_by=known[0].reported_by,
        )


class Answers(NamedTuple):
    """The answers of an external engine to a batch of requests; metrics that it does not expose are None."""

    token_ids: list[list[int]]  # per request; tokens after its end token or beyond its budget are cut off
    ttft_s: float | None = None  # from the call until every request had a token
    counted: int | None = None  # tokens by the engine's own count
    speculation: Speculation | None = None  # of these requests alone
    prepared: bool = False  # the engine compiled or recorded something in this call
    forwards: list[int] | None = None  # per request, by the engine's own count of tokens and of accepted drafts
    cached_tokens: Sequence[int | None] = ()  # per request, tokens of its prompt that were cached; (): not known


class ExternalEngine(Method):
    """A method with its own engine. It uses none of our engines and runs in static batches only."""

    outside: ClassVar[bool] = True
    draws: ClassVar[bool] = False  # True: by random numbers of its own

    def window(self) -> Window:
        raise NotImplementedError(f"{self.name} has its own loop")

    @property
    def host(self) -> str | None:
        """The remote machine that decodes, which `--offline` forbids; None: this machine."""
        return None

    @property
    def server(self) -> str | None:
        """The server that it sends prompts to: `URL`, or `URL=VARIABLE` with the environment variable of its key.

        A foreign plan may name any server and any variable, so a command uses only the servers that it names itself.
        """
        return None

    def generate(
        self, checkpoints: Mapping[str, Any], requests: Sequence[Request], *, ignore_eos: bool, room: int
    ) -> Answers:
        """Decode each request by its `sampling`; return its answer with its end token.

        `checkpoints`: role -> Checkpoint, the target's first; role -> Inspected without `needs_weights`. Never emit one
        of the target's `suppressed` ids. `ignore_eos`: ignore end tokens; then no request has a stop string. Stop
        strings only allow the engine to stop early; the answer is cut at them afterwards. `room`: a number of positions
        that no call of the run exceeds, or 0; an engine that compiles for a shape can compile for this one.
        """
        raise NotImplementedError


def run_outside(
    method: ExternalEngine,
    checkpoints: Mapping[str, Checkpoint | Inspected],
    requests: Sequence[Request],
    *,
    ignore_eos: bool = False,
    room: int = 0,
    sampling: Sampling = GREEDY,
) -> tuple[list[Generation], Timing]:
    """Decode like `mtbench.decoding.loop.decode`, but with the method's own loop.

    `checkpoints`: by role, the target's first.
    """
    target, requests = target_of(checkpoints), in_batch(requests, sampling=sampling, ignore_eos=ignore_eos)
    refuse_unknown_ids(requests, target.vocabulary, next(iter(checkpoints)))

    def generate(requests: Sequence[Request]) -> Answers:
        return method.generate(checkpoints, requests, ignore_eos=ignore_eos, room=room)

    return timed(target, requests, generate, ignore_eos=ignore_eos)


def timed(
    target: Checkpoint | Inspected,
    requests: Sequence[Request],
    generate: Callable[[Sequence[Request]], Answers],
    *,
    ignore_eos: bool,
) -> tuple[list[Generation], Timing]:
    """Decode requests by a function of an external engine; return the answers, cut where they end, and the time."""
    end_ids = target.end_ids
    if ignore_eos:
        end_ids, requests = (), [replace(request, stop=()) for request in requests]
    stopwatch = Stopwatch(target.model.device if isinstance(target, Checkpoint) else torch.device("cpu"))
    started_at = stopwatch.now()
    answers = generate(requests)
    wall_s = stopwatch.now() - started_at
    unknown: Sequence[int | None] = [None] * len(requests)
    counts, cached = answers.forwards or unknown, answers.cached_tokens or unknown
    generations = [
        replace(_generation(target, request, ids, end_ids, count), cached_tokens=kept)
        for request, ids, count, kept in zip(requests, answers.token_ids, counts, cached, strict=True)
    ]
    forwards = [generation.counted for generation in generations if generation.counted is not None]
    return generations, Timing(
        rows=len(requests),
        items=len(requests),
        prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        tokens=sum(len(g.token_ids) for g in generations),
        row_forwards=sum(forwards) if len(forwards) == len(generations) else None,
        wall_s=wall_s,
        ttft_s=answers.ttft_s,
        preparation_s=wall_s if answers.prepared else 0.0,  # at most: engines do not report it
        counted=answers.counted,
        cached_tokens=None if {*cached} == {None} else sum(filter(None, cached)),  # vLLM leaves out a 0
        **(answers.speculation._asdict() if answers.speculation else {}),
    )


def _generation(
    target: Checkpoint | Inspected, request: Request, ids: Sequence[int], end_ids: Sequence[int], forwards: int | None
) -> Generation:
    """Return an engine's answer, cut where it ends. `forwards`: by its own count, of the whole answer."""
    kept = until_end(ids, request.max_new_tokens, end_ids)
    generation = finish(target.tokenizer, kept, end_ids, request.stop, request.prompt_ids)
    return replace(generation, counted=forwards if len(generation.token_ids) == len(ids) else None)


C = TypeVar("C")


def target_of(checkpoints: Mapping[str, C]) -> C:
    """Return the target's checkpoint: the first."""
    return next(iter(checkpoints.values()))


def stock(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the checkpoint's model as transformers loads it: same weights, default settings, without our hooks."""
    model = checkpoint.model
    if checkpoint not in _stock:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        plain = copy.deepcopy(model, shared)
        for module in plain.modules():
            module._forward_hooks.clear()
        softcapped = getattr(plain.config, "attn_logit_softcapping", None)  # Gemma 2: fused attention would omit it
        plain.set_attn_implementation("sdpa" if plain._supports_sdpa and not softcapped else OWN)
        plain.generation_config = GenerationConfig()  # the checkpoint's own settings never apply
        _stock[checkpoint] = plain
    for ours, theirs in zip(model.modules(), _stock[checkpoint].modules(), strict=True):
        theirs._parameters.update(ours._parameters)  # one of our engines may have replaced parameters since
    return _stock[checkpoint]


class Sound(LogitsProcessor):  # type: ignore[misc]  # transformers is Any to mypy
    """Takes note of logits in transformers' `generate` that are no numbers: the latest of each token, so no draft's.

    Where tokens are `drawn`, zeros take their place: transformers cannot draw from them, and a GPU would crash.
    """

    def __init__(self, dtype: torch.dtype, *, drawn: bool) -> None:
        self.dtype, self.drawn = dtype, drawn
        self.rows: dict[int, Tensor] = {}  # length of the text -> which rows' logits are numbers, (R,) bool

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows[input_ids.shape[1]] = sound = numbers(scores)
        return scores.masked_fill(~sound[:, None], 0) if self.drawn else scores

    def refuse_others(
        self, requests: Sequence[Request], prompt: int, answers: Sequence[Sequence[int]], end_ids: Collection[int]
    ) -> None:
        """Raise NotNumbersError for an answer with a token behind a text of `prompt` that no numbers chose."""
        by_token = [self.rows[prompt + n].tolist() for n in range(len(answers[0]))]
        for request, answer, right in zip(requests, answers, zip(*by_token, strict=True), strict=True):
            kept = until_end(answer, request.max_new_tokens, end_ids)
            if (n := [*right, False].index(False)) < len(kept):
                raise NotNumbersError(f"the target's logits at token {n + 1} of item {request.item}", self.dtype)


def static_cache(model: PreTrainedModel, rows: int, length: int) -> tuple[StaticCache, bool]:
    """Return an empty cache for so many rows of a length, and whether an earlier call used it.

    With a new cache for each call, graphs would be recorded anew wherever its address differs, and after 128 of them
    torch 2.11 runs without graphs.
    """
    caches = _static_caches.setdefault(model, {})
    known = (rows, length) in caches
    if known:
        caches[rows, length].reset()
    else:
        caches[rows, length] = StaticCache(model.config, max_cache_len=length)
    return caches[rows, length], known


def until_end(ids: Sequence[int], budget: int, end_ids: Collection[int]) -> list[int]:
    """Return at most `budget` of the tokens, up to and including the first end token."""
    kept = list(ids[:budget])
    return kept[: next((length for length, token in enumerate(kept, start=1) if token in end_ids), len(kept))]
