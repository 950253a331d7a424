"""Bodies of completion requests to a server with OpenAI's protocol, and the token ids of its answers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from mtbench.clients.openai_client import ServerError
from mtbench.clients.openai_data import Reply
from mtbench.decoding.request import Request
from mtbench.models.loading import Inspected
from mtbench.models.token_text import ids_behind
from mtbench.sampling import GREEDY, Sampling


def body_of(request: Request, model: str, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the body of a completion request, with fields of vLLM, SGLang and llama.cpp."""
    return _body(request, model, list(request.prompt_ids)) | {
        **drawn(request.sampling),
        "ignore_eos": ignore_eos,
        "repetition_penalty": 1,
        "return_token_ids": True,
        "return_spec_tokens_details": True,  # by SGLang
        **({"skip_special_tokens": False} if request.stop else {}),  # vLLM and SGLang search the text that they return
        **caching(request.cache, begins=request.begins),
    }


def drawn(sampling: Sampling) -> dict[str, Any]:
    """Return the fields that say how tokens are drawn.

    All are named: a server fills others with its own defaults, or with those of the checkpoint's generation_config.json
    (vLLM, SGLang). A top_k of -1 is none in vLLM 0.24 to 0.32, SGLang and llama.cpp.
    """
    of = sampling if sampling.temperature else GREEDY
    return asdict(of) | {"top_k": of.top_k or -1}


def caching(cache: str | None, *, begins: bool) -> dict[str, Any]:
    """Return the fields that say whose cached prompts a request may use: those of requests with the same `cache`."""
    return {
        "cache_salt": cache or uuid4().hex,  # of vLLM and SGLang
        "cache_prompt": cache is not None and not begins,  # of llama.cpp
    }


def plain_body_of(request: Request, model: str, checkpoint: Inspected) -> dict[str, Any]:
    """Return the body with OpenAI's own fields only, and the prompt as text. Raises ServerError if text will not do."""
    return _body(request, model, text_for(request.prompt_ids, checkpoint))


def _body(request: Request, model: str, prompt: str | list[int]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.max_new_tokens,
        "stream_options": {"include_usage": True},
        "temperature": request.sampling.temperature,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    return body | ({"stop": list(request.stop)} if request.stop else {})


def text_for(ids: Sequence[int], checkpoint: Inspected, written: Sequence[str] = (), *, special: bool = True) -> str:
    """Return a text with these tokens, first of `written`. Raises ServerError if there is none."""
    tokenizer = checkpoint.tokenizer
    decoded = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    for text in (*written, decoded):
        for candidate in (text, text.removeprefix(tokenizer.bos_token or "")):  # `special`: the server adds it
            if tokenizer(candidate, add_special_tokens=special)["input_ids"] == list(ids):
                return candidate
    raise ServerError("the server takes prompts as text only, and no text has the tokens of this prompt")


def ids_of(reply: Reply, checkpoint: Inspected, request: Request) -> list[int]:
    """Return an answer's tokens: the server's own, else those of its text and of the stop that ended it."""
    if reply.token_ids:
        return reply.token_ids
    ended_by, text = reply.stopped_by, reply.text
    if isinstance(ended_by, str) and ended_by not in text:
        text += ended_by
    ids = ids_behind(checkpoint.tokenizer, text, request.prompt_ids)
    if reply.finish != "stop" or isinstance(ended_by, str) or any(s in text for s in request.stop):
        return ids
    return [*ids, ended_by] if isinstance(ended_by, int) else [*ids, *checkpoint.end_ids[:1]]
