"""Lossless methods with models that they run on: the tests that hold for all of them go through these cases."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parallel_eagle_cases
import torch
from block_drafts import fitted
from decoding_cases import BUDGET, PROMPTS, ar, on, run
from eagle_cases import FORMATS, make_pair
from mtp_checkpoints import FAMILIES, save_headed
from other_vocabulary import translated
from safetensors.torch import save_file
from small import MASK, save_small, small_checkpoint, small_tokenizer
from torch import Tensor

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.models.drafts.loading import load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import load, prepare
from mtbench.models.runner import ModelRunner
from mtbench.models.vocabularies import TranslatedRunner

AGREES = {"never": 9.0, "sometimes": 0.02, "always": 0.0}  # how far a draft's weights are from the target's
HEADS = 3


def drafted(agrees: str) -> ModelRunners:
    """A target, and a draft that is the same model, one much like it, or quite another."""
    target = small_checkpoint()
    model = copy.deepcopy(target.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * AGREES[agrees])
    draft = prepare(model, small_tokenizer(), source="draft")
    return ModelRunners("any", {"any": ModelRunner(target), "draft": ModelRunner(draft)})


def last_hidden(runner: ModelRunner, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the logits after a text and what its LM head read, by the model's own attention over the whole text."""
    model = runner.model
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    model.set_attn_implementation("mtbench")
    logits = out.logits[0, -1].index_fill(-1, runner.checkpoint.suppressed, float("-inf"))
    return logits, out.hidden_states[-1][0, -1]


def head_logits(runner: ModelRunner, heads: dict[str, Tensor], text: list[int]) -> list[Tensor]:
    """The logits of each head after a text, (V,) each."""
    hidden, logits = last_hidden(runner, text[:-1])[1], []
    for k in range(HEADS):
        x = hidden + torch.nn.functional.silu(heads[f"{k}.hidden.weight"] @ hidden + heads[f"{k}.hidden.bias"])
        logits.append((heads[f"{k}.head"] @ x).index_fill(0, runner.checkpoint.suppressed, float("-inf")))
    return logits


def headed(folder: Path) -> ModelRunner:
    """A random model, and Medusa heads that are often right: fitted by least squares to what it says itself."""
    runner = ModelRunner(load(str(save_small(folder)), dtype=torch.float64))
    says = run(ar(), runner, ignore_eos=True)
    texts = [p + g.token_ids for p, g in zip(PROMPTS, says, strict=True)]
    states = [(torch.stack([last_hidden(runner, text[:n])[1] for n in range(1, len(text))]), text) for text in texts]
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for k in range(HEADS):
        weight, bias = 0.1 * torch.randn(32, 32).double(), 0.1 * torch.randn(32).double()
        known = torch.cat([hidden[: len(text) - k - 2] for hidden, text in states])
        target = torch.cat([torch.tensor(text[k + 2 :]) for _, text in states])
        x = known + torch.nn.functional.silu(known @ weight.T + bias)
        head = torch.linalg.lstsq(x, torch.eye(40).double()[target], driver="gelsd").solution.T
        head[MASK] = head.sum(0)  # an id no arm may say, which the heads like best
        tensors |= {f"{k}.hidden.weight": weight, f"{k}.hidden.bias": bias, f"{k}.head": head.contiguous()}
    save_file(tensors, folder / "medusa.safetensors")
    return runner


def block_drafted(folder: Path, kind: str) -> ModelRunners:
    """A target, and a block draft whose LM head is fitted to what the target says."""
    target = ModelRunner(load(str(save_small(folder / "target")), dtype=torch.float64))
    says = run(ar(), target, budget=BUDGET, ignore_eos=True)
    texts = [(p + g.token_ids, len(p)) for p, g in zip(PROMPTS, says, strict=True)]
    draft = load_draft(str(fitted(folder / "draft", kind, target, texts)), target.checkpoint)
    return ModelRunners("ar", {"ar": target, "dflash": DraftRunner(draft, target)})


def models(name: str, folder: Path) -> ModelRunners:
    """Return the models of a case."""
    if name in AGREES:
        return drafted(name)
    if name == "translated":
        return translated()
    if name in FORMATS:
        return make_pair(folder, FORMATS[name]).runners()
    if name in parallel_eagle_cases.FORMATS:
        return parallel_eagle_cases.make_pair(folder, parallel_eagle_cases.FORMATS[name]).runners()
    if (family := name.partition(" x")[0]) in FAMILIES:
        return save_headed(folder, family, int(name.partition(" x")[2] or 1)).runners()
    if name in ("z-lab", "rnn", "domino", "dflash2"):
        return block_drafted(folder, name)
    return on(headed(folder) if name == "headed" else ModelRunner(small_checkpoint()))


@dataclass(frozen=True)
class Case:
    """A method and models that it runs on."""

    models: str
    name: str
    options: dict[str, Any]

    @property
    def method(self) -> Method:
        method: Method = METHODS[self.name](**self.options)
        return method

    def __str__(self) -> str:
        return f"{self.name} {self.options} {self.models}"


def cases(models: str, name: str, *options: dict[str, Any]) -> list[Case]:
    return [Case(each, name, chosen) for each in models.split("|") for chosen in options]


CASES = [
    *cases("plain", "prompt-lookup", {}, {"ahead": 1, "ngram": 1}, {"ahead": "auto"}),
    *cases("plain", "prompt-lookup", {"match": "latest", "min_ngram": 2}),
    *cases("plain", "suffix", {}, {"ahead": 3, "depth": 4, "factor": 3.0, "least": 0.0}, {"ahead": "auto"}),
    *cases("plain", "jacobi", {}, {"ahead": BUDGET}),
    *cases("plain", "lookahead", {"width": 4, "ngram": 4, "candidates": 3}, {"width": 1, "ngram": 2, "candidates": 2}),
    *cases("sometimes|never|always", "speculative", {}, {"ahead": 7}, {"per_forward": 3}),
    *cases("never|always", "speculative", {"verify": "rejection"}),
    *cases("sometimes", "speculative", {"ahead": 1}, {"per_forward": "all"}, {"ahead": "auto"}, {"verify": "block"}),
    *cases("sometimes", "speculative", {"ahead": "auto", "confidence": 0.1}),
    *cases("translated", "speculative", {"vocabulary": "intersection"}),
    *cases("translated", "speculative", {"vocabulary": "intersection", "per_forward": "all", "ahead": "auto"}),
    *cases("sometimes|never|always", "mars-speculative", {}, {"ahead": 2, "block_size": 3}, {"per_forward": 2}),
    *cases("plain", "mars-selfspec", {}, {"ahead": 1}, {"ahead": 3}, {"ahead": 2, "tree": "best:6"}),
    *cases("headed", "medusa", *({"heads": HEADS, "tree": tree} for tree in ("1", "3x2", "1x2x2", "best:7"))),
    *cases("specforge|deepspec|speculators|specforge 3.1", "eagle", {}, {"ahead": 3, "tree": "3x3x2"}),
    *cases("specforge", "eagle", {"ahead": 7}, {"ahead": "auto"}, {"verify": "rejection"}),
    *cases("specforge|peagle", "eagle", {"tree": "best:5"}),
    *cases("specforge", "eagle", {"confidence": 0.1, "verify": "block"}),
    *cases("peagle|p-eagle of vllm", "eagle", {}, {"ahead": 3, "tree": "3x3x2"}),
    *cases("peagle", "eagle", {"ahead": 7}, {"ahead": "auto"}, {"verify": "rejection"}, {"ahead": 1}),
    *cases("peagle", "eagle", {"confidence": 0.1, "verify": "block"}),
    *cases("z-lab|rnn", "dflash", {"ahead": 3}, {"ahead": 1}),
    *cases("domino", "dflash", {"ahead": 3, "tree": "3x2"}),
    *cases("z-lab|rnn|dflash2", "dflash", {"ahead": 3, "tree": "best:6"}),
    *cases("z-lab", "dflash", {"ahead": 3, "verify": "rejection"}),
    *cases("rnn", "dflash", {"ahead": 5, "confidence": 0.5}, {"ahead": 3, "verify": "block"}),
    *cases("dflash2", "dflash", *({"ahead": k} for k in range(1, 5)), {"ahead": 3, "tree": "3x2"}),
    *cases("dflash2", "dflash", {"ahead": 4, "verify": "rejection"}, {"ahead": 3, "verify": "block"}),
    *cases("mimo|glm|deepseek|mimo x3", "mtp", {}, {"ahead": 3}),
    *cases("mimo", "mtp", {"ahead": 4, "tree": "best:5"}),
    *cases("mimo", "mtp", {"ahead": "auto"}, {"ahead": 2, "confidence": 0.1, "verify": "block"}),
]


def graph(runners: ModelRunners) -> ModelRunners:
    """The same models, whose weights the graph engine's decoder runs."""
    engine = ENGINES["graph"]()
    [role] = [role for role, runner in runners.items() if runner is runners.target]
    target = engine.runner(runners.target.checkpoint)

    def fast(runner: ModelRunner) -> ModelRunner:
        if isinstance(runner, DraftRunner):
            return DraftRunner(runner.checkpoint, target)
        if isinstance(runner, TranslatedRunner):
            return TranslatedRunner(engine.runner(runner.checkpoint), target)
        return target if runner is runners.target else engine.runner(runner.checkpoint)

    return ModelRunners(role, {role: fast(runner) for role, runner in runners.items()})
