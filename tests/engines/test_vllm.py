"""Arms in vLLM, a real engine: its tokens are those of mtbench's loop, and MARS models draft in it without a patch."""

import re
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, save_architecture
from cached_conversations import check_conversations, run_conversations

import mtbench
from mtbench.decoding.registry import SERVING_ENGINES

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
PYTHON = SERVING_ENGINES["vllm"].installed()  # in the user's cache folder; that of the tests is empty
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="it has 3.5 GB: run `mtbench fetch engine vllm` first"),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVING_ENGINES["vllm"], "installed", lambda: PYTHON)


def test_arms_have_the_tokens_and_the_acceptance_of_mtbench(tmp_path: Path) -> None:
    """In float32 all arms are exact, and n-grams have as many forwards.

    vLLM's prefill commits a token without drafts, so its counts of a draft may differ by less than one forward a
    request in either direction.
    """
    drafted = "prompt-lookup:match=earliest,engine=graph|vllm", "speculative:draft=mars,per_forward=4,engine=graph|vllm"
    results = mtbench.run(
        suite="arithmetic",
        method=("ar:engine=graph|vllm", *drafted, "eagle:tree=1,ahead=4,engine=graph|vllm", "medusa:engine=graph|vllm"),
        limit=24,
        batch_size=2,
        rounds=1,
        dtype="float32",
        out=tmp_path / "DIR",
    )
    cells = results.record["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 10
    ours, theirs = cells[::2], cells[1::2]
    assert [cell["engine"] for cell in theirs] == ["vllm"] * 5
    assert [cell["lossless"]["grade"] for cell in cells[1:]] == ["exact"] * 9
    assert len({cell["tokens"] for cell in cells}) == 1
    assert theirs[0]["tokens_per_forward"] == 1
    assert theirs[1]["tokens_per_forward"] == ours[1]["tokens_per_forward"] > 1.2
    for pair in zip(ours[2:], theirs[2:], strict=True):
        forwards = [cell["tokens"] / cell["tokens_per_forward"] for cell in pair]
        assert forwards[0] < 0.6 * cells[0]["tokens"]
        assert abs(forwards[0] - forwards[1]) <= 24
    assert all("each request" in cell["acceptance"]["reported_by"] for cell in theirs[1:])


def test_a_prefix_cache_changes_no_answer_and_keeps_blocks_of_128(tmp_path: Path) -> None:
    """Its cache on a CPU has blocks of 128 tokens; each conversation of each round begins cold."""
    lookup = "prompt-lookup:match=earliest,ahead=4"
    run, cells = run_conversations("vllm", 2, tmp_path, lookup, times=16)
    check_conversations(run, cells, block=128)


def test_ngrams_on_a_hybrid_have_other_tokens_and_are_not_offered(tmp_path: Path) -> None:
    """vLLM 0.32 reads what a rejected draft left in a Mamba layer: from the second token on, in every answer.

    mtbench's loop cannot decode the model; transformers' modules judge plain decoding, and every first difference.
    """
    model = save_architecture(tmp_path / "granite", "granitemoehybrid")
    found = mtbench.choose(
        suite="arithmetic",
        engine="vllm",
        model=model,
        method=("ar", "prompt-lookup"),
        limit=16,
        batch_size=2,
        dtype="float32",
        max_new_tokens=48,
        out=tmp_path / "DIR",
    )
    plain, drafted = (cell["lossless"] for cell in found.results.record["cells"])
    assert (plain["against"], plain["grade"], plain["items"]) == ("transformers", "exact", plain["identical"])
    assert plain["items"] > 0
    assert (drafted["against"], drafted["grade"], drafted["identical"]) == ("ar@ar/vllm", "divergent", 0)
    assert 0 < drafted["first_divergence"] <= 3
    [decided] = found.decision["recommendations"]
    assert (decided["same_tokens"], decided["within_loss"]) == (None, None)
    audit = mtbench.audit(f"{tmp_path}/DIR:ar", f"{tmp_path}/DIR:prompt-lookup", out=tmp_path / "audit")
    assert {finding["name"] for finding in audit.record["findings"]} == {"beyond rounding, not explained"}
    assert not audit.record["explained"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_architecture_is_served_or_refused_by_vllm_itself(name: str, tmp_path: Path) -> None:
    """The row of docs/engines.md: whether n-gram drafts change answers there, or vLLM's own cause in one line."""
    (prompts := tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "Copy: {n} + {n} = {2 * n}; {n} + {n} = "}}\n' for n in range(11, 15))
    )
    results = mtbench.run(
        suite=f"prompts:{prompts}",
        model=str(save_architecture(tmp_path / name, name)),
        engine="vllm",
        engine_option=("vllm:enforce-eager",),
        method=("ar", "prompt-lookup:match=earliest,ahead=3"),
        max_new_tokens=24,
        ignore_eos=True,
        batch_size=1,
        rounds=1,
        dtype="bfloat16",
        out=tmp_path / "DIR",
    )
    plain, drafted = results.record["cells"]
    served = "served" if not plain["error"] else re.split(r" did not start: |\. See /", plain["error"])[1]
    graded = drafted["lossless"] or {"identical": "–", "items": "–"}
    row = f"| `{name}` | {served} | {graded['identical']} of {graded['items']} |"
    assert row in DOCS.read_text(encoding="utf-8"), row
