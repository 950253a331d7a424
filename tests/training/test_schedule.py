"""The schedule: which conversations each step takes, and that the gradient does not depend on its forward passes."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Mars, Medusa, Objective, Special
from mtbench.training.packing import PADDING, Example, Packed
from mtbench.training.schedule import Schedule, best_fit, generator

VOCAB, MASK, END = 23, 20, 21
SPECIAL = Special(mask=MASK, end=END)
BLOCK = st.integers(2, 17)
OBJECTIVES: st.SearchStrategy[Objective] = st.one_of(
    st.builds(Ar),
    st.builds(Draft),
    st.builds(
        Mars,
        block_size=BLOCK,
        layout=st.sampled_from(["released", "anchored"]),
        ar_weight=st.sampled_from([0.0, 1.0]),
        timestep_weight=st.booleans(),
    ),
    st.builds(BlockDiffusion, block_size=BLOCK),
    st.builds(Medusa, heads=st.integers(1, 6)),
)


@st.composite
def examples(draw: st.DrawFn, most: int = 40) -> Example:
    length = draw(st.integers(2, most))
    return Example(torch.arange(length) % 20, draw(st.integers(0, length - 1)))


def some_examples(count: int, seed: int = 0) -> list[Example]:
    """They differ in their first token."""
    random = torch.Generator().manual_seed(seed)
    return [
        Example(
            torch.cat([torch.tensor([n % 20]), torch.randint(20, (int(length),), generator=random)]),
            1 + int(length) // 3,
        )
        for n, length in enumerate(torch.randint(1, 30, (count,), generator=random))
    ]


def schedule(count: int | list[Example] = 10, **changes: Any) -> Schedule:
    usual: dict[str, Any] = {
        "examples": some_examples(count) if isinstance(count, int) else count,
        "objective": Ar(),
        "special": SPECIAL,
        "batch_size": 4,
        "epochs": 1,
        "seed": 0,
        "rows": 3,
        "packed": 0,
    }
    return Schedule(**(usual | changes))


@given(OBJECTIVES, examples(), st.integers(0, 1 << 40))
@settings(deadline=None, max_examples=40)
def test_a_sequence_is_never_longer_than_its_bound(objective: Objective, example: Example, sample: int) -> None:
    """So rows packed by this size fit. The size grows with the length and shrinks with the prompt."""
    size = objective.max_fed_tokens(len(example.ids), example.prompt)
    assert len(objective.build(example, SPECIAL, generator(0, sample)).ids) <= size <= objective.max_fed_tokens(40, 0)


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 64))
def test_packing_loses_nothing_and_never_overflows(sizes: list[int], capacity: int) -> None:
    """Every conversation is in one row; no row overflows; no two rows would fit into one."""
    rows = best_fit(range(len(sizes)), dict(enumerate(sizes)), capacity)
    assert sorted(turn for row in rows for turn in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[turn] for turn in row) for row in rows)
    assert all(0 < tokens <= capacity for tokens in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


@given(st.integers(1, 60), st.integers(1, 20), st.sampled_from([0.1, 0.25, 0.5, 1, 1.1, 2, 2.5, 3]), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_an_epoch_takes_every_conversation_once(count: int, batch_size: int, epochs: float, seed: int) -> None:
    """All steps but the last are full; a part of an epoch takes that share of its conversations, none twice."""
    plan = schedule(count, batch_size=batch_size, epochs=epochs, seed=seed)
    steps = [plan.conversations(step) for step in range(plan.steps)]
    taken = [n for step in steps for n in step]
    assert len(taken) == max(1, round(count * epochs))
    assert [len(step) for step in steps[:-1]] == [batch_size] * (len(steps) - 1)
    assert 0 < len(steps[-1]) <= batch_size
    whole, rest = divmod(len(taken), count)
    for epoch in range(whole):
        assert sorted(taken[epoch * count : (epoch + 1) * count]) == list(range(count))
    assert len(set(taken[whole * count :])) == rest


def test_epochs_are_in_different_orders_and_seeds_too() -> None:
    """Each has its own random order, which is always the same for the same seed."""
    first = schedule(30, batch_size=30, epochs=2)
    orders = [first.conversations(0), first.conversations(1), schedule(30, batch_size=30, seed=9).conversations(0)]
    assert len({tuple(order) for order in orders}) == 3
    assert orders[:2] == [schedule(30, batch_size=30, epochs=2).conversations(step) for step in (0, 1)]


def test_every_seed_and_sample_has_a_generator_of_its_own() -> None:
    """Large seeds, too."""
    seeds = [0, 1, 42, 20261121, 1 << 31]
    drawn = {
        (seed, turn): torch.rand((), generator=generator(seed, turn)).item() for seed in seeds for turn in range(20)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert drawn[42, 3] == torch.rand((), generator=generator(42, 3)).item()
    masked = [schedule(1, objective=BlockDiffusion(), epochs=9, batch_size=9, seed=seed)[0]["weight"] for seed in seeds]
    assert len({tuple(weights.flatten().tolist()) for weights in masked}) == len(seeds)


@given(
    OBJECTIVES,
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([1, 2.5]),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_all_forwards_together_are_the_whole_training(
    objective: Objective, count: int, batch_size: int, epochs: float, rows: int, packs: bool, processes: int
) -> None:
    """Predictions and weights are those of one forward pass per step, for any packing and number of processes."""
    some = some_examples(count)
    largest = max(objective.max_fed_tokens(len(e.ids), e.prompt) for e in some)
    same = {"objective": objective, "batch_size": batch_size, "epochs": epochs}
    plan = schedule(some, rows=rows, packed=packs * (largest + 7), processes=processes, **same)
    one = schedule(some, rows=batch_size, **same)
    assert one.forwards == 1
    assert len(plan) == plan.steps * plan.forwards
    assert plan.forwards % processes == 0
    assert plan.steps == one.steps
    for step in range(plan.steps):
        parts = [plan[step * plan.forwards + n] for n in range(plan.forwards)]
        assert predictions(parts) == predictions([one[step]])
        if packs:
            [(height, length)] = {tuple(part["ids"].shape) for part in parts}
            assert height <= rows
            assert length == largest + 7


def predictions(batches: list[dict[str, Tensor]]) -> Counter[Any]:
    """Count the predictions by token, position, target, distance ahead and weight."""
    found: Counter[Any] = Counter()
    for batch in (Packed(**tensors) for tensors in batches):
        ids, position = batch.ids.flatten()[batch.predictor], batch.position.flatten()[batch.predictor]
        assert (batch.document.flatten()[batch.predictor] != PADDING).all()
        weights = [tuple(f"{w:.5e}" for w in row) for row in batch.weight.tolist()]
        columns = (ids.tolist(), position.tolist(), batch.target.tolist(), batch.ahead.tolist(), weights)
        found.update(zip(*columns, strict=True))
    return found


def test_rows_of_similar_length_go_together() -> None:
    """Without packing, the longest rows come first, and the longest of a batch has at most 7 tokens of padding."""
    plan = schedule(40, batch_size=40, rows=5)
    lengths: list[int] = []
    for batch in (Packed(**plan[number]) for number in range(plan.forwards)):
        filled = (batch.document != PADDING).sum(1).tolist()
        assert 0 <= batch.ids.shape[1] - max(filled) < 8
        lengths += filled
    assert lengths == sorted(lengths, reverse=True)
