"""Training in several processes: the same steps and losses as in one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtbench.cli.train import app
from mtbench.models.families import RECORD

pytestmark = pytest.mark.whole

OPTIONS = "--data arithmetic --examples 40 --epochs 1 --batch-size 10 --rows 3 --learning-rate 0.01 --save-steps 2"
# `--multi_gpu` makes accelerate start several processes; without a GPU they communicate by gloo.
LAUNCH = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 "
    "--dynamo_backend no --mixed_precision no"
)
SHAPE = "--vocab-size 300 --hidden-size 16 --intermediate-size 16 --num-hidden-layers 1 --num-attention-heads 2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "init"
    CliRunner().invoke(app, ["init", "--data", "arithmetic", "--examples", "50", *SHAPE.split(), "-o", str(out)])
    return out


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ar", "mars"])
def test_two_processes_give_the_losses_of_one(base: Path, tmp_path: Path, objective: str) -> None:
    """`accelerate launch` with the same global batch: equal to 1e-5. Only one process prints and writes."""
    words = [objective, "--base", str(base), *OPTIONS.split(), "-o"]
    assert CliRunner().invoke(app, [*words, str(tmp_path / "one")]).exception is None
    launched = subprocess.run(
        [sys.executable, *LAUNCH.split(), "-m", "mtbench", "train", *words, str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert launched.returncode == 0, launched.stderr
    one, two = (json.loads((tmp_path / name / RECORD).read_text()) for name in ("one", "two"))
    assert [point["step"] for point in two["curve"]] == [1, 2, 3, 4]
    for single, parallel in zip(one["curve"], two["curve"], strict=True):
        assert parallel == pytest.approx(single, abs=1e-5)
    assert two["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], abs=2e-5)
    assert one["tokens"] == two["tokens"]
    assert launched.stdout.split() == [str(tmp_path / "two")]
    assert launched.stderr.count("step 4/4") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"one", "one.training.html", "two", "two.training.html"}
