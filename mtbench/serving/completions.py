"""Answers as OpenAI's API writes them, whole or in the messages of a stream."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mtbench.decoding.live import Ended
from mtbench.decoding.output import Generation, first_of
from mtbench.models.token_text import INCOMPLETE, exact_text, is_byte, shown_text, special_ids
from mtbench.serving.served import Served
from mtbench.serving.wire import Call
from mtbench.serving.worker import TimedTicket

DONE = b"data: [DONE]\n\n"


class Answer:
    """One request's answer. `whole` returns it at once; `grow` and `end` return the messages of a stream."""

    def __init__(self, call: Call, served: Served, job: TimedTicket) -> None:
        self.call, self.served, self.job = call, served, job
        self._names = {"id": f"mtbench-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}
        self._stream = TextStream(served.tokenizer, call.request.stop, call.request.prompt_ids, exact=call.exact)
        self._read = 0  # token ids seen
        self._sent = 0  # token ids in messages
        self._text = 0  # characters in messages

    def whole(self, ended: Ended) -> dict[str, Any]:
        """Return the complete answer."""
        generation = ended.generation
        choice = self._choice({"content": self._text_of(generation)}, generation.token_ids) | self._ending(ended)
        if self.call.chat:
            choice["message"] = {"role": "assistant", **choice.pop("delta")}
        kind = "chat.completion" if self.call.chat else "text_completion"
        counts = {"usage": self._usage(ended), "metrics": self.metrics(ended)}
        return {**self._names, "object": kind, "choices": [choice], **counts}

    def grow(self) -> bytes | None:
        """Return the message with the text decoded since the last one; None if no character is complete."""
        new = self.job.token_ids[self._read :]
        self._read += len(new)
        endings = () if self.call.request.ignore_eos else self.served.end_ids
        text = self._stream.add([token for token in new if token not in endings])
        if not text or self._stream.stopped:
            return None  # `end` returns the text before a stop string
        return self._message([self._part(text, self.job.token_ids[self._sent : self._read])])

    def end(self, ended: Ended) -> list[bytes]:
        """Return the last messages."""
        generation, metrics = ended.generation, self.metrics(ended)
        text = self._text_of(generation)[self._text :]
        last = self._part(text, generation.token_ids[self._sent :]) | self._ending(ended)
        if not self.call.include_usage:
            return [self._message([last], metrics=metrics), DONE]
        return [self._message([last]), self._message([], usage=self._usage(ended), metrics=metrics), DONE]

    def metrics(self, ended: Ended) -> dict[str, Any]:
        """Return the cost of the answer: acceptance as vLLM reports it, and mtbench's own fields."""
        commits, job = ended.generation.commits or [], self.job
        return {
            "speculative_decoding": acceptance(commits, ended.offered, self.served.window),
            "mtbench": {
                "forwards": len(commits),
                "queued_s": (job.joined_s or job.arrived_s) - job.arrived_s,
                "options": [{"tokens": len(ended.generation.token_ids), **ended.options}],
            },
        }

    def _text_of(self, generation: Generation) -> str:
        return generation.exact if self.call.exact else generation.text

    def _part(self, text: str, ids: Sequence[int]) -> dict[str, Any]:
        role = {} if self._sent else {"role": "assistant"}
        self._text += len(text)
        self._sent += len(ids)
        return self._choice({**role, "content": text}, ids) | {"finish_reason": None}

    def _choice(self, message: Mapping[str, str], ids: Sequence[int]) -> dict[str, Any]:
        content = {"delta": dict(message)} if self.call.chat else {"text": message["content"]}
        return {"index": 0, **content, **({"token_ids": list(ids)} if self.call.token_ids else {})}

    def _ending(self, ended: Ended) -> dict[str, Any]:
        generation, request, stopped = ended.generation, self.call.request, None
        if generation.finish_reason == "stop":
            found = first_of(exact_text(self.served.tokenizer, generation.token_ids, request.prompt_ids), request.stop)
            stopped = found and found[1]
        return {"finish_reason": "length" if generation.finish_reason == "length" else "stop", "stop_reason": stopped}

    def _usage(self, ended: Ended) -> dict[str, int]:
        prompt, tokens = len(self.call.request.prompt_ids), len(ended.generation.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _message(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.call.chat else "text_completion"
        return sse({**self._names, "object": kind, "choices": choices, **more})


class TextStream:
    """The text of one answer while it grows, `exact` or shown: whole characters, and no beginning of a stop string."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str],
        prompt: Sequence[int] = (),
        *,
        exact: bool = False,
    ) -> None:
        self._tokenizer, self._stop, self._exact = tokenizer, stop, exact
        self._ids = list(prompt)
        self._read = len(prompt)  # tokens whose text is complete
        self._held = ""  # text behind which a stop string may begin
        self._begun = ""  # exact text that may begin a stop string
        self.stopped = False  # a stop string is complete: `add` returns nothing more

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        self._ids += ids
        new, before = self._ids[self._read :], self._ids[: self._read]
        exact, shown = exact_text(self._tokenizer, new, before), shown_text(self._tokenizer, new, before)
        ordinary = [token for token in new if token not in special_ids(self._tokenizer)]
        goes_on = shown.endswith(INCOMPLETE) or (ordinary and is_byte(self._tokenizer, ordinary[-1]))
        if self.stopped or goes_on or exact.endswith(INCOMPLETE):
            return ""
        self._read = len(self._ids)
        text, self._begun = self._held + (exact if self._exact else shown), self._begun + exact
        self.stopped = first_of(self._begun, self._stop) is not None
        begins = max((n for s in self._stop for n in range(1, len(s)) if self._begun.endswith(s[:n])), default=0)
        self._begun = self._begun[len(self._begun) - begins :]
        end = max(0, len(text) - len(self._begun))
        text, self._held = text[:end], text[end:]
        return "" if self.stopped else text


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
