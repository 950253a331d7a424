"""`mtbench audit` of whole runs and files: what it compares, refuses, writes, and says in other commands."""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import AR, SPECULATIVE, decoded, faulty_run, honest_run, judge_runner, planted, told
from planted_faults import unfiltered
from small import BEGIN, PAD, beginning_tokenizer, small_tokenizer
from typer.testing import CliRunner

import mtbench
from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.experiments import diagnosis
from mtbench.experiments.audit.classes import UNEXPLAINED
from mtbench.experiments.audit.experiment import AuditExperiment
from mtbench.experiments.audit.findings import arms_of, to_judge
from mtbench.experiments.audit.format import JudgedLine, NoiseLine, SideJudged
from mtbench.experiments.audit.judge import Judge
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import Named, Side, SideAnswer, pairs
from mtbench.experiments.audit.texts import with_prompts, with_tokens
from mtbench.models.runner import ModelRunner
from mtbench.plan.formats import GenerationLine
from mtbench.plan.request import Session

CELL, DRAFTED = f"{AR}.b4", f"{SPECULATIVE}.b4"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two arms at two batch sizes, with 4 answers each."""
    return honest_run(tmp_path_factory.mktemp("audit") / "honest", limit=4, max_new_tokens=32)


@pytest.fixture(scope="module")
def faulty(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its copy in which the drafting arm has another third token."""

    def other(line: GenerationLine, _: int) -> dict[str, Any]:
        return {"token_ids": [*line.token_ids[:2], 300 + (line.token_ids[2] == 300), *line.token_ids[3:]]}

    return planted(honest, tmp_path_factory.mktemp("audit") / "faulty", {DRAFTED: other})


def audited(a: object, b: object, tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Return audit.json of two outputs."""
    found = mtbench.audit(str(a), str(b), out=tmp_path / "audit", device="cpu", **given)
    assert found.record == json.loads((tmp_path / "audit/audit.json").read_text())
    return dict(found.record)


def named(record: dict[str, Any]) -> set[str]:
    return {finding["name"] for finding in record["findings"]}


def test_a_token_that_the_filter_forbids_is_found_by_the_grade_and_the_audit(tmp_path: Path) -> None:
    """Accepted drafts, too. Honest arms are exact at the same temperature and top-p."""
    asked: dict[str, Any] = {"limit": 4, "max_new_tokens": 32, "temperature": 0.7, "top_p": 0.9, "batch_size": (4,)}
    honest = honest_run(tmp_path / "honest", **asked)
    wrong = faulty_run(tmp_path / "wrong", unfiltered(), **asked)
    drafting = [json.loads((path / "results.json").read_text())["cells"][1] for path in (honest, wrong)]
    assert [cell["lossless"]["grade"] for cell in drafting] == ["exact", "divergent"]
    record = audited(f"{honest}:speculative", f"{wrong}:speculative", tmp_path)
    assert named(record) == {"filter fault"}
    assert "temperature 0.7, top-p 0.9" in record["findings"][0]["evidence"]


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_says_its_sentence_once_and_exits_with_1_for_a_fault(
    honest: Path, faulty: Path, tmp_path: Path
) -> None:
    good = CliRunner().invoke(main.app, ["audit", f"{honest}:ar", f"{honest}:speculative", "-o", f"{tmp_path}/good"])
    assert good.exit_code == 0
    assert good.output.count("B equals A in all 8 answers") == 1
    bad = CliRunner().invoke(main.app, ["audit", f"{faulty}:{CELL}", f"{faulty}:{DRAFTED}", "-o", f"{tmp_path}/bad"])
    assert bad.exit_code == 1
    assert " ".join(bad.output.split()).count(f"B differs from A in 4 of 4 answers: 4 {UNEXPLAINED}") == 1
    assert "Token by token" in (tmp_path / "bad/audit.html").read_text()


def test_an_interrupted_audit_goes_on(faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was judged before the interruption stays, and nothing is judged twice."""
    sides, judge, left = (f"{faulty}:{CELL}", f"{faulty}:{DRAFTED}"), Judge.judge, iter(range(3))

    def until(*given: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return judge(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", until)
        with pytest.raises(KeyboardInterrupt):
            audited(*sides, tmp_path)
    assert len(audited(*sides, tmp_path, resume=True)["findings"]) == 4
    lines = [json.loads(line) for line in (tmp_path / "audit/judged.jsonl").read_text().splitlines()]
    assert len({line["item"] for line in lines}) == len(lines) == 4


def test_prompts_are_compared(honest: Path, tmp_path: Path) -> None:
    """Those of the plan: one begins twice."""

    def twice(line: GenerationLine, _: int) -> dict[str, Any]:
        ids = line.prompt_ids or []
        return {"prompt_ids": [*ids[:1], *ids], "prompt_tokens": len(ids) + 1}

    run = planted(honest, tmp_path / "b", {file.stem: twice for file in (honest / "generations").iterdir()})
    plan = json.loads((run / "plan.json").read_text())
    for item in plan["suites"][0]["items"]:
        item["prompt_ids"].insert(0, item["prompt_ids"][0])
    (run / "plan.json").write_text(json.dumps(plan))
    record = audited(f"{honest}:{CELL}", f"{run}:{CELL}", tmp_path)
    assert named(record) == {"template/tokenizer"}
    assert "the first token is there twice" in record["findings"][0]["evidence"]


def test_another_checkpoint_names_the_first_tensor(honest: Path, tmp_path: Path) -> None:
    """A side that decoded with other weights, of which one matrix has noise."""
    folder, judge = tmp_path / "other", judge_runner()
    weight = judge.model.base_model.layers[1].mlp.down_proj.weight
    weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    judge.model.save_pretrained(folder)
    judge.checkpoint.tokenizer.save_pretrained(folder)

    def change(line: GenerationLine, _: int) -> dict[str, Any]:
        return told(decoded(judge, line.prompt_ids or [], 32), judge)

    run = planted(honest, tmp_path / "b", {CELL: change})
    plan = json.loads((run / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["checkpoints"]["ar"] = str(folder)
    (run / "plan.json").write_text(json.dumps(plan))
    record = audited(f"{honest}:{CELL}", f"{run}:{CELL}", tmp_path)
    assert named(record) == {"weights"}
    assert record["explained"]
    assert "layers.1.mlp.down_proj.weight" in record["findings"][0]["evidence"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_judge_without_numbers_ends_the_audit(
    faulty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """As other unusable judges do; a run's sentence on a divergent arm is that line, too."""
    forward, sides = ModelRunner.forward, (f"{faulty}:{CELL}", f"{faulty}:{DRAFTED}")

    def spoilt(*given: Any, **how: Any) -> Any:
        out = forward(*given, **how)
        out.logits[..., 5] = value
        return out

    monkeypatch.setattr(ModelRunner, "forward", spoilt)
    said = "the judge's logits are not numbers (NaN or +inf) in float32: is the checkpoint damaged?"
    with pytest.raises(UserError, match=re.escape(said)):
        audited(*sides, tmp_path)
    assert diagnosis.why(*sides, tmp_path / "why", offline=True).endswith(f"cannot say why: {said}")


# --- Other commands ---------------------------------------------------------------------------------------------------


def test_a_run_says_why_an_arm_is_divergent(faulty: Path, tmp_path: Path) -> None:
    """The reason stands beside the word: in results.json, in the report, and on a page of its own."""
    run = shutil.copytree(faulty, tmp_path / "run")
    (run / f"lossless/{DRAFTED}.json").unlink()
    results = mtbench.run(out=run, resume=True)
    [why] = [c["lossless"]["why"] for c in results.record["cells"] if c["lossless"] and c["lossless"]["why"]]
    assert why.startswith("an audit finds a fault, or what nothing explains: B differs from A in 4 of 4 answers")
    assert why.split(":")[1] in (run / "report.md").read_text()
    assert (run / f"audits/{DRAFTED}/audit.html").is_file()


def test_an_audit_that_fails_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a mistake of the user, nor by a fault of the model's own code."""
    for fault in (UserError("no such model."), RuntimeError("no such kernel.")):
        monkeypatch.setattr(diagnosis, "carry_out", lambda *_, fault=fault: (_ for _ in ()).throw(fault))
        monkeypatch.setattr(diagnosis, "begin", lambda *_: None)
        assert diagnosis.why("a", "b", tmp_path / "audit") == f"`mtbench audit a b` cannot say why: {fault}"


# --- Noise ------------------------------------------------------------------------------------------------------------


def test_the_noise_of_an_engine_holds_its_own_differences_and_no_more() -> None:
    """How far the judge holds apart two tokens of its plain decoding at two batch sizes, else the measured noise."""

    def side(arm: str, batch_size: int, token: int) -> Side:
        answer = SideAnswer([1, 2], [3, token], "t", "length")
        name, plain = f"{arm}.b{batch_size}", arm == "ar"
        engine = {"engine": "e", "model": "m", "dtype": "bfloat16", "plain": plain, "batch_size": batch_size}
        return Side(name, "r", "s", arm, {"1": answer}, **engine)  # type: ignore[arg-type]

    cells = [side("ar", 1, 4), side("ar", 8, 5), side("lookup", 8, 6)]
    [pair] = pairs(Named(cells, cells[1:2], chosen=True), Named(cells, cells[2:], chosen=True))
    assert pair.siblings == [(cells[0], cells[1])]
    of = [SideJudged(text="x", probabilities=[0.5], short={"1": gap}, endless=None) for gap in (0.0, 0.3)]
    lines = {(1, "1"): JudgedLine(pair=1, item="1", first=1, side_a=of[0], side_b=of[1])}
    judge: Any = type("Known", (), {"tokenizer": small_tokenizer(), "end_ids": ()})
    for spread, noise in ((0.05, 0.3), (0.1, 0.4), (None, 1.0), (9.0, 1.0)):
        measured = {"bfloat16": NoiseLine(dtype="bfloat16", positions=9, spread=spread)}
        [arms] = arms_of([pair], lines, measured, judge)
        assert arms.noise == noise


# --- Files of texts ---------------------------------------------------------------------------------------------------


def answers_of(run: Path, path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """Write a file with the answers of a run; `change`: of a stored line, a line of the file."""
    lines = map(json.loads, (run / f"generations/{AR}.b4.jsonl").read_text().splitlines())
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("form", ["texts", "tokens"])
def test_a_file_beside_a_run(form: str, honest: Path, tmp_path: Path) -> None:
    """Texts get tokens, an equal answer is the same, another is judged, and a failed request is left out."""
    tokenizer, cell = judge_runner().checkpoint.tokenizer, f"{honest}:{AR}.b4"

    def line(stored: dict[str, Any], other: bool = False) -> dict[str, Any]:
        if form == "tokens":
            ids = [40, *stored["token_ids"][1:]] if other else stored["token_ids"]
            return {"prompt_ids": stored["prompt_ids"], "token_ids": ids, "finish_reason": stored["finish_reason"]}
        text = stored["text"].replace("Okay", "Zebra") if other else stored["text"]
        return {"prompt": tokenizer.decode(stored["prompt_ids"]), "output": text}

    same = answers_of(honest, tmp_path / "same.jsonl", line)
    same.write_text("".join(sorted(same.read_text().splitlines(keepends=True))) + "{}\n")
    found = audited(cell, same, tmp_path / "same", ran_in="float32")
    assert found["sentence"] == "B equals A in all 4 answers."
    assert found["notes"] == ["1 request of B failed and is left out."]
    other = answers_of(honest, tmp_path / "other.jsonl", lambda stored: line(stored, other=True))
    found = audited(cell, other, tmp_path / "other", ran_in="float32")
    assert found["sentence"].startswith("B differs from A in ")
    assert found["findings"]


def texts(*answers: SideAnswer) -> Named:
    side = Side("f", "f", None, "f", {str(n): answer for n, answer in enumerate(answers)}, texts=True)
    return Named([side], [side], chosen=True)


@pytest.mark.parametrize("asked", ["d e", f"{BEGIN} d e", [{"role": "user", "content": "d e"}]])
def test_a_prompt_of_a_file_begins_once(asked: Any) -> None:
    """A text without BOS gets it from the tokenizer, as a server did; one that has it, or a chat, has its own."""
    tokenizer = beginning_tokenizer("{{ bos_token }}{{ messages[0].content }}")
    answer = SideAnswer(prompt=None, tokens=[], text="", finish=None, raw_prompt=asked)
    [made] = with_prompts(texts(answer), tokenizer).meant
    assert made.answers["0"].prompt == [PAD, 3, 4]


def test_requests_are_paired_by_their_prompts_and_each_is_counted() -> None:
    """In another order, with one asked twice, and one that has no partner."""

    def answer(prompt: int, text: str) -> SideAnswer:
        return SideAnswer([prompt], [], text, None)

    a = texts(answer(1, "one"), answer(2, "two"), answer(3, "three"))
    b = texts(answer(3, "drei"), answer(1, "eins"), answer(1, "uno"), answer(4, "vier"))
    [pair] = pairs(a, b._replace(meant=[replace(b.meant[0], name="g")]))
    found = [(pair.a.answers[item].text, pair.b.answers[item].text) for item in pair.items]
    assert found == [("one", "eins"), ("one", "uno"), ("three", "drei")]
    left = [one.text for one in (*pair.a.answers.values(), *pair.b.answers.values()) if one.lacks]
    assert left == ["two", "vier"]


def test_texts_have_the_other_sides_tokens_as_far_as_they_agree() -> None:
    tokenizer = small_tokenizer()
    mine = replace(SideAnswer([1], [2, 3, 4], "", "length"), text=tokenizer.decode([2, 3, 4]))
    a, b = Side("a", "a", None, "a", {"1": mine}), Side("b", "b", None, "b", {}, texts=True)
    for text, tokens in ((mine.text, [2, 3, 4]), (tokenizer.decode([2, 3]), [2, 3])):
        theirs = replace(b, answers={"1": replace(mine, text=text, tokens=[], prompt=None)})
        [pair] = pairs(Named([a], [a], True), Named([theirs], [theirs], True))
        made = with_tokens(pair, tokenizer).b.answers["1"]
        assert (made.prompt, made.tokens, made.whole) == ([1], tokens, True)


def test_token_ids_without_a_prompt_have_that_of_the_run() -> None:
    ran = SideAnswer([1, 2], [3, 4], "a", "length", raw_prompt=None)
    a = Side("a", "a", "s", "a", {"1": ran})
    b = Side("b", "b", None, "b", {"0": replace(ran, prompt=None, tokens=[3, 5])})
    [pair] = pairs(Named([a], [a], True), Named([b], [b], True))
    [item] = pair.items
    assert to_judge(with_tokens(pair, small_tokenizer()), item)


# --- Refused ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "no such arm": ("{a}:arr", "{a}:ar", "unknown arm"),
    "no such place": ("{a}x", "{a}:ar", "is no run directory or file"),
    "the same": ("{a}", "{a}", "are the same"),
    "nothing": ("{a}:ar", "", "is empty; leave it out, or give a value"),
    "other items": ("{a}:ar", "{b}/items:ar", "other items"),
    "other suites": ("{a}:ar", "{b}/suite:ar", "other suites"),
    "a missing answer": ("{a}:ar", "{b}/missing:ar", "has answers to 3 of 4 items"),
    "a foreign id": ("{a}:ar", "{b}/foreign:ar", "has id 600, and the judge's vocabulary has 512"),
    "another model": ("{a}:ar", "{b}/model:ar", "another model"),
    "a run still going": ("{a}:ar", "{b}/going:ar", "is still going"),
    "another number of answers": (
        "{a}:ar",
        "{b}/seven.jsonl",
        "has 7 answers, not both with prompts; give",
    ),
    "no answer at all": ("{a}:ar", "{b}/none.jsonl", "has no answer to its 8 requests: they failed."),
}


@pytest.fixture(scope="module")
def broken(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that cannot be audited; another process holds one of them."""
    folder = tmp_path_factory.mktemp("broken")

    def generations(change: Callable[[str], str]) -> Callable[[Path], None]:
        def all_files(run: Path) -> None:
            for file in run.glob("generations/*"):
                file.write_text(change(file.read_text()))

        return all_files

    def renamed(old: str, new: str) -> Callable[[Path], None]:
        def change(run: Path) -> None:
            for file in (*run.glob("generations/*"), run / "plan.json"):
                file.write_text(file.read_text().replace(old, new))

        return change

    changes: dict[str, Callable[[Path], None]] = {
        "items": renamed('"arithmetic/', '"other/'),
        "suite": renamed('"suite": "arithmetic"', '"suite": "gsm8k"'),
        "missing": generations(lambda text: "".join(text.splitlines(keepends=True)[:-1])),
        "foreign": generations(lambda text: re.sub(r'"token_ids": \[\d+', '"token_ids": [600', text)),
        "model": renamed("embedded:tiny/ar", "embedded:tiny/draft"),
        "going": lambda _: None,
    }
    for name, change in changes.items():
        run = planted(honest, folder / name, {})
        shutil.rmtree(run / "timings")
        change(run)
    (folder / "seven.jsonl").write_text('{"output": "5"}\n' * 7)
    (folder / "none.jsonl").write_text("{}\n" * 8)
    command: Sequence[str] = [sys.executable, "-c", HOLDS, str(folder / "going")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield folder
        holder.communicate()


HOLDS = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_one_line(mistake: str, honest: Path, broken: Path, tmp_path: Path) -> None:
    a, b, message = REFUSED[mistake]
    with pytest.raises(UserError, match=message) as raised:
        audited(a.format(a=honest), b.format(a=honest, b=broken), tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "audit").exists()


def test_an_audit_needs_two_outputs() -> None:
    with pytest.raises(UserError, match="compares two outputs"):
        AuditExperiment().plan(AuditRequest(a="runs/first"), Session())
