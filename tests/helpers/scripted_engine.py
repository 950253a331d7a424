"""A serving engine whose server follows a script: it answers, hangs, crashes, counts wrong, or starts children."""

import json
import sys
from pathlib import Path

import pytest

from mtbench.clients.engine_server import EngineServer
from mtbench.clients.serving_engine import Serving, ServingEngine, Setting
from mtbench.programs.environments import MARKER

SCRIPT = "script.json"  # in the folder of an installed release
PLUGIN = Path(__file__).with_name("scripted_plugin.py")
SERVER = r"""
import http.server, json, os, signal, subprocess, sys, time
port, script = int(sys.argv[1]), json.loads(sys.argv[2])
if script.get("at_start"):
    sys.exit(script["at_start"])
if script.get("ignores_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if script.get("hangs") == "at start":
    time.sleep(1000)
if script["name"] in script.get("core", {}):
    os.sched_setaffinity(0, {script["core"][script["name"]]})
asked = 0
if script.get("holds"):  # the GPU: a folder with the ids of those that do
    device = os.path.join(script["holds"], os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    os.makedirs(device, exist_ok=True)
    open(os.path.join(device, str(os.getpid())), "w").close()
time.sleep(script.get("ready_s", 0))
if script.get("child"):  # a process of its own, as an engine's core
    child = subprocess.Popen([sys.executable, "-c", script.get("computes", "import time; time.sleep(1000)")])
    open(script["child"], "w").write(str(child.pid))

running = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say("application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        global asked
        asked += 1
        running.append(self)
        time.sleep(script.get("takes_s", 0))
        if len(running) >= script.get("stalls", 1000):  # requests side by side
            time.sleep(4 * script.get("takes_s", 0))
        running.remove(self)
        until = time.thread_time() + script.get("computes_s", 0)
        while time.thread_time() < until: pass
        if asked == script.get("stops_at"):  # something stops it for a second
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if script.get("asked"):  # a file with a character for each request
            open(script["asked"], "a").write(".")
        if script.get("hangs") == "in a block":
            time.sleep(1000)
        if script.get("floods"):  # MiB of a log without an end of line
            sys.stdout.write("x" * (script["floods"] << 20) + "\n")
            sys.stdout.flush()
            time.sleep(0.3)
        if script.get("crash"):
            os.write(1, f"Fatal: {script['crash']}\n".encode())  # whole, beside another request
            os._exit(3)
        if not script.get("wants", {}).items() <= body.items():
            return self.send_error(400)
        prompt = body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"]
        tokens = [sum(prompt) % 50 + i for i in range(body["max_tokens"])]
        if script.get("says"):
            tokens = [script["says"][i % len(script["says"])] for i in range(body["max_tokens"])]
        if script["name"] and sum(prompt) % 2 and script.get("loses") in tokens:  # where a draft is accepted across it
            del tokens[len(tokens) - 1 - tokens[::-1].index(script["loses"])]
        usage = {"completion_tokens": script.get("counted", len(tokens))}
        told = {"num_spec_steps": 2, "num_draft_tokens": 8, "num_accepted_draft_tokens": script.get("accepted", 0)}
        told |= {"acceptance_histogram": [0, 2], "mean_acceptance_length": 1.0}
        choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": "length"}
        if not body.get("stream"):
            return self.say("application/json", json.dumps({"choices": [choice], "usage": usage}))
        events = [{"choices": [choice]}, {"choices": [], "usage": usage, "metrics": {"speculative_decoding": told}}]
        data = [*map(json.dumps, events), "[DONE]"]
        self.say("text/event-stream", "".join(f"data: {text}\n\n" for text in data))

    def say(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args): pass

# an engine decodes in one thread, which stays
kind = http.server.HTTPServer if script.get("computes_s") else http.server.ThreadingHTTPServer
kind(("127.0.0.1", port), Handler).serve_forever()
"""


class Scripted(ServingEngine):
    title = "Scripted"
    start = ("scripted",)

    def __init__(self, script: dict[str, object]) -> None:
        self.script = script

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        script = self.script | {"name": serving.setting.name}
        return [str(python), "-c", SERVER, str(port), json.dumps(script)]


def scripted_server(python: Path, log: Path, name: str = "ngram", **script: object) -> EngineServer:
    """A server of the scripted engine for one arm; `name`: the engine's own name of the method, empty: plain."""
    return EngineServer(Scripted(script), python, Serving("model", Setting(name), 2, 64, "float32", 1), "arm", log)


def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the arm of each server that is started."""
    found, start = list[str](), EngineServer.start

    def started(self: EngineServer) -> None:
        found.append(self.arm)
        start(self)

    monkeypatch.setattr(EngineServer, "start", started)
    return found


def install(engine: type[ServingEngine], package: str, **script: object) -> None:
    """Make the environment of a release, as `mtbench fetch engine` does."""
    folder = engine.folder(package)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / SCRIPT).write_text(json.dumps(script))
    (folder / MARKER).touch()
