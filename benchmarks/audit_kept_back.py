"""Faults and suspicious honest pairs that were written without reading how the audit decides.

Each fault makes decoding go wrong as a serving engine, a converter or a decoder of one's own does. Its class is the one
that an engineer who knows the fault calls right; it was written before any audit ran. Words such as vllm#53019 are
public bug reports of that kind.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from audit_kept_back_faults import (
    accepting,
    adapter,
    age,
    around,
    drawn,
    ends,
    ends_last,
    epsilon,
    fp8,
    in_row,
    int4,
    masks,
    matrices,
    overwritten,
    penalised,
    positions,
    prefilled,
    reads,
    requests,
    rope,
    scores,
    texts,
    views,
    xtc,
)
from audit_maker import EXAMPLES, REAL, TINY, WINDOWED, Maker, Plant, prompts_with_system
from planted_faults import weights
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Rows
from mtbench.evaluation.registry import SUITES
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache

PROMPTS = """What does the token <|im_end|> mean in a chat template? Explain in one sentence.
Which number is larger, x² for x = 3 or ½ of 20? Show the steps.
What is the capital of France? Answer with one word.
Name three primary colours. Answer with the names only.""".splitlines()
RULES = (
    "Read the whole question.",
    "Name every amount.",
    "Write each step as an equation.",
    "Ignore ages and weights.",
)
LONG = " ".join(f"Rule {n}: {RULES[n % 4]}" for n in range(1, 31))
ONE, T16, HOT = {"batch_size": (1,)}, {"limit": 16, "batch_size": (8,)}, {"temperature": 0.7}
HALF = T16 | {"dtype": "bfloat16"}
B8: dict[str, Any] = {"limit": 8, "batch_size": (4,), "max_new_tokens": 32}  # of the real model, in bfloat16
B16: dict[str, Any] = {"limit": 16, "batch_size": (8,), "max_new_tokens": 40}
F8, F16 = B8 | {"dtype": "float32"}, B16 | {"dtype": "float32"}
COPIED, DRAFTED, TREE = ({"arms": ("ar", arm)} for arm in ("prompt-lookup", "speculative", "eagle:tree=3x2"))


def of(expected: str, fault: str, *made: tuple[Any, ...]) -> Iterator[Plant]:
    """Yield variants: model, request of both, what is patched, and other fields of a plant."""
    for model, request, patched, *more in made:
        fails = expected == "stop/budget"  # their plans say when an answer ends
        yield Plant(fault, "", expected, patched, model, request, fails=fails, **(more[0] if more else {}))


# fmt: off
def weight_faults() -> Iterator[Plant]:
    w = partial(of, "weights")
    order = torch.randperm(49152, generator=torch.Generator().manual_seed(5))
    yield from w("norms have another epsilon (llama.cpp#3090)", (REAL, B8, epsilon(1e-2)), (TINY, {}, epsilon(0.1)))
    yield from w("an adapter is merged", (REAL, F16, matrices(partial(adapter, share=0.08), "q_proj.weight")),
                 (TINY, T16, matrices(partial(adapter, share=0.05), "v_proj.weight")))
    yield from w("fp8, one scale per matrix", (REAL, B8, matrices(fp8)), (TINY, HALF, matrices(fp8)))
    yield from w("int4", (REAL, F8, matrices(int4, "down_proj.weight")))
    yield from w("biases are not loaded", (TINY, T16, matrices(torch.zeros_like, "proj.bias")))
    yield from w("the LM head is not tied (vllm#53019)", (REAL, B8, weights(lambda c: setattr(
        c.model.lm_head, "weight", torch.nn.Parameter(c.model.lm_head.weight[order], requires_grad=False)))))
    yield from w("a shard of a layer is not added",
                 (TINY, ONE, matrices(lambda x: x * (torch.arange(384) < 192), "down_proj", [2])))


def position_faults() -> Iterator[Plant]:
    c = partial(of, "cache/position")
    yield from c("another base of rotary angles", (REAL, B8, rope(lambda f: f**0.8)),
                 (TINY, T16, rope(lambda f: f**1.5)))
    yield from c("linear scaling of positions", (TINY, HALF, rope(lambda f: f / 4)))
    yield from c("slow frequencies are scaled", (REAL, F8, rope(lambda f: torch.where(f < 2e-3, f / 8, f))))
    yield from c("positions in bfloat16 (gpt-neox#1003)",
                 (REAL, B8 | {"suite": LONG, "limit": 4}, positions(lambda p: p.bfloat16().long(), prompts=True)))
    yield from c("all rows decode at the first row's position (unsloth#3699)",
                 (REAL, B8, positions(lambda p: p[:1].expand_as(p))),
                 (TINY, {}, positions(lambda p: p[:1].expand_as(p))))
    yield from c("a captured step has old positions", (TINY, HALF, positions(lambda p: p // 4 * 4)))
    yield from c("a window that the model does not have", (REAL, B8, masks(lambda right, q, k: right & (k > q - 32))),
                 (TINY, ONE, masks(lambda right, q, k: right & (k > q - 64))))
    yield from c("the model's windows are off", (WINDOWED, {}, around(AttentionMetadata, "attend", lambda
        old, self, q, k, v, scale=None, window=None, *more, sliding_window=None, **named: old(
            self, q, k, v, scale, None, *more, **named))))
    yield from c("chunks do not see each other",
                 (REAL, F8, masks(lambda right, q, k: right & (k // 32 == q // 32), prompts=True)),
                 (TINY, HALF, masks(lambda right, q, k: right & (k // 48 == q // 48), prompts=True)))
    yield from c("sinks and the last tokens", (REAL, B8, masks(lambda right, q, k: right & ((k < 4) | (k > q - 40)))))
    yield from c("the token before is not seen", (TINY, T16, masks(lambda right, q, k: right & (k != q - 2))))
    yield from c("padding is not masked", (REAL, B8, reads(lambda ids, longest: [2] * (longest - len(ids)) + ids)),
                 (TINY, T16, reads(lambda ids, longest: [0] * (longest - len(ids)) + ids)))
    yield from c("long prompts lose their middle",
                 (REAL, F16, reads(lambda ids, _: ids if len(ids) < 56 else ids[:24] + ids[-28:])))


def cache_faults() -> Iterator[Plant]:
    c = partial(of, "cache/position")
    yield from c("keys and values in fp8", (REAL, F8, views(lambda _, k, v: (
        fp8(k, torch.float8_e5m2, 1.0), fp8(v, torch.float8_e5m2, 1.0)))))
    yield from c("keys and values in int4", (TINY, HALF, views(lambda _, k, v: (int4(k), int4(v)))))
    yield from c("a static scale saturates", (TINY, HALF, views(lambda _, k, v: (k.clamp(-3, 3), v))))
    yield from c("query heads read other key heads", (REAL, F8, views(
        lambda n, k, v: (k.roll(int(n == 10), 1), v.roll(int(n == 10), 1)))))
    yield from c("blocks of two prompts collide",
                 (REAL, B16, prefilled(lambda _, held, at: [s[5, 32:48].copy_(s[4, 32:48]) for s in held])),
                 (TINY, T16, prefilled(lambda _, held, at: [s[2, 16:32].copy_(s[1, 16:32]) for s in held])))
    yield from c("the last whole block of a prompt is not computed (vllm#7380)", (REAL, F16, prefilled(
        lambda rows, held, _: [s[row, n - 8 : n - 1].zero_() for s in held
                               for row, n in enumerate(rows.prompt_len.tolist()) if n % 8 == 0])))
    yield from c("a layer's cache is not sent",
                 (REAL, B8, prefilled(lambda _, held, at: [s.index_fill_(0, at, 0) for s in held[14:16]])))
    yield from c("a preempted request loses a block", (TINY, T16, overwritten(24, 1, 64, zero=True)))
    yield from c("a block of the row before (TensorRT-LLM#8813)", (REAL, B16, overwritten(8, 3, 32, zero=False)))
    yield from c("accepted paths of a tree are not moved", (TINY, T16, around(KVCache, "move", lambda *_: None), TREE))


def choice_faults() -> Iterator[Plant]:
    min_p = partial(drawn, temperature=1.0, min_p=0.1, chance=torch.Generator().manual_seed(5))
    s = partial(of, "sampling")
    yield from s("penalties", (REAL, B8, scores(partial(penalised, by=1.1))),
                 (TINY, T16, scores(partial(penalised, by=1.2))), (TINY, {}, scores(partial(penalised, presence=1.5))))
    yield from s("no n-gram occurs twice", (TINY, {}, scores(partial(penalised, ngram=4))))
    yield from s("min-p in one row, or in all", (REAL, B16, in_row(6, min_p)), (TINY, HALF, scores(min_p)))
    yield from s("a shard of the vocabulary", (REAL, B8, scores(lambda _, x: x[..., :24576])))
    yield from s("likely tokens are left out (XTC)", (REAL, B8, scores(xtc)))
    yield from s("another temperature", (TINY, HOT, nullcontext, {"other": {"temperature": 1.1}}))
    yield from of("rounding", "coarse logits", (REAL, F8, scores(lambda _, x: x.bfloat16().float())),
                  (TINY, T16, scores(lambda _, x: fp8(x, torch.float8_e5m2, 1.0))))
    yield from of("unexplained", "a token is replaced once", (REAL, F16, in_row(2, lambda _, x: x.roll(1, -1), 9)))
    e = partial(of, "stop/budget")
    yield from e("an end token is missing", (REAL, F16, ends(lambda ids: ids[:1])), (TINY, T16, ends(lambda _: ())))
    yield from e("a line end is an end token", (REAL, B8, ends(lambda ids: (*ids, 198))))
    yield from e("the budget counts the prompt",
                 (REAL, F8, requests(lambda r, _: {"max_new_tokens": min(r.max_new_tokens, 84 - len(r.prompt_ids))})))
    yield from e("a stop string of the server's", (TINY, {}, requests(lambda r, _: {"stop": ("Second",)})))
    yield from e("an end inside a draft is missed (ipex-llm#11896)",
                 (TINY, T16 | {"max_new_tokens": 160}, around(sampling, "keep", ends_last), DRAFTED))


def text_faults() -> Iterator[Plant]:
    t = partial(of, "template/tokenizer")
    yield from t("the first token is there twice", (TINY, {}, texts(str, lambda ids: [ids[0], *ids])))
    yield from t("the server adds a first token to ids", (REAL, F8, reads(lambda ids, _: [1, *ids])))
    yield from t("white space at the end is stripped", (REAL, F8, texts(str.rstrip)))
    yield from t("the system prompt is missing", (REAL, B8, texts(lambda x: x[x.index("<|im_start|>user") :])))
    yield from t("special tokens of a user are text",
                 (REAL, F16, texts(lambda x: x.replace("token <|im_end|>", "token < |im_end| >"))))
    yield from t("texts are normalised", (REAL, F16, texts(partial(unicodedata.normalize, "NFKC"))))
    yield from of("metric", "scored without its end", (TINY, {"max_new_tokens": 160}, around(
        SUITES["arithmetic"], "score", lambda old, self, given: old(self, {k: v[:-4] for k, v in given.items()}))))
# fmt: on


def draft_faults() -> Iterator[Plant]:
    """Rules are of rows, the model's output and drafts (R, K)."""

    def agrees(_: Rows, output: Any, drafts: Tensor) -> Any:
        return output.agrees(drafts)

    def unread(_: Rows, output: Any, drafts: Tensor) -> Any:
        return output.agrees(drafts) | (torch.arange(drafts.shape[1]) == 0)

    def top2(_: Rows, output: Any, drafts: Tensor) -> Any:
        return (output.logits[:, :-1].topk(2).indices == drafts[..., None]).any(-1)

    def late(rows: Rows, output: Any, drafts: Tensor) -> Any:
        return output.agrees(drafts) | ((rows.request == 5) & (age(rows) > 8))[:, None]

    def best(_: Rows, output: Any, drafts: Tensor) -> Any:
        return output.agrees(drafts).cumprod(1).any(0).expand(drafts.shape)

    a, copies, model = (
        partial(of, "acceptance fault"),
        partial(accepting, "prompt-lookup"),
        partial(accepting, "speculative"),
    )
    yield from a("the first draft is not verified (lattice#243)", (REAL, F8, copies(unread), COPIED))
    yield from a("the first draft is not verified (lattice#243)", (TINY, T16, model(unread), DRAFTED))
    yield from a(
        "a draft among the two best passes", (REAL, B8, copies(top2), COPIED), (TINY, HALF, model(top2), DRAFTED)
    )
    yield from a("all rows accept as many as the best", (TINY, T16, model(best), DRAFTED))
    yield from a("late drafts of a row are not verified", (REAL, F16, copies(late), COPIED))
    yield from a("the token behind is the last column's", (TINY, {}, model(agrees, last=True), DRAFTED))


def plants(maker: Maker) -> Iterator[Plant]:
    """Yield all variants, fault by fault."""
    made = (weight_faults, position_faults, cache_faults, choice_faults, text_faults, draft_faults)
    for number, plant in enumerate(chain.from_iterable(faults() for faults in made)):
        suite = {"suite": (questions(maker, plant.request.get("suite")),)} if plant.model == REAL else {}
        yield plant._replace(variant=f"{number}, {plant.model}", request={**plant.request, **suite})


def questions(maker: Maker, system: str | None = None) -> str:
    """Return the suite of the prompts, or of others with a system prompt."""
    if system is not None:
        return prompts_with_system(maker.folder, [system, "Be brief."], "kept-back-long", 8)
    file = maker.folder / "kept-back.jsonl"
    lines = [json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)]
    file.write_text(EXAMPLES.read_text() + "".join(lines))
    return f"prompts:{file}"


class Pair(NamedTuple):
    """Two honest outputs that look suspicious. Expected: no fault."""

    name: str
    request: Mapping[str, Any] = {}
    other: Mapping[str, Any] = {}
    arm: str = "ar"  # of B
    model: str = TINY


def pairs(maker: Maker) -> Iterator[Pair]:
    """Yield all honest pairs."""
    half: dict[str, Any] = {"dtype": "bfloat16"}
    alone = {"limit": 1, "batch_size": (1,)}
    many = half | {"limit": 32, "batch_size": (16,), "max_new_tokens": 128}
    for title, asked in (("", half | {"limit": 16}), ("many, ", many)):
        yield from (Pair(f"{title}other batches, {n}", asked, {"batch_size": (n,)}) for n in (1, 3, 8))
        yield Pair(f"{title}refilled rows", asked | {"limit": 32}, {"batching": ("refill",)})
        for arm in ("prompt-lookup", "suffix", "jacobi", "lookahead", "speculative", "eagle:tree=3x2", "hf-generate"):
            yield Pair(f"{title}{arm}", asked, arm=arm)
    yield Pair("engines", many, {"engine": ("eager",)})
    yield Pair("engine invariant, drafted", {"engine": ("invariant",)}, arm="suffix")
    yield from (Pair(f"float32 and {dtype}", {}, {"dtype": dtype}) for dtype in ("bfloat16", "float16", "float64"))
    yield Pair("half precision of two kinds", many, {"dtype": "float16"})
    yield Pair("long drafts", many | {"batch_size": (5,)}, arm="speculative:ahead=8")
    yield Pair("long answers", half | {"max_new_tokens": 400, "ignore_eos": True}, {"batch_size": (2,)})
    yield Pair("sampled alike, drafted", many | {"temperature": 0.8}, arm="speculative")
    yield Pair("one answer", half | alone, {"batch_size": (2,), "limit": 2})
    here: dict[str, Any] = B8 | {"suite": (questions(maker),), "batch_size": (8,)}
    long = {"suite": (questions(maker, LONG),), "limit": 4}
    ours = partial(Pair, model=REAL)
    yield ours("real model: batches", here, {"batch_size": (1,)})
    yield ours("real model: batches, padding, prefixes", here | long, {"batch_size": (2,)})
    yield ours("real model: seeds", here, {"seed": 9})
    yield ours("real model: engines", here, {"engine": ("eager",)})
    yield ours("real model: dtypes", here, {"dtype": "float32"})
    yield ours("real model: copies", here, arm="prompt-lookup")
    yield ours("real model: suffixes", here | {"dtype": "float32"}, {"batch_size": (3,)}, "suffix:ahead=8")
    yield ours("real model: one answer, guesses", here | alone, arm="jacobi")
