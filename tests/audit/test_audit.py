"""`mtbench audit`: a fault that is planted in answers is named, and honest differences are not called faults."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import AR, SPECULATIVE, decoded, faulty_run, honest_run, judge_runner, planted, told
from planted_faults import (
    Fault,
    late_rope,
    sampled,
    shifted_rope,
    stale_after_rejection,
    swapped_caches,
    without_layers,
)
from small import BEGIN, PAD, beginning_tokenizer
from torch import Tensor
from typer.testing import CliRunner

import mtbench
from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.experiments import diagnosis
from mtbench.experiments.audit.experiment import AuditExperiment
from mtbench.experiments.audit.judge import Judge
from mtbench.experiments.audit.request import AuditRequest, AuditSession
from mtbench.experiments.audit.sides import Named, Side, SideAnswer
from mtbench.experiments.audit.texts import with_prompts
from mtbench.models.runner import ModelRunner
from mtbench.plan.formats import GenerationLine


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest_run(tmp_path_factory.mktemp("audit") / "honest")


@pytest.fixture(scope="module")
def judge() -> ModelRunner:
    return judge_runner()


def audited(a: object, b: object, tmp_path: Path, **given: Any) -> dict[str, Any]:
    """Return audit.json of two outputs."""
    found = mtbench.audit(str(a), str(b), out=tmp_path / "audit", device="cpu", **given)
    assert found.record == json.loads((tmp_path / "audit/audit.json").read_text())
    return dict(found.record)


def named(record: dict[str, Any]) -> set[str]:
    return {finding["name"] for finding in record["findings"]}


Make = Callable[[ModelRunner, Sequence[int], Sequence[int]], list[int]]  # of the judge, a prompt, the honest answer


def plain(make: Make) -> Callable[..., Any]:
    """A fault of plain decoding: the tokens that `make` gives."""

    def plant(judge: ModelRunner) -> dict[str, Any]:
        def change(line: GenerationLine, _: int) -> dict[str, Any]:
            assert line.prompt_ids is not None
            return told(make(judge, line.prompt_ids, line.token_ids), judge)

        return {f"{AR}.b4": change}

    return plant


def penalised(logits: Tensor, tokens: Sequence[int]) -> int:
    seen = torch.tensor(list(tokens), dtype=torch.long)
    logits = logits.clone()
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
    return int(logits.argmax())


def sampled_by(seed: int) -> Callable[[Tensor, Sequence[int]], int]:
    generator = torch.Generator().manual_seed(seed)
    return lambda logits, _: int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


PLAIN: dict[str, tuple[str, Make]] = {
    "budget one short": ("stop/budget", lambda _, __, tokens: list(tokens[:-1])),
    "end ignored": ("stop/budget", lambda judge, prompt, _: decoded(judge, prompt, 64, _endless(judge))),
    "penalty": ("sampling", lambda judge, prompt, _: decoded(judge, prompt, 64, _with_prompt(prompt))),
    "sampled": ("sampling", lambda judge, prompt, _: decoded(judge, prompt, 64, sampled_by(sum(prompt)))),
    "bfloat16 logits": (
        "rounding",
        lambda judge, prompt, _: decoded(judge, prompt, 64, lambda x, __: int(x.bfloat16().argmax())),
    ),
}


def _endless(judge: ModelRunner) -> Callable[[Tensor, Sequence[int]], int]:
    ends = torch.tensor(judge.checkpoint.end_ids)
    return lambda logits, _: int(logits.index_fill(0, ends, float("-inf")).argmax())


def _with_prompt(prompt: Sequence[int]) -> Callable[[Tensor, Sequence[int]], int]:
    return lambda logits, tokens: penalised(logits, [*prompt, *tokens])


@pytest.mark.parametrize("fault", PLAIN)
def test_fault_of_plain_decoding(fault: str, honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    expected, make = PLAIN[fault]
    run = planted(honest, tmp_path / "b", plain(make)(judge))
    record = audited(f"{honest}:{AR}.b4", f"{run}:{AR}.b4", tmp_path)
    print(record["sentence"], record["findings"][0]["evidence"], *record["trials"], sep="\n")
    assert named(record) == {expected}, record["sentence"]


def drafted(judge: ModelRunner, accept: Callable[[Tensor, int], bool]) -> Callable[..., Any]:
    """Speculative decoding, three tokens a forward: a wrong draft now and then, and a rule that accepts it."""

    def change(line: GenerationLine, _: int) -> dict[str, Any]:
        assert line.prompt_ids is not None
        tokens: list[int] = []
        commits: list[int] = []
        while len(tokens) < 64 and not (tokens and tokens[-1] in judge.checkpoint.end_ids):
            own: list[int] = []

            def choose(logits: Tensor, so_far: Sequence[int], own: list[int] = own) -> int:
                second = int(logits.topk(2).indices[1])
                wrong = len(own) == 1 and accept(logits, second)
                own.append(second if wrong else int(logits.argmax()))
                return own[-1]

            grown = decoded(judge, line.prompt_ids, min(64, len(tokens) + 3), choose, tokens)
            commits.append(len(grown) - len(tokens))
            tokens = grown
        return told(tokens, judge, commits=commits, forwards=len(commits))

    return change


def close(logits: Tensor, second: int) -> bool:
    """A draft is accepted if its probability is at least half of the largest."""
    p = logits.softmax(-1)
    return bool(p[second] >= 0.5 * p.max())


def test_accepted_draft(honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    cell = f"{SPECULATIVE}.b4"
    run = planted(honest, tmp_path / "b", {cell: drafted(judge, close)})
    record = audited(f"{run}:{AR}.b4", f"{run}:{cell}", tmp_path)
    print(record["sentence"], record["findings"][0]["evidence"], *record["trials"], sep="\n")
    assert named(record) == {"acceptance fault"}
    assert not record["explained"]
    assert "is number 2 of them" in record["findings"][0]["here"]


DECODING: dict[str, tuple[str, str, Fault]] = {  # class, method, fault
    "a layer left out": ("weights", "ar", without_layers(2)),
    "rope one off": ("cache/position", "ar", shifted_rope(-1)),
    "rope one off from a length on": ("cache/position", "ar", late_rope(1, 100)),
    "cache not cropped": ("cache/position", "speculative", stale_after_rejection()),
    "caches of two rows exchanged": ("cache/position", "ar", swapped_caches(6)),
    "sampled in place of chosen": ("sampling", "ar", sampled(0.8, top_k=50)),
}


@pytest.mark.parametrize("fault", DECODING)
def test_fault_of_decoding(fault: str, honest: Path, tmp_path: Path) -> None:
    """The loop, its cache or its model is wrong while the run is made."""
    expected, method, wrong = DECODING[fault]
    run = faulty_run(tmp_path / "b", wrong, method=(method,), batch_size=(4,), dtype="float32")
    record = audited(f"{honest}:{AR}.b4", f"{run}:{method}", tmp_path)
    print(record["sentence"], record["findings"][0]["evidence"], *record["trials"], sep="\n")
    assert named(record) == {expected}


def test_mixed_rows(honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    """From token 10 on, two rows of a batch have each other's tokens."""
    cell, lines = f"{AR}.b4", {}
    for text in (honest / f"generations/{cell}.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines[int(line["item"].split("/")[1])] = line["token_ids"]
    swap = {1: 2, 2: 1, 5: 6, 6: 5}

    def change(line: GenerationLine, number: int) -> dict[str, Any]:
        return told(lines[number][:10] + lines[swap.get(number, number)][10:], judge)

    run = planted(honest, tmp_path / "b", {cell: change})
    record = audited(f"{honest}:{cell}", f"{run}:{cell}", tmp_path)
    assert named(record) == {"cache/position"}
    assert "goes on with the tokens of arithmetic/" in record["findings"][0]["here"]


def replanned(honest: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a run with another plan, and the prompts of its items in the lines."""
    planted(honest, path, {})
    plan = json.loads((path / "plan.json").read_text())
    change(plan)
    (path / "plan.json").write_text(json.dumps(plan))
    prompts = {item["item"]: item["prompt_ids"] for item in plan["suites"][0]["items"]}
    for file in (path / "generations").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            ids = prompts[line["item"]]
            line |= {"prompt_ids": ids, "prompt_tokens": len(ids)}
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _prompts(change: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    def all_items(plan: dict[str, Any]) -> None:
        for item in plan["suites"][0]["items"]:
            item["prompt_ids"] = change(item["prompt_ids"])

    return all_items


def _shots(plan: dict[str, Any]) -> None:
    plan["suites"][0]["task"]["num_fewshot"] = 5
    _prompts(lambda ids: ids[:3] + ids)(plan)


PROMPTS = {
    "BOS twice": ("template/tokenizer", _prompts(lambda ids: ids[:1] + ids), "the first token is there twice"),
    "old template": ("template/tokenizer", _prompts(lambda ids: ids[:-2] + ids[-1:]), "another template"),
    "few-shot count": ("metric", _shots, "A has 0 examples, B 5"),
}


@pytest.mark.parametrize("fault", PROMPTS)
def test_fault_of_prompts(fault: str, honest: Path, tmp_path: Path) -> None:
    expected, change, evidence = PROMPTS[fault]
    run = replanned(honest, tmp_path / "b", change)
    record = audited(f"{honest}:{AR}.b4", f"{run}:{AR}.b4", tmp_path)
    assert named(record) == {expected}
    assert evidence in record["findings"][0]["evidence"]


def test_other_score(honest: Path, tmp_path: Path) -> None:
    """The same tokens, scored by another extraction rule."""
    run = replanned(honest, tmp_path / "b", lambda plan: plan["suites"][0]["task"].update(filter="(-?[0-9]+)$"))
    scores = json.loads((run / "scores.json").read_text())
    scores[f"{AR}.b4"] = {item: 1.0 - score for item, score in scores[f"{AR}.b4"].items()}
    (run / "scores.json").write_text(json.dumps(scores))
    record = audited(f"{honest}:{AR}.b4", f"{run}:{AR}.b4", tmp_path)
    assert named(record) == {"metric"}
    assert "filter is" in record["findings"][0]["evidence"]


def test_other_checkpoint_names_the_first_tensor(honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    """A side that decoded with other weights, of which one matrix has noise."""
    folder = tmp_path / "other"
    weight = judge.model.base_model.layers[1].mlp.down_proj.weight
    kept = weight.data.clone()
    weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    try:
        judge.model.save_pretrained(folder)
        judge.checkpoint.tokenizer.save_pretrained(folder)
        changes = plain(lambda judge, prompt, _: decoded(judge, prompt, 64))(judge)
        run = planted(honest, tmp_path / "b", changes)
    finally:
        weight.data = kept
    plan = json.loads((run / "plan.json").read_text())
    for cell in plan["cells"]:
        cell["checkpoints"]["ar"] = str(folder)
    (run / "plan.json").write_text(json.dumps(plan))
    record = audited(f"{honest}:{AR}.b4", f"{run}:{AR}.b4", tmp_path)
    assert named(record) == {"weights"}
    assert record["explained"]
    assert "layers.1.mlp.down_proj.weight" in record["findings"][0]["evidence"]


def test_honest_arms_are_the_same(honest: Path, tmp_path: Path) -> None:
    record = audited(f"{honest}:ar", f"{honest}:speculative", tmp_path)
    assert record["sentence"] == "B equals A in all 16 answers."
    assert record["explained"]


def test_coarse_arithmetic_is_no_fault(honest: Path, tmp_path: Path) -> None:
    """The same plan in bfloat16, whose answers differ from those in float32; float64 has the last word."""
    run = honest_run(tmp_path / "coarse", dtype="bfloat16", method=("ar",), batch_size=(4,))
    assert named(audited(f"{honest}:{AR}.b4", f"{run}:ar", tmp_path, dtype="float64")) == {"near-tie"}


def test_an_interrupted_audit_goes_on(
    honest: Path, judge: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was judged before the interruption stays, and nothing is judged twice."""
    short = planted(honest, tmp_path / "short", {f"{AR}.b4": lambda line, _: told(line.token_ids[:-1], judge)})
    sides, whole = (f"{honest}:{AR}.b4", f"{short}:{AR}.b4"), Judge.judge
    monkeypatch.setattr(Judge, "judge", _interrupted_after(3))
    with pytest.raises(KeyboardInterrupt):
        audited(*sides, tmp_path)
    monkeypatch.setattr(Judge, "judge", whole)
    record = audited(*sides, tmp_path, resume=True)
    assert record["sentence"].startswith("B differs from A in 8 of 8 answers: 8 stop/budget")
    lines = [json.loads(line) for line in (tmp_path / "audit/judged.jsonl").read_text().splitlines()]
    assert len({line["item"] for line in lines}) == len(lines) == 8


def _interrupted_after(answers: int) -> Callable[..., Any]:
    """Return a judge whom Ctrl-C stops."""
    judge, left = Judge.judge, iter(range(answers))

    def until(*given: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return judge(*given)

    return until


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
    assert found["sentence"] == "B equals A in all 8 answers."
    assert found["notes"] == ["1 request of B failed and is left out."]
    other = answers_of(honest, tmp_path / "other.jsonl", lambda stored: line(stored, other=True))
    found = audited(cell, other, tmp_path / "other", ran_in="float32")
    assert found["sentence"].startswith("B differs from A in ")
    assert found["findings"]


@pytest.mark.parametrize("asked", ["d e", f"{BEGIN} d e", [{"role": "user", "content": "d e"}]])
def test_a_prompt_of_a_file_begins_once(asked: Any) -> None:
    """A text without BOS gets it from the tokenizer, as a server did; one that has it, or a chat, has its own."""
    tokenizer = beginning_tokenizer("{{ bos_token }}{{ messages[0].content }}")
    answer = SideAnswer(prompt=None, tokens=[], text="", finish=None, score=None, raw_prompt=asked)
    side = Side(name="f", source="f", suite=None, arm="f", answers={"1": answer}, texts=True)
    [made] = with_prompts(Named([side], [side], chosen=True), tokenizer).meant
    assert made.answers["1"].prompt == [PAD, 3, 4]


def test_a_method_decodes_what_the_run_of_the_other_side_asks(honest: Path, tmp_path: Path) -> None:
    record = audited(f"{honest}:ar", "prompt-lookup:ahead=2", tmp_path)
    assert record["sentence"] == "B equals A in all 16 answers."
    decoded_run = mtbench.read(tmp_path / "audit/decoded")
    assert set(decoded_run.to_frame()["batch_size"]) == {1, 4}


def test_a_run_says_why_an_arm_is_divergent(honest: Path, tmp_path: Path) -> None:
    """The reason stands beside the word: in results.json, in the report, and on a page of its own."""

    def other(line: GenerationLine, number: int) -> dict[str, Any]:
        return {"token_ids": [*line.token_ids[:3], 40, *line.token_ids[4:]]} if number == 2 else {}

    cell = f"{SPECULATIVE}.b4"
    run = planted(honest, tmp_path / "run", {cell: other})
    (run / f"lossless/{cell}.json").unlink()
    results = mtbench.run(out=run, resume=True)
    [why] = [c["lossless"]["why"] for c in results.record["cells"] if c["lossless"] and c["lossless"]["why"]]
    assert why.startswith("an audit finds ")
    assert "B differs from A in 1 of 8 answers" in why
    assert why.split(":")[1] in (run / "report.md").read_text()
    assert (run / f"audits/{cell}/audit.html").is_file()


def test_an_audit_that_fails_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a mistake of the user, nor by a fault of the model's own code."""
    for fault in (UserError("no such model."), RuntimeError("no such kernel.")):
        monkeypatch.setattr(diagnosis, "carry_out", lambda *_, fault=fault: (_ for _ in ()).throw(fault))
        monkeypatch.setattr(diagnosis, "begin", lambda *_: None)
        assert diagnosis.why("a", "b", tmp_path / "audit") == f"`mtbench audit a b` cannot say why: {fault}"


REFUSED = {
    "two methods": ("ar", "speculative", "the other side must be a run"),
    "a method and several arms": ("{a}", "ar", "has 2 arms"),
    "no such option": ("{a}:ar", "ar:foo=1", "foo"),
    "no such arm": ("{a}:arr", "{a}:ar", "unknown arm"),
    "no such place": ("{a}x", "{a}:ar", "is no run directory, file or method"),
    "the same": ("{a}", "{a}", "are the same"),
    "nothing": ("{a}:ar", "", "is empty; leave it out, or give a value"),
    "other items": ("{a}:ar", "{b}/items:ar", "other items"),
    "other suites": ("{a}:ar", "{b}/suite:ar", "other suites"),
    "a missing answer": ("{a}:ar", "{b}/missing:ar", "has answers to 7 of 8 items"),
    "a foreign id": ("{a}:ar", "{b}/foreign:ar", "has id 600, and the judge's vocabulary has 512"),
    "another model": ("{a}:ar", "{b}/model:ar", "another model"),
    "another number of answers": (
        "{a}:ar",
        "{b}/seven.jsonl",
        "has 7 answers, not both with prompts; give",
    ),
    "no answer at all": ("{a}:ar", "{b}/none.jsonl", "has no answer to its 8 requests: they failed."),
}


@pytest.fixture(scope="module")
def broken(honest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs and files that cannot be audited."""
    folder = tmp_path_factory.mktemp("broken")

    def renamed(old: str, new: str) -> Callable[[Path], None]:
        def change(run: Path) -> None:
            for file in (*run.glob("generations/*"), run / "plan.json"):
                file.write_text(file.read_text().replace(old, new))

        return change

    def cut(run: Path) -> None:
        for file in run.glob("generations/*"):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))

    def foreign(run: Path) -> None:
        for file in run.glob("generations/*"):
            file.write_text(re.sub(r'"token_ids": \[\d+', '"token_ids": [600', file.read_text()))

    changes = {
        "items": renamed('"arithmetic/', '"other/'),
        "suite": renamed('"suite": "arithmetic"', '"suite": "gsm8k"'),
        "missing": cut,
        "foreign": foreign,
        "model": renamed("embedded:tiny/ar", "embedded:tiny/draft"),
    }
    for name, change in changes.items():
        run = planted(honest, folder / name, {})
        shutil.rmtree(run / "timings")
        change(run)
    (folder / "seven.jsonl").write_text('{"output": "5"}\n' * 7)
    (folder / "none.jsonl").write_text("{}\n" * 8)
    return folder


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_one_line(mistake: str, honest: Path, broken: Path, tmp_path: Path) -> None:
    a, b, message = REFUSED[mistake]
    with pytest.raises(UserError, match=message) as raised:
        audited(a.format(a=honest), b.format(a=honest, b=broken), tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "audit").exists()


def test_an_audit_needs_two_outputs() -> None:
    with pytest.raises(UserError, match="compares two outputs"):
        AuditExperiment().plan(AuditRequest(a="runs/first"), AuditSession())


def test_run_still_going(honest: Path, tmp_path: Path) -> None:
    run = planted(honest, tmp_path / "b", {})
    command = [sys.executable, "-c", HOLDS, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(UserError, match="is still going"):
            audited(f"{honest}:ar", f"{run}:ar", tmp_path)
        holder.communicate()


HOLDS = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_exit_codes_and_page(honest: Path, judge: ModelRunner, tmp_path: Path) -> None:
    """0: explained; 1: a fault, whose tokens the page has side by side."""
    cell = f"{SPECULATIVE}.b4"
    run = planted(honest, tmp_path / "b", {cell: drafted(judge, close)})
    good, out = [f"{honest}:ar", f"{honest}:speculative"], str(tmp_path / "page")
    assert exit_code(*good, "-o", str(tmp_path / "good")) == 0
    assert exit_code(f"{run}:{AR}.b4", f"{run}:{cell}", "-o", out) == 1
    page = (tmp_path / "page/audit.html").read_text()
    assert "Token by token" in page
    assert "acceptance fault" in page


def exit_code(*words: str) -> int:
    return CliRunner().invoke(main.app, ["audit", *words]).exit_code
