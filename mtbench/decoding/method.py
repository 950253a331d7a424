"""What a method is: it guesses, and it accepts. The loop (mtbench/decoding/loop.py) does everything else.

Every method in this field is the same loop: feed what is known but not cached, then some guesses; look at the
logits; commit; move the cursors. A method owns only **guess** and **accept**, so none can count its own tokens,
skip the end-token rule or hide a forward.

Cursors, per row: `cached ≤ base − 1 < base ≤ known`. The last decided token is always fed again: its logits
judge the first guess, so no logits are kept between steps.

R = rows, G = guesses, N = most tokens one forward commits, S = slots, V = vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mtbench.models import kernels, sampling
from mtbench.models.attention import causal
from mtbench.models.loading import Inspected
from mtbench.models.runner import ModelRunner
from mtbench.options import AUTO

Claims = Literal["lossless", "distribution", "lossy"]
NONE = -1  # in place of a draft: there is none, no token is it
State = dict[str, Tensor]  # static tensors with leading dimension R


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The shape of one forward, fixed for a method. With rows and cache length it is a graph's key."""

    pending: int | None  # P: most decided tokens a row can have outside the cache; None: no bound
    guesses: int  # G
    commits: int  # N: most tokens one forward can commit
    sees: Tensor | None = None  # (G, G) bool: guess g attends to guess h; None: as `visible` says
    offset: Tensor | None = None  # (G,) position of guess g is base + offset[g]; None: 0 … G−1
    hidden: bool = False  # `accept` wants what the LM head reads
    drafts: int = 0  # forwards of another lane before it

    def to(self, device: torch.device) -> "Window":
        """The same window with its patterns on a device."""
        sees = None if self.sees is None else self.sees.to(device)
        return replace(self, sees=sees, offset=None if self.offset is None else self.offset.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A batch of requests. Methods read it; only the loop writes it."""

    tokens: Tensor  # (R, S) prompt, then output; beyond `known` undefined
    request: Tensor  # (R,) which request sits in the row
    prompt_len: Tensor  # (R,)
    known: Tensor  # (R,) decided tokens
    base: Tensor  # (R,) where guesses start
    cached: Tensor  # (R,) leading tokens whose keys and values are final
    limit: Tensor  # (R,) known never passes it; an end token brings it down
    done: Tensor  # (R,) bool: known has reached the limit
    seed: Tensor  # (R,) of each request's dice
    temperature: float = 0.0  # 0: greedy

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """The tokens that logits (R, n, V) say for positions (R, n): the one choice that every lane makes, (R, n)."""
        if not self.temperature:
            return sampling.choose(logits)
        return sampling.choose(sampling.sampled(logits, self.temperature, self.seed, position))

    def distribution(self, logits: Tensor) -> Tensor:
        """That choice's probabilities, (R, n, V) float64."""
        if not self.temperature:
            return torch.zeros_like(logits, dtype=torch.double).scatter_(-1, sampling.choose(logits)[..., None], 1.0)
        return (logits.double() / self.temperature).softmax(-1)


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """The logits behind the last decided token (column 0) and behind each guess (g in column g + 1).

    Each column judges the position behind its own.
    """

    rows: Rows
    guess: Tensor  # (R, G) the ids fed
    position: Tensor  # (R, G+1) judged
    logits: Tensor  # (R, G+1, V); −∞ for ids no arm may emit
    hidden: Tensor | None = None  # (R, G+1, C) what the LM head read, if the window asks for it

    @cached_property
    def _one_pass(self) -> tuple[Tensor, Tensor, Tensor]:
        """Choice, largest logit and log-sum-exp of each column, from one pass of a GPU over the vocabulary."""
        return kernels.argmax_logsumexp(self.logits)

    @cached_property
    def choice(self) -> Tensor:
        """The model's own token at each column, (R, G+1)."""
        if self.logits.is_cuda and not self.rows.temperature:
            return self._one_pass[0]
        return self.rows.choose(self.logits, self.position)

    @cached_property
    def confidence(self) -> Tensor:
        """The largest probability at each column, (R, G+1) float32; greedy, that of the choice."""
        if not self.logits.is_cuda:
            return sampling.confidence(self.logits)
        _, largest, logsumexp = self._one_pass
        return torch.exp(largest - logsumexp)

    def agrees(self, drafts: Tensor, behind: Tensor | None = None) -> Tensor:
        """Which drafts are the model's own choice at their place? (R, K) to (R, K) bool; `NONE` never is.

        `behind` (R, K): the guess that each stands behind, as in `mtbench.decoding.trees`. None: they are the first
        guesses, each behind the one before.
        """
        choice = self.choice[:, : drafts.shape[1]] if behind is None else self.choice.gather(1, behind + 1)
        return choice == drafts

    def sure(self, metric: sampling.Metric, threshold: float) -> Tensor:
        """Is the model sure of its choice? (R, G+1) bool."""
        if metric == "probability":
            return self.confidence.ge(threshold)
        return sampling.sure(self.logits, metric, threshold)


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """What a forward decided. The loop cuts it at end token and budget."""

    tokens: Tensor  # (R, N)
    count: Tensor  # (R,) 0 … N; 0: a block not yet full, a row waiting
    kept: Tensor  # (R,) leading guesses whose keys and values are already final
    path: Tensor | None = None  # (R, D) accepted guesses by their number, where they are not contiguous (trees)
    offered: Tensor | None = None  # (R,) tokens beyond the first that were really offered; None: all the window has


class ModelRunners(dict[str, ModelRunner]):
    """Role -> lane. `target` is the lane that commits.

    The loop says before each step what a second lane needs to know of it too.
    """

    view: int  # slots in view
    tight: bool  # the host may look, and as little is fed as serves

    def __init__(self, target: str, runners: Mapping[str, ModelRunner]) -> None:
        super().__init__(runners)
        self.target = runners[target]


class Method:
    """A decoding strategy: a frozen dataclass whose fields are its options (`mtbench.options`)."""

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]  # the target's default role; others it needs are options (`role=True`)
    reference: ClassVar[bool] = False  # the method that others are compared with
    outside: ClassVar[bool] = False  # its loop is not ours (mtbench/decoding/external.py)
    weightless: ClassVar[bool] = False  # nor are its models: it needs a checkpoint's tokenizer alone
    needs_mask: ClassVar[bool] = False  # it feeds the mask token
    default_arms: ClassVar[tuple[str, ...]] = ()  # the arms it enters when a run names none

    @property
    def claims(self) -> Claims:
        """What it promises on the reference's checkpoint.

        `lossless`: the reference's tokens, and it is held to that. `distribution`: other tokens of the same
        distribution. `lossy`: nothing.
        """
        raise NotImplementedError

    @property
    def variants(self) -> "Sequence[Method]":
        """Itself; or with an option at `auto` what it is with each of that option's widths, narrow to wide.

        They share the widest one's state. The loop steps with one of them, as recent commits call for.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # methods are dataclasses by contract
            if getattr(self, field.name) == AUTO:
                return [replace(self, **{field.name: width}) for width in field.metadata["widths"]]  # type: ignore[type-var]
        return (self,)

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        """Raise UserError if these checkpoints, by role, the target's first, cannot serve it."""

    @property
    def block(self) -> int:
        """Decided tokens come in blocks of so many, from position 0 on, that see each other and are fed whole.

        A prompt has at least one. 1: a token sees none behind it.
        """
        return 1

    def window(self) -> Window:
        """The shape of its forwards."""
        raise NotImplementedError

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """May a position see another? Of decided tokens; rules the prefill too."""
        return causal(query_position, key_position)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """Tensors of its own, if it needs any, as they are before the prompt is cached.

        The loop keeps them in place, and takes from here only the rows of new requests. Write them in place too.
        """
        return {}

    def base(self, state: State, rows: Rows) -> Tensor:
        """Where guesses start, (R,): the first undecided position, or the start of the current block."""
        return rows.known

    def final(self, state: State, rows: Rows) -> Tensor:
        """How many leading tokens may be cached, (R,)."""
        return rows.known - 1

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """The ids to feed behind the decided tokens, (R, G)."""
        return rows.tokens[:, :0]

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        """What becomes output. May write its own state, never the rows."""
        raise NotImplementedError
