"""Arms in llama.cpp, a real engine: its tokens are those of mtbench's loop on the same file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from cached_conversations import check_conversations, run_conversations
from gguf_files import written
from gguf_hybrid import write_hybrid
from printed_commands import answer_of
from transformers.integrations import gguf

import mtbench
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.measure import cache_probe
from mtbench.plan.formats import CacheCheck
from mtbench.plan.plan import LEARNS

pytestmark = pytest.mark.whole
ARMS = ("ar", "ar:engine=llamacpp", "prompt-lookup:ahead=4,engine=llamacpp", "speculative:ahead=3,engine=llamacpp")


@pytest.fixture(scope="module", autouse=True)
def llamacpp() -> None:
    """llama.cpp is installed in the cache folder."""
    SERVING_ENGINES["llamacpp"].fetch(lambda text: None)


@pytest.mark.slow
def test_a_measured_acceptance_is_replayed(tmp_path: Path) -> None:
    """Of a run by mtbench's loop, in the server: within the interval of the file, for each number of drafts."""
    drafts: dict[str, Any] = {"family": "tiny", "method": "speculative:ahead=2|4", "rounds": 1}
    mtbench.run(suite="arithmetic", limit=16, batch_size=2, **drafts, out=tmp_path / "run")
    text = "Eva has {} coins. First, she loses 65 coins. Second she doubles them. How many coins does Eva have now?"
    (prompts := tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text.format(number)}) for number in range(200, 264))
    )
    path, replay = tmp_path / "run" / "acceptance.yaml", tmp_path / "replay"
    drafts |= {"suite": f"prompts:{prompts}", "engine": "llamacpp", "simulate_acceptance": str(path)}
    drafts |= {"limit": 64, "batch_size": 1, "max_new_tokens": 50}  # short: it rejects end tokens
    cells = mtbench.run(**drafts, out=replay).record["cells"]
    for row, cell, ahead in zip(yaml.safe_load(path.read_text())["mtbench"], cells, (2, 4), strict=True):
        timings = [json.loads(line) for line in (replay / f"timings/{cell['cell']}.jsonl").read_text().splitlines()]
        accepted, drafted = (sum(line[name] for line in timings) for name in ("accepted", "drafted"))
        assert row["ci_low"] <= 1 + accepted / (drafted / ahead) <= row["ci_high"]


def test_arms_have_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    """In float32, all arms: exact. The engine's own counts give tokens per forward: 1 for plain decoding."""
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=ARMS,
        limit=8,
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


@pytest.mark.slow
def test_its_own_drafting_has_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    """By its own names, with sizes that a short answer fills. Drafts are counted, and some are accepted."""
    sizes = ("map-k-size-n=3", "map-k4v-size-n=3", "mod-n-match=3", "mod-n-min=1")
    results = mtbench.run(
        suite="arithmetic",
        family="tiny",
        method=("ar", "native:drafts=ngram-map-k|ngram-map-k4v|ngram-mod,ahead=4"),
        engine="llamacpp",
        engine_option=[f"llamacpp:spec-ngram-{size}" for size in sizes],
        limit=16,
        batch_size=2,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    plain, *drafted = results.record["cells"]
    assert plain["tokens_per_forward"] == 1
    assert [cell["lossless"]["grade"] for cell in drafted] == ["exact"] * 3
    assert all(cell["tokens_per_forward"] > 1 for cell in drafted)
    assert [LEARNS in cell["flags"] for cell in drafted] == [False, False, True]
    for name in ("map-k", "map-k4v", "mod"):
        file = next((tmp_path / "DIR" / "timings").glob(f"*ngram-{name}-ahead*"))
        lines = [json.loads(line) for line in file.open()]
        assert sum(line["drafted"] for line in lines) > sum(line["accepted"] for line in lines) > 0


@pytest.mark.slow
def test_the_printed_command_starts_its_server(tmp_path: Path) -> None:
    """The command for the engine of a race, on another port than the printed one, answers a text."""
    found = mtbench.choose(
        engine="llamacpp", method="prompt-lookup:ahead=4", family="tiny", limit=8, batch_size=1, out=tmp_path / "DIR"
    )
    title, command = next(iter(next(iter(found.decision["serving"].values())).items()))
    assert title == "llama.cpp"
    assert answer_of(command)["choices"][0]["text"]


@pytest.mark.skipif(not hasattr(gguf, "convert_gguf_tokenizer"), reason="transformers before 5.23")
@pytest.mark.parametrize("split", [False, True])
def test_a_file_of_any_architecture_is_served_as_it_is(split: bool, tmp_path: Path) -> None:
    """mtbench writes no such file. The judge, which cannot read it, costs a grade only.

    On a hybrid llama.cpp undoes the rejected drafts: prompt lookup has the tokens of plain decoding there.
    """
    file = write_hybrid(tmp_path / "hybrid.gguf")
    if split:
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


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_prefix_cache_changes_no_answer_and_keeps_what_a_conversation_had(size: int, tmp_path: Path) -> None:
    """A conversation begins cold. Later, what its prompt has in common with the last one and its answer is kept."""
    run, cells = run_conversations("llamacpp", size, tmp_path, "prompt-lookup:ahead=4")
    check_conversations(run, cells, block=1)
    for cell in run.plan.cells:
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
