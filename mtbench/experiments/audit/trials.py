"""Changes of the reference model, or of how tokens are chosen, that might explain a side's tokens.

Each is made, and the tokens are judged again, on answers that are off and on answers that are not. A change explains a
side if the tokens that are off become choices and the others remain choices. A trial is one entry of `trials`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.experiments.audit.cases import SAMPLED, Case, Known, Letter
from mtbench.experiments.audit.format import TrialLine, Tried
from mtbench.experiments.audit.judge import TAIL, Judge, answer_of, logits_of, shortfalls
from mtbench.experiments.audit.settings import FILTERS, PENALTIES, ROUNDED, Setting
from mtbench.measure.lossless_check import Answer, with_noise
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.models.whole_texts import WholeTexts

MOST_CASES = 4  # answers that are off on which a trial is made, and answers that are not
BLOCKS, MOST_OTHERS = range(16, 129, 16), 2  # leading tokens that a cache may have of other requests, and of how many
TEMPERATURES = (0.5, 0.7, 0.8, 1.0, 1.2)  # at which sampled tokens are searched
UNLIKELY = 0.1  # probability at the best of these temperatures below which tokens were not sampled
MOST_SAMPLED = 16  # answers whose tokens may have been sampled
LEAST_SAMPLED = 10  # fewer tokens that are no choice fit one of these temperatures by chance
Change = Callable[[AttentionMetadata, int], AttentionMetadata]  # of a forward's metadata and the prompt's length


class Trial(NamedTuple):
    """A change: of the weights for a while, of where tokens are and what they see, of the prompt, or of the logits."""

    name: str  # of the class that it stands for
    exact: bool = True  # False: what a side does may be only similar
    weights: Callable[[Any], AbstractContextManager[None]] = nullcontext
    places: Change | None = None
    prompt: Callable[[Sequence[int]], Sequence[int]] | None = None
    setting: Setting | None = None


class Probe(NamedTuple):
    """An answer that trials are made on: its judged tokens are those from `first` on."""

    item: str
    answer: Answer
    first: int
    off: bool


class Changed:
    """A model runner whose forward passes have other metadata."""

    def __init__(self, runner: ModelRunner, change: Change, prompt: int) -> None:
        self.runner, self.change, self.prompt = runner, change, prompt
        self.device, self.reserve = runner.device, runner.reserve

    def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int) -> Forwarded:
        """Run the model as `ModelRunner.forward` does, on changed metadata."""
        return self.runner.forward(ids, self.change(metadata, self.prompt), judged)


def trials(model: Any, known: Known, letter: Letter) -> dict[str, Trial]:
    """Return the trials of a side for a model by their text."""
    text, weights = model.config.get_text_config(), "weights"
    windows = sorted({w for w in (getattr(text, "sliding_window", None),) if w and getattr(text, "layer_types", None)})
    found = _of_places(known, letter, windows) | _of_prompts(known, letter)
    found |= {
        f"weights in {what}": Trial(weights, exact=False, weights=_rounded_weights(how)) for what, how in COARSE.items()
    }
    found |= {f"layer {i} left out": Trial(weights, weights=_without_layer(i)) for i in range(text.num_hidden_layers)}
    found |= {name: Trial("rounding", setting=setting) for name, setting in ROUNDED.items()}
    settings = PENALTIES | (FILTERS if known.side(letter).temperature > 0 else {})
    return found | {name: Trial("sampling", setting=setting) for name, setting in settings.items()}


def _of_places(known: Known, letter: Letter, windows: list[int]) -> dict[str, Trial]:
    """Return the trials of where tokens are and what they see.

    Positions may be off from the first step of decoding on, which feeds the last prompt token or the first of the
    answer, or from a length on.
    """
    place, off = "cache/position", known.pool(letter).far
    start = min((len(case.answer(letter).prompt or ()) + index - 1 for case, index in off), default=0)
    begins: dict[str, Callable[[int], int]] = {
        "behind the prompt": lambda prompt: prompt,
        "from the prompt's last token on": lambda prompt: prompt - 1,
        f"from position {start} on": lambda _: start,
    }
    shared = shared_prefix([case.answer(letter).prompt or [] for case in known.cases])
    return {
        **{
            f"positions {by:+d} {where}": Trial(place, places=_shifted(by, windows, begin))
            for where, begin in begins.items()
            for by in (1, -1)
        },
        **{f"a sliding window of {w + by}": Trial(place, places=_windowed(w, by)) for w in windows for by in (1, -1)},
        **{
            f"the leading tokens of all prompts, {first} to {shared - 1}, not read": Trial(
                place, places=_unread(first, shared, windows)
            )
            for first in (0, 1)
            if first < shared
        },
    }


def _of_prompts(known: Known, letter: Letter) -> dict[str, Trial]:
    """Return the trials of prompts that are not the stored ones: a server's first token, blocks of another request."""
    prompts = {case.item: tuple(case.answer(letter).prompt or ()) for case in known.cases}
    first = known.pool(letter).cases[0].item
    own = prompts.pop(first)
    found = {
        "the prompts' first token twice": Trial("template/tokenizer", prompt=lambda ids: [*ids[:1], *ids]),
        "prompts without their first token": Trial("template/tokenizer", prompt=lambda ids: ids[1:] or ids),
    }
    for size in BLOCKS:
        others = {ids[:size]: item for item, ids in prompts.items() if ids[:size] != own[:size] and len(own) > size}
        for ids, item in list(others.items())[:MOST_OTHERS]:
            found[f"the first {size} tokens of {item} in the cache"] = Trial("cache/position", prompt=_begun_by(ids))
    return found


def _begun_by(ids: Sequence[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    return lambda own: [*ids, *own[len(ids) :]]


@torch.inference_mode()
def run_trials(judge: Judge, number: int, known: Known, letter: Letter) -> Iterator[TrialLine]:
    """Yield the effect of each trial on the tokens of a side in some of its answers. `number`: of the pair."""
    runner, off = judge.runner(), known.pool(letter).cases
    right = [case for case in known.cases if _is_right(case)]
    probes = [_probe(case, letter) for case in (*off[:MOST_CASES], *right[:MOST_CASES])]
    plain = [_judged(runner, probe, Trial("")) for probe in probes]
    before = [_off(probe, logits, known.bound) for probe, logits in zip(probes, plain, strict=True)]
    yield _as_sampled(runner, number, known, letter)
    for name, trial in trials(runner.model, known, letter).items():
        if trial.places is not None and isinstance(runner, WholeTexts):
            continue  # its class decides what a token sees
        tried: list[Tried] = []
        for probe, logits, (off_before, misfit_before) in zip(probes, plain, before, strict=True):
            changed = logits if trial.setting is not None else _judged(runner, probe, trial)
            after, misfit = _off(probe, changed, known.bound, trial.setting)
            tried.append(
                Tried(
                    item=probe.item,
                    tokens=len(logits),
                    before=off_before,
                    after=after,
                    misfit_before=misfit_before,
                    misfit=misfit,
                )
            )
        yield _line(number, letter, name, trial, tried)


def _line(number: int, letter: Letter, text: str, trial: Trial, tried: list[Tried], **more: Any) -> TrialLine:
    return TrialLine(
        pair=number,
        side=letter,
        trial=text,
        name=trial.name,
        exact=trial.exact,
        answers=len(tried),
        before=sum(of.before for of in tried),
        after=sum(of.after for of in tried),
        tried=tried,
        **more,
    )


def _is_right(case: Case) -> bool:
    """Return whether both sides have the same tokens behind a known prompt."""
    return case.judged is None and case.a.tokens == case.b.tokens and bool(case.a.prompt) and bool(case.a.tokens)


def _probe(case: Case, letter: Letter) -> Probe:
    """Return the judged part of an answer: tokens on both sides of its first difference."""
    first = 0 if case.judged is None else case.judged.first
    begin = max(0, first - TAIL)
    return Probe(case.item, answer_of(case.side(letter), case.answer(letter), first), begin, case.judged is not None)


def _judged(runner: ModelRunner | WholeTexts, probe: Probe, trial: Trial) -> Tensor:
    """Return the logits (n, V) of an answer's judged tokens with a trial."""
    changed: Any = runner
    if trial.places is not None and isinstance(runner, ModelRunner):
        changed = Changed(runner, trial.places, len(probe.answer.prompt))
    answer = probe.answer
    if trial.prompt is not None:
        answer = answer._replace(prompt=trial.prompt(answer.prompt))
    with trial.weights(runner.model):
        return logits_of(changed, answer, probe.first)


def _as_sampled(runner: ModelRunner | WholeTexts, number: int, known: Known, letter: Letter) -> TrialLine:
    """Return whether the tokens look sampled, at the temperature that fits best.

    Sampled tokens differ from the choice as often as their probabilities predict, are as likely as sampled ones,
    and none of them is impossible. A side that computes with other weights, or reads another cache, chooses.
    """
    there = [case for case in known.cases if letter in case.off or _is_right(case)]
    probes = [_probe(case, letter) for case in there[:MOST_SAMPLED]]
    temperatures = [t for t in dict.fromkeys((known.side(letter).temperature, *TEMPERATURES)) if t]
    seen: dict[float, list[Looks]] = {t: [] for t in temperatures}
    other = 0
    for probe in probes:
        logits = _judged(runner, probe, Trial(""))
        emitted = torch.tensor(probe.answer.tokens[probe.first :], device=logits.device)[:, None]
        other += int((shortfalls(logits, emitted) > known.bound).sum())
        for t in temperatures:
            seen[t].append(_looks(logits / t, emitted))
    likely = {t: _likelihood(other, looks) for t, looks in seen.items()}
    best = max(likely, key=lambda t: likely[t])
    fits = other >= LEAST_SAMPLED and likely[best] > UNLIKELY
    tried = [
        Tried(item=probe.item, tokens=0, before=int(probe.off), after=0, misfit_before=float(probe.off), misfit=0)
        for probe in probes
        if fits
    ]
    return _line(number, letter, f"{SAMPLED}{best:g}", Trial("sampling"), tried, chance=likely[best])


class Looks(NamedTuple):
    """Tokens beside those that would be sampled."""

    tokens: int
    others: float  # expected number that is no choice
    others_spread: float  # its variance
    surprise: float  # excess of -log p over the entropy
    surprise_spread: float  # its variance
    reach: float  # smallest probability of a token that is as unlikely


def _looks(logits: Tensor, emitted: Tensor) -> Looks:
    """Return how tokens (n, 1) look beside those that are sampled from logits (n, V)."""
    log_p = logits.log_softmax(-1).clamp_(min=-1e4)
    p, own = log_p.exp(), log_p.gather(1, emitted)
    top, entropy = p.amax(-1), -(p * log_p).sum(-1)
    reach = p.masked_fill(log_p > own, 0).sum(-1).min()
    spread = (p.mul_(log_p).mul_(log_p).sum(-1) - entropy**2).clamp(min=0).sum()
    found = ((1 - top).sum(), (top * (1 - top)).sum(), (-own[:, 0] - entropy).sum(), spread, reach)
    return Looks(len(own), *map(float, found))


def _likelihood(other: int, looks: Sequence[Looks]) -> float:
    """Return how probable it is that sampled tokens look as strange; `other` of these are no choice.

    Fisher's combination of three tests: their number that is no choice, their surprise, and the least likely token.
    """
    tokens, others, others_spread, surprise, surprise_spread, _ = (sum(column) for column in zip(*looks, strict=True))
    values = (
        math.erfc(abs(other - others) / math.sqrt(2 * max(others_spread, 0.25))),
        math.erfc(surprise / math.sqrt(2 * max(surprise_spread, 1e-3))) / 2,
        min(1.0, tokens * min(of.reach for of in looks)),
    )
    log = sum(math.log(max(value, 1e-300)) for value in values)
    return math.exp(log) * (1 - log + log**2 / 2)


def _off(probe: Probe, logits: Tensor, bound: float, setting: Setting | None = None) -> tuple[int, float]:
    """Return how many tokens are no choices by logits (n, V), with a setting, and their misfit."""
    answer, first = probe.answer, probe.first
    if setting is not None:
        counts = torch.zeros_like(logits)
        for i, token in enumerate(answer.tokens[:-1]):
            counts[max(0, i + 1 - first) :, token] += 1
        prompt = torch.bincount(torch.tensor(answer.prompt, device=logits.device), minlength=logits.shape[1])
        logits = setting(logits, counts + prompt, counts)
    emitted = torch.tensor(answer.tokens[first:], device=logits.device)[:, None]
    beyond = shortfalls(with_noise(logits, answer, first), emitted) - bound
    beyond = beyond[beyond > 0].clamp(max=1)
    return len(beyond), float((1 + 2 * beyond).sum())


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all prompts have in common, if there are several prompts."""
    if len(prompts) < 2:
        return 0
    columns = enumerate(zip(*prompts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, prompts)) - 1)


def _masks(metadata: AttentionMetadata, windows: list[int]) -> dict[int | None, Tensor]:
    return {window: metadata.mask(window) for window in (None, *windows)}


def _shifted(by: int, windows: list[int], begin: Callable[[int], int]) -> Change:
    """Return the change of the positions, not of what is seen. `begin`: the first slot, of the prompt's length."""

    def change(metadata: AttentionMetadata, prompt: int) -> AttentionMetadata:
        positions = metadata.positions + by * (metadata.slots >= begin(prompt))
        return replace(metadata, positions=positions, _masks=_masks(metadata, windows), _biases={})

    return change


def _windowed(window: int, by: int) -> Change:
    def change(metadata: AttentionMetadata, _: int) -> AttentionMetadata:
        masks = {None: metadata.mask(None), window: metadata.mask(window + by)}
        return replace(metadata, _masks=masks, _biases={})

    return change


def _unread(first: int, end: int, windows: list[int]) -> Change:
    """Return the change in which no later token sees those from `first` on up to `end`."""

    def change(metadata: AttentionMetadata, _: int) -> AttentionMetadata:
        place = torch.arange(metadata.view, device=metadata.slots.device)
        hidden = (metadata.slots >= end)[:, :, None] & (place >= first) & (place < end)
        masks = {window: mask & ~hidden for window, mask in _masks(metadata, windows).items()}
        return replace(metadata, _masks=masks, _biases={})

    return change


def _integers(bits: int, group: int | None = None) -> Callable[[Tensor], Tensor]:
    """Round weights to integers, with the largest of each output, or of each `group` of its inputs, as the scale."""

    def rounded(weight: Tensor) -> Tensor:
        parts = weight.reshape(-1, weight.shape[1] if group is None or weight.shape[1] % group else group)
        scale = parts.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        whole: Tensor = (parts / scale).round() * scale
        return whole.reshape(weight.shape)

    return rounded


def _one_scale(weight: Tensor) -> Tensor:
    """Round weights to 8-bit integers, with the largest of all as the scale."""
    scale = weight.abs().amax().clamp(min=1e-12) / 127
    rounded: Tensor = (weight / scale).round() * scale
    return rounded


def _floats(weight: Tensor) -> Tensor:
    """Round weights to float8_e4m3, with the largest of all as the scale."""
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    rounded: Tensor = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return rounded


COARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "8 bits": _integers(8),
    "8 bits with one scale for a matrix": _one_scale,
    "8-bit floats": _floats,
    "4 bits in groups of 32": _integers(4, 32),
}


def _rounded_weights(how: Callable[[Tensor], Tensor]) -> Callable[[Any], AbstractContextManager[None]]:
    """Round the weights of all linear layers but the head."""

    @contextmanager
    def change(model: Any) -> Iterator[None]:
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        kept = [module.weight.data for module in linear]
        for module in linear:
            module.weight.data = how(module.weight.data)
        try:
            yield
        finally:
            for module, weight in zip(linear, kept, strict=True):
                module.weight.data = weight

    return change


def _without_layer(index: int) -> Callable[[Any], AbstractContextManager[None]]:
    @contextmanager
    def change(model: Any) -> Iterator[None]:
        layer = model.base_model.layers[index]
        layer.forward = lambda hidden_states, *_, **__: hidden_states
        try:
            yield
        finally:
            del layer.forward

    return change
