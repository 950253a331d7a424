"""Requests of clients: the supported fields, and the allowed values of others.

A field that would change the answer, and that the server cannot honour, is refused by name. Fields of OpenAI's, vLLM's
and SGLang's clients that change nothing are accepted, or accepted at the value that changes nothing.
"""

import json
import math
import secrets
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from mtbench.decoding.request import Request
from mtbench.errors import UserError, first_line
from mtbench.models import chat_template
from mtbench.options.common import MOST_IDS, MinP, Temperature, TopP
from mtbench.serving.served import Served

# Fields that never change an answer here.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "cache_salt", "cache_prompt", "request_id", "rid", "priority"),
    *("parallel_tool_calls", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("return_spec_tokens_details", "return_tokens_as_token_ids", "prediction"),
    *("include_reasoning", "separate_reasoning", "stream_reasoning"),
}
# Fields that change nothing at these values; null always does.
OFF: Sequence[Any] = (False, 0, "", [], {})
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(("echo", "suffix", "top_logprobs", "logit_bias", "min_tokens", "stop_token_ids", "bad_words"), OFF),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "use_beam_search", "tools", "functions"), OFF),
    **dict.fromkeys(("continue_final_message", "no_stop_trim"), OFF),
    **dict.fromkeys(("include_stop_str_in_output", "logprobs"), (False,)),  # logprobs: 0 requests one
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("spaces_between_special_tokens", "detokenize", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "reasoning_effort"), ()),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
}


class BadRequestError(Exception):
    """A refused request, in the form of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class ContentPart(_Record):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Record):
    """A message of a conversation. The chat template gets all of it."""

    role: str
    content: str | list[ContentPart] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


TopK = Annotated[int, Field(ge=-1, le=MOST_IDS), AfterValidator(lambda k: max(k, 0))]  # -1 and 0: all
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class Body(_Record):
    """The fields that both kinds of requests share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None  # it and the filters: null for the server's own
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, bool | None] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None  # false: the text has them
    add_special_tokens: bool | None = None  # by the tokenizer; as in vLLM not to a chat, and to other texts by default


class ChatBody(Body):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    def prompt_ids(self, served: Served) -> list[int]:
        messages = [{**message.model_dump(exclude_none=True), "content": message.text} for message in self.messages]
        options = {name: value for name, value in (self.chat_template_kwargs or {}).items() if value is not None}
        try:
            chat_template.refuse_reserved(served.tokenizer, options, "chat_template_kwargs:")
        except UserError as error:
            raise BadRequestError(str(error), "chat_template_kwargs") from None
        clock = chat_template.Clock(served.date)
        text = chat_template.render(served.tokenizer, messages, answer_follows=True, options=options, clock=clock)
        return chat_template.tokenise(served.tokenizer, [text], plain=bool(self.add_special_tokens))[0]


class CompletionBody(Body):
    """The body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]

    def prompt_ids(self, served: Served) -> list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise BadRequestError(f"prompt has {len(prompt)} prompts; one is allowed.", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return chat_template.tokenise(served.tokenizer, [prompt], plain=self.add_special_tokens is not False)[0]
        return list(prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of a client: the request to decode, and how to answer."""

    request: Request
    chat: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    exact: bool  # the text has special tokens


def parse(raw: bytes, served: Served, *, chat: bool, max_new_tokens: int) -> Call:
    """Return the request in a body. Raises BadRequestError, which names the field.

    `max_new_tokens`: of a request without a number.
    """
    body = _validated(raw, ChatBody if chat else CompletionBody)
    check_model(body.model, served)
    options = _check_others(body, served)
    place = "messages" if chat else "prompt"
    try:
        prompt = body.prompt_ids(served)
    except Exception as error:  # a template or a tokenizer may raise any
        raise error if isinstance(error, BadRequestError) else BadRequestError(first_line(error), place) from None
    if wrong := [number for number in prompt if not 0 <= number < served.vocabulary]:
        raise BadRequestError(f"the prompt has the token id {wrong[0]}; ids are below {served.vocabulary:,}.", place)
    if len(prompt) < served.method.block:
        reason = f"the prompt has {len(prompt)} tokens; {served.arm} needs at least {served.method.block}."
        raise BadRequestError(reason, place)
    budget = body.max_completion_tokens or body.max_tokens
    room = served.max_length - len(prompt)
    if room < (budget or 1):
        reason = f"the context has {served.max_length} tokens; the prompt has {len(prompt)}, the answer {budget or 1}."
        raise BadRequestError(reason, place, "context_length_exceeded", 413)
    stop, own = body.stop or [], body.model_dump(include={*asdict(served.sampling)}, exclude_none=True)
    return Call(
        request=Request(
            prompt_ids=prompt,
            max_new_tokens=budget or min(max_new_tokens, room),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            **asdict(served.sampling) | own,
            ignore_eos=bool(body.ignore_eos),
            options=options,
        ),
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.get("include_usage")),
        token_ids=bool(body.return_token_ids),
        exact=body.skip_special_tokens is False,
    )


def check_model(name: str | None, served: Served) -> None:
    """Raise BadRequestError for the name of another model."""
    if name not in (None, served.name):
        reason = f"The model {name!r:.100} does not exist; this server has {served.name!r}."
        raise BadRequestError(reason, "model", "model_not_found", 404)


def _validated(raw: bytes, kind: type[ChatBody] | type[CompletionBody]) -> ChatBody | CompletionBody:
    try:
        # json.loads reads half a surrogate pair, which no tokenizer does
        return kind.model_validate(from_json(raw.removeprefix(BOM_UTF8)))
    except ValidationError as error:
        # The alternative that fits furthest.
        found = max(error.errors(), key=lambda e: len(e["loc"]))
        place, param = ".".join(map(str, found["loc"])), str(found["loc"][0]) if found["loc"] else None
        raise BadRequestError(f"{place or 'the body'} is wrong: {found['msg']}.", param) from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {first_line(error)}.") from None


def _check_others(body: Body, served: Served) -> dict[str, float]:
    """Return the options among the fields that the records do not name. Raise BadRequestError for a wrong one."""
    found = {}
    for name, value in (body.model_extra or {}).items():
        allowed = NEUTRAL.get(name)
        if value is None or name in IGNORED:
            continue
        if name in served.options:
            found[name] = _option(served, name, value)
        elif allowed is None:
            raise BadRequestError(f"Unrecognized request argument supplied: {name:.100}", name[:100])
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            choices = "leave it out" if allowed in (OFF, ()) else f"{' or '.join(map(json.dumps, allowed))} is allowed"
            raise BadRequestError(f"{name} is not supported; {choices}.", name)
    return found


def _option(served: Served, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequestError(f"{name} is not a number.", name)
    try:
        return served.option(name, value)
    except UserError as error:
        raise BadRequestError(str(error), name) from None
