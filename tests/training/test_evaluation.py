"""The evaluation of a training, against counting by hand."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from trainings import narrow_model

from mtbench.models.attention import ATTENTION
from mtbench.training import linear_cross_entropy
from mtbench.training.evaluation import evaluate
from mtbench.training.loss import attach_loss
from mtbench.training.objectives import Ar, Mars, Medusa, Objective, Special
from mtbench.training.packing import Example, TrainingSequence
from mtbench.training.schedule import Schedule

MASK, END, VOCABULARY = 20, 21, 24


def conversations(count: int) -> list[Example]:
    random = Random(1)
    lengths = [(random.randint(1, 6), random.randint(5, 14)) for _ in range(count)]
    return [Example(torch.tensor(random.choices(range(20), k=sum(one))), one[0]) for one in lengths]


def schedule(objective: Objective, examples: list[Example], **shape: int) -> Schedule:
    return Schedule(
        examples=examples,
        objective=objective,
        special=Special(MASK, END),
        batch_size=len(examples),
        epochs=1,
        seed=0,
        **({"rows": 3, "packed": 0} | shape),
    )


def alone(objective: Objective, examples: list[Example], trained: Any) -> Iterator[tuple[TrainingSequence, Tensor]]:
    """Yield each conversation's sequence and the distributions of its predictions, by transformers' own attention."""
    for sample in range(len(examples)):
        sequence = schedule(objective, examples).sequence(sample)
        clean = sequence.segment == 0
        shown = clean & (sequence.position < sequence.context[:, None])
        own = ~clean & (sequence.segment == sequence.segment[:, None]) & (sequence.position <= sequence.reach[:, None])
        hidden = trained.model(
            input_ids=sequence.ids[None],
            position_ids=sequence.position[None],
            attention_mask=torch.zeros(1, 1, *shown.shape).masked_fill(~(shown | own), float("-inf")),
        ).last_hidden_state[0, sequence.predictor]
        yield sequence, logits(trained, hidden, sequence.ahead.tolist()).softmax(1)


def logits(trained: Any, hidden: Tensor, ahead: list[int]) -> Tensor:
    """Return the logits of each prediction, by the model's head or by the Medusa head for its distance."""
    if not hasattr(trained, "medusa"):
        return hidden @ trained.get_parameter("lm_head.weight").T  # type: ignore[no-any-return]
    heads = [trained.medusa[n - 2] for n in ahead]
    return torch.stack([head(state) @ head.head.T for head, state in zip(heads, hidden, strict=True)])


@pytest.mark.parametrize("shape", [{}, {"packed": 160, "rows": 2}], ids=["rows", "packed"])
@pytest.mark.parametrize("objective", [Ar(), Mars(block_size=4), Medusa(heads=3)], ids=lambda o: o.name)
@torch.no_grad()
def test_accuracy_and_calibration_are_those_of_each_conversation_alone(
    objective: Objective, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any packing of rows and chunks of logits, each prediction is scored once, by its own head."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 5 * VOCABULARY)
    examples, trained = conversations(7), narrow_model(VOCABULARY, seed=1, attention="eager").eval()
    objective.attach(trained, Special(MASK, END))
    for head in getattr(trained, "medusa", ()):
        torch.nn.init.normal_(head.hidden.weight)
    ahead, right, confidence = [], [], []
    for sequence, probabilities in alone(objective, examples, trained):
        ahead += sequence.ahead.tolist()
        right += (probabilities.argmax(1) == sequence.target).tolist()
        confidence += probabilities.amax(1).tolist()

    trained.set_attn_implementation(ATTENTION)
    attach_loss(trained, objective)
    found = evaluate(trained, schedule(objective, examples, **shape), torch.device("cpu"))

    assert found["conversations"] == 7
    assert found["loss"] == pytest.approx(sum(found[part] for part in objective.parts), abs=1e-4)
    scored = [n for n in sorted(set(ahead)) if n > 0]
    assert [entry["ahead"] for entry in found["ahead"]] == scored
    for entry in found["ahead"]:
        mine = [r for r, n in zip(right, ahead, strict=True) if n == entry["ahead"]]
        assert entry["n"] == len(mine)
        assert entry["accuracy"] == pytest.approx(sum(mine) / len(mine), abs=1e-5)
    least = min(2, max(ahead))  # next tokens are calibrated only if nothing else is predicted
    beyond = [(r, c) for r, c, n in zip(right, confidence, ahead, strict=True) if n >= least]
    assert sum(entry["n"] for entry in found["calibration"]) == len(beyond)
    for entry in found["calibration"]:
        inside = [(r, c) for r, c in beyond if entry["low"] <= c < entry["high"] or c == entry["high"] == 1]
        assert entry["n"] == len(inside)
        assert entry["confidence"] == pytest.approx(sum(c for _, c in inside) / len(inside), abs=1e-4)
        assert entry["accuracy"] == pytest.approx(sum(r for r, _ in inside) / len(inside), abs=1e-5)
