"""A server as an arm: what it streams is kept, what it hides is null, what breaks is said."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import decode_prompts, run_external
from rich.console import Console
from service import Answer, Service, serving
from small import save_small
from stages import assemble, generate, score
from stored import stored_lines

from mtbench.clients.openai_client import ServerError
from mtbench.decoding.arms import parse_arms
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.engine_arms import servers_of
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.loading import Inspected, inspect, load
from mtbench.models.runner import ModelRunner
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump
from mtbench.report.progress import RunProgress

TEXTS = ["12 plus 30 is 42.\nThe answer is 42.", "7 times 6 is 42.\nThe answer is 42.\n\nAnd so on", "1"]
PROMPTS = [[11, 12, 13], [14], [15, 16]]


@pytest.fixture(scope="module")
def words() -> Inspected:
    """A byte-level tokenizer: what it joins it splits again."""
    return inspect("embedded:tiny/ar")


@pytest.fixture
def service(words: Inspected) -> Iterator[Service]:
    """Says the text that belongs to the prompt, up to a stop string or the end token, and sends that too."""
    tokenizer, texts = words.tokenizer, dict(zip(map(tuple, PROMPTS), TEXTS, strict=True))

    def answer(body: Mapping[str, Any]) -> Answer:
        prompt = body["prompt"]
        asked = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        ids = tokenizer(texts[tuple(asked)], add_special_tokens=False).input_ids
        ids = ids * 40 if body.get("ignore_eos") else [*ids, *words.end_ids]
        for n in range(1, 1 + min(len(ids), body["max_tokens"])):
            if said := next((s for s in body.get("stop", ()) if s in tokenizer.decode(ids[:n])), None):
                return ids[:n], "stop", said
            if ids[n - 1] in words.end_ids:
                return ids[:n], "stop", None
        return ids[: body["max_tokens"]], "length", None

    with serving(Service(answer, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))) as service:
        yield service


def ask(
    service: Service, words: Inspected, budget: Any = 100, *, prompts: Any = PROMPTS, method: Any = None, **options: Any
) -> tuple[list[Generation], Timing]:
    """What the arm gets of the service."""
    chosen = METHODS["openai"](url=service.url, **(method or {}))
    return run_external(chosen, {"ar": words}, prompts, budget, **options)


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_streamed_answer_is_its_tokens_with_the_end_token(
    tells_ids: bool, service: Service, words: Inspected
) -> None:
    """By the ids that the server tells, or by those of its text: the same, and as many as the server counts."""
    service.tells_ids = tells_ids
    generations, timing = ask(service, words, [100, 5, 100])
    assert [g.text for g in generations] == [TEXTS[0], "7 times", TEXTS[2]]
    assert [g.finish_reason for g in generations] == ["end", "length", "end"]
    assert generations[2].token_ids == [*words.tokenizer("1", add_special_tokens=False).input_ids, *words.end_ids]
    assert [len(g.token_ids) for g in generations[1:]] == [5, 2]
    assert timing.tokens == timing.counted == sum(len(g.token_ids) for g in generations)


@pytest.mark.parametrize("tells_ids", [True, False])
def test_an_answer_ends_with_its_stop_string(tells_ids: bool, service: Service, words: Inspected) -> None:
    """Cut at the same letter and token whether the server tells ids, or names the string."""
    service.tells_ids = tells_ids
    generations, timing = ask(service, words, stop=[["\n\n", "times"], ["\n\n", "answer"], []])
    assert [(g.text, g.finish_reason) for g in generations] == [
        (TEXTS[0], "end"),
        (TEXTS[1].partition("answer")[0], "stop"),
        (TEXTS[2], "end"),
    ]
    assert words.tokenizer.decode(generations[1].token_ids).endswith("answer")
    assert timing.counted == timing.tokens


OPENAI = {"model", "prompt", "max_tokens", "temperature", "presence_penalty", "frequency_penalty", "stop", "stream"}


def test_a_server_that_takes_openais_fields_only(service: Service, words: Inspected) -> None:
    """As `transformers serve`: prompts are text then. A fixed length needs a field that OpenAI does not have."""
    service.knows, service.tells_ids = OPENAI | {"stream_options"}, False
    with pytest.raises(ServerError, match=r"answers 422 to completions: .*, or add plain=true"):
        ask(service, words)
    generations, _ = ask(service, words, method={"plain": True})
    assert [g.text for g in generations] == TEXTS
    with pytest.raises(ServerError, match="leave out plain=true or --ignore-eos"):
        ask(service, words, method={"plain": True}, ignore_eos=True)


def test_a_batch_is_as_many_requests_at_once(service: Service, words: Inspected) -> None:
    """The server answers nobody before all have asked; each asks for itself, greedily, by token ids."""
    service.together = asyncio.Barrier(len(PROMPTS))
    ask(service, words, [8, 9, 10], stop=[["x"], [], []])
    asked = sorted((body for _, _, body in service.seen if body), key=lambda body: body["max_tokens"])
    assert [(b["prompt"], b["max_tokens"], b.get("stop"), b.get("skip_special_tokens")) for b in asked] == [
        (PROMPTS[0], 8, ["x"], False),  # a stop may be a special token
        (PROMPTS[1], 9, None, None),
        (PROMPTS[2], 10, None, None),
    ]
    assert {(b["model"], b["temperature"], b["repetition_penalty"], b["ignore_eos"]) for b in asked} == {
        ("served", 0, 1, False)
    }
    assert len({b["cache_salt"] for b in asked}) == len(asked), "nothing is kept from one request for another"


def test_time_to_first_token_is_the_slowest_rows(service: Service, words: Inspected) -> None:
    """From the stream, not from its end; whatever else the server hides is None."""
    service.delay_s = 0.02
    _, timing = ask(service, words, [20, 3, 3])
    assert timing.ttft_s is not None
    assert 0.02 <= timing.ttft_s < 0.2 < 20 * 0.02 <= timing.wall_s
    hidden = ("row_forwards", "batch_forwards", "prefill_s", "decode_s", "device_s", "step_s", "draft_s", "kv_bytes")
    assert [getattr(timing, name) for name in hidden] == [None] * len(hidden)


def test_at_fixed_length_every_row_spends_its_budget(service: Service, words: Inspected) -> None:
    """By `ignore_eos`; a server that ends all the same is found out."""
    generations, _ = ask(service, words, [30, 3, 12], ignore_eos=True, stop=[["answer"]] * 3)
    assert [(len(g.token_ids), g.finish_reason) for g in generations] == [(n, "length") for n in (30, 3, 12)]
    plain = service.answer
    service.answer = lambda body: plain({**body, "ignore_eos": False})
    with pytest.raises(ServerError, match="does not support ignore_eos; leave out --ignore-eos or this arm"):
        ask(service, words, 30, ignore_eos=True)


@pytest.mark.parametrize(
    ("told", "each", "of_batch"),
    [
        ([0, 0, 0], [0, 0, 0], 0),
        ([2, None, None], [2, None, None], 2),
        ([None] * 3, [None] * 3, None),
    ],
    ids=["none was cached", "a 0 is left out", "silent"],
)
def test_cached_tokens_are_the_servers(
    told: list[int | None], each: list[int | None], of_batch: int | None, service: Service, words: Inspected
) -> None:
    """Of each request, and their sum: a prompt that the server had is not read, whatever was asked of it."""
    service.cached = lambda prompt: told[PROMPTS.index(prompt)]
    generations, timing = ask(service, words)
    assert ([g.cached_tokens for g in generations], timing.cached_tokens) == (each, of_batch)


VLLM = {
    "mean_acceptance_length": 1.75,
    "draft_acceptance_rate": 0.25,
    "acceptance_histogram": [2, 1, 1, 0],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 12,
    "num_spec_tokens": 3,
}
SGLANG = {
    "spec_accept_rate": 0.25,
    "spec_accept_length": 1.75,
    "spec_verify_ct": 4,
    "spec_num_correct_drafts": 3,
    "spec_num_proposed_drafts": 12,
    "spec_correct_drafts_histogram": [2, 1, 1],
}


@pytest.mark.parametrize(
    ("said", "engine", "each"),
    [
        ({"metrics": {"time_to_first_token_ms": 3.0, "speculative_decoding": VLLM}}, "vLLM", (4, 12, 3)),
        ({"sglext": {"spec_tokens_details": SGLANG}}, "SGLang", (4, 12, 3)),
        ({"metrics": {"speculative_decoding": VLLM | {"num_draft_tokens": None}}}, "vLLM", (4, None, 3)),
        ({"metrics": {"speculative_decoding": VLLM | {"num_spec_steps": -1}}}, None, None),
        ({"metrics": {"speculative_decoding": {"acceptance_histogram": [1], "num_spec_steps": 1}}}, None, None),
    ],
    ids=["vLLM", "SGLang", "drafted tokens are not reported", "a wrong number", "TensorRT-LLM's form"],
)
def test_what_it_says_of_each_request_is_kept(
    service: Service, words: Inspected, said: dict[str, Any], engine: str | None, each: tuple[int | None, ...] | None
) -> None:
    """Another form is left unread."""
    service.beside_usage = said
    timing, asked = ask(service, words)[1], len(PROMPTS)
    if each is None:
        assert (timing.drafts, timing.histogram, timing.reported_by) == (None, None, None)
        return
    total = tuple(None if count is None else count * asked for count in each)
    assert (timing.drafts, timing.drafted, timing.accepted) == total
    assert timing.histogram is not None
    assert timing.histogram[:3] == [2 * asked, asked, asked]
    assert timing.reported_by == f"the server's metrics of each request, as {engine} names them"


def test_the_key_comes_from_the_environment_alone(
    service: Service, words: Inspected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "s3cret")
    ask(service, words, method={"api_key_env": "SOME_KEY"})
    assert {headers["authorization"] for _, headers, _ in service.seen} == {"Bearer s3cret"}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://me:pass@host/v1", "http://host/v1?key=1"])
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    """Before anything runs, for it would stand in every file."""
    with pytest.raises(UserError, match="is not a server's plain address"):
        parse_arms([f"openai:url={url}"])


def request_for(folder: Path, url: str, **changes: Any) -> RunRequest:
    asked: dict[str, Any] = {
        "checkpoint": {"ar": str(folder)},
        "method": ["ar", f"openai:url={url}"],
        "batch_size": (1, 2),
        "limit": 5,
        "rounds": 2,
        "max_new_tokens": 6,
        "device": "cpu",
    }
    return RunRequest(**(asked | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("checkpoint"), 1)


@pytest.fixture
def same_model(folder: Path) -> Iterator[Service]:
    """Serves the very checkpoint of the run, decoded in its own way, one request after the other."""
    checkpoint = load(str(folder))

    def answer(body: Mapping[str, Any]) -> Answer:
        runners = ModelRunners("ar", {"ar": ModelRunner(checkpoint)})
        [said], _ = decode_prompts(
            METHODS["ar"](), runners, [body["prompt"]], body["max_tokens"], ignore_eos=body["ignore_eos"]
        )
        return said.token_ids, "length" if said.finish_reason == "length" else "stop", None

    with serving(Service(answer, lambda ids: str(checkpoint.tokenizer.decode(ids, skip_special_tokens=True)))) as it:
        yield it


def finish(folder: Path, request: RunRequest) -> tuple[RunDirectory, dict[str, Any]]:
    run = RunDirectory.create(folder)
    run.write_json("environment.json", {"command": ["mtbench", "run"]})
    plan = make_plan(request)
    run.write_json("plan.json", dump(plan))
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells if cell.method == "ar"})
    with RunProgress(Console(quiet=True)) as progress:
        generate(run, progress, Execution(servers=frozenset(servers_of(request))))
    score(run)
    return run, dump(assemble(run))


@pytest.mark.whole
def test_a_whole_run_beside_ar(same_model: Service, folder: Path, tmp_path: Path) -> None:
    """The same tokens from the same weights; what it hides is null; a server that is not there costs its own cells."""
    same_model.counted_besides = 1
    same_model.cached = lambda prompt: len(prompt) - 1
    there, gone = f"openai:url={same_model.url}", "openai:url=http://127.0.0.1:9/v1"
    run, results = finish(tmp_path / "run", request_for(folder, same_model.url, method=["ar", there, gone]))
    cells = {(c["arm"], c["batch_size"]): c for c in results["cells"]}
    ar, served, failed = (cells[f"{arm}@ar{engine}", 2] for arm, engine in (("ar", "/graph"), (there, ""), (gone, "")))
    assert [c["status"] for c in (ar, served, failed)] == ["ok", "ok", "failed"]
    assert re.fullmatch(r"http://127.0.0.1:9/v1 cannot be reached \(.*\); start .*, or give its url=", failed["error"])

    tokens = [
        [g["token_ids"] for g in sorted(stored_lines(run, f"generations/{c['cell']}.jsonl"), key=lambda g: g["item"])]
        for c in (ar, served)
    ]
    assert tokens[0] == tokens[1]
    assert (served["void"], served["lossless"]) == ([], None)
    hidden = (
        "tokens_per_forward",
        "decode_s",
        "device_s",
        "peak_memory_bytes",
        "energy_j",
        "roofline_fraction",
        "kv_bytes",
    )
    assert [served[name] for name in hidden] == [None] * len(hidden)
    assert served["energy_reason"]
    assert served["roofline_reason"]
    assert served["ttft_s"]["p50"] > 0
    counted = [c for c in served["flags"] if c.startswith("token counts differ")]
    assert counted == [f"token counts differ: engine {c + 5 * 2:,}, ours {c:,}" for c in (2 * served["tokens"],)]
    timings = stored_lines(run, f"timings/{served['cell']}.jsonl")
    kept = sum(t["prompt_tokens"] - t["items"] for t in timings)
    assert any(
        flag.startswith(f"the server had cached {kept:,} tokens of prompts in 6 of 6") for flag in served["flags"]
    )

    engine = [s for s in ar["speedup"] if s.get("includes_engine")]
    assert [s["baseline"] for s in engine] == [f"{there}@ar"]
    assert engine[0]["value"] > 0


@pytest.mark.whole
@pytest.mark.parametrize("refuses", [False, True])
def test_a_warm_up_sends_no_prompt_that_is_timed(
    refuses: bool, same_model: Service, folder: Path, tmp_path: Path
) -> None:
    """Else the server might keep it. A server that refuses the others is warmed up by those that are timed."""
    alone: dict[str, Any] = {"method": [f"openai:url={same_model.url}"], "batch_size": (2,), "rounds": 1}
    request = request_for(folder, same_model.url, **alone)
    planned = {tuple(item.prompt_ids) for item in make_plan(request).suites[0].items}
    answer, others = same_model.answer, list[tuple[int, ...]]()

    def picky(body: Mapping[str, Any]) -> Answer:
        if tuple(body["prompt"]) in planned:
            return answer(body)
        others.append(tuple(body["prompt"]))
        return ([], "stop", None) if refuses else answer(body)

    same_model.answer = picky
    run, results = finish(tmp_path / "run", request)
    assert results["cells"][0]["status"] == "ok"
    sent = [tuple(body["prompt"]) for _, _, body in same_model.seen if body]
    [line] = stored_lines(run, "preparation.jsonl")
    assert (len(line.get("unseen", [])) > 1) != refuses
    assert (len(sent) > len(set(sent))) == refuses, "every prompt is sent once"
    assert {tuple(sorted(ids)) for ids in others} <= {tuple(sorted(ids)) for ids in planned}


@pytest.mark.whole
@pytest.mark.parametrize(("fault", "again"), [("ends", True), ("nonsense", False)])
def test_a_failure_that_may_pass_is_tried_again(
    fault: str, again: bool, same_model: Service, folder: Path, tmp_path: Path
) -> None:
    """By the next session, side by side with the others; one that stays the same is not."""
    same_model.fault = fault
    run, results = finish(tmp_path / "run", request_for(folder, same_model.url, batch_size=(2,)))
    assert [c["status"] for c in results["cells"]] == ["ok", "failed"]
    [line] = stored_lines(run, "failures.jsonl")
    assert line.get("again", False) == again
    of_ar = f"timings/{results['cells'][0]['cell']}.jsonl"
    decoded = run.sha256(of_ar)
    with RunProgress(Console(quiet=True)) as progress:
        generate(run, progress)
        assert run.sha256(of_ar) == decoded, "nothing is lost if it fails again"
        same_model.fault = None
        generate(run, progress)
    score(run)
    cells = dump(assemble(run))["cells"]
    assert [c["status"] for c in cells] == ["ok", "ok" if again else "failed"]
    assert bool(stored_lines(run, "failures.jsonl")) != again
    if again:
        assert cells[0]["samples"] == cells[1]["samples"] == {"used": 6, "dropped": 0}
        assert cells[0]["speedup"]


def test_no_weights_are_loaded_for_it(folder: Path) -> None:
    """It needs the tokenizer alone, and the ends of an answer that a loaded checkpoint would have."""
    lab = ModelPool(request_for(folder, "http://127.0.0.1:8000/v1"))
    plan = make_plan(request_for(folder, "http://127.0.0.1:8000/v1", method=["openai"]))
    threads = torch.get_num_threads()
    lab.load(plan.cells)
    torch.set_num_threads(threads)
    assert (lab.checkpoints, lab.runners) == ({}, {})
    known = lab.known(METHODS["openai"](), str(folder))
    assert isinstance(known, Inspected)
    assert known.end_ids == load(str(folder)).end_ids
    assert inspect("embedded:tiny/ar").end_ids == load("embedded:tiny/ar").end_ids


def test_offline_leaves_only_this_machine(folder: Path) -> None:
    """Another host is refused before anything runs; loopback is not the network."""

    def loaded(url: str) -> None:
        plan = make_plan(request_for(folder, url, method=[f"openai:url={url}"], offline=True))
        ModelPool(plan.request).load(plan.cells)

    for url in ("http://10.1.2.3:8000/v1", "https://api.example.org/v1"):
        with pytest.raises(UserError, match=r"asks (10\.1\.2\.3|api\.example\.org), which --offline forbids"):
            loaded(url)
    for url in ("http://127.0.0.5:8000/v1", "http://localhost:8000/v1", "http://[::1]:8000/v1"):
        loaded(url)
