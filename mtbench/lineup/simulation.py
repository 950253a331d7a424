"""Speed without trained weights: a script decides how many tokens each forward pass commits; the rest is real.

Random weights with the exact shapes (`--weights random:qwen2.5-7b`) and scripted acceptance (`--simulate-acceptance`)
show what a number of tokens per forward pass would gain on a GPU before any training. The text has no meaning, so
mtbench neither scores nor grades it, and marks every result as simulated. The script is given as:

- `0.8,0.6,0.4`, probabilities. A forward pass accepts its d-th draft token with the d-th probability if it accepted all
  tokens before; the last probability also holds for deeper tokens, and probabilities beyond an arm's deepest token have
  no effect.
- `length=2.4`, an acceptance length: mean tokens per forward pass, the model's own token included, as vLLM's
  `synthetic_acceptance_length` and SGLang's `SGLANG_SIMULATE_ACC_LEN` count it. Every forward pass commits 2 or 3
  tokens, which is the least variance (as in vLLM, and in SGLang with `match-expected`).

Each item uses its whole budget. mtbench draws once for each item. A serving engine draws itself, where it can
(`ServingEngine.synthetic`).

Shapes: R = rows, F = forward passes of the longest script, N = most tokens that one forward pass commits.
"""

import copy
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from typing import ClassVar

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.arms import Arm
from mtbench.decoding.method import Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.request import Request
from mtbench.decoding.trees import Guesses
from mtbench.errors import UserError
from mtbench.models.families import RANDOM
from mtbench.plan.plan import Script, Simulated

CURSOR = "simulated_cursor"
KINDS = {"accept": "acceptance", "weights": "weights"}  # key of Cell.simulated -> what is simulated


class CertainOutput(TargetOutput):
    """A target output with full confidence that agrees with every draft token.

    It still computes the real values and discards them, so that a simulation has their cost.
    """

    def agrees(self, drafts: Tensor, column: Tensor | None = None) -> Tensor:
        return torch.ones_like(super().agrees(drafts, column))

    def longest(self, drafts: Tensor, depth: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return a path of the full depth, also where a row's own tree is not so deep."""
        accepted, path = super().longest(drafts, depth, first)
        return torch.full_like(accepted, depth), path

    def sure(self, metric: sampling.Metric, threshold: float | Tensor, never: float | None = None) -> Tensor:
        return torch.ones_like(super().sure(metric, threshold, never)) & (threshold != never)


class Scripted(Method):
    """A method whose forward passes commit the numbers of a script, within the limits of the method's own policy.

    The inner method accepts as if the model were certain of every token. It then commits the policy's maximum:
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

    @property
    def own_cursors(self) -> bool:
        return self.method.own_cursors

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        return {**self.method.start(rows, runners), CURSOR: torch.zeros_like(rows.prompt_len)}

    def base(self, state: State, rows: Rows) -> Tensor:
        return self.method.base(state, rows)

    def final(self, state: State, rows: Rows) -> Tensor:
        return self.method.final(state, rows)

    def places(self, state: State, rows: Rows, places: Tensor) -> Tensor:
        return self.method.places(state, rows, places)

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | Guesses:
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


def rates(probabilities: Sequence[float], method: Method) -> list[float]:
    """Return the chance of each depth of a method's drafts to be accepted, with all before it."""
    depths = [probabilities[min(d, len(probabilities) - 1)] for d in range(most_commits(method) - 1)]
    return list(accumulate(depths, mul))


def least_variance(length: float) -> list[float]:
    """Return conditional probabilities by which each forward commits the floor or the ceiling of `length` tokens."""
    certain = int(length) - 1
    return [1.0] * certain + [length - 1 - certain, 0.0]


def scripted_requests(script: Script, requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the budgets that their scripts give them."""
    lengths = script.lengths
    return [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, lengths[request.item]))
        for request in requests
    ]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The value of `--simulate-acceptance`, used by planning: probabilities, or a length if there are none."""

    source: str
    probabilities: list[float]
    length: float = 1.0  # mean tokens per forward

    @classmethod
    def of(cls, text: str) -> "Acceptance":
        """Return the acceptance that a text describes. Raise UserError if it describes none."""
        length, probabilities = 1.0, []
        try:
            if text.startswith("length="):
                length = float(text.removeprefix("length="))
            else:
                probabilities = [float(part) for part in text.split(",")]
        except ValueError:
            length = math.nan
        if not 1 <= length < math.inf or not all(0 <= p <= 1 for p in probabilities):
            raise UserError(
                f"--simulate-acceptance {text!r} is no file, and neither probabilities from 0 to 1 nor a length of at "
                "least 1; give one of them, such as `--simulate-acceptance 0.8,0.6,0.4` or `length=2.4`."
            )
        return cls(text, probabilities, length)

    def of_arm(self, arm: Arm, method: Method) -> "Acceptance":
        """Return the acceptance of an arm: the same for all."""
        return self

    @property
    def note(self) -> str:
        draws = "independent draws" if self.probabilities else "commits of the least variance"
        return f"{draws}: optimistic for static batches"

    def rates(self, method: Method) -> list[float]:
        """Return the chance of each depth of a method's drafts to be accepted, with all before it."""
        return rates(self.probabilities or least_variance(self.length), method)

    def script(self, arm: Arm, method: Method, items: int, budget: int, seed: int) -> Script:
        """Return the script of an arm with so many items. Raise UserError if it cannot commit so many tokens."""
        most = most_commits(method)
        if self.length > most > 1:
            raise UserError(
                f"--simulate-acceptance {self.source}: {str(arm)!r} commits at most {most} tokens per forward; "
                f"give a length from 1 to {most}, or widen the arm in `--method`."
            )
        probabilities = self.probabilities or least_variance(self.length)
        return Script(
            source=self.source,
            lengths=[budget] * items,
            seed=seed,
            scripts=None,
            probabilities=probabilities if most > 1 else None,
        )


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


def refuse_unknown_acceptance(arm: Arm, method: Method, simulated: Simulated) -> None:
    """Raise UserError if the acceptance of a simulated cell is not known."""
    if simulated.accept is None and most_commits(method) > 1:
        raise UserError(
            f"{str(arm)!r} can commit {most_commits(method)} tokens per forward, and random weights do not "
            "determine how many; add `--simulate-acceptance 0.8,0.6,0.4` or `--simulate-acceptance length=2.4`."
        )


def refuse_unscriptable(arm: Arm, method: Method) -> None:
    """Raise UserError if a script cannot describe `method`."""
    if method.variants[-1].block > 1:
        raise UserError(
            f"{str(arm)!r} decides tokens out of order, and a script describes tokens in order only; "
            "leave out that `--method` or `--simulate-acceptance`."
        )
