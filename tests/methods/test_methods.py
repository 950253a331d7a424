"""Every method in one run on the embedded family, in float64: what is promised is kept, and counts bear recounting."""

from typing import Any

import pytest
from stored import stored_json
from whole import whole_run

from mtbench.decoding.registry import METHODS
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest

pytestmark = pytest.mark.whole

NEW, ITEMS = 16, 3
ARMS = (
    *("ar", "ar:on=mars", "ar:on=medusa", "mars", "mars:tau=0.9,block_size=4|auto", "block-diffusion"),
    *("speculative:ahead=4|auto", "speculative:draft=draft_mars,per_forward=4", "speculative:verify=rejection"),
    *(
        "prompt-lookup",
        "suffix:ahead=8|auto",
        "jacobi",
        f"jacobi:ahead={NEW}",
        "lookahead",
        "medusa:tree=1|3x2",
        "eagle:tree=1|3x2",
        "dflash:tree=1|3x2",
        "mars-selfspec:ahead=auto|3",
    ),
    *("mars-speculative", "mars-speculative:tau=0.9,draft=draft_mars,per_forward=4"),
    *("hf-generate", "hf-generate:draft=draft", "hf-generate:prompt_lookup=4"),
)
ELSEWHERE = {"openai"}  # needs a server: tests/methods/test_openai.py
ELSEWHERE |= {"mtp"}  # needs layers in the target: tests/methods/test_mtp.py
ELSEWHERE |= {"native"}  # needs a serving engine: tests/engines/test_llamacpp.py
ELSEWHERE |= {"fast-dllm-v2"}  # needs a checkpoint of its own: tests/methods/test_fast_dllm_v2.py


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    request = RunRequest(
        method=ARMS, batch_size=(ITEMS,), limit=ITEMS, rounds=1, max_new_tokens=NEW, device="cpu", dtype="float64"
    )
    return whole_run(tmp_path_factory.mktemp("methods"), request)


@pytest.fixture(scope="module")
def cells(run: RunDirectory) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stored_json(run, "results.json")["cells"]
    return found


def test_no_method_is_left_out(cells: list[dict[str, Any]]) -> None:
    assert {c["method"] for c in cells} | ELSEWHERE == {*METHODS}
    assert {c["status"] for c in cells} == {"ok"}
    assert not any(c["void"] for c in cells)


def test_every_lossless_arm_says_what_plain_decoding_says(cells: list[dict[str, Any]]) -> None:
    """Graded `exact` against `ar` on its own checkpoint. Neither a lossy arm nor a same distribution is graded."""
    for cell in cells:
        if cell["claims"] != "lossless":
            assert cell["lossless"] is None
        elif cell["lossless"] is not None:
            assert (cell["lossless"]["grade"], cell["lossless"]["items"]) == ("exact", ITEMS)
    held = {c["method"] for c in cells if c["lossless"]}
    assert held >= {*METHODS} - {"ar", "block-diffusion", *ELSEWHERE}


def test_self_speculation_takes_half_again_as_many_tokens(cells: list[dict[str, Any]]) -> None:
    """Per forward of the target, without a second model."""
    for cell in cells:
        if cell["method"] == "mars-selfspec":
            assert cell["tokens_per_forward"] >= 1.5
            assert cell["draft_forwards"] == 0
