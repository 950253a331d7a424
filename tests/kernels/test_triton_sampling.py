"""The choice of tokens against its definition: `sampling.sampled`, or greedy the largest logit of the lowest id.

test_kernels.py starts the process of Triton's interpreter in which the kernels run, and compiles them for a Hopper GPU.
"""

import os
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import one_in
from torch import Tensor

from mtbench import kernels, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = "TRITON_INTERPRET" in os.environ
runs_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs in the interpreter's process")
Choose = Callable[..., tuple[Tensor, Tensor, Tensor]]
CHOOSE: dict[str, Choose] = {"plain": kernels.choose_logsumexp} if DEVICE == "cpu" else {}
if INTERPRETING or DEVICE == "cuda":
    from mtbench.kernels import triton_kernels

    CHOOSE["triton"] = triton_kernels.choose_logsumexp
each_choose = pytest.mark.parametrize("choose", CHOOSE.values(), ids=CHOOSE)

SEEDS, POSITIONS = [0, 7, -3, 2**62 + 1], [0, 1, 831]
TEMPERATURES: list[list[float] | None] = [None, [0.1] * 4, [0.7] * 4, [3.3] * 4, [0.0, 1.0, 0.0, 0.3]]


def scene(vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (R, n, V) as a slice of wider ones, seeds (R,) and positions (R, n)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(SEEDS), len(POSITIONS), vocabulary + 3, generator=generator) * 4
    positions = torch.tensor(POSITIONS) + torch.arange(len(SEEDS))[:, None] * 100
    return logits.to(DEVICE, dtype)[..., :vocabulary], torch.tensor(SEEDS, device=DEVICE), positions.to(DEVICE)


def rows(values: list[float] | None) -> Tensor | None:
    """Return a temperature for each row; None: all are greedy."""
    return None if values is None else torch.tensor(values, dtype=torch.double, device=DEVICE)


@each_choose
@pytest.mark.parametrize(("temperatures", "vocabulary"), one_in(5, product(TEMPERATURES, [1, 40, 1024, 2500])))
def test_tokens_are_those_of_the_definition(choose: Choose, temperatures: list[float] | None, vocabulary: int) -> None:
    """For any seed and position, and temperatures that are no float32. The other results are those of the logits."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, seed, position = scene(vocabulary, dtype)
        logits[..., 3:9] = logits[..., 30:1500] = float("-inf")
        choice, largest, logsumexp = choose(logits, rows(temperatures), seed, position)
        for row, temperature in enumerate(temperatures or [0.0] * len(SEEDS)):
            own = logits[row : row + 1]
            scores = sampling.sampled(own, temperature, seed[row : row + 1], position[row : row + 1])
            assert torch.equal(choice[row], (scores if temperature else own.double()).argmax(-1)[0])
        assert torch.equal(largest, logits.float().amax(-1))
        torch.testing.assert_close(logsumexp.double(), logits.double().logsumexp(-1), rtol=1e-5, atol=1e-5)


@each_choose
@settings(deadline=None, max_examples=8 if INTERPRETING else 40)
@given(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 80.0, float("-inf")]), min_size=1, max_size=20), st.integers(1, 2500))
def test_of_equal_logits_the_lowest_id_is_chosen(choose: Choose, values: list[float], vocabulary: int) -> None:
    """Ties are common in bfloat16. A row of −∞ only gives id 0 and a logsumexp of −∞."""
    row = torch.tensor(values).repeat(-(-vocabulary // len(values)))[:vocabulary]
    none = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    choice, largest, logsumexp = choose(row.to(DEVICE)[None, None], None, none[0], none)
    assert int(choice) == row.tolist().index(max(row.tolist()))
    assert float(largest) == max(row.tolist())
    torch.testing.assert_close(logsumexp.cpu()[0, 0], row.double().logsumexp(-1).float())


@runs_kernels
def test_the_kernels_noise_is_the_definitions_to_the_last_bits() -> None:
    """With equal logits only the noise decides. The largest sum of each slice is kept in float64."""
    _, seed, position = scene(1)
    logits = torch.zeros(*position.shape, 2500, device=DEVICE)
    choice, _, _ = triton_kernels.choose_logsumexp(logits, rows([1.0] * 4), seed, position)
    assert torch.equal(choice, sampling.sampled(logits, 1.0, seed, position).argmax(-1))
    assert len(choice.unique()) == choice.numel()


@runs_kernels
@pytest.mark.parametrize("temperatures", [None, [1.0] * 4], ids=["greedy", "sampled"])
def test_rows_without_a_token_get_an_id_in_range(temperatures: list[float] | None) -> None:
    """All suppressed: id 0. NaN: any id of the vocabulary, since another would crash the next embedding lookup."""
    logits, seed, position = scene(2500)
    for value, most in ((float("-inf"), 0), (float("nan"), 2499)):
        choice, _, _ = triton_kernels.choose_logsumexp(
            torch.full_like(logits, value), rows(temperatures), seed, position
        )
        assert ((choice >= 0) & (choice <= most)).all()


@each_choose
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_row_chooses_the_same_beside_sampled_ones(choose: Choose, dtype: torch.dtype) -> None:
    """The lowest id of equal logits, which bfloat16 has many of; a sampled row the token of the definition, bit by bit.

    A row of another temperature changes neither.
    """
    logits, seed, position = scene(2500, dtype)
    logits = logits.round()
    mixed = rows([0.0, 0.7, 0.0, 1.3])
    choice, largest, _ = choose(logits, mixed, seed, position)
    greedy, highest, _ = choose(logits, None, seed, position)
    assert mixed is not None
    assert torch.equal(choice, sampling.sampled(logits, mixed, seed, position).argmax(-1))
    assert torch.equal(choice[::2], greedy[::2])
    assert not torch.equal(choice[1::2], greedy[1::2])
    assert torch.equal(largest, highest)


@runs_kernels
def test_a_row_samples_the_same_alone_and_in_a_batch() -> None:
    """Its token depends on its own logits, seed and position only."""
    logits, seed, position = scene(1500)
    together = triton_kernels.choose_logsumexp(logits, rows([0.7] * 4), seed, position)
    alone = triton_kernels.choose_logsumexp(logits[2:3, 1:2], rows([0.7]), seed[2:3], position[2:3, 1:2])
    assert all(torch.equal(a[0, 0], b[2, 1]) for a, b in zip(alone, together, strict=True))


@each_choose
@pytest.mark.parametrize("temperatures", [None, [1.0] * 4], ids=["greedy", "sampled"])
def test_a_logsumexp_is_a_number_where_all_logits_are(choose: Choose, temperatures: list[float] | None) -> None:
    """NaN or +∞ at any place makes it NaN or +∞, also beside −∞ alone; by it the loop finds rows without numbers."""
    logits, seed, position = scene(2500)
    logits[0, 0, 2490] = logits[1, 1, :1024] = logits[2, 2] = float("nan")
    logits[3, 0, 7] = logits[3, 1, -1] = float("inf")
    logits[0, 1, 1024:2048] = float("-inf")
    logits[0, 1, 1050] = float("nan")
    logits[0, 2, 1:], logits[1, 0] = float("-inf"), float("-inf")
    found = choose(logits, rows(temperatures), seed, position)[2] < float("inf")
    assert torch.equal(found, sampling.numbers(logits))
    assert torch.equal(found, ~(logits.isnan() | logits.isposinf()).any(-1))
