"""Changes of the reference model, or of how tokens are chosen, that might explain a side's tokens.

Each is made, and the tokens are judged again, on answers that are off and on answers that are not. A change explains a
side if the tokens that are off become choices and the others remain choices. A trial is one entry of `trials`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.experiments.audit.cases import Case, Known, Letter
from mtbench.experiments.audit.format import TrialLine
from mtbench.experiments.audit.judge import TAIL, Judge, answer_of, logits_of, shortfalls
from mtbench.experiments.audit.settings import FILTERS, PENALTIES, ROUNDED, Setting
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import Forwarded, ModelRunner
from mtbench.runs.lossless_check import Answer, with_noise

MOST_CASES = 4  # answers that are off on which a trial is made, and answers that are not
HELPS = 0.5  # share of the tokens that must become choices
Change = Callable[[AttentionMetadata, int], AttentionMetadata]  # of a forward's metadata and the prompt's length


class Trial(NamedTuple):
    """A change: of the weights for a while, of where the tokens are and what they see, or of the logits."""

    name: str  # of the class that it stands for
    weights: Callable[[Any], AbstractContextManager[None]] = nullcontext
    places: Change | None = None
    setting: Setting | None = None


class Probe(NamedTuple):
    """An answer that trials are made on: its judged tokens are those from `first` on."""

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


def trials(model: Any, shared: int, *, sampled: bool) -> dict[str, Trial]:
    """Return the trials for a model by what they say. `shared`: leading prompt tokens that all items have."""
    text = model.config.get_text_config()
    windows = sorted({w for w in (getattr(text, "sliding_window", None),) if w and getattr(text, "layer_types", None)})
    place, weights = "cache/position", "weights"
    found = {
        **{f"positions {by:+d} behind the prompt": Trial(place, places=_shifted(by, windows)) for by in (1, -1)},
        **{f"a sliding window of {w + by}": Trial(place, places=_windowed(w, by)) for w in windows for by in (1, -1)},
        "weights in 8 bits": Trial(weights, weights=_eight_bits),
        **{f"layer {i} left out": Trial(weights, weights=_without_layer(i)) for i in range(text.num_hidden_layers)},
    }
    if shared:
        found[f"the {shared} leading tokens of all prompts not read"] = Trial(place, places=_unread(shared, windows))
    found |= {name: Trial("rounding", setting=setting) for name, setting in ROUNDED.items()}
    settings = PENALTIES | (FILTERS if sampled else {})
    return found | {name: Trial("sampling", setting=setting) for name, setting in settings.items()}


@torch.inference_mode()
def run_trials(judge: Judge, number: int, known: Known, letter: Letter) -> Iterator[TrialLine]:
    """Yield what each trial does to the tokens of a side in some of its answers. `number`: of the pair."""
    runner, off = judge.runner(), known.pool(letter).cases
    right = [case for case in known.cases if case.judged is None and case.a.tokens == case.b.tokens and case.a.prompt]
    probes = [_probe(case, letter) for case in (*off[:MOST_CASES], *right[:MOST_CASES])]
    plain = [_judged(runner, probe, Trial("")) for probe in probes]
    before = [_far(probe, logits, known.bound) for probe, logits in zip(probes, plain, strict=True)]
    shared = shared_prefix([case.said(letter).prompt or [] for case in known.cases])
    for name, trial in trials(runner.model, shared, sampled=known.side(letter).temperature > 0).items():
        after: list[int] = []
        for probe, logits in zip(probes, plain, strict=True):
            if sum(after) > sum(before[: len(after)]) * (1 - HELPS):
                break  # it does not help
            changed = logits if trial.setting is not None else _judged(runner, probe, trial)
            after.append(_far(probe, changed, known.bound, trial.setting))
        yield TrialLine(
            pair=number,
            side=letter,
            trial=name,
            name=trial.name,
            answers=len(after),
            before=sum(before[: len(after)]),
            after=sum(after),
        )


def _probe(case: Case, letter: Letter) -> Probe:
    """Return what is judged of an answer: tokens on both sides of its first difference."""
    first = 0 if case.judged is None else case.judged.first
    begin = max(0, first - TAIL)
    return Probe(answer_of(case.side(letter), case.said(letter), first), begin, case.judged is not None)


def _judged(runner: ModelRunner, probe: Probe, trial: Trial) -> Tensor:
    """Return the logits (n, V) of an answer's judged tokens with a trial."""
    changed: Any = runner if trial.places is None else Changed(runner, trial.places, len(probe.answer.prompt))
    with trial.weights(runner.model):
        return logits_of(changed, probe.answer, probe.first)


def _far(probe: Probe, logits: Tensor, bound: float, setting: Setting | None = None) -> int:
    """Return how many tokens are no choices by logits (n, V), with a setting."""
    answer, first = probe.answer, probe.first
    if setting is not None:
        said = torch.zeros_like(logits)
        for i, token in enumerate(answer.tokens[:-1]):
            said[max(0, i + 1 - first) :, token] += 1
        prompt = torch.bincount(torch.tensor(answer.prompt, device=logits.device), minlength=logits.shape[1])
        logits = setting(logits, said + prompt, said)
    emitted = torch.tensor(answer.tokens[first:], device=logits.device)[:, None]
    return int((shortfalls(with_noise(logits, answer, first), emitted) > bound).sum())


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many leading tokens all prompts have in common, if there are several prompts."""
    if len(prompts) < 2:
        return 0
    columns = enumerate(zip(*prompts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, prompts)) - 1)


def _masks(metadata: AttentionMetadata, windows: list[int]) -> dict[int | None, Tensor]:
    return {window: metadata.mask(window) for window in (None, *windows)}


def _shifted(by: int, windows: list[int]) -> Change:
    """Return the change of the positions, not of what is seen, of all tokens behind the prompt."""

    def change(metadata: AttentionMetadata, prompt: int) -> AttentionMetadata:
        positions = metadata.positions + by * (metadata.slots >= prompt)
        return replace(metadata, positions=positions, _masks=_masks(metadata, windows), _biases={})

    return change


def _windowed(window: int, by: int) -> Change:
    def change(metadata: AttentionMetadata, _: int) -> AttentionMetadata:
        masks = {None: metadata.mask(None), window: metadata.mask(window + by)}
        return replace(metadata, _masks=masks, _biases={})

    return change


def _unread(shared: int, windows: list[int]) -> Change:
    """Return the change in which no later token sees the leading ones."""

    def change(metadata: AttentionMetadata, _: int) -> AttentionMetadata:
        later, leading = metadata.slots >= shared, torch.arange(metadata.view, device=metadata.slots.device) < shared
        hidden = later[:, :, None] & leading
        masks = {window: mask & ~hidden for window, mask in _masks(metadata, windows).items()}
        return replace(metadata, _masks=masks, _biases={})

    return change


@contextmanager
def _eight_bits(model: Any) -> Iterator[None]:
    """Round the weights of all linear layers but the head to 8 bits, with the largest of each row as the scale."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    kept = [module.weight.data for module in linear]
    for module in linear:
        scale = module.weight.data.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        module.weight.data = (module.weight.data / scale).round() * scale
    try:
        yield
    finally:
        for module, weight in zip(linear, kept, strict=True):
            module.weight.data = weight


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
