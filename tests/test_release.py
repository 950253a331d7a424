"""A release: what a user gets from the package index is whole, and small."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_BYTES = 25_000_000
EXPECTED = {  # files of the package that no import would miss
    "mtbench/py.typed",
    "mtbench/methods/ar.py",
    "mtbench/suites/gsm8k.py",
    "mtbench/report/page/report.html.j2",
    "mtbench/results/published/mars-table-2.json",
    "mtbench/tiny/ar/model.safetensors",
}
FOLDERS = {"mtbench"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True, capture_output=True)
    return out


@pytest.mark.slow
def test_the_wheel_is_whole_and_small(built: Path) -> None:
    """It has the package alone: no tests, documents or examples beside it."""
    [wheel] = built.glob("*.whl")
    assert wheel.stat().st_size <= MOST_BYTES
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert names >= EXPECTED
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == FOLDERS


@pytest.mark.slow
def test_the_source_distribution_is_whole_and_small(built: Path) -> None:
    """It has methods and suites where the checkout has them, and the licence."""
    [archive] = built.glob("*.tar.gz")
    assert archive.stat().st_size <= MOST_BYTES
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert names >= {"README.md", "LICENSE", "SECURITY.md", "methods/ar.py", "suites/gsm8k.py", "mtbench/py.typed"}
    assert not any(name.startswith("tests/") for name in names), "a part of the tests cannot be run"
