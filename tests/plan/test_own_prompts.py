"""Prompts of the user's own, with and without answers, in a plan and in a whole run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from small import save_small
from stages import due
from whole import finish, start

from mtbench.errors import UserError
from mtbench.experiments.choose.plan import plan_of
from mtbench.experiments.choose.request import RaceRequest
from mtbench.lineup.planner import make_plan
from mtbench.models import inspection
from mtbench.plan.plan import RunRequest


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., RunRequest]:
    """Return a request for prompts with these answers (None: without one)."""

    def ask(answers: Sequence[Any], **options: Any) -> RunRequest:
        lines = [{"prompt": "a b c"} | ({} if answer is None else {"answer": answer}) for answer in answers]
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        checkpoint = str(save_small(tmp_path / "ar", 1))
        defaults: dict[str, Any] = {"method": ["ar"], "batch_size": (1,), "rounds": 1, "max_new_tokens": 3}
        suite = [f"prompts:{tmp_path}/mine.jsonl"]
        return RunRequest(suite=suite, checkpoint={"ar": checkpoint}, device="cpu", **defaults | options)

    return ask


def test_a_mixed_file_is_said_in_one_warning(asked: Callable[..., RunRequest]) -> None:
    """A file whose prompts all have answers, or none of them, needs no warning."""
    mixed = make_plan(asked(["a", None, "b", None, "c", "d", "e", "f"])).warnings()

    assert len(mixed) == 1
    assert "2 of 8 items have no answer to compare with: they are timed, and accuracy is that of the others" in mixed[0]
    assert make_plan(asked(["a"] * 8)).warnings() == []
    assert make_plan(asked([None] * 8)).warnings() == []


@pytest.mark.whole
def test_the_accuracy_of_a_mixed_file_is_that_of_its_answers(asked: Callable[..., RunRequest], tmp_path: Path) -> None:
    """The others are timed and have no score, and nothing is left to score."""
    unscored = finish(start(tmp_path / "once", asked([None] * 3)))
    assert unscored["cells"][0]["accuracy"] is None
    line = (tmp_path / "once" / "generations").glob("*.jsonl").__next__().read_text().splitlines()[0]
    right = json.loads(line)["text"]
    run = start(tmp_path / "run", asked([right, None, "no such word"]))
    (cell,) = finish(run)["cells"]

    assert (cell["items"], cell["accuracy"]["n"], cell["accuracy"]["value"]) == (3, 2, 0.5)
    assert cell["accuracy"]["metric"] == "exact_match"
    assert "2 of 3 answers are scored; the other items have no answer to compare with" in cell["flags"]
    assert not due(run)


@pytest.mark.parametrize(("limit", "remedy"), [(None, "add prompts"), (12, "raise `--limit`"), (100, "add prompts")])
def test_too_few_prompts_are_mended_by_more_prompts(
    limit: int | None, remedy: str, asked: Callable[..., RunRequest]
) -> None:
    """A higher limit helps only where the limit left some out."""
    (warning,) = make_plan(asked([None] * 13, batch_size=(8,), limit=limit)).warnings()

    assert "of 6 blocks; 6 take 48 items" in warning
    assert remedy in warning


def test_a_metric_is_chosen_where_there_are_several(asked: Callable[..., RunRequest]) -> None:
    """Another name, or a suite with one metric, is refused in one line."""
    assert make_plan(asked(["a"], metric="contains")).suites[0].metric == "contains"
    with pytest.raises(UserError, match=r"unknown metric 'contain' \(did you mean 'contains'\?\); known: contains, "):
        make_plan(asked(["a"], metric="contain"))
    with pytest.raises(UserError, match="--metric 'exact': arithmetic has no choice of a metric; leave it out"):
        make_plan(RunRequest(metric="exact", limit=1))


@pytest.mark.parametrize("text", [None, "Why?", '{"answer": 1}'], ids=["missing", "not JSON", "without a prompt"])
def test_a_wrong_file_is_found_before_a_checkpoint_is_read(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of the hub may take a minute. The file is wrong in a race, too, and as a second suite."""
    file = tmp_path / "mine.jsonl"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(inspection, "inspect", lambda *_, **__: pytest.fail("a checkpoint was read"))
    suite, model = f"prompts:{file}", "nobody/nothing"

    with pytest.raises(UserError, match=r"^suite 'prompts': .*mine\.jsonl"):
        make_plan(RunRequest(suite=["arithmetic", suite], model=model, method=["ar"], limit=1))
    with pytest.raises(UserError, match=r"^suite 'prompts': .*mine\.jsonl"):
        plan_of(RaceRequest(suite=[suite], model=model))
