"""Files of other tools: each figure is the one that the tool printed, and what mtbench does not know is refused."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_files import TEXTS, VLLM, lines

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedResult
from mtbench.results.imports.registry import IMPORTERS, MOST_RESULTS, read_file

Reader = Callable[..., list[ImportedResult]]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    """Import texts as files whose names say nothing."""

    def reader(*texts: str | bytes) -> list[ImportedResult]:
        results: list[ImportedResult] = []
        for number, text in enumerate(texts):
            path = tmp_path / f"file{number}"
            path.write_bytes(text.encode() if isinstance(text, str) else text)
            results += read_file(path)
        return results

    return reader


@pytest.fixture
def refused(read: Reader) -> Callable[..., str]:
    """Return the one line for a text that cannot be imported."""

    def refuse(text: str | bytes) -> str:
        with pytest.raises(UserError) as raised:
            read(text)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 700
        return str(raised.value)

    return refuse


def values(result: ImportedResult) -> dict[str, float]:
    return {figure.name: figure.value for figure in result.figures}


def ours(result: ImportedResult) -> dict[str, str]:
    return {figure.name: figure.ours for figure in result.figures if figure.ours}


def test_vllm(read: Reader) -> None:
    """The rate is in percent, the rates by position are shares; any percentile is read."""
    (result,) = read(TEXTS["vllm"])
    found = values(result)
    for name in ("output_throughput", "spec_decode_acceptance_length", "spec_decode_acceptance_rate", "p99.9_itl_ms"):
        assert found[name] == VLLM[name]
    assert found["spec_decode_per_position_acceptance_rates[1]"] == 0.375
    units = {figure.name: figure.unit for figure in result.figures}
    assert units["spec_decode_acceptance_rate"] == "percent"
    assert units["spec_decode_per_position_acceptance_rates[1]"] == "share"
    assert "request_goodput" not in found
    assert ours(result) == {
        "spec_decode_acceptance_length": "acceptance.derived.vllm",
        "spec_decode_acceptance_rate": "acceptance.rate",
    }
    assert result.settings["request_rate"] == "inf"


def test_an_appended_vllm_file_holds_a_result_for_each_line(read: Reader) -> None:
    results = read(f"{json.dumps(VLLM)}\n{json.dumps(VLLM | {'output_throughput': 7.0})}")
    assert [(result.part, values(result)["output_throughput"]) for result in results] == [
        ("line 1", 120.0),
        ("line 2", 7.0),
    ]


def test_guidellm(read: Reader) -> None:
    """What the console of guidellm 0.8.1 printed: latencies of completed requests, throughput of all requests."""
    (result,) = read(TEXTS["guidellm"])
    shown = {name: f"{value:.1f}" for name, value in values(result).items()}
    printed = {
        "requests_per_second.total.mean": "53.1",
        "output_tokens_per_second.total.mean": "318.7",
        "tokens_per_second.total.mean": "956.1",
        "request_concurrency.total.mean": "1.8",
        "time_to_first_token_ms.successful.mean": "12.2",
        "time_to_first_token_ms.successful.median": "12.2",
        "time_to_first_token_ms.successful.p95": "13.0",
        "inter_token_latency_ms.successful.mean": "4.1",
        "time_per_output_token_ms.successful.mean": "5.5",
        "output_tokens_per_iteration.successful.median": "2.5",
        "request_totals.successful": "6.0",
    }
    assert shown | printed == shown
    assert (result.version, result.model, result.part) == ("0.8.1", "tiny", "concurrent, streams 2")


def test_aiperf(read: Reader) -> None:
    """What aiperf 0.13.0 printed."""
    (result,) = read(TEXTS["aiperf"])
    shown = {name: f"{value:.2f}" for name, value in values(result).items()}
    printed = {
        "spec_decode_acceptance_length": "2.25",
        "spec_decode_token_weighted_acceptance_length": "2.40",
        "spec_decode_draft_acceptance_rate, avg": "41.67",
        "spec_decode_overall_draft_acceptance_rate": "46.67",
        "time_to_first_token, avg": "18.09",
        "time_to_first_token, p99": "27.57",
        "request_latency, p50": "39.03",
        "inter_token_latency, avg": "4.18",
        "output_token_throughput": "234.04",
        "request_throughput": "39.01",
    }
    assert shown | printed == shown
    assert ours(result) == {
        "spec_decode_acceptance_length": "acceptance.derived.aiperf",
        "spec_decode_token_weighted_acceptance_length": "acceptance.derived.vllm",
        "spec_decode_overall_draft_acceptance_rate": "acceptance.rate",
    }
    assert (result.version, result.model) == ("0.13.0", "tiny")


def test_lm_eval_results(read: Reader) -> None:
    """What lm-eval 0.4.13 printed: acc 0.125 ± 0.125. The definition names task, version, shots and items."""
    (result,) = read(TEXTS["lm_eval_results"])
    assert values(result) == {"sums: acc,none": 0.125, "sums: acc_stderr,none": 0.125}
    assert result.figures[0].definition == (
        "lm-eval's metric `acc` after the filter `none` on sums, version 2.0, 0-shot, 8 items."
    )
    assert (result.version, result.model) == ("0.4.13", "dummy")


def test_tools_share_a_meaning_only_where_the_formula_is_the_same(read: Reader) -> None:
    """vLLM's and aiperf's pooled acceptance are one figure; their rates and latencies are not."""
    tools: dict[str, set[str]] = {}
    for result in read(*TEXTS.values()):
        for figure in result.figures:
            tools.setdefault(figure.meaning, set()).add(result.tool)
    shared = {meaning: sorted(names) for meaning, names in tools.items() if len(names) > 1}
    assert shared == {
        "acceptance length, pooled": ["aiperf", "vLLM"],
        "acceptance rate, pooled": ["aiperf", "vLLM"],
    }


def test_a_meaning_has_one_unit_and_one_definition(read: Reader) -> None:
    figures = [figure for result in read(*TEXTS.values()) for figure in result.figures]
    kinds = {(figure.meaning, figure.unit, figure.definition, figure.ours) for figure in figures}
    assert len(kinds) == len({figure.meaning for figure in figures})


def other_version(text: str, *path: str, version: Any) -> str:
    document = json.loads(text)
    place = document
    for name in path[:-1]:
        place = place[name]
    if version is None:
        del place[path[-1]]
    else:
        place[path[-1]] = version
    return json.dumps(document)


@pytest.mark.parametrize(
    ("tool", "path", "version", "line"),
    [
        ("guidellm", ("metadata", "version"), 1, "metadata.version is 1; mtbench imports version 2."),
        ("guidellm", ("metadata",), None, "metadata.version is unrecorded; mtbench imports version 2."),
        ("aiperf", ("schema_version",), "1.1", "schema_version is '1.1'; mtbench imports version 1.4."),
        (
            "lm_eval_results",
            ("lm_eval_version",),
            "0.3.0",
            "lm_eval_version is '0.3.0'; mtbench imports versions 0.4.x.",
        ),
        (
            "lm_eval_results",
            ("lm_eval_version",),
            "0.41.0",
            "lm_eval_version is '0.41.0'; mtbench imports versions 0.4.x.",
        ),
    ],
)
def test_another_version_is_named(
    refused: Callable[..., str], tool: str, path: tuple[str, ...], version: Any, line: str
) -> None:
    assert line in refused(other_version(TEXTS[tool], *path, version=version))


def changed(document: dict[str, Any], **changes: Any) -> str:
    return json.dumps({k: v for k, v in (document | changes).items() if v != "gone"})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "not JSON"),
        ("no JSON", "not JSON"),
        ("{}", "no known format; mtbench imports vLLM `bench serve` JSON, guidellm"),
        ("[]", "no known format"),
        ("null", "no known format"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (json.dumps({"results": [1], "versions": 1, "config": 1}), "no known format"),
        (lines(VLLM) + "{torn", "line 2: not JSON"),
        (changed(VLLM, output_throughput="gone"), "output_throughput is null; it must be a finite number."),
        (changed(VLLM, mean_ttft_ms=math.nan), "mean_ttft_ms is nan; it must be a finite number."),
        (changed(VLLM, spec_decode_acceptance_rate="46"), "spec_decode_acceptance_rate is '46'; it must be a finite"),
        (changed(VLLM, duration=10**400), "duration is a huge number; it must be a finite number."),
        (changed(VLLM, spec_decode_per_position_acceptance_rates={"0": 1}), "is an object; it must be an array"),
        (lines(VLLM, 1), "line 2: it is 1; it must be an object."),
        (TEXTS["guidellm"].replace('"request_totals"', '"totals"'), "request_totals is missing"),
        (other_version(TEXTS["guidellm"], "benchmarks", version=[]), "benchmarks is empty"),
        (
            other_version(TEXTS["aiperf"], "request_latency", "unit", version="s"),
            "unit of request_latency is 's'; mtbench",
        ),
        (
            other_version(TEXTS["aiperf"], "request_latency", version=1.0),
            "request_latency is 1.0; it must be an object.",
        ),
        (other_version(TEXTS["lm_eval_results"], "results", version={}), "results holds no metric"),
        (
            other_version(TEXTS["lm_eval_results"], "results", "sums", version=[]),
            "sums is an array; it must be an object.",
        ),
        (changed(VLLM | {"mean_ttft_ms": "\x1b[2J\n" * 90}), "it must be a finite number."),
    ],
)
def test_a_broken_file_is_one_line(refused: Callable[..., str], text: str | bytes, line: str) -> None:
    assert line in refused(text)


def test_too_many_results_are_refused(refused: Callable[..., str]) -> None:
    line = refused(lines(*[VLLM] * (MOST_RESULTS + 1)))
    assert "over 1,000 results" in line


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    for path, line in ((tmp_path, "not a plain file"), (tmp_path / "none", "is missing")):
        with pytest.raises(UserError, match=line):
            read_file(path)


WRONG: list[Any] = [None, "x", [], {"a": []}]


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_with_any_wrong_member_is_read_or_refused(tmp_path: Path, name: str) -> None:
    """No member of a stranger's file is trusted: with one null, a text or an array, UserError is the only error."""
    document = json.loads(TEXTS[name])
    path = tmp_path / "file"
    for place in [*places(document)]:
        for wrong in WRONG:
            path.write_text(json.dumps(replaced(document, place, wrong)))
            with contextlib.suppress(UserError):
                read_file(path)


def places(document: Any, depth: int = 6) -> list[tuple[Any, ...]]:
    """Places in a document down to a depth: all upper ones, and some of the lower ones."""
    if not depth or not isinstance(document, dict | list):
        return []
    members = [*(document.items() if isinstance(document, dict) else enumerate(document[:2]))]
    members = members if depth > 5 else members[:2]
    return [(name, *rest) for name, value in members for rest in ((), *places(value, depth - 1))]


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = replaced(document[place[0]], place[1:], value)
    return copy


def test_every_importer_has_a_file_here(read: Reader) -> None:
    assert {result.format for result in read(*TEXTS.values())} == {known.format for known in IMPORTERS}
