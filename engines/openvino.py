"""OpenVINO GenAI (github.com/openvinotoolkit/openvino.genai), a library. SERVE is a server of it.

Read in its source of August 2026. Only its `ContinuousBatchingPipeline` takes a request while it decodes others. Its
reader of GGUF knows llama, qwen2 and qwen3 with matrices in F16 or quantised, not in F32 or BF16; a bfloat16 value
changes in F16 by at most 2^-25. Left alone, it computes in bfloat16 where a CPU can. It reads draft models in its own
format only, so SERVE has it convert them; EAGLE-3 and DFlash need another conversion. It reports acceptance of all
requests together, so SERVE counts the tokens of each request's steps. Prompt lookup pads drafts: their number is null.
It rounds the zero points of Q4_1 and the K types, which makes them other models: SmolLM2 in Q4_1 gave other answers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.serving_engine import HOST, NO_REJECTION, ONE_A_FORWARD, Serving, ServingEngine, Setting, Table
from mtbench.decoding.registry import SERVING_ENGINES

# Runs in the engine's own Python, which has no mtbench: OpenAI's protocol, with token ids as vLLM has them. Arguments:
# model, address, port, requests at the same time, positions of each, and pairs of an option and its value.
SERVE = """
import contextlib, json, os, queue, sys, tempfile, threading
import numpy, openvino, openvino_genai as genai
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
model, address, port, rows, positions = sys.argv[1:4] + [int(number) for number in sys.argv[4:6]]
given = {word[2:].replace("-", "_"): value for word, value in zip(sys.argv[6::2], sys.argv[7::2])}
drafting = {name: int(given.pop(name)) for name in ("max_ngram_size", "num_assistant_tokens") if name in given}
draft, ahead = given.pop("draft_model", None), drafting.get("num_assistant_tokens", 0)
scheduler = genai.SchedulerConfig()
scheduler.max_num_seqs, scheduler.enable_prefix_caching = rows, False
scheduler.num_kv_blocks = rows * ((positions + ahead) // 32 + 2)  # of 32 positions; drafts reach beyond the answer
scheduler.max_num_batched_tokens = max(rows * positions, 256)  # a prompt is one step

class Handler(BaseHTTPRequestHandler):
    def do_GET(self): self.say("application/json", json.dumps({"data": [{"id": model}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not isinstance(body.get("prompt"), list):
            return self.send_error(400, "the prompt must be token ids")
        self.say("text/event-stream", "")
        self.ended = threading.Event()
        waiting.put((self, body))
        self.ended.wait()

    def say(self, kind, text):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def event(self, **parts):
        with contextlib.suppress(OSError):  # the client has gone
            self.wfile.write(f"data: {json.dumps(parts)}\\n\\n".encode())

def begun(number, body):
    sampled = {"do_sample": False}
    if body.get("temperature"):
        sampled = {name: body[name] for name in ("temperature", "top_p", "min_p")} | {"do_sample": True}
        sampled |= {"rng_seed": body.get("seed", 0) % 2**32} | ({"top_k": body["top_k"]} if body["top_k"] > 0 else {})
    config = genai.GenerationConfig(
        max_new_tokens=body["max_tokens"], ignore_eos=body.get("ignore_eos", False), include_stop_str_in_output=True,
        stop_strings=set(body.get("stop", ())), **drafting, **sampled)
    return pipeline.add_request(number, openvino.Tensor(numpy.array([body["prompt"]], dtype=numpy.int64)), config)

def goes_on(handler, handle, steps):  # after the tokens of a step are sent
    finish = None
    while handle.can_read():
        for output in handle.read().values():
            finish = {"STOP": "stop", "LENGTH": "length"}.get(output.finish_reason.name)
            steps.append(len(output.generated_ids))
            handler.event(choices=[{"token_ids": output.generated_ids, "finish_reason": finish}])
    if finish:
        accepted = [count - 1 for count in steps[1:]]  # the first step reads the prompt
        counts = {"num_spec_steps": len(accepted), "num_draft_tokens": None, "num_accepted_draft_tokens": sum(accepted),
                  "acceptance_histogram": [accepted.count(n) for n in range(ahead + 1)], "mean_acceptance_length": None}
        handler.event(usage={"completion_tokens": sum(steps)}, metrics={"speculative_decoding": ahead and counts})
    if finish or handle.get_status() != genai.GenerationStatus.RUNNING: handler.ended.set()
    return not handler.ended.is_set()

options = {name.upper(): value for name, value in given.items()} | {"prompt_lookup": "max_ngram_size" in drafting}
try:
    with tempfile.TemporaryDirectory() as folder:
        if draft:
            os.symlink(os.path.abspath(draft), folder + "/draft.gguf")
            genai.LLMPipeline(folder + "/draft.gguf", "CPU", enable_save_ov_model=True)
            options["draft_model"] = genai.draft_model(folder, "CPU")  # which gets the target's options
        pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
except RuntimeError as error:
    why = str(error).strip().splitlines()[-1]
    sys.exit(f"{draft or model}: {why}; it reads GGUF files with matrices in F16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K")
waiting, running, number = queue.SimpleQueue(), {}, 0
ThreadingHTTPServer.request_queue_size = 1024  # connections that wait
threading.Thread(target=ThreadingHTTPServer((address, int(port)), Handler).serve_forever, daemon=True).start()
while True:
    while not running or len(running) < rows and not waiting.empty():  # prompt lookup fails if a request must wait
        number, (handler, body) = number + 1, waiting.get()
        running[number] = handler, begun(number, body), []
    pipeline.step()
    running = {number: request for number, request in running.items() if goes_on(*request)}
"""


def _ngram(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.match == "latest":
        return "It copies from the earliest occurrence: give match=earliest."
    words = ("--max-ngram-size", str(method.ngram), "--num-assistant-tokens", str(method.ahead))
    return Setting("prompt_lookup", words, "" if method.min_ngram == 1 else "It looks for single tokens, too.")


def _draft_model(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.per_forward != 1 or method.verify != "match":
        return ONE_A_FORWARD if method.per_forward != 1 else NO_REJECTION
    if method.confidence:
        return "It takes a length or a threshold, not both: give confidence=0."
    words = ("--draft-model", drafts[method.draft], "--num-assistant-tokens", str(method.ahead))
    return Setting("draft_model", words, "Sampled answers do not follow the target's distribution.", unbiased=False)


@SERVING_ENGINES.register("openvino")
class OpenVINO(ServingEngine):
    """One process with OpenVINO GenAI's continuous batching an arm."""

    title = "OpenVINO GenAI"
    start = ()  # the library has no server: SERVE is one for measurements
    package = "openvino-genai==2026.4.1"
    gguf = True
    gguf_dtype = "float16"
    text = False
    filters = "top_k", "min_p", "top_p"  # sampling/logit_processor.hpp
    methods: ClassVar[Table] = {"ar": lambda *_: Setting(""), "prompt-lookup": _ngram, "speculative": _draft_model}

    def computing(self, dtype: str) -> tuple[str, ...]:
        precision = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
        names = "--inference-precision-hint", "--kv-cache-precision", "--dynamic-quantization-group-size"
        return tuple(word for pair in zip(names, (precision, precision, "0"), strict=True) for word in pair)

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        return [
            *(str(python), self.program_file(SERVE), serving.model, HOST, str(port)),
            *(str(serving.rows), str(serving.positions)),
            *(*self.computing(serving.dtype), "--inference-num-threads", str(serving.threads)),
            *(*serving.setting.words, *serving.options),
        ]
