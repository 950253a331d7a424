"""A prefix cache that changes answers is named with turn and length, one whose counts lie too, and no honest one."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from block_cache import BLOCK, BlockCache
from scripted_engine import Scripted, install
from whole import finish, forget_plugin_files, start

from mtbench import plugins
from mtbench.decoding.output import Generation
from mtbench.decoding.request import Request
from mtbench.experiments.gate import exact
from mtbench.measure import cache_probe
from mtbench.measure.workers import Died
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import CacheCheck, CacheRecord, RescoringRecord
from mtbench.plan.plan import Cell, Item, Plan, RunRequest, SuitePlan
from mtbench.results import flags

PLUGIN = Path(__file__).parents[1] / "helpers" / "block_cache_plugin.py"


def made_plan(seed: int, conversations: int = 8) -> Plan:
    """Conversations of one to four turns."""
    drawn, items = random.Random(seed), list[Item]()
    for name in range(conversations):
        for turn in range(drawn.randint(1, 4)):
            ids = [drawn.randrange(50) for _ in range(drawn.randint(3, 20))]
            follows = len(items) - 1 if turn else None
            items.append(Item(item=f"made/{name}/{turn}", prompt_ids=ids, stop=[], follows=follows))
    suite = SuitePlan(
        suite="made", family="made", task={}, metric=None, max_new_tokens=drawn.randint(2, 80), flags=[], items=items
    )
    group = SimpleNamespace(blocks=[[n] for n in range(len(items))])
    return cast("Plan", SimpleNamespace(suite=lambda name: suite, group=lambda cell: group))


def probed(cache: BlockCache, seed: int = 0) -> CacheRecord:
    """The probes of a cache that is warm from a run, whose answers are those of a judge that cannot run."""
    plan, answered = made_plan(seed), dict[str, list[int]]()
    suite = plan.suite("made")
    for number, item in enumerate(suite.items):
        prompt = suite.prompt(number, answered)
        salt = f"run {suite.first_turn(number)}"
        answered[item.item], _ = cache.answer(prompt, suite.max_new_tokens, salt)

    def ask(request: Request) -> Generation:
        assert request.slots <= suite.room, "its server would start anew"
        tokens, cached = cache.answer(request.prompt_ids, request.max_new_tokens, str(request.cache))
        return Generation(token_ids=tokens, text="", finish_reason="length", cached_tokens=cached)

    cell = cast("Cell", SimpleNamespace(suite="made", cell="made"))
    return cache_probe.probe(plan, cell, answered, ask).changed(epsilon=0.0)


def test_no_probe_of_honest_caches_is_a_fault() -> None:
    """Each warm request finds the blocks that it has in common with earlier ones, each cold one none."""
    for seed in range(8):
        record = probed(BlockCache(), seed)
        assert len({check.item for check in record.checks}) == 8
        assert cache_probe.faults(record) == []
        for again, more, last in zip(*[iter(record.checks)] * 3, strict=True):
            whole = again.known // BLOCK * BLOCK
            assert again.cached == last.cached == [whole, 0, 0]
            assert len(more.prompt_ids) > len(again.prompt_ids)
            assert more.cached[0] in range(whole, more.known + 1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "shifted",
            "its prefix cache changes answers: turn {turn}: with {cached} cached tokens the answer differs from",
        ),
        (
            "poisoned",
            "its prefix cache changes answers: turn {turn}: with {cached} cached tokens the answer differs from",
        ),
        ("too many", "its counts of cached tokens cannot be: turn {turn}: {cached} of {prompt}, at most "),
        ("on a cold request", "its counts of cached tokens cannot be: turn {turn}: 4 of {prompt}, at most 0 can be"),
        ("no salts", "its counts of cached tokens cannot be: turn {turn}: "),
    ],
)
def test_each_fault_is_named_with_its_turn_and_length(fault: str, said: str) -> None:
    for seed in range(2):
        record = probed(BlockCache(fault), seed)
        found = cache_probe.faults(record)
        wrong = [{"turn": c.turn, "cached": c.cached[0], "prompt": len(c.prompt_ids)} for c in record.checks]
        assert len(found) == 1, "a lie on counts is no changed answer"
        assert any(found[0].startswith(said.format(**of)) for of in wrong), found
        if "answers" in said:
            assert found[0].endswith("; without the cache it is the same twice")
    assert cache_probe.faults(probed(BlockCache("poisoned", drafts=False))) == []


def test_a_probe_that_fails_says_why_and_costs_nothing_else() -> None:
    error = Died("killed")

    def ask(request: Request) -> Generation:
        raise error

    record = cache_probe.probe(made_plan(0), cast("Cell", SimpleNamespace(suite="made", cell="made")), {}, ask)
    why = f"{error}".rstrip(".")
    assert record == CacheRecord(checks=[], why=why)
    assert flags.prefix_cache(record).text == f"no probe of the prefix cache was made: {why}"
    assert cache_probe.faults(record) == []


def check(*answers: list[int], **given: Any) -> CacheCheck:
    """A check whose prompt has two tokens, one of them cached."""
    values: dict[str, Any] = {"item": "a/0/0", "turn": 1, "prompt_ids": [5, 6], "known": 2, "cached": [1, 0, 0]}
    return CacheCheck(**values | {"answers": list(answers)} | given)


class Judge:
    """Logits that hold token 1 apart from token 2 by 0.3, and from 3 by 2."""

    def logits(self, texts: Any, judged: Any) -> list[torch.Tensor]:
        assert [len(text) for text in texts] == [4], "the prompt, the token in common and the first that differs"
        return [torch.tensor([[0.0, 3.0, 2.7, 1.0]])]


def judged(folder: Path, record: CacheRecord, dtype: str, epsilon: float | None, error: Exception | None = None) -> Any:
    """The faults of a cell behind its judge, and why none could read."""
    directory = RunDirectory(folder)
    directory.write_json(cache_probe.FILE.format("c"), record.model_dump())

    def whole(source: str, dtype: str) -> Judge:
        if error is not None:
            raise error
        return Judge()

    rescoring: Any = SimpleNamespace(
        run=SimpleNamespace(directory=directory),
        pool=SimpleNamespace(dtype=dtype),
        whole=whole,
        rescored=lambda cell, lines: RescoringRecord(epsilon=epsilon, items={}),
    )
    cell: Any = SimpleNamespace(cell="c", on="ar", engine="vllm", checkpoints={"ar": "folder"})
    cache_probe.judge(rescoring, cell)
    found = cache_probe.read(directory, "c")
    assert found is not None
    return len(cache_probe.faults(found)), found.why


def test_the_judge_excuses_what_arithmetic_and_the_engines_noise_explain(tmp_path: Path) -> None:
    near, far = check([0, 2], [0, 1], [0, 1]), check([0, 3], [0, 1], [0, 1])
    noisy = check([0, 1], [0, 1], [0, 3])
    for checks, dtype, epsilon, faults in (
        ([near], "bfloat16", 0.4, 0),
        ([near], "bfloat16", 0.2, 1),
        ([far], "bfloat16", None, 1),
        ([near, noisy], "bfloat16", 0.2, 0),
        ([far, noisy], "bfloat16", 0.2, 1),
        ([near, noisy], "float32", 1e-4, 0),
        ([noisy], "float32", 1e-4, 0),
    ):
        assert judged(tmp_path, CacheRecord(checks=checks), dtype, epsilon) == (faults, None)


def test_without_a_judge_only_an_engine_that_repeats_itself_in_exact_arithmetic_is_at_fault(tmp_path: Path) -> None:
    other, noisy, gone = check([0, 3], [0, 1], [0, 1]), check([0], [0], [1]), ValueError("no such model.")
    why = "no such model"
    assert judged(tmp_path, CacheRecord(checks=[other]), "float32", None, gone) == (1, why)
    assert judged(tmp_path, CacheRecord(checks=[other]), "bfloat16", None, gone) == (0, why)
    assert judged(tmp_path, CacheRecord(checks=[other, noisy]), "float32", None, gone) == (0, why)
    late = TimeoutError("late")
    assert judged(tmp_path, CacheRecord(checks=[other]), "float32", None, late) == (0, "late")


def test_a_fault_that_base_has_not_fails_a_gate() -> None:
    sound, faulty = exact.Read({}, {}, None, None), exact.Read({}, {}, None, None, ["it changes answers"])
    for base, again, head, level in ((sound, sound, faulty, "fail"), (faulty, sound, faulty, "note")):
        [finding] = exact.compare("c", base, again, head, allow_changed=False).findings
        assert (finding.kind, finding.level) == ("prefix cache", level)
    assert exact.compare("c", faulty, faulty, sound, allow_changed=False).findings == []


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_a_poisoned_arm_is_void_and_a_resumed_run_does_not_probe_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arm that drafts keeps rejected tokens; plain decoding in the same engine does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plugins.load_file(PLUGIN)
    install(Scripted, "blocks==1", fault="poisoned")
    request = RunRequest(
        engine=("blocks",),
        method=("ar", "prompt-lookup:ahead=4"),
        prefix_cache=("on",),
        limit=4,
        batch_size=(1,),
        rounds=1,
        max_new_tokens=16,
        dtype="float32",
        device="cpu",
    )
    run = start(tmp_path / "run", request)
    try:
        results = finish(run)
        plain, drafted = results["cells"]
        said = "4 of 4 probes of the prefix cache give the same answers, 4 with cached tokens"
        assert plain["prefix_cache"] == {"probes": 4, "equal": 4, "noise": 0, "faults": [], "text": said}
        assert said in plain["flags"]
        assert not plain["void"]
        assert drafted["prefix_cache"]["equal"] == 0
        [reason] = drafted["void"]
        assert drafted["prefix_cache"]["faults"] == [reason]
        assert reason.startswith("its prefix cache changes answers: turn 1: with ")
        assert reason.endswith(" logits apart); without the cache it is the same twice")
        first, second = sorted((run.path / "prefix_cache").iterdir())
        before = first.stat().st_mtime_ns
        second.write_text(CacheRecord(checks=[], why="the time budget is spent").model_dump_json())
        assert finish(run)["cells"][1]["void"], "a new server is probed"
        assert first.stat().st_mtime_ns == before
    finally:
        forget_plugin_files()
