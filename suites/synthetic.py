"""Prompts of an exact length that mean nothing: how fast, at which lengths; nothing is scored.

    mtbench run --suite synthetic:512           # 512 prompt tokens, up to 256 new ones
    mtbench run --suite synthetic:512x128       # up to 128 new ones
    mtbench run --suite synthetic:128-512x128   # prompt lengths spread evenly from 128 to 512

A prompt is random digits between spaces, with no chat template, cut to its length in tokens of the checkpoint at hand;
a tokenizer that makes one token of several such digits is refused by planning. For speed without weights, see
mtbench/runs/simulation.py; with trained weights add `--fixed-length`, for an answer to noise may end at once.
"""

import re
from pathlib import Path
from random import Random

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Suite, Template

ITEMS = 128  # when no limit is given; a limit may ask for more


@SUITES.register("synthetic")
class Synthetic(Suite):
    metric = None

    def __init__(self, rest: str, source: Source) -> None:
        shape = re.fullmatch(r"(\d+)(?:-(\d+))?(?:x(\d+))?", rest or "512")
        low, high, new = (int(n) if n else None for n in shape.groups()) if shape else (0, None, None)
        self.low, self.high = low or 0, high or low or 0
        self.max_new_tokens = self.max_new_tokens if new is None else new
        if not 1 <= self.low <= self.high or self.max_new_tokens < 1:
            raise UserError(
                f"suite 'synthetic': {rest!r} is no length; write prompt tokens, or x and new tokens behind them: "
                "synthetic:512, synthetic:512x256 or synthetic:128-512x256."
            )
        self.seed = source.seed
        self.task = {"name": "synthetic", "chat_template": False, "prompt_tokens": [self.low, self.high]}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [self._prompt(number) for number in range(ITEMS if limit is None else limit)]

    def keep(self, folder: Path) -> None:
        """Nothing: it is made on the spot."""

    def _prompt(self, number: int) -> Prompt:
        chance = Random(f"{self.seed}/{number}")
        tokens = chance.randint(self.low, self.high)
        digits = chance.choices("0123456789", k=tokens)  # each of them, or the space before it, is a token at least
        return Prompt(item=f"synthetic/{number}/0", text=" ".join(digits), tokens=tokens)
