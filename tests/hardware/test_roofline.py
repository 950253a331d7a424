"""The share of the roofline: counts of shapes, floors computed by hand, and null with a reason if undefined."""

from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from made_records import generation_line, timing_line
from small import small_checkpoint, small_config
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, MistralConfig, MixtralConfig

from mtbench.decoding import adaptive_width
from mtbench.hardware import probe
from mtbench.hardware.probe import Probe, Shape, count, floor_s
from mtbench.models.families import SHAPES
from mtbench.plan.formats import GenerationLine, SessionRecord, TimingLine
from mtbench.plan.plan import Cell
from mtbench.results.roofline import fraction

H200 = Probe(
    bandwidth_bytes_per_s=4.3e12, matmul_flop_per_s=790e12, copy_bytes=1 << 31, matmul_size=8192, cache_bytes=50 << 20
)


def empty(config: Any) -> Any:
    """Return a model without weights, in bfloat16."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def qwen() -> dict[str, Shape]:
    """Two shapes of Qwen2.5: 0.5B has tied embeddings, 7B does not."""
    names = ("qwen2.5-0.5b", "qwen2.5-7b")
    return {name: count(empty(AutoConfig.for_model(**SHAPES[name]))) for name in names}


@pytest.mark.parametrize(
    ("name", "body", "head", "kv"),
    [("qwen2.5-0.5b", 357_898_112, 136_134_656, 12_288), ("qwen2.5-7b", 6_525_621_760, 544_997_376, 57_344)],
)
def test_a_forward_pass_reads_body_and_head_but_not_the_input_embedding(
    name: str, body: int, head: int, kv: int, qwen: dict[str, Shape]
) -> None:
    """Parameters and bytes of the published shapes, with tied and untied embeddings."""
    shape = qwen[name]
    assert (shape.body, shape.head, shape.kv_bytes_per_token) == (body, head, kv)
    assert shape.bytes == 2 * (body + head)


@pytest.mark.parametrize(
    ("name", "rows", "positions", "floor_ms"),
    [
        ("qwen2.5-0.5b", 1, 1, 0.233),
        ("qwen2.5-7b", 1, 1, 3.302),
        ("qwen2.5-7b", 64, 32, 38.048),
    ],
)
def test_the_floor_of_a_forward_pass(
    name: str, rows: int, positions: int, floor_ms: float, qwen: dict[str, Shape]
) -> None:
    """As in a table computed independently, with 1,024 tokens of context and logits at every position.

    Some are bound by bytes, some by FLOPs.
    """
    floor = floor_s(qwen[name], H200, rows=rows, positions=positions, judged=positions, context=1024)
    assert 1e3 * floor == pytest.approx(floor_ms, abs=6e-4)


def test_the_floor_takes_the_highest_rate_of_memory(qwen: dict[str, Shape]) -> None:
    """Decoding nearly only reads. With the rate of copies, which is lower, a step could beat its floor."""
    step: dict[str, float] = {"rows": 1, "positions": 1, "judged": 1, "context": 1024}
    faster = replace(H200, read_bytes_per_s=4.7e12)
    assert floor_s(qwen["qwen2.5-7b"], faster, **step) == pytest.approx(
        floor_s(qwen["qwen2.5-7b"], H200, **step) * 4.3 / 4.7, rel=1e-6
    )


def test_positions_are_even_where_multiplying_takes_as_long_as_reading() -> None:
    """184 on an H200 in bfloat16. The widths of `auto` take the probe's, rounded so that sessions choose alike."""
    assert H200.even_positions(torch.bfloat16) == pytest.approx(184, abs=0.5)
    assert replace(H200, read_bytes_per_s=3.0e12, bandwidth_bytes_per_s=2.9e12).even_positions(torch.bfloat16) > 260
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_width, "RIDGE_POSITIONS", {"cuda": 184.0})
        adaptive_width.set_ridge("cuda", 262.7)
        assert adaptive_width.RIDGE_POSITIONS == {"cuda": 264.0}


def test_sliding_layers_read_at_most_their_window() -> None:
    """With some or all layers sliding, and a window longer than the context."""
    sizes = {"head_dim": 8, "sliding_window": 10, "num_hidden_layers": 4}
    some = count(empty(small_config(Gemma2Config, **sizes)))
    every = count(empty(small_config(MistralConfig, **sizes)))
    none = count(empty(small_config(num_hidden_layers=4)))
    assert [shape.seen(100) for shape in (some, every, none)] == [55, 10, 100]
    assert [shape.seen(4) for shape in (some, every, none)] == [4, 4, 4]


def test_a_mixture_of_experts_is_rejected() -> None:
    """Its reads depend on the tokens."""
    with pytest.raises(ValueError, match="mixture of experts"):
        count(empty(small_config(MixtralConfig)))


def line(block: int, **changes: Any) -> GenerationLine:
    """Return an answer of 40 tokens to a prompt of 1,001, one forward pass each."""
    counts: dict[str, Any] = {"prompt_tokens": 1001, "token_ids": [1] * 40, "forwards": 40, "positions_fed": 40}
    return generation_line(**counts | {"draft_forwards": 0, "block": block} | changes)


def sample(block: int, round_: int = 1, **changes: Any) -> TimingLine:
    return timing_line(**{"block": block, "round": round_, "batch_forwards": 40, "decode_s": 0.5, **changes})


@pytest.fixture
def session(qwen: dict[str, Shape]) -> SessionRecord:
    shapes = {"target": asdict(qwen["qwen2.5-7b"]), "small": asdict(qwen["qwen2.5-0.5b"])}
    return SessionRecord.model_validate({"probe": asdict(H200), "probe_reason": None, "shapes": shapes})


def cell(**checkpoints: str) -> Cell:
    return cast("Cell", SimpleNamespace(on="ar", checkpoints={"ar": "target", **checkpoints}))


def test_the_fraction_is_the_floor_over_decode_time(qwen: dict[str, Shape], session: SessionRecord) -> None:
    """Two rows of 40 and 20 tokens: 40 forward passes of 1.5 rows on average; block times are means over rounds."""
    shorter = line(0, token_ids=[1] * 20, forwards=20, positions_fed=20)
    context = (40 * (1001 + 20) + 20 * (1001 + 10)) / 60 - 1  # the last known token is fed, not cached
    floor = floor_s(qwen["qwen2.5-7b"], H200, rows=1.5, positions=1, judged=1, context=context)
    samples = [sample(0, 1, decode_s=0.4), sample(0, 2, decode_s=0.6), sample(1, decode_s=0.5)]
    lines = [line(0), shorter, line(1), line(1, token_ids=[1] * 20, forwards=20, positions_fed=20)]
    value, reason = fraction(cell(), 1, lines, samples, [session])
    assert value == pytest.approx(80 * floor / 1.0, rel=1e-12)
    assert reason is None


def test_cached_tokens_are_those_before_the_tokens_fed(qwen: dict[str, Shape], session: SessionRecord) -> None:
    """Of 7 positions fed, 3 are draft tokens and 4 are known tokens not yet cached."""
    floor = floor_s(qwen["qwen2.5-7b"], H200, rows=1, positions=7, judged=4, context=1021 - 4)
    value, _ = fraction(cell(), 4, [line(0, positions_fed=280)], [sample(0)], [session])
    assert value == pytest.approx(40 * floor / 0.5, rel=1e-12)


def test_a_draft_model_adds_its_floor(qwen: dict[str, Shape], session: SessionRecord) -> None:
    """Four forward passes of the draft for each of the target's."""
    draft = floor_s(qwen["qwen2.5-0.5b"], H200, rows=1, positions=1, judged=1, context=1021)
    alone, _ = fraction(cell(), 1, [line(0)], [sample(0)], [session])
    both, _ = fraction(cell(draft="small"), 1, [line(0, draft_forwards=160)], [sample(0)], [session])
    assert both == pytest.approx((alone or 0) + 160 * draft / 0.5)


def test_every_sample_uses_the_probe_of_its_session(session: SessionRecord) -> None:
    """If a run continues on a GPU of half the speed, the floor there is higher."""
    half = asdict(H200) | {"bandwidth_bytes_per_s": 4.3e12 / 2, "matmul_flop_per_s": 790e12 / 2}
    sessions = [session, session.changed(probe=half)]
    once, _ = fraction(cell(), 1, [line(0)], [sample(0)], sessions)
    again, _ = fraction(cell(), 1, [line(0)], [sample(0, session=2)], sessions)
    assert again == pytest.approx(2 * (once or 0))


def test_an_undefined_fraction_is_null_with_a_reason(session: SessionRecord) -> None:
    """No probe, unknown forward passes, no sample, weights that fit the cache, a shape that cannot be counted."""

    def reason(samples: list[TimingLine], **changes: Any) -> str:
        value, why = fraction(cell(), 1, [line(0)], samples, [session.changed(**changes)])
        assert value is None
        return why or ""

    assert "caches hold small models" in reason([sample(0)], probe=None, probe_reason=probe.NO_GPU)
    assert "was not probed" in reason([sample(0)], probe=None)
    assert "does not reveal" in reason([sample(0, batch_forwards=None, decode_s=None)])
    assert "does not reveal its decode time" in reason([sample(0), sample(0, decode_s=None)])
    assert "no clean sample" in reason([])
    tiny = {"target": asdict(count(small_checkpoint().model))}
    assert "stay in the GPU's cache" in reason([sample(0)], shapes=tiny)
    assert "experts" in reason([sample(0)], shapes={"target": {"reason": "a mixture of experts"}})


def test_a_session_on_a_cpu_says_why_it_has_no_probe() -> None:
    """It stores the shapes nevertheless."""
    checkpoint = small_checkpoint()
    entries = probe.described(*probe.probe("cpu", torch.float64), {"here": checkpoint})
    assert (entries["probe"], entries["probe_reason"]) == (None, probe.NO_GPU)
    assert Shape(**entries["shapes"]["here"]) == count(checkpoint.model)


def test_the_probe_counts_what_it_moves_and_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy reads and writes each byte, a sum reads it; a product takes 2n³ FLOPs; the largest n that fits is used."""

    def half_a_second(device: torch.device, action: Callable[[], object]) -> float:
        action()
        return 0.5

    monkeypatch.setattr(probe, "_median_s", half_a_second)
    monkeypatch.setattr(probe, "_once_s", lambda device, action: 0.0)
    cpu = torch.device("cpu")
    assert probe.copy_rate(cpu, 4096) == 2 * 4096 / 0.5
    assert probe.read_rate(cpu, 4096) == 4096 / 0.5
    assert probe.matmul_rate(cpu, torch.bfloat16, memory=4 * 4 * 32**2, size=8) == (2 * 32**3 / 0.5, 32)
