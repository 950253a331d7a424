"""P-EAGLE's training: loss and gradients against a draft written out in float64, the drop, and what is stored."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from eagle_cases import HEAD, Format
from parallel_eagle_cases import ParallelReference
from small import END, MASK, small_checkpoint, small_config
from torch import Tensor
from trainings import exact
from transformers import Qwen3Config

from mtbench.models.runner import ModelRunner
from mtbench.training import parallel_draft
from mtbench.training.draft_objectives import tapped_layers
from mtbench.training.loss import target_states
from mtbench.training.objectives import Special
from mtbench.training.packing import Example, Packed, TrainingSequence, pack
from mtbench.training.parallel_draft import ParallelEagle

SPECIAL, THETA = Special(MASK, END), 100.0
OBJECTIVE = ParallelEagle(steps=4, layers=2, keep=0.8)


def conversations() -> list[Example]:
    """Answers of one token to twelve; one prompt of one token."""
    rng = Random(0)
    sizes = ((5, 7), (3, 1), (1, 4), (9, 12))
    return [Example(torch.tensor([rng.randrange(30) for _ in range(sum(size))]), size[0]) for size in sizes]


class ExactRotary(torch.nn.Module):
    """Rotary angles in float64; transformers' are computed in float32."""

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequency = THETA ** (-torch.arange(0, HEAD, 2).double() / HEAD)
        angle = (position_ids[..., None] * frequency).repeat(1, 1, 2)
        return angle.cos(), angle.sin()


@pytest.fixture
def runner() -> ModelRunner:
    """A target with a draft of weights that make everything matter."""
    config = small_config(Qwen3Config, num_hidden_layers=4, rope_theta=THETA, head_dim=HEAD)
    runner = ModelRunner(small_checkpoint(config))
    exact(runner.model)
    OBJECTIVE.attach(runner.model, SPECIAL)
    draft: Any = runner.model.draft
    exact(draft)
    draft.rotary_emb = ExactRotary()
    torch.manual_seed(2)
    for parameter in draft.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    return runner


def sequences() -> list[TrainingSequence]:
    return [OBJECTIVE.build(e, SPECIAL, torch.Generator().manual_seed(i)) for i, e in enumerate(conversations())]


def packed() -> Packed:
    """Rows of two conversations, of one, and padding at their ends."""
    made = sequences()
    rows = [made[:2], made[2:3], made[3:]]
    return pack(rows, max(sum(len(one.ids) for one in row) for row in rows) + 4, len(OBJECTIVE.parts))


def ours(runner: ModelRunner) -> Tensor:
    """The loss as in training."""
    batch = packed()
    found = OBJECTIVE.losses(runner.model, target_states(runner.model, batch, OBJECTIVE.taps(runner.model)), batch)
    torch.testing.assert_close(found.parts.sum(), found.total.detach())
    return found.total


def written_out(runner: ModelRunner) -> Tensor:
    """Each prediction by itself, as in decoding: the entries up to its anchor, and masks behind them."""
    tensors = dict(runner.model.draft.named_parameters())
    taps = tuple(layer + 1 for layer in tapped_layers(4))
    form = Format({}, taps, prefix="layers.0", cut=False, head_norms=True, layers=2, mask=MASK)
    reference, head = ParallelReference(form, tensors, runner), runner.model.get_output_embeddings().weight
    choose = runner.model.set_attn_implementation  # transformers' eager attention has a softmax in float32
    runner.model.set_attn_implementation = lambda name: choose("sdpa" if name == "eager" else name)
    total = torch.zeros((), dtype=torch.double)
    for example, made in zip(conversations(), sequences(), strict=True):
        ids = tuple(example.ids.tolist())
        for predictor, ahead in zip(made.predictor.tolist(), made.ahead.tolist(), strict=True):
            label, depth = predictor + 1, ahead - 1
            entries = reference.masked(reference.entries(ids[: label - depth]), depth)
            log_p = (head @ reference.layers(entries)[0][-1]).log_softmax(0)
            wanted = plain_logits(reference, ids[:label]).softmax(0)
            total = total + wanted @ (wanted.log() - log_p) / len(made.predictor)
    return total


def plain_logits(reference: ParallelReference, text: tuple[int, ...]) -> Tensor:
    """The target's logits after a text, with those of ids that decoding never says."""
    model = reference.target.model
    hidden = reference.read(text)[1][-1][-1]
    logits: Tensor = model.get_output_embeddings()(hidden)
    return logits.detach()


def agrees(runner: ModelRunner) -> None:
    """The loss and every gradient, to 1e-9."""
    parameters = dict(runner.model.draft.named_parameters())
    found, expected = ours(runner), written_out(runner)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    both = [torch.autograd.grad(loss, list(parameters.values())) for loss in (found, expected)]
    for name, mine, theirs in zip(parameters, *both, strict=True):
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_masks_learn_what_they_see_in_decoding(runner: ModelRunner) -> None:
    agrees(runner)


def other_masks(**changes: Any) -> Any:
    """Masks with another depth or anchor."""
    right = parallel_draft.masks_of
    return lambda batch: right(batch)._replace(**{name: change(right(batch)) for name, change in changes.items()})


FAULTS: dict[str, tuple[str, Any]] = {
    "positions rest": ("masks_of", other_masks(depth=lambda masks: masks.depth.clamp(max=1))),
    "a later anchor": ("masks_of", other_masks(anchor=lambda masks: masks.anchor + (masks.anchor >= 0))),
    "deeper masks are seen": (
        "seen",
        lambda clean, masks, right=parallel_draft.seen: right(
            clean, masks._replace(depth=torch.zeros_like(masks.depth))
        ),
    ),
    "masks of other anchors are seen": (
        "seen",
        lambda clean, masks, right=parallel_draft.seen: (
            right(clean, masks)
            | right(clean, masks)
            .new_ones(1)
            .logical_and(
                torch.nn.functional.pad(
                    (masks.depth[:, :, None] > masks.depth[:, None]), (clean.shape[1], 0, clean.shape[1], 0)
                )
            )
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_trap_of_the_layout_is_noticed(name: str, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wrong = FAULTS[name]
    monkeypatch.setattr(parallel_draft, target, wrong)
    with pytest.raises(AssertionError):
        agrees(runner)


def test_a_depth_keeps_its_share_of_places_and_continues_the_one_before() -> None:
    """Exactly r^d of them, at least the floor; drawn anew for each conversation and epoch; weights are alike."""
    objective = ParallelEagle(steps=8)
    example, drawn = Example(torch.arange(210), 8), set()
    for seed in range(4):
        made = objective.build(example, SPECIAL, torch.Generator().manual_seed(seed))
        anchors = [(made.predictor - made.ahead)[made.ahead == depth + 1].tolist() for depth in range(8)]
        assert len(anchors[0]) == 202
        for depth, (before, after) in enumerate(pairwise(anchors), start=1):
            going_on = [anchor for anchor in before if anchor + depth + 2 < 210]
            assert len(after) == min(len(going_on), int((202 - depth) * max(0.7**depth, 0.2)))
            assert depth == 1 or set(after) <= set(going_on)
        assert all(one == sorted(set(one)) and one[0] >= 0 for one in anchors)
        assert (made.target == made.predictor + 1).all()  # the text counts up
        assert made.target.min() == 8
        assert made.weight.sum().item() == pytest.approx(1)
        assert len(made.weight.sum(1).unique()) == 1
        drawn.add(tuple(anchors[-1]))
    assert len(drawn) == 4


def test_a_batch_of_padding_has_a_loss_of_zero_and_gradients(runner: ModelRunner) -> None:
    batch = pack([[]], 8, len(OBJECTIVE.parts))
    states = target_states(runner.model, batch, OBJECTIVE.taps(runner.model))
    loss = OBJECTIVE.losses(runner.model, states, batch).total
    loss.backward()
    assert loss == 0
    assert runner.model.draft.mask_hidden.grad is not None


def test_what_is_stored_has_the_names_of_speculators(runner: ModelRunner) -> None:
    """Weights and config.json. Embedding and LM head are the target's, and are left out, as vLLM takes them."""
    config: Any = OBJECTIVE.checkpoint_config(runner.model)
    names = set(OBJECTIVE.detach(runner.model))
    attention = [f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer = {*attention, *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    stored = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert names == stored | {"layers.0.hidden_norm.weight", "fc.weight", "norm.weight", "mask_hidden"}
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert (config["mask_token_id"], config["eagle_aux_hidden_state_layer_ids"]) == (MASK, [1, 2, 3])
