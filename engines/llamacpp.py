"""llama.cpp (github.com/ggml-org/llama.cpp): its server, yours or in the package `xllamacpp`, a library.

Options are those of `llama-server` of November 2026; SERVE translates them for the library. It reads GGUF files only.
Its cache has the arm's dtype, and not its default, float16. In float32 it computes without flash attention, with which
its plain decoding takes tokens whose logit is up to 4.5e-4 under the largest one.
Its completion endpoint takes and returns token ids. A stream of it lacks the tokens of a character whose bytes are in
several tokens, except the last, so an answer comes as a whole; the time of its first token is the server's. It reports
the drafted and the accepted tokens of a request, and not the number of drafts.
It reads DFlash 2 drafts from build 10658 on (github.com/ggml-org/llama.cpp/pull/27816), of which mtbench writes none.
A JSON schema that it cannot compile, such as one with `not`, is ignored: its log says so, and the answers are invalid.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.openai_client import Server
from mtbench.clients.openai_data import Number, Received, Reply
from mtbench.clients.openai_wire import drawn
from mtbench.clients.serving_engine import (
    ALWAYS_WIDE,
    HOST,
    IN_TARGET,
    NO_CONFIDENCE,
    NO_REJECTION,
    NO_TREE,
    NOT_ALWAYS,
    ONE_A_FORWARD,
    SAMPLED,
    Serving,
    ServingEngine,
    Setting,
    Table,
)
from mtbench.decoding.external import Speculation
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.decoding.request import Request

AMONG_TEN = "A probability is that among the draft's ten likeliest tokens."
SAMPLERS = ["temperature", *ServingEngine.filters]  # they run in this order, and no other does
CACHE_TYPES = ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v")
CACHES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}  # its names of the types
# Read in common/speculative.cpp of November 2026. The number of layers is the file's `nextn_predict_layers`.
CHAINED = "Of several layers the k-th drafts token k, on the output of the one before; it drafts no more than it has."
# Its own name of a method -> its option for `ahead`, and what it does (common/ngram-map.cpp, common/speculative.cpp).
OWN = {
    "ngram-map-k": ("size-m", "It drafts what followed the last 12 tokens, as far as its last draft there was right."),
    "ngram-map-k4v": ("size-m", "As ngram-map-k, where one of four continuations outnumbers the others by three."),
    "ngram-mod": (
        "n-max",
        "It drafts what followed the last 24 tokens in a table of all texts of its server, so that earlier requests "
        "matter; fewer than 48 tokens only as a whole.",
    ),
}

# Runs in the Python that has the library, which has no mtbench. Arguments: options of llama-server.
SERVE = """
import enum, signal, sys
import xllamacpp

FLAGS = {
    "-m": "model.path",
    "--host": "hostnames" if hasattr(xllamacpp.CommonParams(), "hostnames") else "hostname",  # before October 2026
    "--parallel": "n_parallel",
    "--ctx-size": "n_ctx",
    "--cache-ram": "cache_ram_mib",
    "--cache-type-k": "cache_type_k",
    "--cache-type-v": "cache_type_v",
    "--flash-attn": "flash_attn_type",
    "--threads": "cpuparams.n_threads",
    "--threads-batch": "cpuparams_batch.n_threads",
    "--batch-size": "n_batch",
    "--ubatch-size": "n_ubatch",
    "--spec-type": "speculative.types",
    "--spec-synth-rates": "speculative.synth_rates",
    "--spec-draft-model": "speculative.draft.mparams.path",
    "--spec-draft-threads": "speculative.draft.cpuparams.n_threads",
    "--spec-draft-threads-batch": "speculative.draft.cpuparams_batch.n_threads",
    "--spec-draft-type-k": "speculative.draft.cache_type_k",
    "--spec-draft-type-v": "speculative.draft.cache_type_v",
}
MAP = "size-n size-m min-hits"
SIZES = {"draft": "n-max n-min p-min", "ngram-simple": MAP, "ngram-map-k": MAP, "ngram-map-k4v": MAP}
for kind, sizes in (SIZES | {"ngram-mod": "n-match n-min n-max"}).items():
    FLAGS |= {f"--spec-{kind}-{size}": f"speculative.{kind}.{size}".replace("-", "_") for size in sizes.split()}
NUMBERS = {"f32": 0, "f16": 1, "bf16": 30, "off": 0, "on": 1, "auto": -1}
NUMBERS |= {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}
LISTS = {
    "hostnames": lambda text: [text],
    "synth_rates": lambda text: [float(rate) for rate in text.split(",")],
    "types": lambda text: [
        getattr(xllamacpp.common_speculative_type, "COMMON_SPECULATIVE_TYPE_" + text.upper().replace("-", "_"))
    ],
}

def put(params, path, text):
    *owners, name = path.split(".")
    for owner in owners:
        params = getattr(params, owner)
    kind = type(getattr(params, name))
    if kind is bool or issubclass(kind, enum.Enum):
        value = kind(int(NUMBERS.get(text, text)))
    else:
        value = LISTS.get(name, kind)(text)
    setattr(params, name, value)

params, words = xllamacpp.CommonParams(), iter(sys.argv[1:])
for flag in words:
    value = next(words)
    path = FLAGS.get(flag, flag.removeprefix("--").replace("-", "_"))  # else an attribute of xllamacpp.CommonParams
    try:
        put(params, path, value)
    except (AttributeError, ValueError):
        sys.exit(f"unknown option {flag} {value}; known: {', '.join(FLAGS)}, attributes of xllamacpp.CommonParams")
server = xllamacpp.Server(params)
while True:
    signal.pause()
"""


def _drafts(kind: str, method: Any, model: str) -> Setting:
    """Return the setting for a chain of drafts, which ends before the first unlikely one."""
    words = ("--spec-type", kind, *(("--spec-draft-model", model) if model else ()))
    words += ("--spec-draft-n-max", str(method.ahead), "--spec-draft-p-min", f"{method.confidence:g}")
    setting = Setting(kind, words, SAMPLED)
    return setting.but(AMONG_TEN) if method.confidence else setting


def _if_matched(make: Any) -> Any:
    """Return the function that makes a setting, for drafts that are verified by the target's own choice only."""
    return lambda method, drafts: NO_REJECTION if method.verify != "match" else make(method, drafts)


def _speculative(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    return ONE_A_FORWARD if method.per_forward != 1 else _drafts("draft-simple", method, drafts[method.draft])


def _eagle(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    return NO_TREE if method.tree != "1" else _drafts("draft-eagle3", method, drafts[method.draft])


def _block(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    kind = "draft-dspark" if method.draft == "dspark" else "draft-dflash"
    return NO_CONFIDENCE if method.confidence else _drafts(kind, method, drafts[method.draft])


def _mtp(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    if not method.draft.startswith("#"):
        return IN_TARGET
    return _drafts("draft-mtp", method, "").but(CHAINED if method.ahead > 1 else "")


def _ngram(method: Any, drafts: Mapping[str, str]) -> Setting:
    sizes = ("--spec-ngram-simple-size-n", str(method.ngram), "--spec-ngram-simple-size-m", str(method.ahead))
    setting = Setting("ngram-simple", ("--spec-type", "ngram-simple", *sizes), ALWAYS_WIDE)
    if method.min_ngram < method.ngram:
        setting = setting.but(f"It looks for {method.ngram} tokens only, and mtbench for {method.min_ngram} too.")
    if method.match == "latest":
        return setting.but(f"Its copy ends before the text's last token and has {method.ngram} tokens at least.")
    return setting.but("It copies from the latest occurrence, and mtbench from the earliest.")


def _native(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.drafts not in OWN or method.draft:
        return f"Its methods by its own names, without a draft, are {', '.join(OWN)}: give drafts=NAME."
    size, does = OWN[method.drafts]
    words = ("--spec-type", method.drafts, f"--spec-{method.drafts}-{size}", str(method.ahead))
    return Setting(method.drafts, words, does, learns=method.drafts == "ngram-mod")


def _is_python(program: Path) -> bool:
    return program.name.startswith("python")


@SERVING_ENGINES.register("llamacpp")
class LlamaCpp(ServingEngine):
    """One llama.cpp server an arm."""

    title = "llama.cpp"
    start = ("llama-server", "-m")
    package = "xllamacpp==2026.10.11549"
    gguf = True
    caches = True
    constraint = staticmethod(lambda schema: {"json_schema": schema})
    overridable = ("--threads", "--threads-batch", "--flash-attn", *CACHE_TYPES)
    same_output = ("threads", "threads-batch", "batch-size", "ubatch-size")
    start_s = 3.0
    fields: ClassVar[Mapping[str, Any]] = {"cache_prompt": False, "samplers": SAMPLERS}
    choices = (f"native:drafts={'|'.join(OWN)}",)
    methods: ClassVar[Table] = {
        "ar": lambda method, drafts: Setting(""),
        "prompt-lookup": _ngram,
        "speculative": _if_matched(_speculative),
        "eagle": _if_matched(_eagle),
        "dflash": _if_matched(_block),
        "mtp": _if_matched(_mtp),
        "native": _native,
    }

    def computing(self, dtype: str) -> tuple[str, ...]:
        exact = ("--flash-attn", "off") if dtype == "float32" else ()
        return *(word for flag in CACHE_TYPES for word in (flag, CACHES[dtype])), *exact

    def synthetic(self, setting: Setting, rates: Sequence[float]) -> Setting | str:
        if not setting.name.startswith("draft-"):
            return NOT_ALWAYS
        return setting._replace(words=(*setting.words, "--spec-synth-rates", ",".join(map(str, rates))))

    @classmethod
    def release_command(cls, program: Path) -> list[str]:
        return super().release_command(program) if _is_python(program) else [str(program), "--version"]

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        """Return the command of llama-server, or of the library with the same options."""
        threads = str(serving.threads)
        return [
            *((str(python), self.program_file(SERVE)) if _is_python(python) else (str(python),)),
            *("-m", serving.model, "--host", HOST, "--port", str(port), "--parallel", str(serving.rows)),
            *("--ctx-size", str(serving.rows * serving.positions), "--cache-ram", "0"),
            *("--threads", threads, "--threads-batch", threads, *self.computing(serving.dtype)),
            *("--spec-draft-threads", threads, "--spec-draft-threads-batch", threads),
            *serving.setting.words,
            *serving.options,
        ]

    def complete(self, server: Server, requests: Sequence[Request], model: str, *, ignore_eos: bool) -> list[Reply]:
        """Use its own endpoint, which returns token ids; OpenAI's returns text only."""
        bodies = [
            {
                "prompt": list(request.prompt_ids),
                "n_predict": request.max_new_tokens,
                **drawn(request.sampling),
                "seed": request.seed % 2**32,
                "samplers": SAMPLERS,
                "ignore_eos": ignore_eos,
                "stop": list(request.stop),
                "cache_prompt": request.cache is not None and not request.begins,
                "return_tokens": True,
                "stream": False,
                **self.constrained(request),
            }
            for request in requests
        ]
        return server.ask("/completion", bodies, [request.max_new_tokens for request in requests], add)


class Timings(Received):
    predicted_n: Number
    predicted_ms: float = 0.0  # from the first token to the last
    draft_n: Number = 0
    draft_n_accepted: Number = 0
    cache_n: Number | None = None  # tokens of the prompt that were cached


class Answer(Received):
    """An answer of /completion."""

    tokens: list[Number]
    stop_type: str
    timings: Timings | None = None


def add(reply: Reply, data: str) -> None:
    """Add an answer to a reply. Raises ValueError if it has another form."""
    answer = Answer.model_validate_json(data)
    reply.token_ids += answer.tokens
    reply.finish = "length" if answer.stop_type == "limit" else "stop"
    if (timings := answer.timings) is not None:
        reply.first_s = time.perf_counter() - timings.predicted_ms / 1000
        reply.counted = timings.predicted_n
        reply.cached = timings.cache_n
        reply.speculation = Speculation(
            None, timings.draft_n, timings.draft_n_accepted, None, "llama.cpp's timings of a request"
        )
