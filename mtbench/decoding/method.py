"""The interface of a decoding method: it proposes guesses and accepts some. The loop (loop.py) does everything else.

Every multi-token method is the same loop: feed the tokens that are decided but not cached, then some guesses; compute
logits; commit; move the cursors. A method implements only `propose` and `accept`, so it cannot count its own tokens,
skip the end-token rule or hide a forward.

Cursors, per row: `cached ≤ base − 1 < base ≤ known`. The last decided token is always fed again: its logits verify the
first guess, so no logits are kept between steps.

R = rows, G = guesses, N = most tokens one forward commits, S = slots, V = vocabulary.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtbench import kernels, sampling
from mtbench.decoding import trees
from mtbench.models.loading import Inspected
from mtbench.models.runner import ModelRunner
from mtbench.options.fields import AUTO, option_of

Claims = Literal["lossless", "distribution", "lossy"]
NONE = -1  # marks a missing draft; it equals no token id
State = dict[str, Tensor]  # tensors that keep their memory address, with leading dimension R


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The shape of one forward, fixed for a method, and the tree of its guesses unless `propose` returns one."""

    pending: int | None  # P: most decided tokens a row can have outside the cache; None: no bound
    guesses: int  # G
    commits: int  # N: most tokens one forward can commit
    sees: Tensor | None = None  # (G, G) bool: guess g attends to guess h; None: by `block`
    offset: Tensor | None = None  # (G,) position of guess g is base + offset[g]; None: 0 … G−1
    drafts: int = 0  # forwards of a draft model before each forward
    room: int = 0  # slots of a row that a draft model needs more than the target

    def to(self, device: torch.device) -> "Window":
        """Return the same window with its tensors on a device."""
        sees = None if self.sees is None else self.sees.to(device)
        offset = None if self.offset is None else self.offset.to(device)
        return replace(self, sees=sees, offset=offset)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A batch of requests. Methods read it; only the loop writes it."""

    tokens: Tensor  # (R, S) prompt, then output; beyond `known` undefined
    request: Tensor  # (R,) number of the request in the row
    prompt_len: Tensor  # (R,)
    known: Tensor  # (R,) decided tokens
    base: Tensor  # (R,) where guesses start
    cached: Tensor  # (R,) leading tokens whose keys and values are final
    limit: Tensor  # (R,) upper bound of known; an end token lowers it
    done: Tensor  # (R,) bool: known has reached the limit
    seed: Tensor  # (R,) random seed of each request
    endless: Tensor  # (R,) bool: no token ends the request
    temperature: Tensor | None = None  # (R,), 0: greedy; None: all rows are greedy
    filters: sampling.Filters | None = None  # of the tokens that a row may choose; None: no row has any
    options: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # (R,) each: options that requests set

    def option(self, method: "Method", name: str) -> Any:
        """Return an option's value: the method's own, or (R, 1) where requests set it."""
        return self.options[name][:, None] if name in self.options else getattr(method, name)

    def differs(self, method: "Method", name: str, value: float) -> Tensor:
        """Return where an option has another value than this, (R,) long: 0 or 1."""
        different = self.option(method, name) != value
        return different[:, 0].long() if isinstance(different, Tensor) else torch.full_like(self.known, different)

    @property
    def unfiltered(self) -> "Rows":
        """The rows without filters."""
        return self if self.filters is None else replace(self, filters=None)

    def filtered(self, logits: Tensor) -> Tensor:
        """Return logits (R, n, V) with −∞ for tokens that the filters remove."""
        if self.temperature is None or self.filters is None:
            return logits
        return sampling.filtered(logits, self.temperature, self.filters)

    def suffix_matches(self, longest: int) -> Tensor:
        """Return the length of the text's suffix that ends at each position, (R, S), at most `longest`.

        0 at the text's own end and behind it. Methods that copy drafts from the text use it.
        """
        last = self.known[:, None] - 1
        place = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        same, matched = place < last, torch.zeros_like(self.tokens)
        for back in range(longest):
            token = self.tokens.gather(1, (last - back).clamp(min=0))
            same = same & (self.tokens.roll(back, 1) == token) & (place >= back)
            matched += same
        return matched

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """Choose tokens (R, n) from logits (R, n, V) at positions (R, n). Target and draft use it."""
        if self.temperature is not None and logits.is_cuda:
            return self.choose_in_one_pass(logits, position)[0]
        return sampling.choose(self.scores(logits, position))

    def best(self, logits: Tensor, position: Tensor, count: int) -> Tensor:
        """Return the `count` tokens of each column (R, n) that `choose` prefers, the best first: (R, n, count)."""
        if count == 1:
            return self.choose(logits, position)[..., None]
        return self.scores(logits, position).topk(count, -1).indices

    def likeliest(self, logits: Tensor, position: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return what `best` returns, and the log-probabilities of these tokens, float64: (R, n, count) each.

        Probabilities are the softmax of `scores`. A vocabulary of fewer tokens than `count` gives as many as it has.
        """
        scores = self.scores(logits, position)
        top = scores.topk(min(count, scores.shape[2]), -1)
        return top.indices, top.values.double() - scores.double().logsumexp(-1, keepdim=True)

    def scores(self, logits: Tensor, position: Tensor) -> Tensor:
        """Return what `choose` takes the largest of, (R, n, V): logits, or with a temperature logits/T plus noise."""
        if self.temperature is None:
            return logits
        return sampling.sampled(self.filtered(logits), self.temperature, self.seed, position)

    def choose_in_one_pass(self, logits: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return choice, largest logit and log-sum-exp of each column, (R, n) each, by one pass over the vocabulary.

        Filters apply to the choice only, which takes a pass of its own then.
        """
        if self.filters is None:
            return kernels.choose_logsumexp(logits, self.temperature, self.seed, position)
        choice, _, _ = kernels.choose_logsumexp(self.filtered(logits), self.temperature, self.seed, position)
        return (choice, *kernels.choose_logsumexp(logits, None, self.seed, position)[1:])

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities with which `choose` chooses, (R, n, V) float64."""
        certain = torch.zeros_like(logits, dtype=torch.double).scatter_(-1, sampling.choose(logits)[..., None], 1.0)
        if self.temperature is None:
            return certain
        hot = self.temperature[:, None, None]
        wide = self.filtered(logits).double()
        return torch.where(hot > 0, (wide / hot.masked_fill(hot == 0, 1)).softmax(-1), certain)


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """The target's logits at the last decided token (column 0) and at each guess (guess g in column g + 1).

    Each column predicts the position after its own.
    """

    rows: Rows
    guess: Tensor  # (R, G) the ids fed
    position: Tensor  # (R, G+1) the positions predicted
    logits: Tensor  # (R, G+1, V); −∞ for suppressed ids
    one_pass: tuple[Tensor, Tensor, Tensor] | None = None  # on a GPU: `Rows.choose_in_one_pass` of the logits
    sees: Tensor | None = None  # (G, G) or (R, G, G) bool: of the window, or of the guesses

    @cached_property
    def choice(self) -> Tensor:
        """The token that the model chooses at each column, (R, G+1)."""
        return self.rows.choose(self.logits, self.position) if self.one_pass is None else self.one_pass[0]

    @cached_property
    def confidence(self) -> Tensor:
        """The largest probability at each column, (R, G+1) float32, at temperature 1 and without filters.

        In greedy decoding it is that of the choice. (MARS, arXiv 2604.07023, section 3.4.)
        """
        if self.one_pass is None:
            return sampling.confidence(self.logits)
        _, largest, logsumexp = self.one_pass
        return torch.exp(largest - logsumexp)

    def agrees(self, drafts: Tensor, column: Tensor | None = None) -> Tensor:
        """Return which drafts (R, K) are the model's choice at their position, (R, K) bool; `NONE` never agrees.

        `column` (K,) or (R, K): where the draft before each one is. None: the drafts are the first guesses, in a chain.
        """
        choice = self.choice[:, : drafts.shape[1]]
        return (choice if column is None else self.choice.gather(1, column.expand_as(drafts))) == drafts

    @property
    def depth(self) -> Tensor:
        """How many levels each row's tree has, (R,)."""
        return self.position.amax(1) - self.position[:, 0]

    def longest(self, drafts: Tensor, depth: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return how many drafts (R,) the longest path of a tree has that agree, and that path, as `Commit.path`.

        `drafts` (R, K): the guesses from number `first` on, a tree of at most `depth` levels by the window's `sees`,
        in which a parent has a lower number than its children; `NONE` for those to leave out.
        """
        assert self.sees is not None
        end = first + drafts.shape[1]
        sees = self.sees[..., first:end, first:end]
        column = trees.columns(sees)
        accepted, path = trees.longest(self.agrees(drafts, column + first * (column > 0)), sees, depth)
        return accepted, path + first

    def sure(self, metric: sampling.Metric, threshold: float | Tensor, never: float | None = None) -> Tensor:
        """Return whether the model is confident of its choice, (R, G+1) bool; `threshold`: one, or (R, 1).

        `never`: the threshold that no choice reaches.
        """
        if not isinstance(threshold, Tensor) and threshold == never:
            return torch.zeros_like(self.choice, dtype=torch.bool)
        if metric == "probability":
            sure = sampling.reaches(self.confidence, threshold)
        else:
            sure = sampling.sure(self.logits, metric, threshold)
        return sure & (threshold != never) if isinstance(threshold, Tensor) else sure

    def sound(self, commit: "Commit", block: int) -> Tensor:
        """Return how many leading tokens of a commit were chosen by numbers, (R,); in a block all or none."""
        logits = self.logits if self.one_pass is None else self.one_pass[2][..., None]  # their log-sum-exp
        numbers, most, columns = sampling.numbers(logits), commit.tokens.shape[1], commit.columns
        if block > 1:
            return numbers.all(1) * most
        if columns is None and commit.path is not None:
            columns = pad(commit.path + 1, (1, 0))
        numbers = numbers if columns is None else numbers.gather(1, columns)
        return sampling.prefix_length(pad(numbers, (0, most - numbers.shape[1]), value=True))


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """The tokens that a forward decided. The loop cuts them at end token and budget."""

    tokens: Tensor  # (R, N)
    count: Tensor  # (R,) 0 … N; 0: a block not yet full, a row waiting
    kept: Tensor  # (R,) leading guesses whose keys and values are already final
    path: Tensor | None = None  # (R, D) accepted guesses by number, if they are not contiguous (trees)
    offered: Tensor | None = None  # (R,) tokens beyond the first that could be committed; None: all of the window
    stopped: Tensor | None = None  # (R,) 1: it held back more as unlikely, which counts as one rejected; None: 0
    columns: Tensor | None = None  # (R, N) where each token was chosen; None: at 0, 1 …, or at those of the path


def block_start(position: Tensor, block: int) -> Tensor:
    """Return the first position of the block in which a position lies."""
    return position if block == 1 else position // block * block


class ModelRunners(dict[str, ModelRunner]):
    """Role -> model runner. `target` is the runner whose tokens are committed.

    Before each step the loop sets `view`, `tight` and `commits`, for draft models too.
    """

    view: int  # slots in view
    tight: bool  # the host may read tensors, and feeds only the positions needed
    commits: int  # most tokens that the step before can have committed, in any width

    def __init__(self, target: str, runners: Mapping[str, ModelRunner]) -> None:
        super().__init__(runners)
        self.target = runners[target]


class Method:
    """A decoding strategy: a frozen dataclass whose fields are its options (`mtbench.options`)."""

    name: ClassVar[str]
    title: ClassVar[str] = ""  # its name in reports; empty: `name`
    roles: ClassVar[tuple[str, ...]]  # the target's default role; other roles are options (`role=True`)
    reference: ClassVar[bool] = False  # other methods are compared with it
    outside: ClassVar[bool] = False  # an external engine, with its own loop (mtbench/decoding/external.py)
    draws: ClassVar[bool] = True  # tokens by the run's sampling; False: it decodes greedily only
    served_only: ClassVar[bool] = False  # only serving engines have it; the loop does not
    needs_weights: ClassVar[bool] = True  # False: an external engine with its own models needs only the tokenizer
    needs_mask: ClassVar[bool] = False  # it feeds the mask token
    default_arms: ClassVar[tuple[str, ...]] = ()  # its arms if a run names no method
    choices: ClassVar[tuple[str, ...]] = ()  # its arms in `mtbench choose`: a few values of its main option

    @property
    def claims(self) -> Claims:
        """The method's promise on the reference's checkpoint.

        `lossless`: the reference's tokens, which the run verifies. `distribution`: other tokens of the same
        distribution. `lossy`: nothing.
        """
        raise NotImplementedError

    @property
    def variants(self) -> "Sequence[Method]":
        """The method itself, or, if an option is `auto`, the method at each of that option's widths, narrow to wide.

        All share the state of the widest. In each step the loop chooses one by recent acceptance.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # methods are dataclasses by contract
            if getattr(self, field.name) == AUTO:
                return [replace(self, **{field.name: width}) for width in option_of(field.metadata["option"]).widths]  # type: ignore[type-var]
        return (self,)

    @property
    def translates(self) -> bool:
        """Whether its draft models have vocabularies of their own (mtbench/models/vocabularies.py)."""
        return False

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        """Raise UserError if the method cannot run on these checkpoints, by role, the target's first."""

    @property
    def block(self) -> int:
        """Size of a block. Blocks count from position 0; a position attends to its whole block; a block is fed whole.

        A prompt has at least one block. 1: attention is causal.
        """
        return 1

    def window(self) -> Window:
        """Return the shape of its forwards."""
        raise NotImplementedError

    def taps(self, runners: ModelRunners) -> Sequence[int]:
        """Return which of the target's hidden states it reads, numbered as transformers' `hidden_states`.

        Layer i's input is number i; the LM head's input has the largest number. The target's cache keeps them for every
        position fed, in the slots of the tokens (`KVCache.features`). Default: those that its draft models read.
        """
        return sorted({tap for runner in runners.values() for tap in runner.taps})

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """Return the initial values of the method's own tensors, before the prompt is cached.

        The loop copies the rows of new requests into tensors that keep their memory address. Write to them in place.
        """
        return {}

    @property
    def own_cursors(self) -> bool:
        """Whether `base` or `final` are its own. If not, a GPU moves the cursors in the kernel that commits."""
        return type(self).base is not Method.base or type(self).final is not Method.final

    def base(self, state: State, rows: Rows) -> Tensor:
        """Return where guesses start, (R,): the first undecided position, or the start of its block."""
        return block_start(rows.known, self.block)

    def final(self, state: State, rows: Rows) -> Tensor:
        """Return how many leading tokens may be cached, (R,)."""
        return rows.known - 1

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | trees.Guesses:
        """Return the ids to feed after the decided tokens, (R, G), or these with a tree of each row's own."""
        return rows.tokens[:, :0]

    def places(self, state: State, rows: Rows, places: Tensor) -> Tensor:
        """Return the slots of the guesses, (R, G). `places`: base, base + 1 … Equal guesses may share a slot.

        What is cached in a slot of the block that is not fed stays.
        """
        return places

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        """Return the tokens to commit. It may write its own state, never the rows."""
        raise NotImplementedError
