"""Speed without trained weights: a script decides how many tokens each forward pass commits; the rest is real.

Random weights with the exact shapes (`--weights random:qwen2.5-7b`) and scripted acceptance (`--simulate-acceptance`)
show what a number of tokens per forward pass would gain on a GPU before any training. The text has no meaning, so
mtbench neither scores nor grades it, and marks every result as simulated. The script is given as:

- `RUN_DIRECTORY`, which replays the commits of that run: each item takes the commits and the length of a stored answer
  of the same arm.
- `0.8,0.6,0.4`, probabilities. A forward pass accepts its d-th draft token with the d-th probability if it accepted all
  tokens before; the last probability also holds for deeper tokens, and probabilities beyond an arm's deepest token have
  no effect.
- `length=2.4`, an acceptance length: mean tokens per forward pass, the model's own token included, as vLLM's
  `synthetic_acceptance_length` and SGLang's `SGLANG_SIMULATE_ACC_LEN` count it. Every forward pass commits 2 or 3
  tokens, which is the least variance (as in vLLM, and in SGLang with `match-expected`). With `length=2.4,independent`
  every draft token has the same probability, from which the arm gets this mean.
- `rates=0.8,0.5,0.3`, as vLLM's `synthetic_acceptance_rates`: the share of forward passes that accept the first d draft
  tokens; deeper ones are never accepted.

Without a run, each item uses its whole budget. mtbench draws once for each item, so this becomes a script as well.

Shapes: R = rows, F = forward passes of the longest script, N = most tokens that one forward pass commits.
"""

import copy
import dataclasses
import math
import random
import re
import typing
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.arms import Arm
from mtbench.decoding.method import Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.models.families import RANDOM
from mtbench.options import show
from mtbench.runs.directory import JsonObject, RunDirectory
from mtbench.runs.plan import Cell, Script, Simulated
from mtbench.runs.plan_checks import read_plan

CURSOR = "simulated_cursor"
KINDS = {"accept": "acceptance", "weights": "weights"}  # key of Cell.simulated -> what is simulated


class CertainOutput(TargetOutput):
    """A target output with full confidence that agrees with every draft token.

    It still computes the real values and discards them, so that a simulation has their cost.
    """

    def agrees(self, drafts: Tensor, behind: Tensor | None = None) -> Tensor:
        return torch.ones_like(super().agrees(drafts, behind))

    def sure(self, metric: sampling.Metric, threshold: float | Tensor, never: float | None = None) -> Tensor:
        return torch.ones_like(super().sure(metric, threshold, never)) & (threshold != never)


class Scripted(Method):
    """A method whose forward passes commit the numbers of a script, within the limits of the method's own policy.

    The inner method accepts as if the model were certain of every token. What it then commits is the policy's maximum:
    B for a window, the rest of a block, 0 while a row waits or a block is filled. Each forward pass with a maximum
    above 0 uses the next entry of the script; after its end each commits one token.
    If the script shortens a commit, `kept` is at most the new count, also for a method that verifies drafts.
    """

    name: ClassVar[str]

    def __init__(self, method: Method, scripts: Sequence[Sequence[int]], device: torch.device) -> None:
        """`scripts[i]`: the tokens that each forward pass of item i commits; entries of 0 are dropped."""
        self.method = method
        self.__dict__["name"] = method.name
        positive = [[n for n in script if n] for script in scripts]
        forwards = max(map(len, positive), default=0) + 1
        self.script = torch.tensor([s + [1] * (forwards - len(s)) for s in positive], device=device)  # (items, F + 1)
        self.item = torch.arange(len(positive), device=device)  # index of the request in its batch -> item

    def serve(self, items: Sequence[int]) -> None:
        """Set the items of the next batch's requests. Written in place, because a CUDA graph reads this tensor."""
        self.item[: len(items)] = torch.tensor(items, device=self.item.device)

    @property
    def claims(self) -> Claims:
        return self.method.claims

    @property
    def variants(self) -> Sequence[Method]:
        scripted = []
        for variant in self.method.variants:
            scripted.append(copy.copy(self))
            scripted[-1].method = variant
        return scripted

    @property
    def block(self) -> int:
        return self.method.block

    def window(self) -> Window:
        return self.method.window()

    def taps(self, runners: ModelRunners) -> Sequence[int]:
        return self.method.taps(runners)

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return self.method.visible(query_position, key_position)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        return {**self.method.start(rows, runners), CURSOR: torch.zeros_like(rows.prompt_len)}

    def base(self, state: State, rows: Rows) -> Tensor:
        return self.method.base(state, rows)

    def final(self, state: State, rows: Rows) -> Tensor:
        return self.method.final(state, rows)

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        return self.method.propose(state, rows, runners)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        fields = dataclasses.fields(output)
        commit = self.method.accept(state, rows, CertainOutput(**{f.name: getattr(output, f.name) for f in fields}))
        cursor = state[CURSOR]
        scripted = self.script[self.item[rows.request], cursor.clamp(max=self.script.shape[1] - 1)]  # (R,)
        count = torch.minimum(commit.count, scripted)
        cursor.add_(commit.count > 0)
        kept = torch.where(count < commit.count, torch.minimum(commit.kept, count), commit.kept)
        offered = commit.offered if commit.offered is None else torch.maximum(commit.offered, count - 1)
        return dataclasses.replace(commit, count=count, kept=kept, offered=offered)


def scripted(method: Method, script: Script, device: torch.device) -> Method:
    """Return `method` with the scripted acceptance of its cell; unchanged if it commits one token at a time."""
    scripts = script.scripts
    if script.probabilities is not None:
        most, seed = most_commits(method), script.seed
        scripts = [draw(script.probabilities, most, n, f"{seed}/{i}") for i, n in enumerate(script.lengths)]
    return method if scripts is None else Scripted(method, scripts, device)


def draw(probabilities: Sequence[float], most: int, forwards: int, seed: str) -> list[int]:
    """Return the tokens that each forward pass commits: one, and one for each accepted draft token, `most` at most."""
    rng = random.Random(seed)
    depths = [probabilities[min(d, len(probabilities) - 1)] for d in range(most - 1)]
    return [1 + sum(1 for _ in takewhile(lambda p: rng.random() < p, depths)) for _ in range(forwards)]


def least_variance(length: float) -> list[float]:
    """Return conditional probabilities by which each forward commits the floor or the ceiling of `length` tokens."""
    certain = int(length) - 1
    return [1.0] * certain + [length - 1 - certain, 0.0]


def same_probability(length: float, most: int) -> list[float]:
    """Return the probability p of every draft token with 1 + p + p² + … = `length` over `most` tokens, by bisection.

    (Leviathan et al., arXiv 2211.17192, equation 1.)
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**d for d in range(most)) < length else (low, middle)
    return [high]


def budgets(script: Script, items: Sequence[int], most: Sequence[int]) -> list[int]:
    """Return the token budget of each of these items, at most its entry in `most`."""
    return [min(n, script.lengths[i]) for i, n in zip(items, most, strict=True)]


class Acceptance:
    """The value of `--simulate-acceptance`, used by planning: probabilities, rates, a length, or a run to replay."""

    def __init__(self, text: str) -> None:
        """Raise UserError if `text` is neither the directory of a run nor one of the other forms."""
        self.source = text
        self.run = RunDirectory(Path(text)) if text and Path(text).is_dir() else None
        self.cells: Sequence[Cell] = _read_cells(self.run) if self.run else []
        self.generations: dict[str, list[JsonObject]] = {}  # cell -> lines of its generations
        self.probabilities: list[float] = []
        self.length: float | None = None  # mean tokens per forward
        self.independent = True
        if self.run:
            return
        try:
            self._parse(text)
        except ValueError:
            raise UserError(
                f"--simulate-acceptance {text!r} is neither the directory of a run nor probabilities from 0 to 1, "
                "falling rates or a length of at least 1; give one of them, such as "
                "`--simulate-acceptance 0.8,0.6,0.4` or `--simulate-acceptance length=2.4`."
            ) from None

    def _parse(self, text: str) -> None:
        """Read probabilities, rates or a length. Raise ValueError for anything else."""
        form, equals, values = text.partition("=")
        if not equals:
            self.probabilities = [float(part) for part in text.split(",")]
        elif form == "length":
            number, _, word = values.partition(",")
            self.length, self.independent = float(number), word == "independent"
            if not 1 <= self.length < math.inf or word not in ("", "independent"):
                raise ValueError
        elif form == "rates":
            rates = [float(part) for part in values.split(",")]
            self.probabilities = [rate / before if before else 0.0 for before, rate in pairwise([1.0, *rates])] + [0.0]
        else:
            raise ValueError
        if not all(0 <= p <= 1 for p in self.probabilities):
            raise ValueError

    @property
    def note(self) -> str | None:
        if self.run:
            return None
        draws = "independent draws" if self.independent else "commits of the least variance"
        return f"{draws}: optimistic for static batches"

    def conditional(self, arm: Arm, most: int) -> list[float]:
        """Return the probabilities for an arm that commits up to `most` tokens. Raise UserError if it cannot."""
        if self.length is None:
            return self.probabilities
        if self.length > most:
            raise UserError(
                f"--simulate-acceptance {self.source}: {str(arm)!r} commits at most {most} tokens per forward; "
                "give a length from 1 "
                f"to {most}, or widen the arm in `--method`."
            )
        return same_probability(self.length, most) if self.independent else least_variance(self.length)

    def trained_options(self, arm: Arm, suite: str) -> Mapping[str, Any]:
        """Return the arm's options in that run, to use with random weights, which have no training options."""
        cell = self._find_cell(arm, suite)
        return cell.options if cell else {}

    def plan(
        self, arm: Arm, method: Method, arms: Sequence[Arm], suite: str, items: int, budget: int, seed: int
    ) -> tuple[Script, str | None]:
        """Return Cell.accept for an arm with so many items, and a note on what the replay omits.

        An arm that commits one token at a time only needs lengths: those of its own answers, or else of the first of
        `arms` that the run has. Raise UserError if the run has no commits for the arm, or with other options.
        """
        multi_token = most_commits(method) > 1
        if self.run is None:
            probabilities = self.conditional(arm, most_commits(method)) if multi_token else None
            script = Script(
                source=self.source, lengths=[budget] * items, seed=seed, scripts=None, probabilities=probabilities
            )
            return script, self.note
        candidates = [arm] if multi_token else [arm, *arms]
        cell = next(filter(None, (self._find_cell(candidate, suite) for candidate in candidates)), None)
        lines = self._lines(cell.cell) if cell else []
        if cell is None or (multi_token and any(line["commits"] is None for line in lines)):
            raise self._no_commits(candidates)
        if multi_token:
            self._refuse_other_options(arm, method, cell)
        replayed = [lines[i % len(lines)] for i in range(items)]
        full_lengths = [len(line["token_ids"]) for line in replayed]
        lengths = [min(budget, length) for length in full_lengths]
        scripts = [line["commits"] for line in replayed] if multi_token else None
        script = Script(source=self.source, lengths=lengths, seed=seed, scripts=scripts, probabilities=None)
        return script, _shortening_note(lengths, full_lengths, scripts)

    def _no_commits(self, candidates: Sequence[Arm]) -> UserError:
        missing = " or ".join(dict.fromkeys(map(_without_engine, candidates)))
        available = dict.fromkeys(_strip_engine(c.arm, c.engine) for c in self.cells if self._lines(c.cell))
        return UserError(
            f"--simulate-acceptance {self.source}: the run has no commits of {missing}; it has: "
            f"{', '.join(available) or 'none'}. "
            "Choose one of these with `--method`."
        )

    def _refuse_other_options(self, arm: Arm, method: Method, cell: Cell) -> None:
        """Raise UserError if the stored cell ran with other options than `method` has."""
        options = dataclasses.asdict(method)  # type: ignore[call-overload]  # a dataclass
        for name, value in options.items():
            stored = cell.options.get(name)
            if stored != value:
                raise UserError(
                    f"--simulate-acceptance {self.source}: {_without_engine(arm)!r} ran there with "
                    f"{name}={show(stored)}, and would "
                    f"run now with {show(value)}; set {name} in `--method`."
                )

    def _find_cell(self, arm: Arm, suite: str) -> Cell | None:
        """Return the arm's cell in that run, with any engine: preferably of this suite, then of the largest batch."""
        name = _without_engine(arm)
        same = [c for c in self.cells if _strip_engine(c.arm, c.engine) == name and self._lines(c.cell)]
        return max(same, key=lambda c: (c.suite == suite, c.batch_size), default=None)

    def _lines(self, cell: str) -> list[JsonObject]:
        assert self.run is not None
        if cell not in self.generations:
            self.generations[cell] = self.run.lines(f"generations/{cell}.jsonl")
        return self.generations[cell]


def _read_cells(run: RunDirectory) -> Sequence[Cell]:
    """Return the cells of a run. Raise UserError if the directory holds no run."""
    if not run.has("plan.json"):
        raise UserError(
            f"--simulate-acceptance {run.path}: the directory holds no run; give the directory of a finished run, "
            "or probabilities such as `--simulate-acceptance 0.8,0.6,0.4`."
        )
    try:
        return read_plan(run).cells
    except UserError as error:
        raise UserError(f"--simulate-acceptance {run.path}: {error}") from None


def _shortening_note(
    lengths: Sequence[int], full_lengths: Sequence[int], scripts: Sequence[Sequence[int]] | None
) -> str | None:
    """Return a note if a replay is shorter than its run: the ends of answers may have another acceptance."""
    if sum(lengths) == sum(full_lengths):
        return None
    mean, full_mean = sum(lengths) / len(lengths), sum(full_lengths) / len(full_lengths)
    note = f"replays the first {mean:.0f} of {full_mean:.0f} tokens on average"
    if scripts is None:
        return note
    tokens_per_forward = sum(full_lengths) / sum(map(len, scripts))
    return f"{note}; the source run had {tokens_per_forward:.2f} tokens per forward"


def most_commits(method: Method) -> int:
    """Return the most tokens that one forward pass commits; 1 for an external engine, which does not expose it."""
    return 1 if method.outside else method.variants[-1].window().commits


def simulated_parts(checkpoints: Mapping[str, str], acceptance: Acceptance | None) -> Simulated | None:
    """Return Cell.simulated, the simulated parts of a cell; None if there are none."""
    weights = next((source for source in checkpoints.values() if source.startswith(RANDOM)), None)
    if weights is None and acceptance is None:
        return None
    return Simulated(weights=weights, accept=None if acceptance is None else acceptance.source, note=None)


def flags_of(simulated: Simulated | None) -> list[str]:
    """Return Cell.simulated as flags such as "simulated weights"."""
    return [f"simulated {word}" for kind, word in KINDS.items() if getattr(simulated, kind, None)]


def refuse_scored(suite: str, metric: str | None, simulated: str) -> None:
    """Raise UserError if the suite has a metric: a simulation has no accuracy. `simulated`: the simulating option."""
    if metric is not None:
        speed_only = [name for name in SUITES if SUITES[name].metric is None]
        raise UserError(
            f"suite {suite!r} scores accuracy, and {simulated} has none; choose a suite that measures speed only: "
            f"{', '.join(speed_only)}. See `mtbench ls suites`."
        )


def refuse_unsuitable(suite: str, metric: str | None, arm: Arm, method: Method, simulated: Simulated) -> None:
    """Raise UserError if the simulated cell would be scored, or if its acceptance is not known."""
    refuse_scored(suite, metric, f"weights {simulated.weights!r}")
    if simulated.accept is None and most_commits(method) > 1:
        raise UserError(
            f"{str(arm)!r} can commit {most_commits(method)} tokens per forward, and random weights do not "
            "determine how many; add `--simulate-acceptance RUN_DIRECTORY`, `--simulate-acceptance 0.8,0.6,0.4` "
            "or `--simulate-acceptance length=2.4`."
        )


def refuse_unscriptable(arm: Arm, method: Method) -> None:
    """Raise UserError if a script cannot describe `method`, or if an option limits it to the plain loop's tokens.

    To find such an option, this tries its other values: with one of them the method makes no promise.
    """
    if method.variants[-1].block > 1:
        raise UserError(
            f"{str(arm)!r} decides tokens out of order, and a script describes tokens in order only; "
            "leave out that `--method` or `--simulate-acceptance`."
        )
    if method.reference or most_commits(method) == 1 or method.claims == "lossy":
        return
    types = typing.get_type_hints(type(method))
    for field in dataclasses.fields(method):  # type: ignore[arg-type]  # methods are dataclasses by contract
        values = [value for value in _other_values(field, types[field.name]) if value is not None]
        if any(_claims(method, field.name, value) == "lossy" for value in values):
            raise UserError(
                f"{str(arm)!r} promises the plain loop's tokens at {field.name}={show(getattr(method, field.name))}, "
                f"so --simulate-acceptance cannot make it commit more per forward; set another {field.name} in "
                "`--method`."
            )


def _other_values(field: dataclasses.Field[Any], kind: Any) -> Sequence[Any]:
    """Return the values of an option to try: all of a bool or Literal, otherwise the lowest and the highest."""
    if kind is bool:
        return (True, False)
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind)
    return (field.metadata["low"], field.metadata["high"])


def _claims(method: Method, option: str, value: Any) -> str | None:
    """Return what `method` promises with another value of an option; None if the value is not allowed."""
    try:
        changed: Method = dataclasses.replace(method, **{option: value})  # type: ignore[type-var]
    except UserError:
        return None
    return changed.claims


def _without_engine(arm: Arm) -> str:
    """Return the arm's text without its engine."""
    return _strip_engine(str(arm), arm.engine)


def _strip_engine(arm: str, engine: str | None) -> str:
    return re.sub(r"#\d+$", "", arm).removesuffix(f"/{engine}")
