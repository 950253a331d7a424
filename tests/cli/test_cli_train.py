"""`mtbench train`: commands made from objectives, the requests they make, and their errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtbench.cli.train import app
from mtbench.errors import UserError
from mtbench.models.families import RECORD
from mtbench.options.fields import fields_of
from mtbench.training.objectives import Mars
from mtbench.training.recipe_runner import arguments, needs, output
from mtbench.training.recipes import RECIPES, Stage
from mtbench.training.registry import OBJECTIVES
from mtbench.training.train import TrainingRequest
from mtbench.training.trainer import Settings

STAGES = [(stages, stage) for stages in RECIPES.values() for stage in stages if stage.answer_tokens is None]
SMALL = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained checkpoint."""
    out = tmp_path_factory.mktemp("base") / "init"
    shape = [word for name, size in SMALL.items() for word in (f"--{name.replace('_', '-')}", size)]
    result = invoke("init", "--data", "arithmetic", "--examples", 50, *shape, "-o", out)
    assert result.exception is None, result.exc_info
    assert result.stdout.splitlines() == [str(out)]
    return out


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the request of a command instead of training."""
    seen: dict[str, Any] = {}

    def train(request: TrainingRequest, *_: Any) -> None:
        seen["request"] = request

    def initialise(_: Any, out: Path, *, seed: int, data: Any, **shape: int) -> None:
        seen.update(out=out, seed=seed, data=data, shape=shape)

    monkeypatch.setattr("mtbench.training.train.train", train)
    monkeypatch.setattr("mtbench.training.init_model.initialise", initialise)
    return seen


def test_every_objective_has_a_command_that_explains_its_options() -> None:
    """The options of the class are those of the help."""
    assert all(name in invoke("--help").output for name in ["init", *OBJECTIVES])
    for name, objective in OBJECTIVES.items():
        text = invoke(name, "--help").output
        assert all(f"--{o.replace('_', '-')}" in text for o in (*fields_of(objective), *fields_of(Settings)))


@pytest.mark.parametrize(("stages", "stage"), STAGES, ids=lambda s: s.name if isinstance(s, Stage) else "")
def test_the_command_of_a_stage_requests_that_stage(
    received: dict[str, Any], tmp_path: Path, stages: tuple[Stage, ...], stage: Stage
) -> None:
    """A stage written as a command and read again is the same stage."""
    words = arguments(stage, stages, tmp_path)
    assert words[0] == "train"
    result = invoke(*words[1:])
    assert result.exception is None, result.output
    if stage.objective is None:
        data = {"data": list(stage.data), "examples": stage.examples, "seed": stage.settings.seed}
        assert received == {
            "out": tmp_path / stage.name,
            "seed": stage.settings.seed,
            "data": data,
            "shape": stage.shape,
        }
        return

    made = {other.name: str(output(other, tmp_path)) for other in stages if other.name in needs(stage, stages)}

    def place(source: str | None) -> str | None:
        return made.get(source or "", source)

    assert received["request"] == TrainingRequest(
        name=stage.name,
        objective=stage.objective,
        base=place(stage.base) or "",
        data=tuple(place(data) or "" for data in stage.data),
        examples=stage.examples,
        settings=stage.settings,
        out=tmp_path / stage.name,
        teacher=place(stage.teacher),
        mask_token=stage.mask_token,
    )


def test_options_of_a_recipe_before_an_objective_are_refused() -> None:
    """They would be dropped without a word."""
    result = invoke("--flops", "1e9", "ar", "--base", "a/b", "--data", "x", "-o", "out")
    assert "--flops before 'ar' is for --recipe; give it after that" in str(result.exception)


def test_values_reach_the_objective_with_their_types(received: dict[str, Any]) -> None:
    """Numbers, words and switches; options that are not given have their defaults."""
    words = "mars --base a/b --data x --data y -o out --block-size 8 --layout anchored --ar-weight 0"
    words += " --chat-template-kwargs enable_thinking=false"
    assert invoke(*words.split(), "--no-timestep-weight", "--learning-rate", "1e-3", "--pack", "0").exception is None
    assert received["request"] == TrainingRequest(
        name="out",
        objective=Mars(block_size=8, layout="anchored", ar_weight=0.0),
        base="a/b",
        data=("x", "y"),
        settings=Settings(learning_rate=1e-3, pack=0),
        chat_template_kwargs={"enable_thinking": False},
        out=Path("out"),
    )


def test_a_command_trains_and_prints_the_folder(base: Path, tmp_path: Path) -> None:
    """Standard output has only the folder; standard error has the data's counts and the loss."""
    out = tmp_path / "out"
    result = invoke("ar", "--base", base, "--data", "arithmetic", "--examples", 18, "--epochs", 1, "-o", out)
    assert result.exception is None, result.output
    assert result.stdout.splitlines() == [str(out)]
    assert result.stderr.splitlines()[0] == "20 conversations: 0 dropped, 0 cut"
    assert "loss" in result.stderr
    assert json.loads((out / RECORD).read_text())["tokens"]["conversations"] == 18


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data", "nothing"], "no data 'nothing'; known: a suite"),
        (["--data", "arithmetic", "--examples", "8", "--max-length", "3"], "no conversation to train on"),
        (["--data", "arithmetic", "--batch-size", "0"], "--batch-size 0 is not allowed; it is a whole number of at"),
        (["--data", "arithmetic", "--examples", "8", "--teacher", "/nowhere"], "uses no teacher"),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["train", "dry run"])
def test_a_mistake_is_one_error_and_writes_nothing(
    base: Path, tmp_path: Path, words: list[str], reason: str, dry_run: list[str]
) -> None:
    """Command and dry run raise a UserError that names the value; no folder is left behind."""
    result = invoke("ar", "--base", base, "--out", tmp_path / "out", *words, *dry_run)
    assert isinstance(result.exception, UserError)
    assert reason in str(result.exception)
    assert not list(tmp_path.iterdir())
