"""Training in several processes: the same steps, losses, gradients and checkpoints as in one, also after a crash."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import several_processes
from safetensors.torch import load_file
from several_processes import FSDP, Case, Step, steps_of, train_alone, train_together
from trainings import MARS, USUAL, losses_of, record, requested, resume_folder
from transformers import AutoModelForCausalLM

from mtbench.models.families import RECORD
from mtbench.training.block_objectives import MarkovBlockDraft
from mtbench.training.draft_objectives import Eagle, Mtp
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Medusa, Objective
from mtbench.training.self_distillation import SelfDistill

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]

DSPARK = MarkovBlockDraft(layers=1, block_size=3, markov_rank=4, anchors=4)
TAUGHT = [SelfDistill(block_size=3), Draft(distil="logits")]
OBJECTIVES = [Ar(), MARS, *TAUGHT, BlockDiffusion(), Medusa(heads=2), Eagle(steps=2), Mtp(), DSPARK]
FEW = replace(USUAL, epochs=1, rows=1)  # 4 steps of 4 forward passes; the last one has no conversation
DOCS = Path(__file__).parents[2] / "docs" / "train.md"
KINDS = ("multi_gpu", "use_fsdp")  # options of its commands
ON_CPU = "--num_machines 1 --main_process_port 0 --dynamo_backend no --mixed_precision no"
SMALL = "--epochs 1 --batch-size 4 --rows 2 --learning-rate 0.01 --save-steps 2 --dtype float32 --block-size 4"


def assert_equal_steps(steps: Sequence[Step], alone: Sequence[Step], tolerance: float) -> None:
    """Each gradient to a share of the norm of all, and the norm, by which gradients are clipped."""
    assert len(steps) == len(alone)
    for step, single in zip(steps, alone, strict=True):
        assert step.norm == pytest.approx(single.norm, rel=tolerance, abs=1e-15)
        assert step.gradients.keys() == single.gradients.keys()
        for name, gradient in step.gradients.items():
            assert (gradient - single.gradients[name]).abs().max() <= tolerance * single.norm, name


def assert_equal_checkpoints(out: Path, alone: Path) -> None:
    """The same curve, evaluation and files; the same tensors in float32, each once."""
    assert losses_of(out) == pytest.approx(losses_of(alone), abs=2e-6)
    assert record(out)["evaluation"]["loss"] == pytest.approx(record(alone)["evaluation"]["loss"], abs=2e-5)
    assert record(out)["tokens"] == record(alone)["tokens"]
    assert {file.name for file in out.iterdir()} == {file.name for file in alone.iterdir()}
    assert (out / "config.json").read_text() == (alone / "config.json").read_text()
    for file in alone.glob("*.safetensors"):
        ours, theirs = load_file(out / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() <= 1e-7, name


@pytest.mark.parametrize(
    "cases",
    [
        [("ddp", DSPARK), ("fsdp", MARS)],
        pytest.param([(kind, each) for each in OBJECTIVES for kind in ("ddp", "fsdp")], marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_two_processes_give_the_gradients_of_one(
    cases: Sequence[tuple[str, Objective]], deeper: str, rows: str, tmp_path: Path
) -> None:
    """DDP and FSDP2, in float64 to 1e-12; a model, and a draft of a frozen one."""
    together, alone = [], []
    for number, (kind, objective) in enumerate(cases):
        teacher = deeper if objective.needs_teacher else None
        single, several = (
            requested(objective, deeper, rows, FEW, tmp_path / f"{name}-{number}", teacher=teacher)
            for name in ("alone", "together")
        )
        alone.append((single.out, train_alone(single)))
        together.append(Case(several, FSDP if kind == "fsdp" else {}))
    train_together(2, together)
    for (kind, _), (out, steps), case in zip(cases, alone, together, strict=True):
        assert_equal_steps(steps_of(case), steps, 1e-12)
        assert {step.split for step in steps_of(case)} == {kind == "fsdp"}
        assert_equal_checkpoints(case.request.out, out)


def documented(kind: str) -> str:
    """Return the command of docs/train.md that has an option."""
    (command,) = re.findall(rf"^accelerate launch --{kind} .*$", DOCS.read_text(), re.MULTILINE)
    return str(command)


def launch(command: str, folder: Path, killed: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of docs/train.md in two processes on a CPU, on a small model; kill processes, as `killed` says."""
    options, _, words = command.partition(" -m mtbench ")
    options = re.sub(r"--num_processes \d+", "--num_processes 2", options.removeprefix("accelerate launch "))
    program = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(f"{options} {ON_CPU}")]
    return subprocess.run(
        [*program, several_processes.__file__, *shlex.split(f"{words} {SMALL}")],
        cwd=folder,
        env={**os.environ, "KILLED": killed, "PYTHONPATH": str(Path(several_processes.__file__).parent)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_is_killed_ends_the_others_and_the_same_command_finishes(
    deeper: str, rows: str, tmp_path: Path, kind: str
) -> None:
    """The commands of docs/train.md: first one process is killed, then both; the weights are equal to the bit.

    Only one process prints and writes. The checkpoint loads, and `mtbench run` decodes with it.
    """
    command = documented(kind)
    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my-ar").symlink_to(deeper)
        (tmp_path / name / "mine.jsonl").symlink_to(rows)
    undisturbed, out = launch(command, tmp_path / "undisturbed"), tmp_path / "killed" / "my-mars"
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert undisturbed.stdout.split() == ["my-mars"]
    assert undisturbed.stderr.count("step 4/4") == 1
    for killed, last in (("1@3", "checkpoint-2"), ("0@4 1@4", "checkpoint-2")):
        begun = time.perf_counter()
        ended = launch(command, out.parent, killed)
        assert ended.returncode not in (0, None), ended.stderr
        assert "SIGKILL" in ended.stderr
        assert time.perf_counter() - begun < 90
        assert not out.exists()
        assert [folder.name for folder in resume_folder(out).glob("checkpoint-*")] == [last]
        AutoModelForCausalLM.from_pretrained(resume_folder(out) / last)
    assert launch(command, out.parent).returncode == 0
    expected = tmp_path / "undisturbed" / "my-mars"
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert record(out)["curve"] == record(expected)["curve"]
    assert {file.name for file in out.parent.iterdir()} == {file.name for file in expected.parent.iterdir()}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1?"}\n')
    decode = "run --suite prompts:prompts.jsonl --method ar --max-new-tokens 4 --rounds 1 --batch-size 1 -o run"
    run = subprocess.run(
        [sys.executable, "-m", "mtbench", *decode.split(), "--model", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_a_training_resumes_in_another_number_of_processes(deeper: str, rows: str, tmp_path: Path) -> None:
    """Killed in two, resumed in one: the losses of a training in one to 1e-5. FSDP's checkpoint is refused."""
    (tmp_path / "my-ar").symlink_to(deeper)
    (tmp_path / "mine.jsonl").symlink_to(rows)
    ddp, fsdp = (documented(kind) for kind in KINDS)
    words = ddp.partition(" -m mtbench ")[2].split()
    assert launch(ddp, tmp_path, "1@3").returncode

    def alone(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mtbench", *words[:-1], *more, *SMALL.split()]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    refused = launch(fsdp, tmp_path)
    assert 'whose fsdp was null, not "FULL_STATE_DICT"; repeat its command' in refused.stderr
    resumed = alone("my-mars")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from step 2/4" in resumed.stderr
    assert alone("other").returncode == 0
    assert losses_of(tmp_path / "my-mars") == pytest.approx(losses_of(tmp_path / "other"), abs=1e-5)
    assert json.loads((tmp_path / "my-mars" / RECORD).read_text())["steps"] == 4
