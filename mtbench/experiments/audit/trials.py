"""Trials: what a side may have done is done to the reference model, and its tokens are judged again.

All trials are made on few answers, those with the most tokens that are off for the positions to be fed. Values between
those that fit best are tried, and changes that begin later. The best trials are then made on all answers that are off,
and on some that are not. Which of them explain the side: mtbench/experiments/audit/explanation.py.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mtbench.experiments.audit.cases import Case, Known, Letter
from mtbench.experiments.audit.changes import (
    BACK,
    SAMPLING,
    WEIGHTS,
    Family,
    Probe,
    Trial,
    families,
    identity,
    layers_of,
    replaced,
    windows_of,
)
from mtbench.experiments.audit.drawn import Draws
from mtbench.experiments.audit.explanation import SLACK, misfit
from mtbench.experiments.audit.format import TrialLine, Tried
from mtbench.experiments.audit.judge import TAIL, Judge, answer_of, logits_of, shortfalls
from mtbench.measure.lossless_check import JUDGED_AT_ONCE, judged_logits, with_noise
from mtbench.models.whole_texts import WholeTexts
from mtbench.statistics import EXACT_EPSILON

MOST_OFF, MOST_RIGHT = 16, 4  # answers on which the best trials are made
ENOUGH, MOST_SCREENED = 6, 3  # tokens that are off on which all trials are made, and answers that have them
COUNTED = 8  # tokens of an answer that are off: those behind them are not read
SECOND = 2  # answers on which trials are made that are not clearly worse than the best on the first ones
WORSE, MOST_LEFT = 8.0, 10  # misfit by which a trial is clearly worse; trials that are made on further answers
HOPE = 2.0  # misfit by which the best trial must be better than none
SEARCHED, ROUNDS = 3, 8  # families whose best value is searched
LATE = 4  # trials that are also made from a later token on


class Bench:
    """The judged tokens of an answer, on which trials are made.

    The runner's cache holds the unchanged keys and values up to `cached`, and `kept` the outputs of its layers.
    """

    def __init__(self, judge: Judge, probe: Probe, bound: float) -> None:
        self.judge, self.probe, self.bound, self.runner = judge, probe, bound, judge.runner()
        self.layers = layers_of(self.runner.model)
        self.kept: list[list[Any]] = [[] for _ in self.layers]
        pairs = zip(self.layers, self.kept, strict=True)
        hooks = [of.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out)) for of, kept in pairs]
        self.plain = logits_of(self.runner, probe.answer, probe.first)
        for hook in hooks:
            hook.remove()
        self.cached = len(probe.prompt) + len(probe.answer.tokens) - 1
        self.before, self.found = self._off(self.plain), dict[Hashable, tuple[int, float, float]]()

    def tried(self, trial: Trial) -> tuple[Tried, float]:
        """Return the effect of a trial, and by how much it lowers the misfit from the first token that is off on."""
        key = trial.same(self.probe)
        if key is None or key not in self.found:
            self.found[key] = self._off(self._logits(trial), trial)
        (before, was, late_before), (after, misfit, late), item = self.before, self.found[key], self.probe.item
        of = Tried(item=item, tokens=len(self.plain), before=before, after=after, misfit_before=was, misfit=misfit)
        return of, late_before - late

    def _logits(self, trial: Trial) -> Tensor:
        """Return the logits (n, V) of the judged tokens with a trial."""
        answer, first, begin = self.probe.answer, self.probe.first, trial.begin(self.probe)
        if trial.setting is not None:
            return self.plain
        if trial.dtype is not None:
            return logits_of(self.judge.runner(trial.dtype), answer, first)
        if trial.prompt is not None:
            answer = answer._replace(prompt=trial.prompt(self.probe))
        same = min(max(0, begin + 1 - len(answer.prompt) - first), len(self.plain))  # tokens that do not change
        if same == len(self.plain):
            return self.plain
        if begin > self.cached:
            logits_of(self.runner, answer, first)
        with ExitStack() as stack:
            stack.enter_context(trial.model(self.runner.model))
            for layer, given in self._given(trial.layer):
                stack.enter_context(replaced(layer, "forward", given))
            if isinstance(self.runner, WholeTexts):
                return logits_of(self.runner, answer, first)
            if (update := trial.cache) is not None:
                cache = self.runner.cache
                changed: Any = lambda key, value, layer, *_, **__: update(cache, key, value, layer)  # noqa: E731
                stack.enter_context(replaced(cache, "update", changed))
            if (places := trial.places) is not None:
                forward, windows = self.runner.forward, windows_of(self.runner.model)
                moved: Any = lambda ids, of, judged: forward(ids, places(of, self.probe, windows), judged)  # noqa: E731
                stack.enter_context(replaced(self.runner, "forward", moved))
            self.cached = min(begin, len(answer.prompt) + first + same - 1)
            parts = judged_logits(self.runner, answer, JUDGED_AT_ONCE, first + same, self.cached)
            return torch.cat((self.plain[:same], *(logits for _, logits in parts)))

    def _given(self, layer: int) -> Iterator[tuple[Any, Any]]:
        """Yield the layers before one, and forwards by which the last of them gives what it gave."""
        for before in self.layers[: max(0, layer - 1)]:
            yield before, identity
        if layer:
            kept = iter(self.kept[layer - 1])
            yield self.layers[layer - 1], lambda *_, **__: next(kept)

    def _off(self, logits: Tensor, trial: Trial | None = None) -> tuple[int, float, float]:
        """Return how many tokens are no choices by logits (n, V), their misfit, and its part from the first off on."""
        answer, first = self.probe.answer, self.probe.first
        if trial is not None and trial.setting is not None:
            counts = torch.zeros_like(logits)
            for i, token in enumerate(answer.tokens[:-1]):
                counts[max(0, i + 1 - first) :, token] += 1
            prompt = torch.bincount(torch.tensor(answer.prompt, device=logits.device), minlength=logits.shape[1])
            logits = trial.setting(logits, counts + prompt, counts)
        emitted = torch.tensor(answer.tokens[first:], device=logits.device)[:, None]
        beyond = shortfalls(with_noise(logits, answer, first), emitted) - self.bound
        misfits = (1 + 2 * beyond.clamp(max=1)) * (beyond > 0)
        return int((beyond > 0).sum()), float(misfits.sum()), float(misfits[self.probe.wrong - first :].sum())


class Trials:
    """The trials of a side by their texts, and what was found on each answer."""

    def __init__(self, judge: Judge, number: int, known: Known, letter: Letter) -> None:
        self.judge, self.number, self.known, self.letter = judge, number, known, letter
        self.made: dict[str, tuple[Trial, list[Tried]]] = {}
        self.late: dict[str, float] = {}  # by how much the misfit is lower behind the first token that is off

    def make(self, probes: Sequence[Probe], trials: dict[str, Trial]) -> None:
        """Make trials on answers; those that change only late positions come first, while the cache is right."""
        whole = isinstance(self.judge.runner(), WholeTexts)
        for probe in probes:
            bench = Bench(self.judge, probe, self.known.bound)
            for text, trial in sorted(trials.items(), key=lambda of: -of[1].begin(probe)):
                if not (whole and (trial.places or trial.cache or trial.begin(probe))):
                    tried, lower = bench.tried(trial)
                    self.made.setdefault(text, (trial, []))[1].append(tried)
                    self.late[text] = self.late.get(text, 0.0) + lower

    def lines(self) -> Iterator[TrialLine]:
        for text, (trial, tried) in self.made.items():
            exact = trial.exact and self.known.bound <= EXACT_EPSILON["float32"]
            yield line(self.number, self.letter, text, trial._replace(exact=exact), tried)

    def misfit(self, text: str) -> float:
        return misfit(self.made[text][1])

    def left(self) -> dict[str, Trial]:
        """Return the trials that are not clearly worse than the best one; none if that one is no better than none."""
        answers = max((len(tried) for _, tried in self.made.values()), default=0)
        there = {text: self.misfit(text) for text, (_, tried) in self.made.items() if len(tried) == answers}
        best = sorted(there, key=lambda text: there[text])[:MOST_LEFT]
        if not best or there[best[0]] > sum(of.misfit_before for of in self.made[best[0]][1]) - HOPE:
            return {}
        reach = there[best[0]] * (1 + SLACK) + WORSE
        return {text: self.made[text][0] for text in best if there[text] <= reach}

    def later(self, start: int) -> list[Family]:
        """Return the trials that fit best behind the first token that is off, as changes from a new token on."""

        def family(text: str) -> Family:
            def begun(number: int) -> Trial:
                return trial._replace(begin=lambda probe: len(probe.prompt) + number)

            trial = self.made[text][0]._replace(layer=0)
            values = sorted({start - back for back in BACK if start > back})
            return Family(f"{text}, from new token {{}} on", begun, values, 1)

        fitting = [text for text, (trial, _) in self.made.items() if not (trial.prompt or trial.setting or trial.dtype)]
        best = sorted((text for text in fitting if self.late[text] > HOPE), key=lambda text: -self.late[text])[:LATE]
        return [family(text) for text in best if "from new token" not in text and "from position" not in text]

    def screen(self, probes: Sequence[Probe], tried: Sequence[Family]) -> None:
        """Make the trials of families, and with values between those that fit best."""
        self.make(probes, {of.text.format(n): of.make(n) for of in tried for n in of.values})
        searched = [of for of in tried if of.step and self.made.keys() & {of.text.format(n) for n in of.values}]
        there = {of.text: [*of.values] for of in searched}

        def best(of: Family) -> tuple[float, Any]:
            return min((self.misfit(of.text.format(n)), n) for n in there[of.text])

        for _ in range(ROUNDS):
            new = dict[str, Trial]()
            for of in sorted(searched, key=lambda of: best(of)[0])[:SEARCHED]:
                values, (_, at) = sorted(there[of.text]), best(of)
                place = values.index(at)
                for other in values[max(0, place - 1) : place + 2]:
                    middle = round((at + other) / 2 / of.step) * of.step
                    text = of.text.format(middle)  # of two numbers that are nearly equal it is the same
                    if text not in self.made:
                        there[of.text].append(middle)
                        new[text] = of.make(middle)
            if not new or not self.left():
                return
            self.make(probes, new)


@torch.inference_mode()
def run_trials(judge: Judge, number: int, known: Known, letter: Letter) -> Iterator[TrialLine]:
    """Yield the effect of each trial on the tokens of a side in some of its answers. `number`: of the pair."""
    cases = known.pool(letter).cases[:MOST_OFF]
    draws, chosen, worth = Draws(known.bound), list[int](), dict[str, int]()
    for probe in (_whole(case, letter) for case in cases):
        logits = logits_of(judge.runner(), probe.answer, 0)
        draws.add(probe, logits)
        noisy, emitted = with_noise(logits, probe.answer, 0), torch.tensor(probe.answer.tokens, device=logits.device)
        far = shortfalls(noisy, emitted[:, None]) > known.bound
        chosen += noisy[far].argmax(-1).tolist()
        worth[probe.item] = min(COUNTED, int(far.sum()))
    if (found := draws.best()) is not None:
        yield line(number, letter, found.text, Trial(SAMPLING), found.tried, chance=found.chance)
        if not found.clear:
            yield line(number, letter, "logits with errors", Trial(WEIGHTS), found.tried, chance=found.chance)
    cut = [_cut(case, letter, known.bound) for case in cases]
    off = sorted(cut, key=lambda of: -worth[of.item] / (20 + len(of.prompt) + len(of.answer.tokens)))
    enough = (n for n in range(1, MOST_SCREENED) if sum(worth[of.item] for of in off[:n]) >= ENOUGH)
    few, trials = next(enough, MOST_SCREENED), Trials(judge, number, known, letter)
    tried = families(judge.runner().model, known, letter, chosen, judge.known.tokenizer)
    trials.screen(off[:few], tried)
    trials.screen(off[:few], trials.later(min(probe.wrong for probe in off) - 1))
    right = [_whole(case, letter) for case in known.cases if _is_right(case)][:MOST_RIGHT]
    for probes in (off[few : few + SECOND], [*off[few + SECOND :], *right]):
        if probes:
            trials.make(probes, trials.left())
    yield from trials.lines()


def line(number: int, letter: Letter, text: str, trial: Trial, tried: list[Tried], **more: Any) -> TrialLine:
    """Return the line of a trial."""
    more |= {"before": sum(of.before for of in tried), "after": sum(of.after for of in tried), "answers": len(tried)}
    return TrialLine(pair=number, side=letter, trial=text, name=trial.name, exact=trial.exact, tried=tried, **more)


def _is_right(case: Case) -> bool:
    """Return whether both sides have the same tokens behind a known prompt."""
    return case.judged is None and case.a.tokens == case.b.tokens and bool(case.a.prompt) and bool(case.a.tokens)


def _whole(case: Case, letter: Letter) -> Probe:
    """Return an answer as far as it is judged."""
    own, every = case.answer(letter), [of.answer(letter) for of in case.known.cases]
    answer = answer_of(case.side(letter), own, case.judged.first if case.judged else 0)
    longest = max(len(of.prompt or ()) for of in every if of is own or (of.block == own.block is not None))
    return Probe(case.item, answer, pads=longest - len(answer.prompt))


def _cut(case: Case, letter: Letter, bound: float) -> Probe:
    """Return the part of an answer that is off on which trials are made."""
    whole, far = _whole(case, letter), case.far(letter, bound)
    tokens = whole.answer.tokens[: far[COUNTED] if len(far) > COUNTED else None]
    answer = whole.answer._replace(tokens=tokens)
    return whole._replace(answer=answer, first=max(0, far[0] - TAIL), wrong=far[0])
