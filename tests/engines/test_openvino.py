"""Arms in OpenVINO GenAI, a real engine: its tokens are those of mtbench's loop on the same file."""

from pathlib import Path

import pytest

import mtbench
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.models import gguf_writer

TINY = Path(mtbench.__file__).parent / "tiny"
pytestmark = [pytest.mark.whole, pytest.mark.slow]
ARMS = ("ar", "prompt-lookup:ahead=4", "speculative:ahead=3")


@pytest.fixture(scope="module", autouse=True)
def openvino() -> None:
    """OpenVINO GenAI is installed in the cache folder."""
    SERVING_ENGINES["openvino"].fetch(lambda text: None)


def test_arms_have_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    """In float32, all arms: exact. Prompt lookup has the drafts of ours, so the tokens per forward of ours."""
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=ARMS,
        engine=("graph", "openvino"),
        limit=48,
        batch_size=4,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    cells = {cell["arm"]: cell for cell in results.record["cells"]}
    assert [cell["status"] for cell in cells.values()] == ["ok"] * 6
    theirs = [cell for arm, cell in cells.items() if arm.endswith("/openvino")]
    assert [cell["lossless"]["grade"] for cell in theirs] == ["exact"] * 3
    plain, lookup, drafted = (cell["tokens_per_forward"] for cell in theirs)
    assert plain == 1
    assert lookup == pytest.approx(cells["prompt-lookup:ahead=4@ar/graph"]["tokens_per_forward"], rel=0.01)
    assert drafted == pytest.approx(cells["speculative:ahead=3@ar/graph"]["tokens_per_forward"], rel=0.05)
    assert [cell["acceptance"]["offered"] for cell in theirs[1:]] == [None, None]


def test_a_file_that_it_cannot_read_is_refused_with_the_types_that_it_reads(tmp_path: Path) -> None:
    file, out = str(gguf_writer.written(TINY / "ar", "float32")), tmp_path / "DIR"
    results = mtbench.run(
        suite="arithmetic", checkpoint={"ar": file}, method="ar:engine=openvino", limit=2, batch_size=1, out=out
    )
    [cell] = results.record["cells"]
    assert "Unsupported quantization type; it reads GGUF files with matrices in F16, Q8_0" in cell["error"]
