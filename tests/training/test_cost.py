"""The cost of a training: counted pairs and products equal those of the masks and of PyTorch's own counter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainings import SPECIAL, VOCAB, conversations, narrow_model, sequences_of

from mtbench.errors import UserError
from mtbench.training import cost as cost_module
from mtbench.training.cost import cost_of
from mtbench.training.loss import target_states
from mtbench.training.objectives import Ar, BlockDiffusion, Mars, Medusa, Objective
from mtbench.training.packing import PADDING, AttentionMask, Example, pack
from mtbench.training.schedule import Schedule
from mtbench.training.self_distillation import SelfDistill

WHOLE = [Ar(), Mars(block_size=3), Mars(layout="anchored", ar_weight=0.0), SelfDistill(block_size=3), BlockDiffusion()]


@pytest.mark.parametrize("objective", WHOLE, ids=lambda objective: objective.name)
def test_the_pairs_of_a_batch_are_those_of_its_mask(objective: Objective) -> None:
    """Packed and padded rows; padding attends to padding, which is no work."""
    first, *others = sequences_of(objective, 0)
    batch = pack([[first, others[0]], others[1:]], 120, len(objective.parts))
    allowed = AttentionMask(batch).dense() & (batch.document != PADDING)[:, :, None]
    assert int(batch.pairs) == int(allowed.sum())


def test_products_are_those_that_pytorch_counts() -> None:
    """A forward and a backward pass of a text whose every position predicts, without the scores of attention."""
    model: Any = narrow_model(VOCAB, layers=3)
    batch = pack([[Ar().build(Example(torch.arange(19), 1), SPECIAL, torch.Generator())]], 18, 1)
    with FlopCounterMode(display=False) as counter:
        logits = target_states(model, batch).predicting @ model.get_output_embeddings().weight.T
        logits.sum().backward()
    products = counter.get_flop_counts()["Global"]
    counted = sum(products[name] for name in products if str(name) in ("aten.addmm", "aten.mm"))  # of no scores
    cost = cost_of(Ar(), model, None)
    assert cost is not None
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)  # no product
    assert counted == cost.flops(18, 18, 0) - 3 * 2 * 18 * vectors
    head_dim = 16 // 4
    assert cost.flops(18, 18, 100) - cost.flops(18, 18, 0) == 3 * 4 * 3 * 4 * head_dim * 100


def schedule_of(objective: Objective, examples: list[Example]) -> Schedule:
    """One pass, one conversation per row."""
    return Schedule(
        examples=examples, objective=objective, special=SPECIAL, batch_size=4, epochs=1, seed=0, rows=8, packed=0
    )


@pytest.mark.parametrize("objective", WHOLE, ids=lambda objective: objective.name)
@pytest.mark.parametrize("counted", [4096, 40])
def test_trainings_of_one_budget_cost_the_same(
    monkeypatch: pytest.MonkeyPatch, objective: Objective, counted: int
) -> None:
    """Within 3 %, with the teacher, over several passes; also where the mean of the first stands for the others."""
    monkeypatch.setattr(cost_module, "SAMPLED", counted)
    model = narrow_model(VOCAB)
    cost = cost_of(objective, model, model if objective.needs_teacher else None)
    assert cost is not None
    schedule = schedule_of(objective, [example for seed in range(5) for example in conversations(seed)])
    budgeted, spent = replace(schedule, epochs=cost.epochs(5e7, schedule)), 0
    for sample in range(budgeted.samples):
        sequence = budgeted.sequence(sample)
        batch = pack([[sequence]], len(sequence.ids), len(objective.parts))
        spent += cost.flops(len(sequence.ids), len(sequence.predictor), int(batch.pairs))
    assert spent == pytest.approx(5e7, rel=0.03)


def test_a_budget_below_a_conversation_is_refused() -> None:
    model, objective = narrow_model(VOCAB), SelfDistill(block_size=3)
    cost = cost_of(objective, model, model)
    assert cost is not None
    schedule = schedule_of(objective, conversations(0))
    with pytest.raises(UserError, match=r"--flops 1000 is too few: conversation . makes them"):
        cost.epochs(1e3, schedule)


def test_added_modules_beside_a_frozen_model_are_not_counted() -> None:
    assert cost_of(Medusa(), narrow_model(VOCAB), None) is None
