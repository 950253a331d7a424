"""Answers as OpenAI's API writes them, whole or in the messages of a stream."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.decoding.live import Ended
from mtbench.decoding.output import text_of
from mtbench.serving.served import Served
from mtbench.serving.text_stream import TextStream
from mtbench.serving.wire import Asked
from mtbench.serving.worker import Job


class Answer:
    """One request's answer. `whole` returns it at once; `grow` and `end` return the messages of a stream."""

    def __init__(self, asked: Asked, served: Served, job: Job) -> None:
        self.asked, self.served, self.job = asked, served, job
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._stream = TextStream(served.tokenizer, asked.request.stop)
        self._read = 0  # token ids seen
        self._sent = 0  # token ids in messages
        self._text = 0  # characters in messages
        self._created = int(time.time())

    def whole(self, ended: Ended) -> bytes:
        """Return the complete answer."""
        choice: dict[str, Any] = {"index": 0}
        if self.asked.chat:
            choice["message"] = {"role": "assistant", "content": self.text(ended)}
        else:
            choice["text"] = self.text(ended)
        choice |= self._ending(ended)
        if self.asked.token_ids:
            choice["token_ids"] = ended.generation.token_ids
        usage = self._usage(len(ended.generation.token_ids))
        body = self._message([choice], usage=usage, metrics=self.metrics(ended))
        return json.dumps(self._with_prompt_ids(body)).encode()

    def grow(self) -> bytes | None:
        """Return the message with what was decoded since the last one; None if no character is complete."""
        new = self.job.token_ids[self._read :]
        self._read += len(new)
        endings = () if self.asked.request.ignore_eos else self.served.end_ids
        text = self._stream.add([token for token in new if token not in endings])
        if not text or self._stream.stopped:
            return None  # `end` returns what comes before a stop string
        return self._event(text, self.job.token_ids[self._sent : self._read])

    def end(self, ended: Ended) -> list[bytes]:
        """Return the last messages."""
        ids = ended.generation.token_ids
        last = self._choice(self.text(ended)[self._text :], ids[self._sent :]) | self._ending(ended)
        usage, metrics = self._usage(len(ids)), {"metrics": self.metrics(ended)}
        if not self.asked.include_usage:
            extra = metrics | ({"usage": usage} if self.asked.usage_everywhere else {})
            return [self._sse([last], **extra), DONE]
        some = {"usage": usage} if self.asked.usage_everywhere else {}
        return [self._sse([last], **some), self._sse([], usage=usage, **metrics), DONE]

    def text(self, ended: Ended) -> str:
        """Return the text of the answer, with its stop string if the client wants it."""
        generation = ended.generation
        if generation.finish_reason != "stop" or not self.asked.keep_stop:
            return generation.text
        complete = text_of(self.served.tokenizer, generation.token_ids)
        return generation.text + (self._stop_string(complete, len(generation.text)) or "")

    def metrics(self, ended: Ended) -> dict[str, Any]:
        """Return what the answer took: acceptance as vLLM reports it, and what mtbench adds."""
        commits = ended.generation.commits or []
        job, tokens = self.job, len(ended.generation.token_ids)
        return {
            "speculative_decoding": acceptance(commits, ended.offered, self.served.window),
            "mtbench": {
                "forwards": len(commits),
                "tokens": tokens,
                "queued_s": (job.joined_s or job.arrived_s) - job.arrived_s,
                "ttft_s": (job.first_s or job.latest_s) - job.arrived_s,
                "options": [{"tokens": segment.tokens, **segment.options} for segment in ended.segments],
            },
        }

    def _event(self, text: str, ids: Sequence[int]) -> bytes:
        usage = {"usage": self._usage(self._read)} if self.asked.usage_everywhere else {}
        return self._sse([self._choice(text, ids)], **usage)

    def _choice(self, text: str, ids: Sequence[int]) -> dict[str, Any]:
        first = not self._sent
        self._text += len(text)
        self._sent += len(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if self.asked.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        if self.asked.token_ids:
            choice["token_ids"] = list(ids)
            if first and not self.asked.chat:
                choice["prompt_token_ids"] = list(self.asked.request.prompt_ids)
        return choice

    def _ending(self, ended: Ended) -> dict[str, Any]:
        generation = ended.generation
        if generation.finish_reason == "length":
            return {"finish_reason": "length", "stop_reason": None}
        stopped = None
        if generation.finish_reason == "stop":
            complete = text_of(self.served.tokenizer, generation.token_ids)
            stopped = self._stop_string(complete, len(generation.text))
        return {"finish_reason": "stop", "stop_reason": stopped}

    def _stop_string(self, text: str, begin: int) -> str | None:
        return next((s for s in self.asked.request.stop if text.startswith(s, begin)), None)

    def _usage(self, tokens: int) -> dict[str, int]:
        prompt = len(self.asked.request.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _message(self, choices: Sequence[Mapping[str, Any]], *, chunk: bool = False, **more: Any) -> dict[str, Any]:
        kind = "text_completion"
        if self.asked.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        names = {"id": self.id, "object": kind, "created": self._created, "model": self.served.name}
        return {**names, "choices": choices, **more}

    def _with_prompt_ids(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add the prompt's ids where vLLM has them."""
        if self.asked.token_ids:
            place = body if self.asked.chat else body["choices"][0]
            place["prompt_token_ids"] = list(self.asked.request.prompt_ids)
        return body

    def _sse(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        return sse(self._message(choices, chunk=True, **more))


def acceptance(commits: Sequence[int], offered: Sequence[int], window: int) -> dict[str, Any]:
    """Return how many drafts were accepted, under vLLM's names. A step is a forward that committed and had drafts.

    `window`: most tokens that a forward can commit.

    >>> acceptance([3, 1, 2], [3, 3, 0], 4)["acceptance_histogram"]
    [1, 0, 1, 0]
    """
    steps = [(count - 1, drafts) for count, drafts in zip(commits, offered, strict=True) if count and drafts]
    accepted, drafted = sum(count for count, _ in steps), sum(drafts for _, drafts in steps)
    histogram = Counter(count for count, _ in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [histogram[count] for count in range(window)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": window - 1,
        "per_step_accepted": [count for count, _ in steps],
        "per_step_drafted": [drafts for _, drafts in steps],
    }


def sse(body: Mapping[str, Any]) -> bytes:
    """Return one message of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
