"""Objectives of drafts that read hidden states: losses and gradients against drafts written out in float64.

The references are those of the decoding tests (helpers/eagle_cases.py, block_drafts.py): one prediction at a time,
everything recomputed for it, no packing and no mask.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from random import Random
from typing import Any

import block_drafts
import eagle_cases
import pytest
import torch
from eagle_cases import Entry, Format
from small import END, MASK, VOCABULARY, small_checkpoint, small_config
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from trainings import exact
from transformers import Qwen3Config

from mtbench.models.runner import ModelRunner
from mtbench.training.block_objectives import BlockDraft, MarkovBlockDraft
from mtbench.training.draft_objectives import DraftObjective, Eagle, Mtp, SequentialDraft, tapped_layers
from mtbench.training.loss import target_states
from mtbench.training.objectives import Special
from mtbench.training.packing import Example, Examples, contiguous_examples, pack

SPECIAL = Special(MASK, END)
TRIMMED = 12  # tokens of a trimmed vocabulary
BLOCK, RANK, STEPS, THETA = 3, 5, 3, 100.0


def target(head: int) -> ModelRunner:
    """A target whose heads have the size that a reference is written for."""
    config = small_config(Qwen3Config, num_hidden_layers=4, rope_theta=THETA, head_dim=head)
    runner = ModelRunner(small_checkpoint(config))
    exact(runner.model)
    choose = runner.model.set_attn_implementation  # transformers' eager attention has a softmax in float32

    def choose_exact(name: str) -> None:
        choose("sdpa" if name == "eager" else name)

    runner.model.set_attn_implementation = choose_exact
    return runner


@pytest.fixture
def runner() -> ModelRunner:
    return target(eagle_cases.HEAD)


def conversations() -> list[Example]:
    """Answers of one token to twelve; one prompt of one token."""
    rng = Random(0)
    sizes = ((5, 7), (3, 1), (1, 4), (9, 12))
    return [Example(torch.tensor([rng.randrange(30) for _ in range(sum(size))]), size[0]) for size in sizes]


def examples() -> Examples:
    """The conversations as the data holds them."""
    ids, prompts = zip(*conversations(), strict=True)
    return contiguous_examples(torch.cat(ids).int(), torch.tensor([*map(len, ids)]), torch.tensor(prompts))


def most_frequent() -> list[int]:
    """The ids that are most often in the answers, counted one by one."""
    counts = Counter(token for ids, prompt in conversations() for token in ids[prompt:].tolist())
    return sorted(sorted(range(VOCABULARY), key=lambda token: (-counts[token], token))[:TRIMMED])


class ExactRotary(torch.nn.Module):
    """Rotary angles in float64; transformers' are computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.frequency = THETA ** (-torch.arange(0, size, 2).double() / size)

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angle = (position_ids[..., None] * self.frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


def attached(objective: DraftObjective, runner: ModelRunner) -> dict[str, Tensor]:
    """Add the draft to the target, with weights that make everything matter. Its tensors by name."""
    objective.attach(runner.model, SPECIAL._replace(examples=examples()))
    draft: Any = runner.model.draft
    exact(draft)
    reads_rotary = runner.model.base_model if isinstance(objective, Mtp) else draft
    reads_rotary.rotary_emb = ExactRotary(runner.model.config.head_dim)
    torch.manual_seed(2)
    learned = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    for parameter in learned.values():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    return learned


def ours(objective: DraftObjective, runner: ModelRunner, padding: int = 4) -> Tensor:
    """The parts of the loss as in training: rows of two conversations and padding at their ends."""
    sequences = [objective.build(e, SPECIAL, torch.Generator().manual_seed(i)) for i, e in enumerate(conversations())]
    rows = [sequences[:2], sequences[2:3], sequences[3:]]
    length = max(sum(len(one.ids) for one in row) for row in rows) + padding
    batch = pack(rows, length, len(objective.parts))
    states = target_states(runner.model, batch, objective.taps(runner.model))
    found = objective.losses(runner.model, states, batch)
    torch.testing.assert_close(found.parts.sum(), found.total.detach())
    return found.total


def same(found: Tensor, expected: Tensor, parameters: dict[str, Tensor]) -> None:
    """The loss and every gradient, to 1e-9."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    both = [torch.autograd.grad(loss, list(parameters.values())) for loss in (found, expected)]
    for name, mine, theirs in zip(parameters, *both, strict=True):
        assert theirs.abs().max() > 0, name
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9), name


@cache
def target_distribution(runner: ModelRunner, text: tuple[int, ...]) -> Tensor:
    """What the target says after a text, by attention of transformers."""
    model = runner.model
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([text]), use_cache=False).logits[0, -1]
    model.set_attn_implementation("mtbench")
    return logits.softmax(0)


class MtpReference(eagle_cases.Reference):
    """A layer for multi-token prediction, written out: an ordinary layer reads feature and embedding, projected."""

    def fused(self, states: Tensor) -> Tensor:
        return states

    def joined(self, entries: Sequence[Entry]) -> Tensor:
        """The layer's input, (n, C). The first position has no embedding."""
        table = self.target.model.get_input_embeddings().weight
        embedding = torch.stack([table[e.token] if e.position else torch.zeros_like(table[0]) for e in entries])
        feature = torch.stack([e.feature for e in entries])
        both = torch.cat((self.norm(feature, "feature_norm"), self.norm(embedding, "token_norm")), 1)
        return both @ self.t["join.weight"].T

    def output(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
        """What is fed back and what the LM head reads: both are the normed output."""
        x = self.joined(entries)
        read = self.norm(x, "block.input_layernorm")
        query, key, value = (
            self.project(read, f"self_attn.{name}").unflatten(1, (-1, eagle_cases.HEAD)) for name in "qkv"
        )
        positions = torch.tensor([e.position for e in entries]).double()
        query = self.turned(self.norm(query, "block.self_attn.q_norm"), positions)[-1]
        key = self.turned(self.norm(key, "block.self_attn.k_norm"), positions)
        key, value = (t.repeat_interleave(len(query) // t.shape[1], 1) for t in (key, value))
        weights = (torch.einsum("hd,nhd->hn", query, key) / eagle_cases.HEAD**0.5).softmax(1)
        hidden = x[-1] + self.project(torch.einsum("hn,nhd->hd", weights, value).flatten(), "self_attn.o")
        read = self.norm(hidden, "block.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.project(read, "mlp.gate"))
        hidden = hidden + self.project(gate * self.project(read, "mlp.up"), "mlp.down")
        normed = self.norm(hidden, "last_norm")
        return normed, normed


def eagle_loss(runner: ModelRunner, tensors: dict[str, Tensor]) -> Tensor:
    """Divergence from the target's distribution."""
    taps = tuple(layer + 1 for layer in tapped_layers(4))
    form = Format({}, taps, prefix="layers.0", cut=False, head_norms=True)

    def divergence(log_p: Tensor, ids: tuple[int, ...], label: int) -> Tensor:
        wanted = target_distribution(runner, ids[:label])
        return wanted @ (wanted.log() - log_p)

    return sequential_loss(eagle_cases.Reference(form, tensors, runner), 0.8, divergence)


def trimmed_loss(runner: ModelRunner, tensors: dict[str, Tensor]) -> Tensor:
    """Divergence from the target's distribution among the tokens that the draft has; others are not learned."""
    form = Format({}, tuple(layer + 1 for layer in tapped_layers(4)), prefix="layers.0", cut=False, head_norms=True)
    kept = most_frequent()

    def divergence(log_p: Tensor, ids: tuple[int, ...], label: int) -> Tensor:
        if ids[label] not in kept:
            return log_p.sum() * 0
        wanted = target_distribution(runner, ids[:label])[kept]
        wanted = wanted / wanted.sum()
        return wanted @ (wanted.log() - log_p[kept].log_softmax(0))

    return sequential_loss(eagle_cases.Reference(form, tensors, runner), 0.8, divergence)


def mtp_loss(runner: ModelRunner, tensors: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of the text."""
    reference = MtpReference(Format({}, (4,), prefix="block", cut=False), tensors, runner)
    return sequential_loss(reference, 0.6, lambda log_p, ids, label: -log_p[ids[label]])


def sequential_loss(
    reference: eagle_cases.Reference, decay: float, loss: Callable[[Tensor, tuple[int, ...], int], Tensor]
) -> Tensor:
    """Each label by itself: final entries from the target's hidden states, then entries of the draft's own output."""
    head = reference.target.model.get_output_embeddings().weight
    total = torch.zeros((), dtype=torch.double)
    for example in conversations():
        ids = example.ids.tolist()
        labels = range(max(example.prompt, 2), len(ids))
        for label in labels:
            for step in range(min(STEPS, label - 1)):
                last = label - 2 - step
                entries = reference.entries(ids[: last + 2])
                for again in range(1, step + 1):
                    feature, _ = reference.output(entries)
                    entries.append(Entry(feature, ids[last + 1 + again], last + again))
                drafted = (head @ reference.output(entries)[1]).log_softmax(0)
                total = total + decay**step / len(labels) * loss(drafted, tuple(ids), label)
    return total


SEQUENTIAL = {
    "eagle": (Eagle(steps=STEPS), eagle_loss),
    "eagle, trimmed": (Eagle(steps=STEPS, draft_vocabulary=TRIMMED), trimmed_loss),
    "mtp": (Mtp(steps=STEPS), mtp_loss),
}
sequential = pytest.mark.parametrize(("objective", "loss"), SEQUENTIAL.values(), ids=SEQUENTIAL)
Loss = Callable[[ModelRunner, dict[str, Tensor]], Tensor]


@sequential
def test_steps_of_training_are_decoding_with_the_right_tokens(
    objective: SequentialDraft, loss: Loss, runner: ModelRunner
) -> None:
    """Every step of every label sees what it sees in decoding."""
    tensors = attached(objective, runner)
    same(ours(objective, runner), loss(runner, tensors), tensors)


def block_reference(runner: ModelRunner, tensors: dict[str, Tensor], objective: BlockDraft) -> Any:
    """The draft that is trained, by plain torch; its `_hidden` keeps gradients."""
    reference: Any = object.__new__(block_drafts.Reference)
    raw = runner.model.draft.format.raw | {"rope_theta": THETA, "block_size": objective.block_size}
    reference.take(raw, tensors, runner)
    reference.features, reference._hidden = reference._features, partial(reference._hidden.__wrapped__, reference)
    return reference


def block_loss(runner: ModelRunner, tensors: dict[str, Tensor], objective: BlockDraft) -> Tensor:
    """Each anchor by itself: the block after a text, as in decoding, with the right tokens before each place."""
    reference = block_reference(runner, tensors, objective)
    head, markov = runner.model.get_output_embeddings().weight, isinstance(objective, MarkovBlockDraft)
    total = torch.zeros((), dtype=torch.double)
    for example in conversations():
        ids = example.ids.tolist()
        terms, weights = [], []
        for anchor in range(max(example.prompt, 1) - 1, len(ids) - 1):
            hidden = reference._hidden(tuple(ids[: anchor + 1]))
            for place, label in enumerate(range(anchor + 1, min(anchor + 1 + len(hidden), len(ids)))):
                logits, h = head @ hidden[place], hidden[place]
                if markov:
                    before = tensors["markov_head.markov_w1.weight"][ids[label - 1]]
                    logits = logits + tensors["markov_head.markov_w2.weight"] @ before
                loss = -logits.log_softmax(0)[ids[label]]
                if markov:
                    l1 = (logits.softmax(0) - target_distribution(runner, tuple(ids[:label]))).abs().sum()
                    read = torch.cat((h, before))
                    sure = tensors["confidence_head.proj.weight"][0] @ read + tensors["confidence_head.proj.bias"][0]
                    chance = 1 - l1.detach() / 2
                    loss = 0.1 * loss + 0.9 * l1 + binary_cross_entropy_with_logits(sure, chance)
                terms.append(loss)
                weights.append(math.exp(-place / 4))
        total = total + torch.stack(terms) @ torch.tensor(weights, dtype=torch.double) / sum(weights)
    return total


@pytest.mark.parametrize(
    "objective",
    [BlockDraft(layers=2, block_size=BLOCK), MarkovBlockDraft(layers=1, block_size=BLOCK, markov_rank=RANK)],
    ids=lambda objective: objective.name,
)
def test_blocks_learn_what_they_see_in_decoding(objective: BlockDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """From every anchor, with all hidden states before it; also where the logits come in chunks."""
    monkeypatch.setattr("mtbench.training.linear_cross_entropy.CHUNK", 7 * VOCABULARY)
    runner = target(block_drafts.SIZE)
    tensors = attached(objective, runner)
    same(ours(objective, runner), block_loss(runner, tensors, objective), tensors)


@pytest.mark.parametrize("objective", [Eagle(steps=2), BlockDraft(), MarkovBlockDraft()], ids=lambda o: o.name)
def test_a_batch_of_padding_has_a_loss_of_zero_and_gradients(objective: DraftObjective, runner: ModelRunner) -> None:
    """The last step of an epoch may have such forward passes."""
    objective.attach(runner.model, SPECIAL)
    batch = pack([[]], 8, len(objective.parts))
    loss = objective.losses(runner.model, target_states(runner.model, batch, objective.taps(runner.model)), batch).total
    loss.backward()
    assert loss == 0


def test_few_anchors_are_drawn_anew_for_each_conversation_and_epoch() -> None:
    """Each weight is a share of its conversation's, whatever was drawn."""
    objective = BlockDraft(block_size=BLOCK, anchors=4)
    example = Example(torch.arange(30), 6)
    drawn = set()
    for seed in range(8):
        sequence = objective.build(example, SPECIAL, torch.Generator().manual_seed(seed))
        first = sequence.ahead == 1
        assert first.sum() == 4
        assert math.isclose(sequence.weight.sum(), 1, rel_tol=1e-12)
        assert (sequence.target == sequence.predictor + 1).all()  # the text counts up
        assert sequence.target.min() >= 6
        drawn.add(tuple(sequence.predictor[first].tolist()))
    assert len(drawn) > 4
