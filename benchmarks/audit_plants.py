"""The planted faults of `audit_corpus.py`, and the class that a person expects for each, written before the audit ran.

Variants of a fault vary seed, model, batch size, prompts and length. audit_reading_plants.py has further ones.
"""

from collections.abc import Iterator

import audit_faults as faults
import audit_loop_faults as loop
import audit_reading_plants
import planted_faults as planted
import planted_reading as reading
import torch
from audit_faults import added_token, coarse_logits, extraction, penalised, quantised, with_stop
from audit_loop_faults import foreign_prefix
from audit_maker import REAL, WINDOWED, Maker, Plant, prompts_with_system
from planted_faults import sampled, shifted_rope

from mtbench.models.loading import inspect

PROMPT, STOP, SAMPLING, WEIGHTS = "template/tokenizer", "stop/budget", "sampling", "weights"
CACHE, ACCEPTANCE, METRIC, ROUNDING, NEAR = "cache/position", "acceptance fault", "metric", "rounding", "near-tie"
START = "<|im_start|>"
SPECULATIVE = ("ar", "speculative")
LOOKUP = ("ar", "prompt-lookup")
F32 = {"dtype": "float32"}
B1, B2, B8 = {"batch_size": (1,)}, {"batch_size": (2,)}, {"batch_size": (8,)}
OURS = "You are a careful accountant who checks every sum twice and answers briefly."
THEIRS = "You are a cheerful pirate who counts gold on a ship and sings all the while."
GSM8K = {"suite": ("gsm8k",), "limit": 4, "max_new_tokens": 64, "batch_size": (2,)}


def plants(maker: Maker) -> Iterator[Plant]:
    """Yield every fault with its variants."""
    yield from _prompts()
    yield from _drafts()
    yield from _positions(maker)
    yield from _models()
    yield from _choices()
    yield from _scores(maker)
    yield from audit_reading_plants.plants(maker)


def _prompts() -> Iterator[Plant]:
    twice, missing = faults.template(lambda text: START + text), faults.template(lambda text: text.removeprefix(START))
    yield Plant("wrong BOS", "twice", PROMPT, twice)
    yield Plant("wrong BOS", "missing", PROMPT, missing, request={"seed": 1, **B2})
    yield Plant("wrong BOS", "twice, real model", PROMPT, twice, REAL)
    yield Plant("wrong BOS", "missing, files of texts", PROMPT, missing, form="texts")
    hidden = reading.other_prompts(lambda ids, _: [1, *ids])
    yield Plant("wrong BOS", "twice, only inside the engine", PROMPT, hidden, REAL, F32)
    old = faults.template(lambda text: text.replace("user\n", "user: ").replace("assistant\n", "assistant: "))
    yield Plant("old template", "other separators", PROMPT, old)
    yield Plant("old template", "no newline at the end", PROMPT, faults.template(str.rstrip), request={"seed": 2, **B8})
    bare = faults.template(lambda text: text[text.index("<|im_start|>user") :])
    yield Plant("old template", "no system prompt, real model", PROMPT, bare, REAL)
    yield Plant("old template", "one side a file of texts", PROMPT, old, form="text", request={"seed": 3})
    yield Plant("tokenizer with an added token", "a word of the vocabulary", PROMPT, added_token("hells", "irst"))
    yield Plant("tokenizer with an added token", "other words", PROMPT, added_token("ow many"), request={"seed": 1})
    yield Plant("tokenizer with an added token", "real model", PROMPT, added_token("rite", "ont"), REAL)
    yield Plant("tokenizer with an added token", "batch size 1", PROMPT, added_token("as", "ore"), request=B1)


def _drafts() -> Iterator[Plant]:
    lossless = loop.claims_lossless()
    for variant, arms, request in (
        ("MARS, tau 0.6", ("ar:on=mars", "mars:tau=0.6"), {}),
        ("MARS, tau 0.3, batch size 1", ("ar:on=mars", "mars:tau=0.3"), {"seed": 1, **B1}),
        ("MARS of 8, tau 0.5", ("ar:on=mars_b8", "mars:on=mars_b8,block_size=8,tau=0.5"), {"seed": 2, **B8}),
    ):
        yield Plant("tau in a lossless arm", variant, ACCEPTANCE, lossless, request=request, arms=arms)
    name = "tau in a lossless arm"
    yield Plant(name, "speculative, half of the largest", ACCEPTANCE, loop.tolerant(0.5), arms=SPECULATIVE)
    yield Plant(name, "prompt lookup, real model", ACCEPTANCE, loop.tolerant(0.1), REAL, arms=LOOKUP)
    name = "draft accepted without check in 1 of 200 steps"
    long = {"limit": 24, "batch_size": (1,)}
    yield Plant(name, "speculative", ACCEPTANCE, loop.unchecked(200, 3), request=long, arms=SPECULATIVE)
    yield Plant(name, "8 drafts", ACCEPTANCE, loop.unchecked(20, 7), request=long, arms=("ar", "speculative:ahead=8"))
    yield Plant(name, "EAGLE", ACCEPTANCE, loop.unchecked(200, 50), request={**long, "seed": 1}, arms=("ar", "eagle"))
    yield Plant(name, "batch size 4", ACCEPTANCE, loop.unchecked(60, 5), request={"limit": 24}, arms=SPECULATIVE)
    yield Plant(name, "prompt lookup, real model", ACCEPTANCE, loop.unchecked(12, 5), REAL, arms=LOOKUP)
    yield Plant(name, "real model, float32", ACCEPTANCE, loop.unchecked(12, 5), REAL, {**F32, **B1}, arms=LOOKUP)


def _positions(maker: Maker) -> Iterator[Plant]:
    name = "one-off rope"
    yield Plant(name, "decode steps one ahead", CACHE, shifted_rope(1))
    yield Plant(name, "decode steps one behind", CACHE, shifted_rope(-1), request={"seed": 1, **B1})
    yield Plant(name, "drafts only", CACHE, shifted_rope(1, guesses_only=True), arms=SPECULATIVE)
    yield Plant(name, "real model", CACHE, shifted_rope(1), REAL)
    yield Plant(name, "real model, float32, two ahead", CACHE, shifted_rope(2), REAL, {**F32, **B2})
    yield Plant(name, "from position 100 on", CACHE, planted.late_rope(1, 100), request={"seed": 2, **B8})
    name = "cache not cropped after rejection"
    stale = planted.stale_after_rejection()
    yield Plant(name, "speculative", CACHE, stale, arms=SPECULATIVE)
    yield Plant(name, "8 drafts, batch size 1", CACHE, stale, request=B1, arms=("ar", "speculative:ahead=8"))
    yield Plant(name, "path of a tree", CACHE, loop.unmoved_path(), request={"seed": 1}, arms=("ar", "eagle:tree=3x2"))
    keeps = ("ar", "corpus-lookup:crop=false")
    yield Plant(name, "an engine that hides its drafts", CACHE, request=B1, arms=keeps)
    yield Plant(name, "prompt lookup, real model", CACHE, stale, REAL, arms=LOOKUP)
    yield Plant(name, "hidden drafts, real model", CACHE, model=REAL, request=B1, arms=keeps)
    name = "sliding window off by one"
    yield Plant(name, "one wider", CACHE, loop.wider_window(1), WINDOWED)
    yield Plant(name, "one narrower", CACHE, loop.wider_window(-1), WINDOWED, {"seed": 1, **B1})
    yield Plant(name, "speculative", CACHE, loop.wider_window(1), WINDOWED, {"seed": 2}, arms=LOOKUP)
    yield Plant(name, "bfloat16", CACHE, loop.wider_window(-1), WINDOWED, {"dtype": "bfloat16", "limit": 16})
    name = "batch rows mixed up"
    yield Plant(name, "answers exchanged from token 10 on", CACHE, loop.swapped_answers(10))
    yield Plant(name, "answers exchanged, batch size 2", CACHE, loop.swapped_answers(0), request={"seed": 1, **B2})
    yield Plant(name, "caches exchanged at step 6", CACHE, planted.swapped_caches(6), request={"seed": 2})
    yield Plant(name, "logits exchanged in three steps", CACHE, loop.swapped_logits(10, 13), request={"seed": 3, **B8})
    yield Plant(name, "caches exchanged, real model", CACHE, planted.swapped_caches(4), REAL)
    name = "prefix cache of another system prompt"
    ours = {"suite": (prompts_with_system(maker.folder, [OURS], "ours"),)}
    tokenizer = inspect("embedded:tiny/ar", offline=True).tokenizer
    theirs = tokenizer(f"{START}system\n{THEIRS}", add_special_tokens=False)["input_ids"]
    begins = len(tokenizer(f"{START}system\n", add_special_tokens=False)["input_ids"])
    mine = tokenizer(f"{START}system\n{OURS}", add_special_tokens=False)["input_ids"]
    theirs = theirs[: len(mine)]
    yield Plant(name, "the whole system prompt", CACHE, foreign_prefix(theirs), request=ours)
    yield Plant(name, "a block of 16", CACHE, foreign_prefix(theirs[:16]), request={**ours, **B1})
    yield Plant(name, "its middle", CACHE, foreign_prefix(theirs[begins : begins + 24], begins), request=ours)
    mixed = {"suite": (prompts_with_system(maker.folder, [OURS, THEIRS], "mixed"),), "limit": 16}
    yield Plant(name, "of another request in the run", CACHE, foreign_prefix(theirs[:48]), request=mixed)
    yield Plant(name, "of another request, batch size 1", CACHE, foreign_prefix(mine[:32]), request={**mixed, **B1})
    if maker.real:
        words = inspect(maker.real, offline=True).tokenizer
        pirate = words(f"{START}system\n{THEIRS} {THEIRS}", add_special_tokens=False)["input_ids"][:20]
        yield Plant(name, "real model", CACHE, foreign_prefix(pirate), REAL)
        yield Plant(name, "real model, float32", CACHE, foreign_prefix(pirate[:16]), REAL, {**F32, **B1})


def _models() -> Iterator[Plant]:
    name = "8-bit weights"
    yield Plant(name, "integers by channel", WEIGHTS, quantised(8), request={"limit": 32})
    yield Plant(name, "integers, one scale", WEIGHTS, quantised(8, tensor=True), request={"limit": 16, "seed": 1})
    yield Plant(name, "floats e4m3", WEIGHTS, faults.eight_bit_floats(), request={"limit": 16, **B1})
    yield Plant(name, "integers by channel, real model in float32", WEIGHTS, quantised(8), REAL, {**F32, "limit": 8})
    yield Plant(name, "integers, one scale, real model", WEIGHTS, quantised(8, tensor=True), REAL, {"limit": 8})
    yield Plant(name, "4 bits in groups of 32, real model", WEIGHTS, quantised(4, 32), REAL)
    name = "a layer left out"
    yield Plant(name, "the second", WEIGHTS, planted.without_layers(1))
    yield Plant(name, "the last", WEIGHTS, planted.without_layers(3), request={"seed": 1, **B1})
    yield Plant(name, "one of the real model", WEIGHTS, planted.without_layers(12), REAL)
    yield Plant(name, "two of the real model, float32", WEIGHTS, planted.without_layers(20, 21), REAL, F32)
    yield Plant(name, "one side a file of texts", WEIGHTS, planted.without_layers(2), form="text", request={"seed": 2})


def _choices() -> Iterator[Plant]:
    name = "top-k 50 sampling by default"
    yield Plant(name, "temperature 1", SAMPLING, sampled(1.0, 50))
    yield Plant(name, "temperature 0.7, top-p 0.9", SAMPLING, sampled(0.7, 50, 0.9, 1), request={"seed": 1, **B8})
    yield Plant(name, "real model", SAMPLING, sampled(1.0, 50, seed=2), REAL)
    yield Plant(name, "real model, temperature 0.2, top-p 0.9", SAMPLING, sampled(0.2, 50, 0.9, 3), REAL)
    yield Plant(name, "real model, a file of texts", SAMPLING, sampled(0.8, 50, seed=4), REAL, form="text")
    name = "penalty on"
    yield Plant(name, "repetition 1.3", SAMPLING, penalised(1.3))
    yield Plant(name, "repetition 1.1, answer only", SAMPLING, penalised(1.1, prompt=False), request={"seed": 1, **B1})
    yield Plant(name, "presence 1.5", SAMPLING, penalised(presence=1.5, prompt=False), request={"seed": 2})
    yield Plant(name, "repetition 1.1, real model", SAMPLING, penalised(1.1), REAL)
    yield Plant(name, "repetition 1.2, a file of texts", SAMPLING, penalised(1.2), REAL, F32, form="text")
    name = "EOS ignored"
    many = {"max_new_tokens": 96}
    yield Plant(name, "in the loop", STOP, faults.endless(), request=many)
    yield Plant(name, "by the option", STOP, request={**many, "seed": 1, **B1}, other={"ignore_eos": True})
    yield Plant(name, "speculative", STOP, faults.endless(), request=many, arms=SPECULATIVE)
    yield Plant(name, "a file of texts", STOP, faults.endless(), request={**many, "seed": 2}, form="text")
    yield Plant(name, "real model", STOP, faults.endless(), REAL, {"max_new_tokens": 96})
    name = "budget one short"
    yield Plant(name, "in the loop", STOP, faults.short_budget(1), request={"max_new_tokens": 24})
    yield Plant(name, "by the option", STOP, request={"max_new_tokens": 32, **B1}, other={"max_new_tokens": 31})
    yield Plant(name, "speculative", STOP, faults.short_budget(1), request={"max_new_tokens": 17}, arms=SPECULATIVE)
    yield Plant(name, "real model, texts", STOP, faults.short_budget(1), REAL, {"max_new_tokens": 24}, form="texts")
    name, missed = "stop string inside a token", faults.stops_between_tokens()
    yield Plant(name, "found between tokens only", STOP, missed, always=with_stop("econd"))
    yield Plant(name, "end of a word", STOP, missed, request={"seed": 1, **B1}, always=with_stop("ing more"))
    yield Plant(name, "speculative", STOP, missed, arms=SPECULATIVE, always=with_stop("hird"))
    yield Plant(name, "a file of texts", STOP, missed, form="text", request={"seed": 2}, always=with_stop("akes 1"))
    name = "bfloat16 logits"
    yield Plant(name, "of a float32 model", ROUNDING, coarse_logits(), request={"limit": 32})
    yield Plant(name, "speculative", ROUNDING, coarse_logits(), request={"limit": 32, "seed": 1}, arms=SPECULATIVE)
    yield Plant(name, "real model in float32", ROUNDING, coarse_logits(), REAL, {**F32, "limit": 8})
    yield Plant(name, "float16 logits", ROUNDING, coarse_logits(torch.float16), request={"limit": 256, **B8})


def _scores(maker: Maker) -> Iterator[Plant]:
    name, gsm8k = "few-shot count", {**GSM8K, "data_dir": maker.data_dir}
    yield Plant(name, "3 in place of 5", METRIC, faults.shots(3), REAL, gsm8k)
    yield Plant(name, "0 in place of 5, tiny model", METRIC, faults.shots(0), request={**gsm8k, "max_new_tokens": 32})
    yield Plant(name, "files of texts", METRIC, faults.shots(4), REAL, gsm8k, form="texts")
    yield Plant(name, "one side a file", METRIC, faults.shots(1), request={**gsm8k, "max_new_tokens": 32}, form="text")
    name = "answer extraction"
    yield Plant(name, "the first number", METRIC, extraction(r"(-?\d+)\+"), request={"limit": 16})
    yield Plant(name, "not recorded", METRIC, extraction(r"=(\d+)", stated=False), request={"limit": 16, "seed": 1})
    yield Plant(name, "files of texts", METRIC, extraction(r"(\d)\."), request={"limit": 16}, form="texts")
    yield Plant(name, "one side a file", METRIC, extraction(r"answer is (\d)"), request={"limit": 16}, form="text")
