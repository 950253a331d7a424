"""Speed without weights: how many tokens each forward commits is scripted, everything else is real.

With random weights of the exact shapes (`--weights random:qwen2.5-7b`) and scripted acceptance (`--accept`) a team sees
what tokens per forward would buy on its GPU before anything is trained. The text means nothing, so nothing is scored
and nothing is graded; whatever comes of it is marked.

- `--accept RUN_DIRECTORY` replays that run's commits: each item takes those of a stored answer of the same arm, and is
  as long as that answer.
- `--accept 0.8,0.6,0.4`: the d-th mask is accepted with the d-th probability if all before it were (the last one goes
  for deeper ones too, and those beyond an arm's deepest mask say nothing); every item takes its whole budget. Drawn
  once per item, so it becomes a script as well.

R = rows, F = forwards of the longest script, N = most tokens one forward commits.
"""

import copy
import dataclasses
import random
import re
import typing
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mtbench.decoding.arms import Arm
from mtbench.decoding.method import Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.models import sampling
from mtbench.models.families import RANDOM
from mtbench.options import show
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.plan import Cell, Script, Simulated, read_plan

CURSOR = "simulated_cursor"
KINDS = {"accept": "acceptance", "weights": "weights"}  # of simulation, as Cell.simulated has them, in words


class Certain(TargetOutput):
    """The model's choices: it is sure of all, and all drafts are among them. Finding out is paid for all the same."""

    def agrees(self, drafts: Tensor, behind: Tensor | None = None) -> Tensor:
        return torch.ones_like(super().agrees(drafts, behind))

    def sure(self, metric: sampling.Metric, threshold: float) -> Tensor:
        return torch.ones_like(super().sure(metric, threshold))


class Scripted(Method):
    """A method whose forwards commit what a script says, as far as its own policy lets them.

    The inner method accepts as if the model were sure of everything; what it would commit then is the policy's cap:
    B for a window, what is left of a block, 0 while a row waits or a block is filled. A script's next entry is used up
    by every forward with a cap above 0; behind its end one token is committed at a time.
    Note: `kept` of a cut commit is at most its count; a method that verifies drafts has its own say in that.
    """

    name: ClassVar[str]

    def __init__(self, method: Method, scripts: Sequence[Sequence[int]], device: torch.device) -> None:
        """`scripts[i]`: the tokens that item i's forwards commit; entries of 0 are the policy's matter and dropped."""
        self.method = method
        self.__dict__["name"] = method.name
        positive = [[n for n in script if n] for script in scripts]
        forwards = max(map(len, positive), default=0) + 1
        self.script = torch.tensor([s + [1] * (forwards - len(s)) for s in positive], device=device)  # (items, F + 1)
        self.item = torch.arange(len(positive), device=device)  # request of the batch -> item

    def serve(self, items: Sequence[int]) -> None:
        """The next batch's requests are these items. Written in place: a captured step sees it."""
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
        commit = self.method.accept(state, rows, Certain(**{f.name: getattr(output, f.name) for f in fields}))
        cursor = state[CURSOR]
        scripted = self.script[self.item[rows.request], cursor.clamp(max=self.script.shape[1] - 1)]  # (R,)
        count = torch.minimum(commit.count, scripted)
        cursor.add_(commit.count > 0)
        kept = torch.where(count < commit.count, torch.minimum(commit.kept, count), commit.kept)
        offered = commit.offered if commit.offered is None else torch.maximum(commit.offered, count - 1)
        return dataclasses.replace(commit, count=count, kept=kept, offered=offered)


def scripted(method: Method, script: Script, device: torch.device) -> Method:
    """`method` with the acceptance of its cell; itself if it commits one token at a time anyway."""
    scripts = script.scripts
    if script.probabilities is not None:
        most, seed = most_commits(method), script.seed
        scripts = [draw(script.probabilities, most, n, f"{seed}/{i}") for i, n in enumerate(script.lengths)]
    return method if scripts is None else Scripted(method, scripts, device)


def draw(probabilities: Sequence[float], most: int, forwards: int, seed: str) -> list[int]:
    """What each forward commits: one token, and one more for every mask accepted in a row, `most` at most."""
    chance = random.Random(seed)
    depths = [probabilities[min(d, len(probabilities) - 1)] for d in range(most - 1)]
    return [1 + sum(1 for _ in takewhile(lambda p: chance.random() < p, depths)) for _ in range(forwards)]


def budgets(script: Script, items: Sequence[int], most: Sequence[int]) -> list[int]:
    """The tokens that each of these items takes, none more than its `most`."""
    return [min(n, script.lengths[i]) for i, n in zip(items, most, strict=True)]


class Acceptance:
    """What `--accept` says, asked by planning: probabilities, or a run whose commits are replayed."""

    def __init__(self, text: str) -> None:
        """Raises UserError if `text` is neither."""
        self.source = text
        self.run = RunDirectory(Path(text)) if text and Path(text).is_dir() else None
        self.cells: Sequence[Cell] = _cells(self.run) if self.run else []
        self.answers: dict[str, list[Record]] = {}  # cell -> lines of its generations
        self.probabilities: list[float] = []
        if self.run:
            return
        try:
            self.probabilities = [float(part) for part in text.split(",")]
            if not all(0 <= p <= 1 for p in self.probabilities):
                raise ValueError
        except ValueError:
            raise UserError(
                f"--accept {text!r} is neither the directory of a run nor probabilities from 0 to 1; "
                "give one, or such as `--accept 0.8,0.6,0.4`."
            ) from None

    @property
    def note(self) -> str | None:
        return None if self.run else "independent draws: optimistic for static batches"

    def trained(self, arm: Arm, suite: str) -> Mapping[str, Any]:
        """The options the arm had in that run, for weights that were not trained with any."""
        cell = self._find(arm, suite)
        return cell.options if cell else {}

    def plan(
        self, arm: Arm, method: Method, arms: Sequence[Arm], suite: str, items: int, budget: int, seed: int
    ) -> tuple[Script, str | None]:
        """What the arm's cell is made to accept, for so many items, and what to mind about it.

        Raises UserError if the run does not say.

        Arms that commit one token at a time need lengths only: of their own answers, else of the first arm's found.
        """
        many = most_commits(method) > 1
        if self.run is None:
            probabilities = self.probabilities if many else None
            script = Script(
                source=self.source, lengths=[budget] * items, seed=seed, scripts=None, probabilities=probabilities
            )
            return script, self.note
        wanted = [arm] if many else [arm, *arms]
        cell = next(filter(None, (self._find(one, suite) for one in wanted)), None)
        lines = self._lines(cell.cell) if cell else []
        if cell is None or (many and any(line["commits"] is None for line in lines)):
            missing = " or ".join(dict.fromkeys(map(_name, wanted)))
            there = dict.fromkeys(_unengined(c.arm, c.engine) for c in self.cells if self._lines(c.cell))
            raise UserError(
                f"--accept {self.source}: no commits of {missing} there; it has: {', '.join(there) or 'none'}. "
                "Replay one of these with `--method`."
            )
        ran, asked = cell.options, dataclasses.asdict(method)  # type: ignore[call-overload]  # a dataclass
        if many and (other := [name for name in asked if ran.get(name) != asked[name]]):
            raise UserError(
                f"--accept {self.source}: {_name(arm)!r} ran there with {other[0]}={show(ran.get(other[0]))}, here it "
                f"would with {show(asked[other[0]])}; say which in `--method`."
            )
        taken = [lines[i % len(lines)] for i in range(items)]
        scripts = [line["commits"] for line in taken] if many else None
        whole = [len(line["token_ids"]) for line in taken]
        lengths = [min(budget, n) for n in whole]
        script = Script(source=self.source, lengths=lengths, seed=seed, scripts=scripts, probabilities=None)
        return script, cut(lengths, whole, scripts)

    def _find(self, arm: Arm, suite: str) -> "Cell | None":
        """The arm's cell in that run, by whatever engine: of the same suite if there is one, of the largest batch."""
        same = [c for c in self.cells if _unengined(c.arm, c.engine) == _name(arm) and self._lines(c.cell)]
        return max(same, key=lambda c: (c.suite == suite, c.batch_size), default=None)

    def _lines(self, cell: str) -> list[Record]:
        assert self.run is not None
        if cell not in self.answers:
            self.answers[cell] = self.run.lines(f"generations/{cell}.jsonl")
        return self.answers[cell]


def _cells(run: RunDirectory) -> Sequence[Cell]:
    """Those of a run to replay. Raises UserError if it is none."""
    if not run.has("plan.json"):
        raise UserError(
            f"--accept {run.path}: there is no run in it; give the directory of a finished run, or probabilities such "
            "as `--accept 0.8,0.6,0.4`."
        )
    try:
        return read_plan(run).cells
    except UserError as error:
        raise UserError(f"--accept {run.path}: {error}") from None


def cut(lengths: Sequence[int], whole: Sequence[int], scripts: Sequence[Sequence[int]] | None) -> str | None:
    """What a replay that is shorter than its run leaves out: the ends of answers may go faster or slower than these."""
    if sum(lengths) == sum(whole):
        return None
    said = f"replays the first {sum(lengths) / len(lengths):.0f} of {sum(whole) / len(whole):.0f} tokens on average"
    if scripts is None:
        return said
    return f"{said}; the source run had {sum(whole) / sum(map(len, scripts)):.2f} tokens per forward"


def most_commits(method: Method) -> int:
    """Tokens one forward can commit; of a loop that is not ours none is known to be more than one."""
    return 1 if method.outside else method.variants[-1].window().commits


def mark(checkpoints: Mapping[str, str], acceptance: Acceptance | None) -> Simulated | None:
    """Cell.simulated: what is not real about a cell; None if all of it is."""
    weights = next((source for source in checkpoints.values() if source.startswith(RANDOM)), None)
    if weights is None and acceptance is None:
        return None
    return Simulated(weights=weights, accept=None if acceptance is None else acceptance.source, note=None)


def flags_of(simulated: Simulated | None) -> list[str]:
    """The same in a word or two, for whoever reads flags only."""
    return [f"simulated {word}" for kind, word in KINDS.items() if getattr(simulated, kind, None)]


def refuse_scored(suite: str, metric: str | None, asked: str) -> None:
    """Raise UserError where what is asked for would be scored, for a simulation says nothing about accuracy."""
    if metric is not None:
        speed_only = [name for name in SUITES if SUITES[name].metric is None]
        raise UserError(
            f"suite {suite!r} scores accuracy, and {asked} can have none; choose one that measures speed only: "
            f"{', '.join(speed_only)}. See `mtbench ls suites`."
        )


def refuse_unmeant(suite: str, metric: str | None, arm: Arm, method: Method, simulated: Simulated) -> None:
    """Raise UserError where a simulation would say something about accuracy, or nothing about speed."""
    refuse_scored(suite, metric, f"weights {simulated.weights!r}")
    if simulated.accept is None and most_commits(method) > 1:
        raise UserError(
            f"{str(arm)!r} can commit {most_commits(method)} tokens per forward, and random weights do not tell how "
            "many it would; add `--accept RUN_DIRECTORY` or `--accept 0.8,0.6,0.4`."
        )


def refuse_unmoved(arm: Arm, method: Method) -> None:
    """Raise UserError where a script means nothing to `method`, or an option keeps it to the plain loop's tokens.

    Such an option is found by trying its other values: with one of them the method promises nothing.
    """
    if method.variants[-1].block > 1:
        raise UserError(
            f"{str(arm)!r} decides tokens out of order, which a script of leading runs cannot tell; "
            "leave that `--method` or `--accept` out."
        )
    if method.reference or most_commits(method) == 1 or method.claims == "lossy":
        return
    kinds = typing.get_type_hints(type(method))
    for field in dataclasses.fields(method):  # type: ignore[arg-type]  # methods are dataclasses by contract
        now, kind = getattr(method, field.name), kinds[field.name]
        choices = (True, False) if kind is bool else (field.metadata["low"], field.metadata["high"])
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
        if any(_claims(method, field.name, other) == "lossy" for other in choices if other is not None):
            raise UserError(
                f"{str(arm)!r} promises the plain loop's tokens at {field.name}={show(now)}, so no --accept makes it "
                f"commit more per forward; give another {field.name} in `--method`."
            )


def _claims(method: Method, option: str, value: Any) -> str | None:
    """What `method` would promise with another value; None where that is not allowed."""
    try:
        changed: Method = dataclasses.replace(method, **{option: value})  # type: ignore[type-var]
    except UserError:
        return None
    return changed.claims


def _name(arm: Arm) -> str:
    """An arm's string up to its engine."""
    return _unengined(str(arm), arm.engine)


def _unengined(arm: str, engine: str | None) -> str:
    return re.sub(r"#\d+$", "", arm).removesuffix(f"/{engine}")
