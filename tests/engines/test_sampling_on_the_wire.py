"""Each request to an engine's server says how its tokens are drawn: no default of an engine or a model is left on."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mtbench.clients.openai_client import Server, ServerError
from mtbench.clients.serving_engine import Serving, Setting
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.sampling import Sampling

NEUTRAL = {"top_k": -1, "top_p": 1, "min_p": 0}
PLAIN = Setting("")


class Recorder(HTTPServer):
    """A server that keeps the body of each request and refuses it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Keep)
        self.bodies = list[dict[str, Any]]()


class Keep(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_error(400)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as recorder:
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        yield recorder
        recorder.shutdown()


@pytest.mark.parametrize("name", ["llamacpp", "openvino", "sglang", "vllm"])
@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7, **NEUTRAL}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}, {}),
        ({"top_p": 0.9}, {"temperature": 0, **NEUTRAL}),
    ],
)
def test_a_request_names_every_setting(
    name: str, settings: dict[str, float], sent: dict[str, float], recorder: Recorder
) -> None:
    """llama.cpp has top-k 40, top-p 0.95 and min-p 0.05 on by default; vLLM and SGLang read the checkpoint's own."""
    request = Request(prompt_ids=[1, 2], max_new_tokens=3, **settings)  # type: ignore[arg-type]
    server = Server(f"http://127.0.0.1:{recorder.server_port}/v1", None, 5.0, 5.0)
    with pytest.raises(ServerError):
        SERVING_ENGINES[name]().complete(server, [request], "m", ignore_eos=False)
    [body] = recorder.bodies
    assert {field: body.get(field) for field in ("temperature", *NEUTRAL)} == {**(sent or settings)}
    if name == "llamacpp":
        assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"], "its penalties would run, too"
    else:
        assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1, 0, 0)


def test_servers_that_read_the_checkpoints_settings_do_not() -> None:
    serving = Serving("MODEL", PLAIN, rows=1, positions=64, dtype="float32", threads=1)
    for name, words in (("vllm", "--generation-config vllm"), ("sglang", "--sampling-defaults openai")):
        assert words in " ".join(SERVING_ENGINES[name]().launch(Path("python"), serving, 8000))


def test_vllm_has_no_min_p_where_it_drafts() -> None:
    """It would answer such a request by an error."""
    vllm, drafting = SERVING_ENGINES["vllm"](), Setting("ngram")
    asked = Sampling(1.0, min_p=0.05)
    assert vllm.lacking(drafting, asked) == "vLLM has no min_p with ngram: give `--min-p 0`, or leave that out."
    assert vllm.lacking(PLAIN, asked) is None
    assert vllm.lacking(drafting, Sampling(0.0, min_p=0.05)) is None, "greedy decoding has no filters"


def test_another_order_of_filters_is_noted_where_it_matters() -> None:
    """Top-p depends on the filters before it, and the others do not."""
    vllm, sglang, llamacpp = (SERVING_ENGINES[name]() for name in ("vllm", "sglang", "llamacpp"))
    every = Sampling(1.0, top_k=20, top_p=0.9, min_p=0.05)
    assert vllm.other_filtering(PLAIN, every) == "vLLM filters by min_p, then top_k, then top_p"
    assert vllm.other_filtering(PLAIN, Sampling(1.0, top_k=20, min_p=0.05)) == ""
    assert vllm.other_filtering(PLAIN, Sampling(0.6, top_k=20, top_p=0.95)) == ""
    assert "also to those that top_k removes" in sglang.other_filtering(PLAIN, Sampling(1.0, top_k=20, top_p=0.9))
    assert llamacpp.other_filtering(PLAIN, every) == ""
