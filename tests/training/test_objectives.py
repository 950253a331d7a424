"""Objectives against references written by hand, in float64: one plain forward pass per prediction."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thinned import one_in
from torch import Tensor
from trainings import END, MASK, SPECIAL, VOCAB, conversations, exact, narrow_model, sequences_of

from mtbench.models.attention import ATTENTION
from mtbench.training.loss import target_states, teacher_output
from mtbench.training.objectives import (
    LEAST_TIME,
    Ar,
    BlockDiffusion,
    Draft,
    Mars,
    Medusa,
    Objective,
)
from mtbench.training.packing import AttentionMask, Example, TrainingSequence, pack
from mtbench.training.registry import OBJECTIVES
from mtbench.training.self_distillation import SelfDistill

BLOCKS = (2, 3, 4, 8, 16)


@pytest.fixture
def model() -> Any:
    return exact(narrow_model(VOCAB, layers=2))


def ours(
    model: Any, objective: Objective, sequence: list[TrainingSequence], teacher: Any = None, *, packed: bool = True
) -> Tensor:
    """The loss as in training: three rows, the first with two conversations, each with padding at its end.

    Not `packed`: each conversation has a row of its own.
    """
    rows = [sequence[:2], sequence[2:3], sequence[3:]] if packed else [[one] for one in sequence]
    batch = pack(rows, sum(len(one.ids) for one in sequence), len(objective.parts))
    states = target_states(model, batch)
    taught = None if teacher is None else teacher_output(teacher, objective.read_by_teacher(model, states, batch))
    found = objective.losses(model, states, batch, taught)
    torch.testing.assert_close(found.parts.sum(), found.total.detach())
    return found.total


def forward(
    model: Any, ids: list[int], allowed: list[list[bool]] | None = None, positions: list[int] | None = None
) -> Tensor:
    """Logits (T, V) by transformers' own attention; causal, or with `allowed` per query and key."""
    model.set_attn_implementation("sdpa")
    mask = None
    if allowed is not None:
        mask = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        mask = mask.masked_fill(~torch.tensor(allowed), float("-inf"))
    position_ids = None if positions is None else torch.tensor([positions])
    output = model(torch.tensor([ids]), attention_mask=mask, position_ids=position_ids, use_cache=False)
    logits: Tensor = output.logits[0]
    model.set_attn_implementation(ATTENTION)
    return logits


def surprise(model: Any, context: list[int], token: int) -> Tensor:
    """-log p(token) after `context`, by one plain causal forward pass: no mask, no padding, no second stream."""
    return -forward(model, context)[-1].log_softmax(-1)[token]


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, loss: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(loss, reference, rtol=1e-9, atol=1e-9)
    expected = gradients(model, reference)
    found = gradients(model, loss)
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def labelled(example: Example) -> Iterator[int]:
    return iter(range(example.prompt, len(example.ids)))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_loss_of_ar_is_the_surprise_of_all_labels(model: Any, seed: int) -> None:
    """Each label is predicted from all tokens before it; the loss is a mean over tokens."""
    terms = [surprise(model, e.ids[:t].tolist(), int(e.ids[t])) for e in conversations(seed) for t in labelled(e)]
    shares = [Ar().divisor_share(len(e.ids), e.prompt) for e in conversations(seed)]
    assert sum(shares) == len(terms)
    assert_same(model, ours(model, Ar(), sequences_of(Ar(), seed)), torch.stack(terms).sum())


def mars_terms(model: Any, example: Example, block: int, layout: str) -> tuple[Tensor, Tensor]:
    """The surprise of each target behind the masks of its block, and behind the text, by one forward pass for each.

    A block's masks follow the clean text before it: `released` blocks start at position 0, `anchored` ones behind the
    last token before the answer, which is clean.
    """
    anchors = int(layout == "anchored")
    text, prompt = example.ids.tolist(), example.prompt
    first = prompt - 1 if anchors else 0
    if not anchors:
        text += [END] * ((first - len(text)) % block)
    masked, plain = [], []
    for t in range(prompt, len(text)):
        known = max((t - 1 - first) // block * block + first + anchors, prompt)
        masked.append(surprise(model, text[:known] + [MASK] * (t - known), text[t]))
        plain.append(surprise(model, text[:t], text[t]))
    return torch.stack(masked).mean(), torch.stack(plain).mean()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("layout", ["released", "anchored"])
@pytest.mark.parametrize("seed", one_in(2, [0, 1]))
def test_mars_equals_one_forward_pass_per_target(model: Any, block: int, layout: Any, seed: int) -> None:
    """As in decoding: everything before a block is clean, then as many masks as tokens were skipped."""
    terms = [mars_terms(model, example, block, layout) for example in conversations(seed)]
    masked, next_token = (torch.stack(part).sum() for part in zip(*terms, strict=True))
    for ar_weight in (1.0, 0.0, 0.3):
        mars = Mars(block_size=block, layout=layout, ar_weight=ar_weight)
        assert_same(model, ours(model, mars, sequences_of(mars, seed)), masked + ar_weight * next_token)


def test_the_timestep_weight_is_one_over_a_time_per_conversation() -> None:
    """As in the released ablation: the masked loss of a whole conversation times 1/(t + 1e-6)."""
    plain, weighted = Mars(ar_weight=0.0), Mars(ar_weight=0.0, timestep_weight=True)
    for one, other in zip(sequences_of(plain, 0), sequences_of(weighted, 0), strict=True):
        ratio = other.weight / one.weight
        assert ratio.min() == ratio.max()
        assert 1 <= ratio.min() <= 1 / LEAST_TIME
    example = conversations(0)[1]
    share = plain.build(example, SPECIAL, torch.Generator()).weight[0, 0]
    drawn = [weighted.build(example, SPECIAL, torch.Generator().manual_seed(i)).weight[0, 0] for i in range(999)]
    assert abs((share / torch.stack(drawn)).mean() - 0.5) < 0.05  # the times


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_block_diffusion_equals_the_plain_two_stream_forward_pass(model: Any, block: int, seed: int) -> None:
    """[noisy | clean], the rules of BD3-LM per pair, 1/t for masked tokens, the mean over labels."""
    objective = BlockDiffusion(block_size=block)
    total = torch.zeros((), dtype=torch.float64)
    for number, (ids, prompt) in enumerate(conversations(seed)):
        text = ids.tolist() + [END] * (-len(ids) % block)
        random = torch.Generator().manual_seed(number)
        time = LEAST_TIME + (1 - LEAST_TIME) * torch.rand((), generator=random).item()
        masked = (torch.rand(len(text) - prompt, generator=random) < time).tolist()
        noisy = [MASK if place >= prompt and masked[place - prompt] else token for place, token in enumerate(text)]
        length = len(text)

        def allowed(query: int, key: int, length: int = length) -> bool:
            q, k = query % length // block, key % length // block
            match query < length, key < length:
                case True, True:
                    return q == k
                case True, False:
                    return k < q
                case False, True:
                    return False
                case _:
                    return k <= q

        pairs = [[allowed(q, k) for k in range(2 * length)] for q in range(2 * length)]
        log_p = forward(model, noisy + text, pairs, [*range(length)] * 2).log_softmax(-1)
        terms = [-log_p[t - 1, text[t]] / time for t in range(prompt, length) if masked[t - prompt]]
        if terms:
            total = total + torch.stack(terms).sum() / (length - prompt)
    assert_same(model, ours(model, objective, sequences_of(objective, seed)), total)


def test_the_loss_of_distillation_is_the_divergence_from_the_teacher(model: Any) -> None:
    """Kullback-Leibler, teacher first, at every label; the teacher gets no gradient."""
    teacher = exact(narrow_model(VOCAB, layers=2, seed=1))
    terms = []
    for ids, prompt in conversations(0):
        for t in range(prompt, len(ids)):
            log_q = forward(teacher, ids[:t].tolist())[-1].log_softmax(-1).detach()
            log_p = forward(model, ids[:t].tolist())[-1].log_softmax(-1)
            terms.append((log_q.exp() * (log_q - log_p)).sum())
    draft = Draft(distil="logits")
    assert draft.needs_teacher
    assert not Draft().needs_teacher
    loss = ours(model, draft, sequences_of(draft, 0), teacher)
    assert_same(model, loss, torch.stack(terms).sum())
    assert all(p.grad is None for p in teacher.parameters())


def spans(size: int, example: Example, seed: int) -> tuple[int, int, list[int]]:
    """k, the distance of spans, and their anchors, as a conversation's own generator draws them."""
    random = torch.Generator().manual_seed(seed)
    k = int(torch.randint(2, size + 1, (), generator=random))
    apart = 2 * size + 1 - k
    first = example.prompt - 1 + int(torch.randint(apart, (), generator=random))
    return k, apart, list(range(first, len(example.ids) - 1, apart))


def self_distillation(model: Any, teacher: Any, size: int, target: str, seed: int) -> Tensor:
    """One forward pass of the student and one of the teacher for each span: the teacher reads the student's tokens."""
    terms = [torch.zeros((), dtype=torch.float64)]
    for number, example in enumerate(conversations(seed)):
        k, apart, anchors = spans(size, example, number)
        for anchor in anchors:
            text = example.ids[: anchor + 1].tolist()
            log_p = forward(model, text + [MASK] * (k - 1))[-k:].log_softmax(-1)
            own = log_p.argmax(-1).tolist()
            log_q = forward(teacher, text + own[:-1])[-k:].log_softmax(-1).detach()
            if target == "hard":
                losses = -log_p[torch.arange(k), log_q.argmax(-1)]
            else:
                losses = (log_q.exp() * (log_q - log_p)).sum(-1)
            terms.append(losses.mean() * apart)
    return torch.stack(terms).sum()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("target", ["hard", "soft"])
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), (5, 0), (5, 1)])
def test_self_distillation_judges_the_students_own_tokens(
    model: Any, size: int, seed: int, target: Any, packed: bool
) -> None:
    """Loss and gradients; neither the choice of tokens nor the teacher has a gradient."""
    teacher = exact(narrow_model(VOCAB, layers=2, seed=1))
    objective = SelfDistill(block_size=size, target=target)
    expected = self_distillation(model, teacher, size, target, seed)
    found = ours(model, objective, sequences_of(objective, seed), teacher, packed=packed)
    assert expected > 0
    assert_same(model, found, expected)
    assert all(p.grad is None for p in teacher.parameters())


def test_every_k_weighs_as_much_as_its_labels() -> None:
    """Spans have all sizes from 2 to B and begin anywhere; on average each k weighs as many labels as there are."""
    objective, example = SelfDistill(block_size=5), Example(torch.arange(47) % 20, 7)
    weights: dict[int, list[float]] = {}
    anchors = set()
    for seed in range(2000):
        sequence = objective.build(example, SPECIAL, torch.Generator().manual_seed(seed))
        weights.setdefault(int(sequence.ahead.max()), []).append(float(sequence.weight.sum()))
        anchors.update(sequence.predictor[sequence.ahead == 1].tolist())
        assert len(sequence.ids) <= objective.max_fed_tokens(47, 7)
    assert anchors == set(range(6, 46))
    assert sorted(weights) == [2, 3, 4, 5]
    for of in weights.values():
        assert len(of) > 400
        assert sum(of) / len(of) == pytest.approx(objective.divisor_share(47, 7), rel=0.02)


def test_medusa_trains_heads_and_not_the_target(model: Any) -> None:
    """Head k, x + silu(Wx) and its own matrix, predicts k tokens beyond the next, with the weight 0.8 to the k."""
    medusa = Medusa(heads=3)
    medusa.attach(model, SPECIAL)
    for head in model.medusa:
        torch.nn.init.normal_(head.hidden.weight, std=0.3)
    terms = []
    for ids, prompt in conversations(0):
        for p in range(prompt - 1, len(ids) - 1):
            model.set_attn_implementation("sdpa")
            hidden = model.base_model(ids[None, : p + 1], use_cache=False).last_hidden_state[0, -1]
            model.set_attn_implementation(ATTENTION)
            for k, head in enumerate(model.medusa, start=1):
                if p + 1 + k < len(ids):
                    state = hidden + torch.nn.functional.silu(head.hidden.weight @ hidden + head.hidden.bias)
                    terms.append(-(head.head @ state).log_softmax(-1)[ids[p + 1 + k]] * 0.8**k)
    loss = ours(model, medusa, sequences_of(medusa, 0))
    assert_same(model, loss, torch.stack(terms).sum())
    assert {name.split(".")[0] for name in gradients(model, ours(model, medusa, sequences_of(medusa, 0)))} == {"medusa"}
    assert set(medusa.detach(model)) == {
        f"{k}.{what}" for k in range(3) for what in ("hidden.weight", "hidden.bias", "head")
    }
    assert not hasattr(model, "medusa")


# --- The attention mask, by counting ---


def visible(sequence: TrainingSequence) -> Tensor:
    """(T, T) of bool."""
    return AttentionMask(pack([[sequence]], len(sequence.ids), sequence.weight.shape[1])).dense()[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_released_targets_have_the_distance_of_the_shifted_outputs(block: int) -> None:
    """Offset o of a block is o + 1 tokens ahead, its first token B + 1: from the last mask of the block before."""
    prompt, length = 2 * block, 5 * block
    mars = Mars(block_size=block, ar_weight=0.0)
    sequence = mars.build(Example(torch.arange(length) % 19, prompt), SPECIAL, torch.Generator())
    by_target = {
        int(sequence.position[at]) + 1: int(ahead) for at, ahead in zip(sequence.predictor, sequence.ahead, strict=True)
    }
    assert by_target == {t: 1 if t == prompt else (t - 1) % block + 2 for t in range(prompt, length)}


@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    prompt=st.integers(1, 40),
    answer=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_sequences_are_valid(name: str, prompt: int, answer: int, seed: int) -> None:
    """Indices in range, weights finite, prompts never masked, each target a labelled token or an end token."""
    kinds: dict[str, Callable[[], list[Objective]]] = {
        "mars": lambda: [Mars(block_size=5, layout="anchored"), Mars(block_size=16, ar_weight=0)],
        "self-distill": lambda: [SelfDistill(block_size=3), SelfDistill()],
    }
    for objective in kinds.get(name, lambda: [OBJECTIVES[name]()])():
        example = Example(torch.arange(prompt + answer) % 19, prompt)
        sequence = objective.build(example, SPECIAL, torch.Generator().manual_seed(seed))
        assert len({len(column) for column in sequence[:5]}) == 1
        assert len({len(column) for column in sequence[5:]}) == 1
        assert sequence.weight.shape[1] == len(objective.parts)
        assert sequence.weight.isfinite().all()
        assert len(sequence.ids) <= objective.max_fed_tokens(len(example.ids), prompt)
        assert ((sequence.predictor >= 0) & (sequence.predictor < len(sequence.ids))).all()
        assert not (sequence.ids[sequence.position < prompt] == MASK).any()
        assert ((sequence.ahead > 0) | (sequence.target == END)).all()
        assert visible(sequence).any(1).all()
        if len(objective.parts) == 1 and not isinstance(objective, BlockDiffusion | Ar | Medusa | SelfDistill):
            assert math.isclose(sequence.weight.sum().item(), 1, rel_tol=1e-5)
