"""What a plan asks: conversations whose later turns follow answers, questions that no file may hold, late stops."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small import PAD, save_small, small_tokenizer
from stages import assemble, begin_run, generate, open_plan, score
from stored import stored_json, stored_lines
from whole import Quiet, figures

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Suite, Template
from mtbench.lineup.planner import make_plan
from mtbench.measure.score import before
from mtbench.plan.checks import read_plan
from mtbench.plan.directory import JsonObject, RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.records import dump

ARMS = ("ar:on=mars", "mars:tau=0.3", "mars")


class Talk(Suite):
    """Six conversations of two turns or three."""

    name = "talk"
    family = "tiny"
    max_new_tokens = 5

    def __init__(self, rest: str, source: Source) -> None:
        self.task = {"name": "talk"}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        turns = {n: ("b c d e"[: 3 + 2 * (n % 3)], "f g", "h i j")[: 2 + n % 2] for n in range(6)}
        return [
            Prompt(item=f"talk/{n}/{turn}", text=text, follows=f"talk/{n}/{turn - 1}" if turn else None)
            for n, said in turns.items()
            for turn, text in enumerate(said)
        ][:limit]


class Riddle(Suite):
    """Questions that are asked not to be spread."""

    name = "riddle"
    family = "tiny"
    max_new_tokens = 4
    metric = "right"
    private = True
    words: ClassVar[tuple[str, ...]] = ("j k l m n", "o p q r", "s t u v w x")

    def __init__(self, rest: str, source: Source) -> None:
        self.task = {"name": "riddle"}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [Prompt(item=f"riddle/{n}/0", text=text) for n, text in enumerate(self.words)][:limit]

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        return {item: float("a" in text) for item, text in answers.items()}


@pytest.fixture(autouse=True)
def suites(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    list(SUITES)
    for suite in (Talk, Riddle):
        monkeypatch.setitem(SUITES._classes, suite.name, suite)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {"ar": str(save_small(root / "ar", 1)), "mars": str(save_small(root / "mars", 2))}


def begun(path: Path, checkpoints: dict[str, str], **asked: Any) -> RunDirectory:
    request = RunRequest(checkpoint=checkpoints, method=ARMS, rounds=1, **asked)
    plan = make_plan(request)
    run = begin_run(path, plan, ["mtbench", "run"])
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
    return run


def answers(run: RunDirectory) -> dict[str, dict[str, JsonObject]]:
    cells = [cell["cell"] for cell in stored_json(run, "plan.json")["cells"]]
    return {cell: {g["item"]: g for g in stored_lines(run, f"generations/{cell}.jsonl")} for cell in cells}


# --- conversations ------------------------------------------------------------------------------------------------


def test_a_later_turn_is_read_behind_what_the_arm_itself_answered(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """At every batch size, refilled or not: prompt, answer without its end token, and what comes behind it."""
    run = begun(tmp_path / "run", checkpoints, suite=("talk",), batch_size=(1, 2), batching=("static", "refill"))
    generate(run, Quiet())
    plan = read_plan(run)
    alone = {item.item: item.prompt_ids for item in plan.suites[0].items}
    of_cells = answers(run)

    assert len(of_cells) == 9
    for lines in of_cells.values():
        assert len(lines) == 15
        for item, line in lines.items():
            task, number, turn = item.split("/")
            before = lines.get(f"{task}/{number}/{int(turn) - 1}")
            said: list[int] = []
            if before is not None:
                ended = before["finish_reason"] == "end"
                said = before["prompt_ids"] + (before["token_ids"][:-1] if ended else before["token_ids"])
            assert line["prompt_ids"] == said + alone[item]
            assert line["prompt_tokens"] == len(line["prompt_ids"])
    assert len({json.dumps(lines["talk/1/2"]["prompt_ids"]) for lines in of_cells.values()}) > 1  # arms differ


def test_an_interrupted_conversation_goes_on_where_it_was(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """A second turn finds its answer in the run directory."""
    asked: Mapping[str, Any] = {"suite": ("talk",), "batch_size": (2,)}
    whole = begun(tmp_path / "whole", checkpoints, **asked)
    generate(whole, Quiet())
    halted = begun(tmp_path / "halted", checkpoints, **asked)
    with pytest.raises(KeyboardInterrupt):
        generate(halted, Quiet(until=5))
    generate(halted, Quiet())

    assert figures(dump(assemble(halted))) == figures(dump(assemble(whole)))


def test_room_is_for_a_whole_conversation(checkpoints: dict[str, str]) -> None:
    """What all turns and answers take must fit the context; it is refused before anything runs."""
    request = RunRequest(suite=("talk",), checkpoint=checkpoints, method=("ar",), max_new_tokens=340)
    suite = make_plan(request.changed(max_new_tokens=300)).suites[0]

    assert suite.room == max(3 * 300 + 4 + 2 + 3, 2 * 300 + 3 + 2)
    with pytest.raises(UserError, match=r"talk/5/2 has 9 .* 3 x 340 new .*lower `--max-new-tokens` to 338"):
        make_plan(request)


# --- questions that are not spread --------------------------------------------------------------------------------


def test_a_turn_that_follows_nothing_is_the_suites_fault(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names the suite and the item."""
    lost = [Prompt(item="talk/0/1", text="b", follows="talk/0/0")]
    monkeypatch.setattr(Talk, "prompts", lambda *_: lost)
    with pytest.raises(UserError, match="suite 'talk': 'talk/0/1' follows 'talk/0/0', which does not exist"):
        make_plan(RunRequest(suite=("talk",), checkpoint=checkpoints))


def test_no_file_of_a_run_holds_a_private_question(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Neither its words nor its tokens; what comes out is what came out if it were not private."""
    run = begun(tmp_path / "run", checkpoints, suite=("riddle",), batch_size=(2,))
    generate(run, Quiet())
    score(run)
    assemble(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Riddle, "private", False)
        shown = begun(tmp_path / "shown", checkpoints, suite=("riddle",), batch_size=(2,))
        generate(shown, Quiet())
    tokenizer = small_tokenizer()
    asked = [tokenizer(text)["input_ids"] for text in Riddle.words]
    held = "".join(file.read_text() for file in run.path.rglob("*.json*"))

    assert all(json.dumps(ids)[1:-1] in (shown.path / "plan.json").read_text() for ids in asked)
    for text, ids in zip(Riddle.words, asked, strict=True):
        assert text not in held
        assert json.dumps(ids)[1:-1] not in held
        assert json.dumps(ids, indent=1)[1:-1].strip() not in held
    public, private = answers(shown), answers(run)
    for cell, lines in private.items():
        for item, line in lines.items():
            assert line["prompt_ids"] is None
            assert {**public[cell][item], "prompt_ids": None} == line
    graded = {c["arm"]: c["lossless"] for c in stored_json(run, "results.json")["cells"]}
    assert (graded["mars@mars/graph"]["grade"], graded["mars@mars/graph"]["near_ties"]) == ("exact", 0)


def test_private_questions_that_changed_are_refused(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not go on with other questions than it was planned with."""
    run = begun(tmp_path / "run", checkpoints, suite=("riddle",), batch_size=(2,))
    assert open_plan(run).suites[0].prompt(0)
    monkeypatch.setattr(Riddle, "words", ("j k l m n", "o p q r", "s t u v w y"))
    with pytest.raises(UserError, match=r"the prompts of suite 'riddle' are not those planned in .*`--data-dir`"):
        open_plan(run)


# --- stop strings that only cut ------------------------------------------------------------------------------------


def test_by_the_papers_protocol_stop_strings_cut_only_what_is_scored(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding goes on behind them; the score is that of the text before."""
    seen: dict[str, str] = {}

    def stopping(suite: Suite, template: Template, limit: int | None) -> list[Prompt]:
        return [Prompt(item=f"riddle/{n}/0", text=text, stop=(word,)) for n, text in enumerate(Riddle.words)]

    free = begun(tmp_path / "free", checkpoints, suite=("riddle",), batch_size=(2,))
    generate(free, Quiet())
    texts = next(iter(answers(free).values()))
    longest = max(texts.values(), key=lambda line: len(line["text"]))
    word = longest["text"][1:3]
    monkeypatch.setattr(Riddle, "prompts", stopping)
    monkeypatch.setattr(Riddle, "score", lambda _, given: seen.update(given) or dict.fromkeys(given, 0.0))
    late = begun(tmp_path / "late", checkpoints, suite=("riddle",), batch_size=(2,), protocol="paper")
    early = begun(tmp_path / "early", checkpoints, suite=("riddle",), batch_size=(2,))
    for run in (late, early):
        generate(run, Quiet())
    cell = next(iter(answers(late)))
    score(late)

    item = longest["item"]
    assert answers(late)[cell][item]["token_ids"] == longest["token_ids"]
    assert answers(early)[cell][item]["finish_reason"] == "stop"
    assert before(longest["text"], [word]) == answers(early)[cell][item]["text"]
    score(early)
    assert seen[item] == answers(early)[cell][item]["text"]


# --- what is said beforehand, and of batches that were not full ----------------------------------------------------


def test_subtasks_are_those_of_any_suite_and_the_others_are_said_to_be_whole(
    checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no suite knows is refused with the choices."""
    monkeypatch.setattr(Riddle, "subtasks", ("riddle", "other"))
    request = RunRequest(suite=("riddle", "talk"), subtask=("riddle",), checkpoint=checkpoints, method=("ar",))

    assert "talk runs completely: --subtask names no subtask of it" in make_plan(request).warnings()
    with pytest.raises(UserError, match=r"'ridle'.*riddle.*other"):
        make_plan(request.changed(subtask=("ridle",)))
    with pytest.raises(UserError, match=r"--subtask 'x': talk has no choice of a subtask"):
        make_plan(request.changed(suite=("talk",), subtask=("x",)))


def test_a_method_given_twice_is_said() -> None:
    """Each is an arm, as when the noise of two equal arms is asked for; it may be a slip."""
    plan = make_plan(RunRequest(method=["ar", "mars:on=mars", "ar"], limit=64, batch_size=(1,), rounds=1, device="cpu"))
    assert plan.warnings() == ["`--method ar` is given 2 times"]
    assert [cell.arm for cell in plan.cells] == ["ar@ar/graph", "mars@mars/graph", "ar@ar/graph#2"]


def test_batches_that_were_not_full_are_flagged(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Three rows are no measurement of batch size 5."""
    run = begun(tmp_path / "run", checkpoints, suite=("riddle",), batch_size=(1, 5))
    generate(run, Quiet())
    flags = {(c.batch_size, flag) for c in assemble(run).cells for flag in c.flags if "held" in flag}

    assert flags == {(5, "batches held 3.0 rows of 5")}


def test_without_methods_a_family_meets_its_own_and_a_model_all_that_need_no_training(
    checkpoints: dict[str, str],
) -> None:
    """A plan of `ar` alone would compare nothing. Drawn tokens of transformers' loop have the same distribution."""

    def methods(**options: Any) -> dict[str, str]:
        asked = RunRequest(suite=("talk",), batch_size=(1,), device="cpu", **options)
        return {cell.method: cell.claims for cell in make_plan(asked).cells}

    ours = dict.fromkeys(("ar", "jacobi", "lookahead", "prompt-lookup", "suffix"), "lossless")
    model = checkpoints["ar"]
    assert methods(model=model) == ours | {"hf-generate": "lossless"}
    assert methods(model=model, temperature=1.0) == ours | {"hf-generate": "distribution"}
    assert methods(family="tiny").keys() == {"ar", "mars"}
    with pytest.raises(
        UserError, match="'openai@ar' decodes greedily; leave that `--method` out, or give `--temperature 0`"
    ):
        methods(model=model, temperature=1.0, method=("openai",))


@pytest.mark.parametrize("arm", ["speculative", "hf-generate:draft=draft"])
def test_a_draft_must_have_a_row_for_every_token_that_the_target_emits(arm: str, tmp_path: Path) -> None:
    """One that lacks a row is refused when the run is planned. Rows of the mask and of padding may lack."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a b c"}')
    target = str(save_small(tmp_path / "target"))
    request = RunRequest(model=target, method=("ar", arm), suite=(f"prompts:{tmp_path}/mine.jsonl",), batch_size=(1,))
    for rows in (PAD, PAD + 1):
        save_small(tmp_path / str(rows), vocab_size=rows, pad_token_id=None)
    with pytest.raises(UserError, match=f"has {PAD} embedding rows, and .*target' emits token ids up to {PAD}; name"):
        make_plan(request.changed(checkpoint={"draft": str(tmp_path / str(PAD))}))
    assert len(make_plan(request.changed(checkpoint={"draft": str(tmp_path / str(PAD + 1))})).cells) == 2
