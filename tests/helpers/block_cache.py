"""A model with a cache of blocks, and its server: an answer follows from the keys that the cache holds, not the prompt.

A block's key is a hash of its tokens and of the block before. Blocks of prompts and answers are kept, per salt. As a
program it has arguments PORT, FAULT and, for an arm that drafts, the word `drafts`. It needs the standard library only.
"""

import http.server
import json
import sys
import zlib
from collections.abc import Sequence

BLOCK, VOCABULARY = 4, 50
FAULTS = ("shifted", "poisoned", "too many", "on a cold request", "no salts")


class BlockCache:
    """It answers by its keys. `fault`: one of FAULTS. `drafts`: it writes rejected tokens into blocks, if poisoned."""

    def __init__(self, fault: str = "", *, drafts: bool = True) -> None:
        self.fault, self.drafts = fault, drafts
        self.keys: dict[tuple[str, tuple[int, ...]], int] = {}  # by salt, and the tokens up to a block's end

    def answer(self, prompt: Sequence[int], tokens: int, salt: str) -> tuple[list[int], int]:
        """Return the answer, and how many tokens of the prompt are said to be cached."""
        salt, text, keys = "" if self.fault == "no salts" else salt, list(prompt), list[int]()
        for end in range(BLOCK, len(prompt), BLOCK):  # the last token is always read
            if (salt, tuple(text[:end])) not in self.keys:
                break
            keys.append(self.keys[salt, tuple(text[:end])])
        cached = BLOCK * len(keys)
        if self.fault == "shifted" and keys:
            keys = [0, *keys[:-1]]
        while len(text) < len(prompt) + tokens:
            for end in range(BLOCK * (len(keys) + 1), len(text) + 1, BLOCK):
                block = text[end - BLOCK : end]
                keys.append(_hash(keys[-1:], block))
                rejected = self.fault == "poisoned" and self.drafts and end > len(prompt)
                self.keys[salt, tuple(text[:end])] = _hash(keys[-2:-1], [*block[:-1], 0]) if rejected else keys[-1]
            text.append(_hash(keys, text[BLOCK * len(keys) :]) % VOCABULARY)
        cached += BLOCK * (self.fault == "too many" and cached > 0)
        return text[len(prompt) :], cached or BLOCK * (self.fault == "on a cold request")


def _hash(*parts: Sequence[int]) -> int:
    return zlib.crc32(repr(parts).encode())


class Handler(http.server.BaseHTTPRequestHandler):
    """vLLM's protocol, as far as mtbench needs it."""

    cache: BlockCache

    def do_GET(self) -> None:
        self.say(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens, cached = self.cache.answer(body["prompt"], body["max_tokens"], body["cache_salt"])
        usage = {"completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
        choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": "length"}
        self.say("".join(f"data: {text}\n\n" for text in (json.dumps({"choices": [choice], "usage": usage}), "[DONE]")))

    def say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if text.startswith("data") else "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    Handler.cache = BlockCache(sys.argv[2], drafts=sys.argv[3:] == ["drafts"])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
