"""Methods with a known name draft what the code of their owners drafts, on 1,000 random and real texts.

The owners' code is called as it is: ArcticInference's (`pip install arctic-inference`, or MTBENCH_ARCTIC_INFERENCE
names a folder to import it from), and vLLM's in the environment of mtbench's engine.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
from drafts_of import drafts_of
from tokenizers import Tokenizer

import mtbench
from mtbench.decoding.registry import METHODS, SERVING_ENGINES

REAL = os.environ.get("MTBENCH_DATA_DIR")
VLLM = SERVING_ENGINES["vllm"].installed()  # in the user's cache folder; that of the tests is empty
ARCTIC = os.environ.get("MTBENCH_ARCTIC_INFERENCE")
TOKENIZER = Tokenizer.from_file(str(Path(mtbench.__file__).parent / "tiny/ar/tokenizer.json"))
VOCABULARY = TOKENIZER.get_vocab_size()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with spec_bench")]

Texts = list[list[int]]


@pytest.fixture(scope="module")
def texts() -> dict[str, Texts]:
    """500 texts of a few different tokens, and 500 prompts of Spec-Bench and MT-bench's answers, cut anywhere."""
    dice = random.Random(1)
    few = [[dice.randrange(dice.choice([2, 3, 5, 9])) for _ in range(dice.randint(1, 200))] for _ in range(500)]
    files = ["spec_bench/question.jsonl", "mt_bench/mt_bench__reference_answer__gpt-4.jsonl"]
    rows = [json.loads(line) for file in files for line in Path(REAL or "", file).read_text().splitlines()]
    turns = ["\n".join(row["turns"] if "turns" in row else row["choices"][0]["turns"]) for row in rows]
    ids = [TOKENIZER.encode(text).ids[:1500] for text in turns]
    return {"random": few, "real": [all_[: dice.randint(1, len(all_))] for all_ in ids if all_][:500]}


def ours(name: str, texts: Texts, **options: Any) -> Texts:
    """Return our drafts after each text, in batches of texts of similar length."""
    order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), 16):
        some = order[at : at + 16]
        drafts = drafts_of(METHODS[name](**options), [texts[n] for n in some], VOCABULARY)
        found.update(zip(some, drafts, strict=True))
    return [found[n] for n in range(len(texts))]


def share(one: Texts, other: Texts) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


@pytest.fixture(scope="module")
def arctic() -> Callable[..., list[int]]:
    """ArcticInference's drafts, as vLLM asks for them, of a cold tree."""
    if ARCTIC:
        sys.path.append(ARCTIC)
    owner = pytest.importorskip("arctic_inference.suffix_decoding", reason="arctic-inference is not installed")

    def draft(text: list[int], depth: int, factor: float, least: float, ahead: int) -> list[int]:
        cache = owner.SuffixDecodingCache(depth, 0)
        cache.start_request(0, text)
        return list(cache.speculate(0, text[-depth:], ahead, factor, min_token_prob=least).token_ids)

    return draft


SUFFIX = [(24, 1.0, 0.1, 8), (24, 1.0, 0.1, 32), (8, 2.0, 0.3, 6), (64, 1.5, 0.0, 16), (9, 0.7, 0.2, 4)]


@pytest.mark.parametrize("limits", SUFFIX)
@pytest.mark.parametrize(("kind", "equal"), [("random", 0.95), ("real", 0.98)])
def test_suffix_differs_from_its_owner_in_ties_only(
    kind: str, equal: float, limits: tuple[int, float, float, int], texts: dict[str, Texts], arctic: Callable[..., Any]
) -> None:
    """With the owner's order among equal counts, a plain count has all its drafts; with ours, all of ours."""
    depth, factor, least, ahead = limits
    owners = [arctic(text, *limits) for text in texts[kind]]
    found = ours("suffix", texts[kind], depth=depth, factor=factor, least=least, ahead=ahead)
    assert owners == [naive.suffix_draft(text, *limits, naive.first_of_the_owners_list) for text in texts[kind]]
    assert found == [naive.suffix_draft(text, *limits) for text in texts[kind]]
    print(f"{kind} {limits}: {share(found, owners):.1%} equal, {sum(map(bool, owners))} not empty")
    assert share(found, owners) >= equal


NGRAM = [(3, 1, 10), (3, 3, 4), (5, 2, 8), (1, 1, 1)]  # longest, shortest suffix, drafts
PROPOSE = """
import json, sys
import numpy as np
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as propose
texts, limits = json.load(sys.stdin)
found = [[propose(np.array(t, np.int32), low, high, 10**6, k).tolist() for t in texts] for high, low, k in limits]
print(json.dumps(found))
"""


@pytest.mark.skipif(VLLM is None, reason="it has 3.5 GB: run `mtbench fetch engine vllm` first")
def test_prompt_lookup_has_vllms_drafts(texts: dict[str, Texts]) -> None:
    every = texts["random"] + texts["real"]
    asked = json.dumps([every, NGRAM])
    said = subprocess.run([str(VLLM), "-c", PROPOSE], input=asked, capture_output=True, text=True, check=True).stdout
    for (high, low, ahead), owners in zip(NGRAM, json.loads(said.splitlines()[-1]), strict=True):
        assert sum(map(bool, owners)) > 200
        assert ours("prompt-lookup", every, ngram=high, min_ngram=low, ahead=ahead) == owners
