"""The sampling kernels against their definition, `sampling.sampled`: the same hash, the same noise, the same token.

test_kernels.py starts the process of Triton's interpreter in which they run, and compiles the kernels for a Hopper GPU.
"""

import os
from itertools import product

import pytest
import torch
from thinned import one_in
from torch import Tensor

from mtbench import kernels, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = "TRITON_INTERPRET" in os.environ
runs_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs in the interpreter's process")
if INTERPRETING or DEVICE == "cuda":
    from mtbench.kernels import triton_sampling

SEEDS, POSITIONS = [0, 7, -3, 2**62 + 1], [0, 1, 831]


def scene(vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (R, n, V) as a slice of wider ones, seeds (R,) and positions (R, n)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(SEEDS), len(POSITIONS), vocabulary + 3, generator=generator) * 4
    positions = torch.tensor(POSITIONS) + torch.arange(len(SEEDS))[:, None] * 100
    return logits.to(DEVICE, dtype)[..., :vocabulary], torch.tensor(SEEDS, device=DEVICE), positions.to(DEVICE)


@runs_kernels
@pytest.mark.parametrize(("temperature", "vocabulary"), one_in(5, product([0.1, 0.7, 1.0, 3.3], [1, 40, 1024, 2500])))
def test_the_kernels_sample_the_definitions_tokens(temperature: float, vocabulary: int) -> None:
    """For any seed and position, and temperatures that are no float32. The other results are those of the logits."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, seed, position = scene(vocabulary, dtype)
        logits[..., 3:9] = float("-inf")
        choice, largest, logsumexp = triton_sampling.sample_logsumexp(logits, temperature, seed, position)
        assert torch.equal(choice, sampling.sampled(logits, temperature, seed, position).argmax(-1))
        assert torch.equal(largest, logits.float().amax(-1))
        torch.testing.assert_close(logsumexp.double(), logits.double().logsumexp(-1), rtol=1e-5, atol=1e-5)


@runs_kernels
def test_the_kernels_noise_is_the_definitions_to_the_last_bits() -> None:
    """With equal logits only the noise decides. The largest sum of each slice is kept in float64."""
    _, seed, position = scene(1)
    logits = torch.zeros(*position.shape, 5000, device=DEVICE)
    choice, _, _ = triton_sampling.sample_logsumexp(logits, 1.0, seed, position)
    noise = sampling.sampled(logits, 1.0, seed, position)
    assert torch.equal(choice, noise.argmax(-1))
    assert len(choice.unique()) == choice.numel()


@runs_kernels
def test_rows_without_a_token_get_an_id_in_range() -> None:
    """All suppressed: id 0. NaN: any id of the vocabulary, since another would crash the next embedding lookup."""
    logits, seed, position = scene(2000)
    none = triton_sampling.sample_logsumexp(torch.full_like(logits, float("-inf")), 1.0, seed, position)[0]
    assert not none.any()
    nan = triton_sampling.sample_logsumexp(torch.full_like(logits, float("nan")), 1.0, seed, position)[0]
    assert ((nan >= 0) & (nan < 2000)).all()


@runs_kernels
def test_a_row_samples_the_same_alone_and_in_a_batch() -> None:
    """Its token depends on its own logits, seed and position only."""
    logits, seed, position = scene(1500)
    together = triton_sampling.sample_logsumexp(logits, 0.7, seed, position)
    alone = triton_sampling.sample_logsumexp(logits[2:3, 1:2], 0.7, seed[2:3], position[2:3, 1:2])
    assert all(torch.equal(a[0, 0], b[2, 1]) for a, b in zip(alone, together, strict=True))


def test_without_a_gpu_the_definition_samples() -> None:
    """The same three results."""
    logits, seed, position = scene(40)
    choice, largest, logsumexp = kernels.sample_logsumexp(logits.cpu(), 0.7, seed.cpu(), position.cpu())
    assert torch.equal(choice, sampling.sampled(logits.cpu(), 0.7, seed.cpu(), position.cpu()).argmax(-1))
    torch.testing.assert_close(largest, logits.cpu().amax(-1))
    torch.testing.assert_close(logsumexp, logits.cpu().logsumexp(-1))
