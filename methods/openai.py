"""A server that speaks OpenAI's completions protocol: vLLM, SGLang, llama.cpp's server, or what a service runs.

vLLM: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
SGLang: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", arXiv 2312.07104.

The server has a model of its own, which nobody here can look into: it is to be that of the role given by `on`, whose
tokenizer makes the prompts' tokens, and no promise is graded. A batch of R prompts is R requests at once. Greedy, with
a checkpoint's penalties off; nothing is kept from one request for another, since our arms keep nothing either.

Token ids are the server's where it tells them (vLLM: `return_token_ids`), else those of its text; where their number is
not that of its own `usage`, the cell is flagged. Forwards and commits it does not tell. What it counts of its own
speculation is for all who ask it, so it should have nobody else to serve.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import uuid4

from mtbench.decoding.external import Answers, Outside
from mtbench.decoding.openai_client import Reply, Server, ServerError
from mtbench.decoding.registry import METHODS
from mtbench.models.loading import Inspected
from mtbench.options import option

# What engines call them. SGLang tells of acceptance by gauges only (`sglang:spec_accept_length`), which are no counts.
COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "sglang:spec_verify_calls_total": "drafts",
}
GREEDY = {"temperature": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
TOLD = {
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "include_stop_str_in_output": True,  # by vLLM; by SGLang:
    "no_stop_trim": True,
}


@METHODS.register("openai")
@dataclass(frozen=True, kw_only=True)
class OpenAI(Outside):
    """By a server, however that decodes."""

    url: str = option("http://127.0.0.1:8000/v1", "the server's address, up to /v1", engine=True)
    model: str | None = option(None, "what it calls the model; none: the first that it names", engine=True)
    api_key_env: str | None = option(None, "environment variable that holds its key", engine=True)
    metrics: bool = option(True, "read its /metrics before and after each batch", engine=True)
    timeout_s: float = option(300.0, "longest silence", low=0.01, engine=True)

    roles = ("ar",)
    reference = True
    weightless = True
    claims = "lossy"

    def __post_init__(self) -> None:
        _ = self.server  # an address that is none is refused here

    @property
    def server(self) -> Server:
        return Server(self.url.rstrip("/"), self.api_key_env, self.timeout_s)

    @property
    def host(self) -> str | None:
        return self.server.elsewhere

    def counters(self) -> Mapping[str, int]:
        samples = self.server.samples() if self.metrics else {}
        return {ours: int(samples[theirs]) for theirs, ours in COUNTERS.items() if theirs in samples}

    def generate(
        self,
        checkpoints: Mapping[str, Inspected],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        fixed_length: bool,
        stop: Sequence[Sequence[str]],
        room: int,
    ) -> Answers:
        server, words = self.server, next(iter(checkpoints.values()))
        asked = {"model": self.model or first_model(server), "ignore_eos": fixed_length, **GREEDY, **TOLD}

        def ask(prompt: Sequence[int], budget: int, strings: Sequence[str]) -> Reply:
            stops: dict[str, Any] = {"stop": list(strings)} if strings else {}
            fresh = {"cache_salt": uuid4().hex, "cache_prompt": False}  # by vLLM and SGLang; by llama.cpp
            return server.complete({**asked, **fresh, **stops, "prompt": list(prompt), "max_tokens": budget})

        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(ask, prompts, max_new_tokens, stop))
        if fixed_length and any(reply.finish != "length" for reply in replies):
            raise ServerError(f"{server.url} does not know ignore_eos; leave --fixed-length or this arm out")
        answers = [ids_of(reply, words, strings) for reply, strings in zip(replies, stop, strict=True)]
        if not all(answers):
            raise ServerError(f"{server.url} gave an answer without a token; see whether it serves the model as it is")
        counts = [reply.counted for reply in replies if reply.counted is not None]
        return Answers(
            answers,
            ttft_s=max(reply.first_s or began for reply in replies) - began,
            counted=sum(counts) if len(counts) == len(replies) else None,
        )


@cache
def first_model(server: Server) -> str:
    """The model that a server names first."""
    if names := server.models():
        return names[0]
    raise ServerError(f"{server.url} names no model; give one with model=")


def ids_of(reply: Reply, words: Inspected, stop: Sequence[str]) -> list[int]:
    """An answer's tokens: as the server tells them, else those of its text and of what ended it."""
    if reply.token_ids:
        return reply.token_ids
    by, text = reply.stopped_by, reply.text
    if isinstance(by, str) and by not in text:
        text += by
    ids: list[int] = words.tokenizer(text, add_special_tokens=False)["input_ids"]
    if reply.finish != "stop" or isinstance(by, str) or any(s in text for s in stop):
        return ids
    return [*ids, *([by] if isinstance(by, int) else words.end_ids[:1])]
