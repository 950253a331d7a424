"""The cost of a training in FLOPs, from what was fed: the measure by which objectives are compared at equal cost.

A forward pass takes two FLOPs for each parameter of the layers and position, two for each parameter of the LM head and
prediction, and attention four for each query-key pair and channel of a layer's heads (Kaplan et al., arXiv 2001.08361,
section 2.1; Chowdhery et al., arXiv 2204.02311, appendix B, here with the pairs that attend). A backward pass takes
twice as many; a teacher has none. Not counted are padding, what is computed again (activations by `--checkpointing`,
logits whose likeliest token was needed first), and evaluations. A sliding window counts as none.
"""

from dataclasses import dataclass

from mtbench.errors import UserError
from mtbench.hardware.probe import Shape, count
from mtbench.training.objectives import Model, Objective
from mtbench.training.packing import pack
from mtbench.training.schedule import Schedule

SAMPLED = 4096  # conversations whose cost is counted before a training, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a model and a teacher compute in a training."""

    model: Shape
    teacher: Shape | None

    def flops(self, fed: int, predicted: int, pairs: int) -> int:
        """Return the FLOPs of so many positions fed, predictions, and query-key pairs of one head."""
        student = 3 * _forward_flops(self.model, fed, predicted, pairs)
        return student + (_forward_flops(self.teacher, fed, predicted, pairs) if self.teacher else 0)

    def epochs(self, flops: float, schedule: Schedule) -> float:
        """Return how many passes over a schedule's examples cost so many FLOPs.

        The first SAMPLED conversations are counted, their mean stands for those behind them. Raises UserError if the
        budget is less than a conversation takes.
        """
        spent = 0
        for sample in range(SAMPLED):
            sequence = schedule.sequence(sample)
            batch = pack([[sequence]], len(sequence.ids), len(schedule.objective.parts))
            spent += self.flops(len(sequence.ids), len(sequence.predictor), int(batch.pairs))
            if spent > 2 * flops:
                raise UserError(f"--flops {flops:g} is too few: conversation {sample + 1} makes them {spent:.2g}.")
            if spent >= flops:
                return (sample + 1) / len(schedule.examples)
        return flops / spent * SAMPLED / len(schedule.examples)


def _forward_flops(shape: Shape, fed: int, predicted: int, pairs: int) -> int:
    products = 2 * (shape.body * fed + shape.head * predicted)
    return products + 4 * shape.layers * shape.heads * shape.head_dim * pairs


def cost_of(objective: Objective, model: Model, teacher: Model | None) -> Cost | None:
    """Return the cost of a training; None if FLOPs are not counted: beside a frozen model, or where `count` cannot."""
    if objective.freezes_model:
        return None
    try:
        return Cost(model=count(model), teacher=None if teacher is None else count(teacher))
    except ValueError:
        return None
