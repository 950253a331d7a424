"""Start the command that `mtbench choose` prints, and ask its server."""

import shlex
import socket
import subprocess
import time
from typing import Any

import httpx

READY_S = 300.0


def answer_of(command: str) -> Any:
    """The answer of /v1/completions to a text. The server has a free port in place of the printed one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words = shlex.split(command)
    words[words.index("--port") + 1] = str(port)
    model = words[words.index("--model" if "--model" in words else "-m") + 1]
    body = {"model": model, "prompt": "Tom has 3 apples.", "max_tokens": 8}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(int(READY_S)):
                assert process.poll() is None, "the server has ended"
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(1.0)
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
            return reply.raise_for_status().json()
        finally:
            process.terminate()
