"""The server over real HTTP, on a small model: the same answers, the protocol, and what goes wrong."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from decoding_cases import MANY, ar, mars, on, requests_for
from live_server import WAIT_S, Running, events, serving, small_served, spec, text_of_events
from small import CHAT, MASK, PAD, TEMPLATES, VOCABULARY, small_checkpoint

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import decode
from mtbench.decoding.method import Method
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling
from mtbench.serving import app, wire

BUDGET = 20
TAUS = [1.0, 0.3, 0.05, 0.6]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ENGINES["graph"]().runner(small_checkpoint())


@pytest.fixture(scope="module")
def reference(runner: ModelRunner) -> ModelRunner:
    """The same model with a cache of its own: the server's batch keeps the other one."""
    return ENGINES["graph"]().runner(runner.checkpoint)


@pytest.fixture(scope="module")
def mars_server(runner: ModelRunner) -> Iterator[Running]:
    with serving(small_served(mars(tau=0.5), runner)) as running:
        yield running


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def streamed(running: Running, **body: Any) -> list[dict[str, Any]]:
    """The messages of a streamed completion."""
    with running.client() as client, client.stream("POST", "/completions", json=body | {"stream": True}) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        return events(got)


def test_answers_are_those_of_a_run_whoever_else_asks(reference: ModelRunner, mars_server: Running) -> None:
    """28 at once, ragged, streamed or not, each at its own τ: tokens and text of `decode` at that τ."""
    asked = [
        replace(request, options={"tau": TAUS[i % 4]}, max_new_tokens=5 + i % 17)
        for i, request in enumerate(requests_for(MANY * 3 + MANY[:1], BUDGET))
    ]
    want, _ = decode(mars(tau=0.5), on(reference), asked, rows=8)

    def ask(i: int) -> tuple[list[int], str]:
        body = {"prompt": list(asked[i].prompt_ids), "max_tokens": asked[i].max_new_tokens, "return_token_ids": True}
        body |= {"tau": TAUS[i % 4]}
        if i % 2:
            choice = mars_server.complete(**body)["choices"][0]
            return choice["token_ids"], choice["text"]
        messages = streamed(mars_server, **body)
        ids = [token for message in messages for choice in message["choices"] for token in choice["token_ids"]]
        return ids, text_of_events(messages)

    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(ask, range(len(asked))))
    assert got == [(g.token_ids, g.text) for g in want]
    assert mars_server.metric("mtbench_rows_running") == mars_server.metric("mtbench_queue_length") == 0


def test_an_answer_says_what_it_took(mars_server: Running) -> None:
    """Forwards and tokens agree with the acceptance that vLLM's clients read, and τ is told."""
    answer = mars_server.complete(prompt=[3, 5], max_tokens=30, ignore_eos=True, tau=0.05)
    told, steps = spec(answer), answer["metrics"]["speculative_decoding"]
    assert answer["usage"]["completion_tokens"] == 30
    assert told["options"] == [{"tokens": 30, "tau": 0.05}]
    assert told["forwards"] + steps["num_accepted_draft_tokens"] == 30
    assert sum(n * count for n, count in enumerate(steps["acceptance_histogram"])) == steps["num_accepted_draft_tokens"]
    assert sum(steps["acceptance_histogram"]) == steps["num_spec_steps"] == len(steps["per_step_accepted"])
    assert told["queued_s"] >= 0
    one = mars_server.complete(prompt=[3, 5], max_tokens=30, ignore_eos=True, tau=1)
    assert spec(one)["forwards"] == 30


def test_usage_stands_where_a_stream_asks_for_it(mars_server: Running) -> None:
    """In a message of its own without choices, or in none. Metrics are in the last message."""
    body = {"prompt": [3, 5, 7], "max_tokens": 12, "ignore_eos": True}
    plain = streamed(mars_server, **body)
    assert all(message["choices"] and "usage" not in message for message in plain)
    assert [message["choices"][0]["finish_reason"] for message in plain][-1] == "length"
    assert "metrics" in plain[-1]
    *chunks, last = streamed(mars_server, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert "metrics" in last
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer(reference: ModelRunner, mars_server: Running, stream: bool) -> None:
    """The text ends before it, and the answer names it."""
    [whole], _ = decode(mars(tau=0.05), on(reference), requests_for([[3, 5]], BUDGET))
    stop = whole.text[4:6]
    body = {"prompt": [3, 5], "max_tokens": BUDGET, "tau": 0.05, "stop": stop}
    messages = streamed(mars_server, **body) if stream else [mars_server.complete(**body)]
    choice = messages[-1]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert text_of_events(messages) == whole.text[: whole.text.index(stop)]


def test_a_seed_decides_a_sampled_answer(mars_server: Running) -> None:
    def text(seed: int | None, temperature: float = 1.5) -> str:
        body = {"prompt": [3, 5], "max_tokens": 16, "ignore_eos": True, "temperature": temperature}
        return str(mars_server.complete(**body, seed=seed, top_p=1)["choices"][0]["text"])

    assert text(7) == text(7)
    assert len({text(seed) for seed in (1, 2, 3, None)}) > 1
    assert text(1, 0.0) == text(2, 0.0)


def test_a_batch_has_rows_of_any_sampling(reference: ModelRunner) -> None:
    """Each answer is that of its request alone. What a request does not name is the server's; a top_k of -1 is none."""
    own = Sampling(1.5, top_k=3)
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": -1},
        {"top_k": 0, "top_p": 0.5},
        {"temperature": 0.8, "top_k": -1, "min_p": 0.2},
        {"top_k": 1},
    ]
    own_runner = ENGINES["graph"]().runner(reference.checkpoint)
    with serving(replace(small_served(ar(), own_runner, rows=len(bodies)), sampling=own)) as running:

        def ask(number: int) -> list[int]:
            body = {"prompt": [3, 5], "max_tokens": BUDGET, "ignore_eos": True, "seed": number}
            return list(running.complete(**body, **bodies[number], return_token_ids=True)["choices"][0]["token_ids"])

        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(ask, range(len(bodies))))
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        settings = {**asdict(own), **body}
        settings["top_k"] = max(settings["top_k"], 0)
        [request] = requests_for([[3, 5]], BUDGET, seeds=[number])
        [alone], _ = decode(ar(), on(reference), [request], ignore_eos=True, sampling=Sampling(**settings))
        assert answer == alone.token_ids
    assert len(set(map(tuple, answers))) > 3


def test_openais_client_reads_chats_streams_and_errors(mars_server: Running) -> None:
    """The package `openai`, whole and streamed, with an option of the method in `extra_body`."""
    import openai  # takes a second in every process that collects tests

    with openai.OpenAI(base_url=mars_server.url, api_key="any", max_retries=0) as client:
        asked: Any = {"model": "small", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 12}
        asked |= {"extra_body": {"tau": 0.05}}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert told == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [model.id for model in client.models.list()] == ["small"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(**asked | {"model": "other"})
        with pytest.raises(openai.BadRequestError, match="tau"):
            client.chat.completions.create(**asked | {"extra_body": {"tau": 2}})


@pytest.mark.parametrize(
    ("template", "body", "ids"),
    [
        (None, {"prompt": "b c"}, [PAD, 1, 2]),
        (None, {"prompt": "b c", "add_special_tokens": False}, [1, 2]),
        (CHAT, {"messages": [{"role": "user", "content": "c"}]}, [1, 2]),
        (CHAT, {"messages": [{"role": "user", "content": "c"}], "add_special_tokens": True}, [PAD, 1, 2]),
        (TEMPLATES["writes BOS"], {"messages": [{"role": "user", "content": "c"}]}, [PAD, 1, 2]),
        (None, {"messages": [{"role": "user", "content": "c"}]}, "template .* is missing .*/v1/completions"),
        (None, {"prompt": "b <|mask|>"}, r"token id 38; ids are below 38"),
    ],
)
def test_a_prompt_has_the_tokens_that_vllm_makes(
    template: str | None, body: dict[str, Any], ids: list[int] | str, runner: ModelRunner
) -> None:
    """Special tokens are the tokenizer's own, except of a chat, where the template writes them."""
    served = replace(small_served(ar(), runner, template=template), vocabulary=MASK)

    def read() -> list[int]:
        return list(
            wire.parse(json.dumps(body).encode(), served, chat="messages" in body, max_new_tokens=4).request.prompt_ids
        )

    if isinstance(ids, list):
        assert read() == ids
    else:
        with pytest.raises(wire.BadRequestError, match=ids):
            read()


NEUTRAL = {"n": 1, "repetition_penalty": 1, "presence_penalty": 0.0, "cache_salt": "x", "min_tokens": 0, "top_p": 0.9}


def test_fields_that_change_nothing_are_accepted(mars_server: Running) -> None:
    plain = mars_server.complete(prompt=[3, 4], max_tokens=6)["choices"]
    for body in (NEUTRAL, {"logprobs": None, "user": "me"}, {"response_format": {"type": "text"}}):
        assert mars_server.complete(prompt=[3, 4], max_tokens=6, **body)["choices"] == plain


MESSAGES: list[tuple[dict[str, Any], str | None]] = [  # a message, and what refuses it; None: it is as "a b"
    ({"content": "a b", "name": None, "refusal": None, "tool_calls": [], "annotations": [{}]}, None),
    ({"content": [{"type": "text", "text": "a b", "cache_control": {"type": "ephemeral"}}]}, None),
    ({"content": [{"type": "image_url", "text": ""}]}, ".0.type is wrong: Input should be 'text'."),
    ({"content": "a b", "role": 5}, "messages.0.role is wrong: Input should be a valid string."),
]


@pytest.mark.parametrize(("message", "refused"), MESSAGES, ids=str)
def test_a_message_goes_to_the_template(mars_server: Running, message: dict[str, Any], refused: str | None) -> None:
    with mars_server.client() as client:
        asked = [{"messages": [{"role": "user"} | one], "max_tokens": 6} for one in ({"content": "a b"}, message)]
        plain, answer = (client.post("/chat/completions", json=body).json() for body in asked)
    if refused is None:
        assert answer["choices"] == plain["choices"]
    else:
        assert answer["error"]["message"].endswith(refused)


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [  # a body, the status, the field, and the end of the message
    ({"tau": 1.5}, 400, "tau", "tau=1.5 is not allowed; a probability is a number from 0 to 1."),
    ({"tua": 0.5}, 400, "tua", "Unrecognized request argument supplied: tua"),
    ({"max_tokens": 0}, 400, "max_tokens", ""),
    ({"max_tokens": 4000}, 413, "prompt", "the prompt has 1, the answer 4000."),
    ({"top_p": 0}, 400, "top_p", "top_p is wrong: Input should be greater than 0."),
    ({"top_k": -2}, 400, "top_k", "top_k is wrong: Input should be greater than or equal to -1."),
    ({"min_p": 1.0}, 400, "min_p", "min_p is wrong: Input should be less than 1."),
    ({"n": 2}, 400, "n", "n is not supported; 1 is allowed."),
    ({"tools": [{"a": 1}]}, 400, "tools", "tools is not supported; leave it out."),
    ({"prompt": [VOCABULARY]}, 400, "prompt", f"the token id {VOCABULARY}; ids are below {VOCABULARY}."),
    ({"prompt": ["a", "b"]}, 400, "prompt", "prompt has 2 prompts; one is allowed."),
    ({"model": "other"}, 404, "model", "The model 'other' does not exist; this server has 'small'."),
    ({"stop": ""}, 400, "stop", ""),
    ({"messages": []}, 400, "messages", ""),
]


@pytest.mark.parametrize(("body", "status", "param", "ends"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_bad_request_is_refused_by_its_field_and_rule(
    mars_server: Running, body: dict[str, Any], status: int, param: str, ends: str
) -> None:
    path, plain = ("/chat/completions", {}) if "messages" in body else ("/completions", {"prompt": [3]})
    with mars_server.client() as client:
        answer = client.post(path, json=plain | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], set(error)) == (status, param, {"message", "type", "param", "code"})
    assert error["message"].endswith(ends)


HALF = r'{"prompt": "\ud800", "messages": [{"role": "user", "content": "a"}]}'  # of a surrogate pair


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", "the body is not JSON"),
        ("[]", "the body is wrong"),
        (HALF, "the body is not JSON: unexpected end of hex escape at line 1 column 19."),
    ],
)
def test_a_body_that_is_no_object_of_texts_is_refused(mars_server: Running, raw: str | bytes, message: str) -> None:
    for path in ("/completions", "/chat/completions"):
        with mars_server.client() as client:
            answer = client.post(path, content=raw)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert message in answer.json()["error"]["message"]


def test_every_error_is_openais_json(mars_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer fails."""

    def fails(*_: Any, **__: Any) -> Any:
        raise TypeError("broken\nin two lines")

    monkeypatch.setattr("mtbench.models.chat_template.tokenise", fails)
    with mars_server.client() as client:
        asked = [client.get(path) for path in ("/nothing", "/completions")]
        asked.append(client.post("/completions", json={"prompt": "a"}))
    assert [answer.status_code for answer in asked] == [404, 405, 400]
    for answer in asked:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "\n" not in answer.json()["error"]["message"]


def test_bodies_have_a_limit(mars_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request is answered."""
    monkeypatch.setattr(app, "LARGEST_BODY", 10_000)
    with mars_server.client() as client:
        answer = client.post("/completions", content=b" " * 20_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert client.get("/models").status_code == 200


def test_a_key_is_needed_where_there_is_one(runner: ModelRunner) -> None:
    with serving(small_served(ar(), runner), api_key="sesam") as running, running.client() as client:
        body = {"prompt": [3], "max_tokens": 2}
        for headers in ({}, {"authorization": "Bearer sesa"}, {"authorization": "Bearer sesam!"}):
            answer = client.post("/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert client.get("/models", headers=headers).status_code == 401
        assert client.post("/completions", json=body, headers={"authorization": "Bearer sesam"}).status_code == 200
        assert client.get(running.url.removesuffix("/v1") + "/health").status_code == 200


def test_a_refused_client_that_still_sends_gets_its_answer(runner: ModelRunner) -> None:
    """The server reads what it refuses, and answers the next request on the same connection."""
    with serving(small_served(ar(), runner), max_queue=0) as running:
        body = json.dumps({"prompt": [3], "max_tokens": 2}).encode()
        connection = http.client.HTTPConnection(*running.address, timeout=WAIT_S)
        for _ in range(2):
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders()
            time.sleep(0.1)  # the server has seen the headers, and not the body
            connection.send(body)
            answer = connection.getresponse()
            answer.read()
            assert (answer.status, answer.will_close) == (503, False)
        connection.close()


LONG = {"prompt": [3], "max_tokens": 90, "ignore_eos": True}


def slowed(running: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01) -> None:
    """Let every forward take longer, so that a test can act meanwhile."""
    stepped = running.service.worker.stepped

    def slow(rows: int) -> None:
        time.sleep(seconds)
        stepped(rows)

    monkeypatch.setattr(running.service.worker, "stepped", slow)


def test_a_full_queue_refuses_with_a_time_to_try_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(small_served(ar(), runner, rows=1), max_queue=2) as running, running.client() as client:
        slowed(running, monkeypatch)
        with ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(lambda _: client.post("/completions", json=LONG), range(8)))
        refused = [answer for answer in codes if answer.status_code == 503]
        assert refused
        assert len(refused) + len([a for a in codes if a.status_code == 200]) == 8
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert running.metric("mtbench_requests_total", outcome="rejected") == len(refused)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_row(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """At once, not when the answer would have been complete; a queued request leaves the queue."""
    with serving(small_served(ar(), runner, rows=1)) as running:
        slowed(running, monkeypatch, 0.05)
        raw = json.dumps(LONG | {"stream": stream}).encode()
        asked = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        first, second = (socket.create_connection(running.address) for _ in range(2))
        first.sendall(asked)
        wait_until(lambda: running.metric("mtbench_rows_running") == 1)
        second.sendall(asked)
        wait_until(lambda: running.metric("mtbench_queue_length") == 1)
        second.close()
        wait_until(lambda: running.metric("mtbench_queue_length") == 0)
        first.close()
        wait_until(lambda: running.metric("mtbench_rows_running") == 0)
        wait_until(lambda: running.metric("mtbench_requests_total", outcome="cancelled") == 2)
        assert running.metric("mtbench_tokens_total") < 90


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_time_limit(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with serving(small_served(ar(), runner), request_timeout_s=0.2) as running, running.client() as client:
        slowed(running, monkeypatch, 0.02)
        answer = client.post("/completions", json=LONG | {"stream": stream})
        assert "no answer within 0.2 s" in answer.text
        assert answer.status_code == (200 if stream else 504)
        wait_until(lambda: running.metric("mtbench_rows_running") == 0)
        assert running.metric("mtbench_requests_total", outcome="timed_out") == 1


def test_a_method_that_fails_costs_its_requests_and_not_the_server(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    method: Method = ar()
    accept, broken = type(method).accept, [True]

    def failing(*arguments: Any) -> Any:
        if broken and broken.pop():
            raise torch.OutOfMemoryError("out of memory")
        return accept(*arguments)

    with serving(small_served(method, runner)) as running, running.client() as client:
        monkeypatch.setattr(type(method), "accept", failing)
        answer = client.post("/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "out of memory" in answer.json()["error"]["message"]
        assert client.post("/completions", json=LONG).status_code == 200
        assert running.metric("mtbench_requests_total", outcome="failed") == 1
        assert running.metric("mtbench_rows_running") == 0


def test_a_reader_that_does_not_read_delays_nobody(runner: ModelRunner) -> None:
    """Its answer is decoded and its row is free; others are answered meanwhile."""
    with serving(small_served(ar(), runner, rows=1)) as running:
        with running.client() as client, client.stream("POST", "/completions", json=LONG | {"stream": True}) as slow:
            assert running.complete(prompt=[3], max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
            assert len("".join(text_of_events(events(slow)))) > 0
        wait_until(lambda: running.metric("mtbench_requests_total", outcome="ok") == 2)


def test_ending_lets_open_requests_end_and_refuses_new_ones(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accepts(running: Running) -> bool:
        with suppress(OSError), socket.create_connection(running.address):
            return True
        return False

    with serving(small_served(ar(), runner)) as running, running.client() as client:
        slowed(running, monkeypatch)
        with client.stream("POST", "/completions", json=LONG | {"stream": True}) as answer:
            running.end()
            wait_until(lambda: not accepts(running))
            assert events(answer)[-1]["choices"][0]["finish_reason"] == "length"
        running.thread.join(WAIT_S)
        assert not running.thread.is_alive()
