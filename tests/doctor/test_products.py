"""`mtbench doctor`: how fast products are, on stand-ins for kernels, graphs and the probe of a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mtbench import kernels
from mtbench.doctor import gpu, products
from mtbench.doctor.checks import Finding, Subject, all_checks
from mtbench.hardware import probe
from mtbench.kernels import PLAIN
from mtbench.kernels.cases import Noise, Sizes

[CHECK] = [check for check in all_checks() if check.name == "products"]
CPU = Subject("cpu")
PROBE = probe.Probe(bandwidth_bytes_per_s=1e3, matmul_flop_per_s=1e4, copy_bytes=1, matmul_size=1, cache_bytes=4000)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, recorded: list[str]) -> None:
    """A slow GPU: definitions of the kernels, one small shape, and a probe that they outrun."""
    monkeypatch.setattr(kernels, "operations", lambda *_: PLAIN)
    monkeypatch.setattr(gpu, "under_load", lambda: ({}, PROBE, None))
    monkeypatch.setattr(products, "SHAPES", {"small": Sizes(32, 48, 4, 2, 8)})
    monkeypatch.setattr(products, "WARM_UP_S", 0.0)


def measured(subject: Subject = CPU) -> Any:
    figures = CHECK.measure(subject)
    assert isinstance(figures, dict), figures
    return figures


def judged(subject: Subject = CPU) -> Finding:
    return CHECK.judge(**measured(subject))


def test_every_product_is_measured_at_each_number_of_positions() -> None:
    found = measured()["products"]
    assert list(found) == [f"small {name} {n}" for name in ("qkv", "o", "gate_up", "down") for n in (1, 16, 128)]
    assert all(
        figures["bytes_per_s"] > 0 and figures["of_roofline"] > products.LEAST_SHARE for figures in found.values()
    )
    assert judged().state == "pass"


def test_the_least_time_is_that_of_memory_or_of_arithmetic() -> None:
    """It reads a weight of 64 x 32 once, at one position; at 128 it multiplies for longer than it reads."""
    [one, _, many, *_] = products._of_layer(PLAIN, Noise(torch.float32, torch.device("cpu")), Sizes(32), 4000)
    assert one.least_s(PROBE) == pytest.approx(one.moved_bytes / 1e3)
    assert many.least_s(PROBE) == pytest.approx(many.flop / 1e4)
    fast = replace(PROBE, bandwidth_bytes_per_s=1e15, matmul_flop_per_s=1e18)
    assert many.least_s(fast) == pytest.approx(products.START_S, rel=0.01)


def test_a_weight_is_read_from_memory_and_not_from_the_cache() -> None:
    """Its copies are larger than the cache, however small it is."""
    sizes, noise = Sizes(32, 48, 4, 2, 8), Noise(torch.float32, torch.device("cpu"))
    for product in products._of_layer(PLAIN, noise, sizes, 100_000):
        weights = [call.args[0] for call in product.calls]  # type: ignore[attr-defined]
        assert sum(weight.nbytes for weight in weights) > 4 * 100_000
        assert len({weight.data_ptr() for weight in weights}) == len(weights)


def test_a_product_below_the_stated_share_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its weight again and again."""

    def slow(x: Any, norm: Any, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            kernels.norm_swiglu_plain(x, norm, weight)
        return kernels.norm_swiglu_plain(x, norm, weight)

    rates = replace(PROBE, bandwidth_bytes_per_s=3e7, matmul_flop_per_s=1e12, cache_bytes=1)
    monkeypatch.setattr(products, "POSITIONS", (1,))
    monkeypatch.setattr(gpu, "under_load", lambda: ({}, rates, None))
    monkeypatch.setattr(kernels, "operations", lambda *_: PLAIN._replace(norm_swiglu=slow))
    found = judged()
    assert found.state == "warn"
    assert "small gate_up 1 " in found.text.partition("below 50 %: ")[2]


def test_without_time_kernels_or_a_probe_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trust rests on it, so that a machine that compiles slowly passes within the minute."""
    assert "no time was left" in CHECK.measure(CPU._replace(until_s=0.0))
    monkeypatch.setattr(kernels, "operations", lambda *_: None)
    assert "do not run here" in CHECK.measure(CPU)
    monkeypatch.setattr(gpu, "under_load", lambda: ({}, None, "out of memory during the probe"))
    assert CHECK.measure(CPU) == "out of memory during the probe"
