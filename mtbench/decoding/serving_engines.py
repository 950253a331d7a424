"""How a serving engine is told to decode by a method: the command that starts its server.

Names of options were read in the documentation of vLLM 0.32, SGLang and llama.cpp in November 2026. mtbench starts none
of these commands and measures nothing there.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NONE_HAS_IT = "no engine has this method"
SAMPLED = "Above a temperature of 0 it verifies drafts by another rule."
ALWAYS_WIDE = "Where nothing matches, it feeds one position, and mtbench the whole window."
START = {  # engine -> the words before the model
    "vLLM": ("vllm", "serve"),
    "SGLang": ("python", "-m", "sglang.launch_server", "--model-path"),
    "llama.cpp": ("llama-server", "-m"),
}
GGUF = ".gguf"


class Setting(NamedTuple):
    """The setting of one engine for a method."""

    engine: str  # of START
    words: Sequence[str]  # options of the command that starts its server
    differs: str = ""  # what it does otherwise than mtbench, in sentences

    def but(self, differs: str) -> "Setting":
        """Return the setting with something that the engine does otherwise."""
        return self._replace(differs=f"{self.differs} {differs}".strip())

    def command(self, model: str) -> str:
        """Return the command that starts the server with a model, as text for a shell."""
        return shlex.join([*START[self.engine], self._file(model), *self.words])

    def note(self, model: str) -> str:
        """Return what the engine does otherwise, and that it needs another format of a checkpoint's files."""
        if self._file(model) == model:
            return self.differs
        form = "a GGUF file" if self.engine == "llama.cpp" else "safetensors"
        return f"{self.differs} It needs the checkpoint as {form}.".strip()

    def _file(self, model: str) -> str:
        return gguf(model) if self.engine == "llama.cpp" else safetensors(model, "MODEL")


def vllm(**config: Any) -> Setting:
    """Return vLLM's setting; `config`: keys of its speculative configuration."""
    config |= {"model": safetensors(config["model"], "DRAFT")} if "model" in config else {}
    return Setting("vLLM", ("--speculative-config", json.dumps(config)))


def drafted(verify: str, config: Mapping[str, Any], *others: Setting) -> Sequence[Setting]:
    """Return the settings for a chain of drafts from a model; `config`: of `vllm`, the one engine for `rejection`."""
    if verify == "rejection":
        return (vllm(**config, draft_sample_method="probabilistic"),)
    return [setting.but(SAMPLED) for setting in (vllm(**config), *others)]


def sglang(algorithm: str, ahead: int, draft: str = "", *, steps: int | None = None) -> Setting:
    """Return SGLang's setting for a chain of `ahead` drafts; `steps`: forwards of the draft, default one per draft."""
    words = ["--speculative-algorithm", algorithm]
    words += ["--speculative-draft-model-path", safetensors(draft, "DRAFT")] if draft else []
    words += ["--speculative-num-steps", str(steps or ahead), "--speculative-eagle-topk", "1"]
    return Setting("SGLang", (*words, "--speculative-num-draft-tokens", str(ahead + 1)))


def llama_cpp(kind: str, ahead: int, draft: str = "") -> Setting:
    """Return llama.cpp's setting for a chain of `ahead` drafts, however unsure the draft is of them."""
    words = ["--spec-type", kind, *(["--spec-draft-model", gguf(draft)] if draft else [])]
    return Setting("llama.cpp", (*words, "--spec-draft-n-max", str(ahead), "--spec-draft-p-min", "0"))


def llama_cpp_ngram(ngram: int, ahead: int) -> Setting:
    """Return llama.cpp's setting for `ahead` tokens copied from behind the latest occurrence of the last `ngram`."""
    sizes = ("--spec-ngram-simple-size-n", str(ngram), "--spec-ngram-simple-size-m", str(ahead))
    return Setting("llama.cpp", ("--spec-type", "ngram-simple", *sizes))


def safetensors(name: str, placeholder: str) -> str:
    """Return a checkpoint's name for an engine that is not made for GGUF files: of such a file, the placeholder."""
    return placeholder if name.endswith(GGUF) else name


def gguf(name: str) -> str:
    """Return the name of a checkpoint's GGUF file, which llama.cpp needs: a checkpoint of another format's own name."""
    return name if name.endswith(GGUF) else Path(name).name + GGUF
