"""Arms in llama.cpp, a real engine: its tokens are those of mtbench's loop on the same file."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_architectures import KEYS, write_architecture
from gguf_files import written
from printed_commands import answer_of
from transformers.integrations import gguf

import mtbench
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.measure import cache_probe
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import CacheCheck
from mtbench.plan.prompts import common_length
from mtbench.plan.run import Run

pytestmark = pytest.mark.whole
ARMS = ("ar", "ar:engine=llamacpp", "prompt-lookup:ahead=4,engine=llamacpp", "speculative:ahead=3,engine=llamacpp")


@pytest.fixture(scope="module", autouse=True)
def llamacpp() -> None:
    """llama.cpp is installed in the cache folder."""
    SERVING_ENGINES["llamacpp"].fetch(lambda text: None)


def test_a_made_up_acceptance_is_the_servers(tmp_path: Path) -> None:
    """The server accepts at random, as often as asked, but no drafted end token; its counts give the rest."""
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "Write a story about a train."}\n' * 8)
    results = mtbench.run(
        suite=f"prompts:{prompts}",
        family="tiny",
        method=("ar", "speculative:ahead=4"),
        engine="llamacpp",
        simulate_acceptance="length=2.5",
        max_new_tokens=100,
        batch_size=1,
        rounds=1,
        out=tmp_path / "DIR",
    )
    plain, drafted = results.record["cells"]
    assert plain["tokens_per_forward"] == 1
    assert drafted["tokens_per_forward"] == pytest.approx(2.4, abs=0.1)
    assert "simulated acceptance" in drafted["flags"]
    assert drafted["lossless"] is None, "the text has no meaning"


def test_drafts_and_cache_types_are_one_comparison(tmp_path: Path) -> None:
    """The cache's type is part of the arm; another than the run's promises no tokens."""
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=("ar", "prompt-lookup:ahead=2|4"),
        engine="llamacpp",
        engine_option="llamacpp:cache-type-k=f32|q8_0",
        limit=16,
        batch_size=2,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    cells = results.record["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 6
    assert [cell["engine_options"] for cell in cells] == [["cache-type-k=f32"], ["cache-type-k=q8_0"]] * 3
    plain, *others = cells[::2]
    assert [cell["lossless"]["grade"] for cell in others] == ["exact"] * 2
    assert [cell["claims"] for cell in cells[1::2]] == ["lossy"] * 3
    assert all(cell["speedup"][0]["baseline"] == plain["arm"] for cell in cells[1:])
    assert not any(cell["void"] for cell in cells)


def test_arms_have_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    """In float32, all arms: exact. The engine's own counts give tokens per forward: 1 for plain decoding."""
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=ARMS,
        limit=16,
        batch_size=2,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    ours, plain, *drafted = results.record["cells"]
    assert [cell["status"] for cell in results.record["cells"]] == ["ok"] * 4
    assert [cell["lossless"]["grade"] for cell in (plain, *drafted)] == ["exact"] * 3
    assert ours["accuracy"]["value"] == plain["accuracy"]["value"] > 0.5
    assert plain["tokens_per_forward"] == 1
    assert all(cell["tokens_per_forward"] > 1 for cell in drafted)


def test_the_printed_command_starts_its_server(tmp_path: Path) -> None:
    """The command for the engine of a race, on another port than the printed one, answers a text."""
    found = mtbench.choose(
        engine="llamacpp", method="prompt-lookup:ahead=4", family="tiny", limit=8, batch_size=1, out=tmp_path / "DIR"
    )
    title, command = next(iter(next(iter(found.decision["serving"].values())).items()))
    assert title == "llama.cpp"
    assert answer_of(command)["choices"][0]["text"]


@pytest.mark.skipif(not hasattr(gguf, "convert_gguf_tokenizer"), reason="transformers before 5.23")
@pytest.mark.parametrize("architecture", KEYS)
def test_a_file_of_any_architecture_is_served_as_it_is(architecture: str, tmp_path: Path) -> None:
    """mtbench writes no such file; the hybrid's is split. The judge, which cannot read them, costs a grade only.

    On the hybrid llama.cpp undoes the rejected drafts: prompt lookup has the tokens of plain decoding there.
    """
    file = write_architecture(tmp_path / f"{architecture}.gguf", architecture)
    if architecture == "lfm2":
        file = written(file, tmp_path / "split.gguf", tensors_a_part=12)
        assert file.name == "split-00001-of-00004.gguf"
    results = mtbench.run(
        suite="arithmetic",
        model=str(file),
        method=("ar", "prompt-lookup:ahead=4"),
        engine="llamacpp",
        limit=4,
        max_new_tokens=48,
        batch_size=1,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    plain, drafted = results.record["cells"]
    assert [cell["status"] for cell in (plain, drafted)] == ["ok", "ok"]
    assert "cannot be read as a GGUF checkpoint" in plain["lossless"]["why"]
    assert drafted["lossless"]["grade"] == "exact"
    assert plain["tokens_per_forward"] == 1
    assert drafted["tokens_per_forward"] > 1
    flags = [flag for cell in (plain, drafted) for flag in cell["flags"]]
    assert not any("token counts differ" in flag for flag in flags), "a stream lacks tokens of parts of a character"
    lines = [json.loads(line) for line in next((tmp_path / "DIR" / "timings").glob("*lookup*")).open()]
    assert sum(line["drafted"] for line in lines) > sum(line["accepted"] for line in lines) > 0
    assert all(0 < line["ttft_s"] < line["wall_s"] for line in lines)


def conversations(file: Path) -> str:
    """Three conversations of four turns; the suite that reads them."""
    texts = [[f"What is {n + turn} + {turn}?" for turn in range(4)] for n in (3, 20, 41)]
    lines = [
        {"messages": [m for text in turns for m in ({"role": "user", "content": text}, answer)]}
        for turns in texts
        for answer in [{"role": "assistant", "content": f"It is {len(turns)}, I think."}]
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"conversations:{file}"


@pytest.mark.parametrize("size", [1, 2])
def test_a_prefix_cache_changes_no_answer_and_keeps_what_a_conversation_had(size: int, tmp_path: Path) -> None:
    """A conversation begins cold. Later, what its prompt has in common with the last one and its answer is kept."""
    results = mtbench.run(
        suite=conversations(tmp_path / "talk.jsonl"),
        family="tiny",
        method=("ar", "prompt-lookup:ahead=4"),
        engine="llamacpp",
        prefix_cache="off,on",
        max_new_tokens=8,
        batch_size=size,
        rounds=2,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    run = Run.open(RunDirectory.open(tmp_path / "DIR"))
    [suite] = run.plan.suites
    assert len(suite.items) == 12
    plain = {line.item: line.token_ids for line in run.answers[run.plan.cells[0].cell]}
    for cell, found in zip(run.plan.cells, results.record["cells"], strict=True):
        assert found["lossless"]["grade"] == "exact"
        answers = {line.item: line for line in run.answers[cell.cell]}
        assert {name: line.token_ids for name, line in answers.items()} == plain
        for number, item in enumerate(suite.items):
            kept = 0
            if cell.prefix_cache and item.follows is not None:
                before = suite.prompt(item.follows) + plain[suite.items[item.follows].item][:-1]
                kept = min(common_length(before, suite.prompt(number)), len(suite.prompt(number)) - 1)
            assert answers[item.item].cached_tokens == kept
        by_round = Counter[int]()
        for line in run.timings[cell.cell]:
            by_round[line.round] += line.cached_tokens or 0
        assert by_round[1] == by_round[2] == sum(line.cached_tokens or 0 for line in answers.values())
        probed = found.get("prefix_cache", {"probes": 0, "equal": 0, "faults": []})
        assert (probed["probes"], probed["equal"], probed["faults"]) == (*[3 * cell.prefix_cache] * 2, [])
        for again, longer, last in batched(cache_probe.read(run.directory, cell.cell).checks):
            assert again.cached[1:] == longer.cached[1:] == last.cached[1:] == [0, 0]
            assert longer.cached[0] in (longer.known - 1, longer.known), "the answer's last token was never fed"
            assert last.cached[0] == last.known == len(again.prompt_ids) - 1


def batched(checks: list[CacheCheck]) -> Iterator[tuple[CacheCheck, ...]]:
    """The three checks of each probe."""
    return zip(*[iter(checks)] * 3, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_200_probes_of_an_honest_prefix_cache_find_no_fault(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_probe, "PROBES", 100)
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=("ar", "prompt-lookup:ahead=4"),
        engine="llamacpp",
        prefix_cache="on",
        limit=100,
        max_new_tokens=64,
        batch_size=2,
        rounds=1,
        dtype=dtype,
        out=tmp_path / "DIR",
    )
    for cell in results.record["cells"]:
        assert (cell["prefix_cache"]["probes"], cell["prefix_cache"]["faults"]) == (100, []), cell["prefix_cache"]


def test_answers_meet_their_schema(tmp_path: Path) -> None:
    """The model would write anything else. Drafts change nothing, and no token that a schema forces is a fault."""
    schemas = [{"const": "ok"}, {"enum": ["a", "b"]}, {"type": "boolean"}, {"type": "string", "maxLength": 3}]
    asked = [{"messages": [{"role": "user", "content": "Which?"}], "json_schema": schema} for schema in schemas]
    (file := tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    results = mtbench.run(
        suite=f"conversations:{file}",
        family="tiny",
        method=("ar", "prompt-lookup:ahead=4"),
        engine="llamacpp",
        max_new_tokens=12,
        batch_size=2,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    plain, drafted = results.record["cells"]
    assert [cell["valid"]["value"] for cell in (plain, drafted)] == [1, 1]
    assert drafted["valid_vs"][0]["verdict"]["word"] == "not worse"
    assert (plain["lossless"], drafted["lossless"]["grade"]) == (None, "exact")
    assert not any("not constrained" in flag for cell in (plain, drafted) for flag in cell["flags"])
