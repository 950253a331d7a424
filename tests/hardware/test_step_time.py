"""The estimated time of a step: its parts add up, follow the assumptions, and stay above the floor."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtbench.hardware.probe import Probe, Shape, count, floor_s
from mtbench.hardware.step_time import FEW, GPUS, WIDE, Code, code_of, named, parts, prefill_s, step_s
from mtbench.models import fused_decoder
from mtbench.models.random_shapes import SHAPES

H200 = GPUS["H200"]
STEP = {"rows": 1, "positions": 1, "judged": 1, "context": 832}


@pytest.fixture(scope="module")
def qwen() -> dict[str, Shape]:
    with torch.device("meta"):
        return {
            name: count(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=torch.bfloat16))
            for name in ("qwen2.5-0.5b", "qwen2.5-7b")
        }


@pytest.mark.parametrize(
    ("name", "rows", "positions", "judged", "ms"),
    [("qwen2.5-7b", 1, 1, 1, 3.74), ("qwen2.5-7b", 16, 1, 1, 4.2), ("qwen2.5-7b", 16, 7, 4, 4.2)],
)
def test_estimates_agree_with_those_made_by_hand(
    name: str, rows: int, positions: int, judged: int, ms: float, qwen: dict[str, Shape]
) -> None:
    """Within 12 %, the uncertainty that both claim."""
    found = step_s(qwen[name], H200, "graph", rows=rows, positions=positions, judged=judged, context=832)
    assert 1e3 * found == pytest.approx(ms, rel=0.12)


def test_parts_by_hand() -> None:
    """A model of round numbers on a GPU of round numbers."""
    shape = Shape(
        body=1000,
        head=500,
        body_bytes=2000,
        head_bytes=1000,
        vocabulary=10,
        logit_bytes=2,
        kv_bytes_per_token=8,
        layers=2,
        heads=1,
        head_dim=1,
        sliding_layers=0,
        sliding_window=0,
    )
    gpu = type(H200)(name="", bandwidth_bytes_per_s=1e3, matmul_flop_per_s=1e4)
    code = Code(layer_kernels=3, other_kernels=4, kernel_s=0.1, product_share=0.5)
    expected = {
        "layers' weights": 4.0,
        "LM head's weights": 2.0,
        "FLOPs": 2 * (1000 * 40 + 500 * 8) / 1e4 - 6.0,
        "keys and values": (4 * 6 + 2 * 40) * 8 / 500,
        "logits": 2 * 8 * 10 * 2 / 1e3,
        "launches": (2 * 3 + 4) * 0.1,
    }
    assert parts(shape, gpu, code, rows=4, positions=10, judged=2, context=6) == pytest.approx(expected)


def test_a_step_takes_longer_than_its_floor(qwen: dict[str, Shape]) -> None:
    probe = Probe(bandwidth_bytes_per_s=4.3e12, matmul_flop_per_s=790e12, copy_bytes=0, matmul_size=0, cache_bytes=0)
    for shape in qwen.values():
        for rows, positions, judged in ((1, 1, 1), (16, 7, 4), (128, 7, 4)):
            step = {"rows": rows, "positions": positions, "judged": judged, "context": 832}
            for engine in ("graph", "eager", "invariant"):
                assert step_s(shape, H200, engine, **step) > floor_s(shape, probe, **step)


def test_launches_of_the_host_hide_behind_work_and_those_of_a_graph_do_not(qwen: dict[str, Shape]) -> None:
    """Eager decoding takes about 0.9 ms a layer, whatever its size."""
    for name, layers in (("qwen2.5-0.5b", 24), ("qwen2.5-7b", 28)):
        assert step_s(qwen[name], H200, "eager", **STEP) == pytest.approx(0.9e-3 * layers, rel=0.1)
    assert code_of("graph", 1) is code_of("graph", fused_decoder.FEW) is code_of("invariant", 1000) is FEW
    assert code_of("graph", fused_decoder.FEW + 1) is WIDE


def test_a_prefill_is_bound_by_products_of_many_and_by_weights_of_few_positions(qwen: dict[str, Shape]) -> None:
    shape = qwen["qwen2.5-7b"]
    assert prefill_s(shape, H200, rows=1, prompt=1) == pytest.approx(shape.body_bytes / 4.3e12)
    assert prefill_s(shape, H200, rows=8, prompt=512) == pytest.approx(2 * shape.body * 4096 / 474e12, rel=0.02)


def test_gpus_are_known_by_the_names_that_drivers_give() -> None:
    assert named("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert named("NVIDIA H200") is GPUS["H200"]
    assert named("NVIDIA A100-SXM4-80GB") is None
