"""Several processes train as one: the same steps, the same losses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtbench.cli.train import app
from mtbench.models.families import RECORD

SAID = "--data arithmetic --examples 40 --epochs 1 --batch-size 10 --rows 3 --learning-rate 0.01 --save-steps 2"
# `--multi_gpu` is how accelerate starts several processes; without a GPU they talk by gloo.
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


@pytest.mark.parametrize("objective", [pytest.param("ar", marks=pytest.mark.slow), "mars"])
def test_two_processes_have_the_losses_of_one(base: Path, tmp_path: Path, objective: str) -> None:
    """`accelerate launch -m mtbench train …`, the same global batch: equal to 1e-5; one of them speaks and writes."""
    said = [objective, "--base", str(base), *SAID.split(), "-o"]
    assert CliRunner().invoke(app, [*said, str(tmp_path / "one")]).exception is None
    launched = subprocess.run(
        [sys.executable, *LAUNCH.split(), "-m", "mtbench", "train", *said, str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert launched.returncode == 0, launched.stderr
    one, two = (json.loads((tmp_path / name / RECORD).read_text()) for name in ("one", "two"))
    assert [point["step"] for point in two["curve"]] == [1, 2, 3, 4]
    for mine, theirs in zip(one["curve"], two["curve"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5)
    assert two["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], abs=2e-5)
    assert one["tokens"] == two["tokens"]
    assert launched.stdout.split() == [str(tmp_path / "two")]
    assert launched.stderr.count("step 4/4") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"one", "one.training.html", "two", "two.training.html"}
