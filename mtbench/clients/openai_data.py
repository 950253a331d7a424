"""What a server with OpenAI's protocol sends: models, events of a streamed answer, and the reply that they make."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mtbench.decoding.external import Speculation


class Received(BaseModel):
    """Data of a server: other fields are ignored, but nothing is converted."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Number = Annotated[int, Field(ge=0, lt=2**31)]  # a token id, or a number of tokens

# Fields of a request's speculation: verified drafts, their tokens, accepted ones, and how many of each draft. Only
# vLLM's object has the last field; TensorRT-LLM's has other numbers.
VLLM = (  # docs, features/speculative_decoding/acceptance_metrics.md
    *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram"),
    "mean_acceptance_length",
)
# srt/entrypoints/openai/protocol.py
SGLANG = "spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_correct_drafts_histogram"
COUNTS = TypeAdapter(tuple[Number, Number | None, Number, list[Number] | None], config=ConfigDict(strict=True))


class Model(Received):
    id: Annotated[str, Field(min_length=1, max_length=1000)]


class Models(Received):
    data: list[Model]


class PromptTokens(Received):
    cached_tokens: Number | None = None


class Usage(Received):
    completion_tokens: Number | None = None
    prompt_tokens_details: PromptTokens | None = None


class Choice(Received):
    index: Annotated[int, Field(ge=0, le=0)] = 0  # one answer was requested
    text: str | None = None
    delta: Any = None  # of a chat
    token_ids: list[Number] | None = None  # vLLM's name
    finish_reason: str | None = None
    stop_reason: Number | str | None = None  # vLLM's and SGLang's name for the end token or stop string
    matched_stop: Number | str | None = None


class Event(Received):
    """One event of a streamed answer."""

    choices: Annotated[list[Choice], Field(max_length=1)] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None  # vLLM's
    sglext: Any = None  # SGLang's

    @property
    def speculation(self) -> Speculation | None:
        """Return the event's counts of speculation; None without them, or in a form of another version."""
        for engine, holder, name, fields in (
            ("vLLM", self.metrics, "speculative_decoding", VLLM),
            ("SGLang", self.sglext, "spec_tokens_details", SGLANG),
        ):
            reported = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(reported, dict) and reported.keys() >= set(fields):
                with suppress(ValidationError):
                    counts = COUNTS.validate_python(tuple(reported[field] for field in fields[:4]))
                    return Speculation(*counts, f"the server's metrics of each request, as {engine} names them")
        return None


@dataclass(slots=True)
class Reply:
    """The joined chunks that a server streamed for one prompt; None for values that it does not report."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty if the server returns text only
    pieces: int = 0  # chunks with text: at most as many as tokens
    finish: str | None = None  # `stop` or `length`
    stopped_by: int | str | None = None  # the end token or stop string, if the server reports it
    counted: int | None = None  # tokens by the server's count
    cached: int | None = None  # tokens of the prompt that the server had kept
    speculation: Speculation | None = None  # of this request
    first_s: float | None = None  # time.perf_counter() at the first chunk of the answer

    def add(self, event: Event) -> None:
        """Append one chunk of the stream."""
        if event.usage is not None and event.usage.completion_tokens is not None:
            self.counted = event.usage.completion_tokens
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self.cached = event.usage.prompt_tokens_details.cached_tokens
        self.speculation = event.speculation or self.speculation
        for choice in event.choices or ():
            text, ids = choice.text or "", choice.token_ids or []
            if self.first_s is None and (text or ids or choice.finish_reason):
                self.first_s = time.perf_counter()
            self.text += text
            self.token_ids += ids
            self.pieces += bool(text)
            self.finish = choice.finish_reason or self.finish
            for stop in (choice.stop_reason, choice.matched_stop):
                self.stopped_by = self.stopped_by if stop is None else stop
