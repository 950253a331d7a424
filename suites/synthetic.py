"""Prompts of an exact length without meaning, to measure speed at a given length. The answers are not scored.

    mtbench run --suite synthetic:512           # 512 prompt tokens, up to 256 new tokens
    mtbench run --suite synthetic:512x128       # up to 128 new tokens
    mtbench run --suite synthetic:128-512x128   # prompt lengths spread evenly from 128 to 512

A prompt is random digits separated by spaces, without a chat template, cut to its length in the checkpoint's tokens.
Planning refuses a tokenizer that merges several such digits into one token. For speed without weights, see
mtbench/lineup/simulation.py. With trained weights add `--ignore-eos`, because an answer to random digits may end early.
"""

import re
from random import Random

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Suite, Template

ITEMS = 128  # without a limit; a larger limit gives more


@SUITES.register("synthetic")
class Synthetic(Suite):
    metric = None

    def __init__(self, variant: str, source: Source) -> None:
        shape = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?(?:x(\d{1,7}))?", variant or "512")
        self.shortest = self.longest = 0
        if shape is not None:
            shortest, longest, new_tokens = shape.groups()
            self.shortest = int(shortest)
            self.longest = int(longest or shortest)
            if new_tokens is not None:
                self.max_new_tokens = int(new_tokens)
        if not 1 <= self.shortest <= self.longest or self.max_new_tokens < 1:
            raise UserError(
                f"suite 'synthetic': {variant!r} is not a length; write prompt tokens, optionally x and new tokens, "
                "each below 10,000,000: synthetic:512, synthetic:512x256 or synthetic:128-512x256."
            )
        self.seed = source.seed
        self.task = {"name": "synthetic", "chat_template": False, "prompt_tokens": [self.shortest, self.longest]}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [self._prompt(number) for number in range(ITEMS if limit is None else limit)]

    def _prompt(self, number: int) -> Prompt:
        rng = Random(f"{self.seed}/{number}")
        tokens = rng.randint(self.shortest, self.longest)
        digits = rng.choices("0123456789", k=tokens)  # each digit, or the space before it, is at least one token
        return Prompt(item=f"synthetic/{number}/0", text=" ".join(digits), tokens=tokens)
