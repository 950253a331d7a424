"""SGLang (github.com/sgl-project/sglang): Zheng et al., arXiv 2312.07104.

Options were read in its documentation and source of November 2026. It has no package for a CPU, so mtbench has never
run it: its server gets requests as vLLM's does, and only the command to deploy is certain.

Several MTP layers were read in srt/speculative/multi_layer_eagle_worker_v2.py of 0.5.19. A DFlash 2 draft's sampled
tokens are verified by rejection, by the selector's probabilities, whichever rule is asked for.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.serving_engine import (
    HOST,
    IN_TARGET,
    NO_BLOCK,
    NO_CONFIDENCE,
    NO_REJECTION,
    NO_TREE,
    ONE_A_FORWARD,
    SAMPLED,
    Serving,
    ServingEngine,
    Setting,
    Table,
)
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.sampling import Sampling

LAYERS = "Of several layers it uses the first; with --enable-multi-layer-eagle, and as many drafts as layers, each."
# srt/model_executor/model_runner_kv_cache_mixin.py: that part of what was free before is for weights, keys and values.
BESIDE_BYTES = 5 << 29  # 2.5 GiB: its CUDA context, activations of a chunk of 8,192 tokens, graphs
JOINT = "SGLang applies top_p to all tokens, also to those that top_k removes"
REJECTS = ("EAGLE3", "NEXTN")  # algorithms whose drafts it samples and verifies by --speculative-use-rejection-sampling


def _chain(algorithm: str, method: Any, draft: str = "", steps: int | None = None) -> Setting | str:
    """Return the setting for a chain of drafts. `steps`: forwards of the draft, by default one for each token."""
    if method.confidence:
        return NO_CONFIDENCE
    if method.verify != "match" and algorithm not in REJECTS:
        return NO_REJECTION
    if method.verify == "block":  # github.com/sgl-project/sglang/pull/36516 is open
        return NO_BLOCK
    rejection = method.verify == "rejection"
    words = ["--speculative-algorithm", algorithm]
    words += ["--speculative-draft-model-path", draft] if draft else []
    words += ["--speculative-num-steps", str(steps or method.ahead), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(method.ahead + 1)]
    words += ["--speculative-use-rejection-sampling"] if rejection else []
    return Setting(algorithm, tuple(words), "" if rejection else SAMPLED)


def _speculative(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    return ONE_A_FORWARD if method.per_forward != 1 else _chain("STANDALONE", method, drafts[method.draft])


def _eagle(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    return NO_TREE if method.tree != "1" else _chain("EAGLE3", method, drafts[method.draft])


def _block(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":  # github.com/sgl-project/sglang/pull/31069 is open
        return NO_TREE
    kind = "DSPARK" if method.draft == "dspark" else "DFLASH"
    return _chain(kind, method, drafts[method.draft], steps=1)


def _mtp(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    setting = _chain("NEXTN", method) if method.draft.startswith("#") else IN_TARGET
    return setting if isinstance(setting, str) or method.ahead == 1 else setting.but(LAYERS)


@SERVING_ENGINES.register("sglang")
class SGLang(ServingEngine):
    """One process of SGLang's server an arm."""

    title = "SGLang"
    start = ("python", "-m", "sglang.launch_server", "--model-path")
    distributions = ("sglang",)
    caches = True
    share_option = "mem-fraction-static"
    share_of_free = True
    beside_bytes, work_bytes = BESIDE_BYTES, 0
    splits = ("tensor-parallel-size", "tp-size", "tp", "pipeline-parallel-size", "pp-size")
    constraint = staticmethod(lambda schema: {"json_schema": json.dumps(schema)})
    methods: ClassVar[Table] = {
        "ar": lambda method, drafts: Setting(""),
        "speculative": _speculative,
        "eagle": _eagle,
        "dflash": _block,
        "mtp": _mtp,
    }

    def computing(self, dtype: str) -> tuple[str, ...]:
        return "--dtype", dtype

    def filters_with(self, setting: Setting) -> Sequence[str]:
        return self.filters[:2] if setting.name else self.filters  # releases verify drafts without min_p

    def other_filtering(self, setting: Setting, sampling: Sampling) -> str:
        """Return the difference of plain decoding: flashinfer's top-p counts tokens that top-k removes."""
        together = sampling.top_k > 0 and sampling.top_p < 1 and not sampling.min_p and not setting.name
        return JOINT if sampling.filters and together else ""

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        return [
            *(str(python), "-m", "sglang.launch_server", "--model-path", serving.model),
            *("--host", HOST, "--port", str(port), *self.computing(serving.dtype), "--sampling-defaults", "openai"),
            *("--context-length", str(serving.positions)),
            *("--max-running-requests", str(serving.rows), "--enable-cache-report"),
            *(() if serving.prefix_cache else ("--disable-radix-cache",)),
            *(() if serving.share is None else (f"--{self.share_option}", f"{serving.share:.4f}")),
            *serving.setting.words,
            *serving.options,
        ]
