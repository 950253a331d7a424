"""What is wrong with a request is said before weights are loaded, by the dry run, too."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainings import SHAPE, USUAL, both_refuse, requested, saved
from transformers import GPT2Config

from mtbench.training.draft_objectives import Eagle
from mtbench.training.init_model import initialise
from mtbench.training.objectives import Ar, Draft, Mars, Medusa, Objective
from mtbench.training.train import check

pytest_plugins = ["training_fixtures"]
pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("single_thread")]


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("objective", "changes", "teacher", "reason"),
    [
        (Draft(), {}, True, "draft with these options uses no teacher; leave out `--teacher`"),
        (Draft(distil="logits"), {}, False, "draft needs `--teacher CHECKPOINT`"),
        (
            Mars(),
            {"pack": 64},
            False,
            "cannot hold a conversation of 48, for which mars feeds up to 93; give `--pack 93`",
        ),
        (Medusa(), {"flops": 1e9}, False, "--flops: medusa trains modules beside a frozen model.*give `--epochs`"),
    ],
    ids=["teacher", "no teacher", "pack", "flops"],
)
def test_options_are_refused_before_weights_are_loaded(
    base: str, rows: str, tmp_path: Path, objective: Objective, changes: dict[str, Any], teacher: bool, reason: str
) -> None:
    """By the dry run, too; nothing is written."""
    request = requested(objective, base, rows, replace(USUAL, **changes), tmp_path / "out")
    both_refuse(replace(request, teacher=base) if teacher else request, reason)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("without_weights")
def test_a_base_is_refused_before_weights_are_loaded(base: str, rows: str, tmp_path: Path) -> None:
    """One that is missing, has no chat template, no list of layers, or too few, too few rows."""

    def refuse(source: str, reason: str, objective: Objective) -> None:
        both_refuse(requested(objective, source, rows, USUAL, tmp_path / "out"), reason)

    refuse("/nowhere/at-all", "'/nowhere/at-all'", Ar())
    untemplated = tmp_path / "untemplated"
    shutil.copytree(base, untemplated)
    (untemplated / "chat_template.jinja").unlink()
    refuse(str(untemplated), "the tokenizer has no chat template", Ar())
    clipped = tmp_path / "clipped"
    shutil.copytree(base, clipped)
    config = json.loads((clipped / "config.json").read_text())
    (clipped / "config.json").write_text(json.dumps(config | {"vocab_size": 100, "pad_token_id": None}))
    refuse(str(clipped), r"the data have the token id \d+, and '.*clipped' has 100 rows; give", Ar())
    gpt2 = saved(tmp_path / "gpt2", base, GPT2Config(vocab_size=SHAPE["vocab_size"], n_embd=16, n_layer=1, n_head=2))
    refuse(gpt2, r"\(gpt2\) cannot be trained by mtbench: it has no `base_model.layers`", Ar())
    refuse(base, "eagle reads layers before the last, and the base has one", Eagle())


@pytest.mark.usefixtures("without_weights")
def test_a_teacher_with_another_vocabulary_is_refused_before_weights_are_loaded(
    base: str, rows: str, tmp_path: Path
) -> None:
    """A token id must mean the same to base and teacher."""
    talk = [[{"role": "user", "content": "wholly other words"}, {"role": "assistant", "content": "words other"}]] * 3
    other = initialise(talk, tmp_path / "other", seed=1, data={}, **SHAPE)
    request = requested(Draft(distil="logits"), base, rows, USUAL, tmp_path / "out")
    both_refuse(replace(request, teacher=str(other)), "the teacher's tokenizer gives")
    both_refuse(replace(request, teacher="/nowhere/teacher"), "'/nowhere/teacher'")


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "cannot train with FSDP 1; .*`--use_fsdp --fsdp_version 2`",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "cannot train with `--use_deepspeed`; .*`--multi_gpu` or"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "give `--checkpointing` to `mtbench train` instead",
        ),
    ],
    ids=["FSDP 1", "DeepSpeed", "activation checkpointing"],
)
def test_another_launch_is_refused_before_weights_are_loaded(
    base: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reason: str
) -> None:
    """`accelerate launch` passes its options in the environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    both_refuse(requested(Ar(), base, rows, USUAL, tmp_path / "out"), reason)


@pytest.mark.usefixtures("without_weights")
def test_variables_of_the_chat_template_are_recorded_and_kept_on_resuming(base: str, rows: str, tmp_path: Path) -> None:
    """None, too: a record without them is of an older version. An interrupted training of that version goes on."""
    thinks = tmp_path / "base"
    shutil.copytree(base, thinks)
    template = thinks / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt and enable_thinking %}{{ ' ' }}{% endif %}")
    request = requested(Ar(), str(thinks), rows, USUAL, tmp_path / "out")
    record = check(request).record
    assert record.pop("chat_template_kwargs") == {}
    request.resume_folder.mkdir()
    (request.resume_folder / "request.json").write_text(json.dumps(record))
    assert check(request).record == record | {"chat_template_kwargs": {}}
    given = replace(request, chat_template_kwargs={"enable_thinking": False})
    both_refuse(given, "interrupted training whose chat_template_kwargs.enable_thinking was null, not false")
    both_refuse(
        replace(request, chat_template_kwargs={"thinking": True}), "'thinking': the chat template does not read"
    )
