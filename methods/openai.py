"""A server with OpenAI's completions protocol: vLLM, SGLang, llama.cpp's server or a hosted service.

vLLM: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
SGLang: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", arXiv 2312.07104.

The server must serve the checkpoint of the role given by `on`; the tokenizer of that checkpoint encodes the prompts.
mtbench cannot check this, so the server's tokens are not graded. A batch of R prompts is R concurrent requests.
Decoding is greedy, without the checkpoint's penalties. Requests ask for no prefix cache. A server that
keeps prompts is flagged: by its counts of cached tokens, else by first tokens over 3 times as fast as those of
the warm-up, whose prompts it cannot know: they are rotated at random.

Token ids are the server's if it returns them (vLLM: `return_token_ids`), else those of its text. If their number is not
that of the server's own `usage`, the cell is flagged. Forwards and commits are null. Acceptance is the server's report
on each request (vLLM with `--per-request-spec-decode-metrics summary`; SGLang). With `plain`, a server that refuses the
fields of vLLM and SGLang (`transformers serve`) gets OpenAI's own fields, and its prompts as text.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtbench.clients.openai_client import Server, ServerError
from mtbench.clients.openai_wire import body_of, ids_of, plain_body_of
from mtbench.decoding.external import Answers, ExternalEngine, Speculation, target_of
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("openai")
@dataclass(frozen=True, kw_only=True)
class OpenAI(ExternalEngine):
    """A server; it chooses the decoding method."""

    url: str = option("http://127.0.0.1:8000/v1", "the server's address, up to /v1", engine=True)
    model: str | None = option(None, "the server's name for the model; none: the first that it lists", engine=True)
    api_key_env: str | None = option(None, "environment variable that holds its key", engine=True)
    plain: bool = option(False, "send OpenAI's own fields only, which every server takes", engine=True)
    timeout_s: float = option(300.0, "longest silence in seconds", low=0.01, high=1e6, engine=True)
    total_s: float = option(3600.0, "longest time of one request in seconds", low=0.01, high=1e6, engine=True)

    title = "OpenAI server"
    roles = ("ar",)
    reference = True
    needs_weights = False
    claims = "lossy"

    def __post_init__(self) -> None:
        _ = self.endpoint  # raises UserError for a bad address

    @property
    def endpoint(self) -> Server:
        return Server(self.url.rstrip("/"), self.api_key_env, self.timeout_s, self.total_s)

    @cached_property
    def served(self) -> str:
        """The server's name for the model, by default the first that it lists."""
        names = [self.model] if self.model else self.endpoint.models()
        if not names:
            raise ServerError(f"{self.url} names no model; give one with model=")
        return names[0]

    @property
    def host(self) -> str | None:
        return self.endpoint.elsewhere

    @property
    def server(self) -> str:
        return self.endpoint.url + (f"={self.api_key_env}" if self.api_key_env else "")

    def generate(
        self, checkpoints: Mapping[str, Inspected], requests: Sequence[Request], *, ignore_eos: bool, room: int
    ) -> Answers:
        server, checkpoint, model = self.endpoint, target_of(checkpoints), self.served
        if self.plain and ignore_eos:
            raise ServerError("OpenAI's own fields have no ignore_eos; leave out plain=true or --ignore-eos")
        if self.plain:
            bodies = [plain_body_of(request, model, checkpoint) for request in requests]
        else:
            bodies = [body_of(request, model, ignore_eos=ignore_eos) for request in requests]
        started_at = time.perf_counter()
        replies = server.complete(bodies)
        if ignore_eos and any(reply.finish != "length" for reply in replies):
            raise ServerError(f"{server.url} does not support ignore_eos; leave out --ignore-eos or this arm")
        answers = [ids_of(reply, checkpoint, request) for reply, request in zip(replies, requests, strict=True)]
        for ids in answers:
            check(ids, server, checkpoint)
        counts = [reply.counted for reply in replies if reply.counted is not None]
        return Answers(
            answers,
            ttft_s=max(reply.first_s or started_at for reply in replies) - started_at,
            counted=sum(counts) if len(counts) == len(replies) else None,
            speculation=Speculation.total([reply.speculation for reply in replies]),
            cached_tokens=[reply.cached for reply in replies],
        )


def check(ids: Sequence[int], server: Server, checkpoint: Inspected) -> None:
    """Raise ServerError for an answer without a token, or with one that the tokenizer does not know."""
    if not ids:
        raise ServerError(f"{server.url} returned an empty answer; check that it serves the unmodified model")
    if max(ids) >= len(checkpoint.tokenizer):
        raise ServerError(
            f"{server.url} gave the token {max(ids)}, which {checkpoint.source} does not have; see model="
        )
