"""transformers' own greedy `generate`: what people run, and what our engine is measured against.

Wolf et al.: "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv 1910.03771.
An engine of its own: the stock attention, cache and loop, on the very weights the other arms use. Prompts are padded
on the left. With a static cache transformers compiles the model by itself where there is CUDA, for each length anew,
so it has the run's one length from the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from mtbench.decoding import READ_EVERY
from mtbench.generation import text_of
from mtbench.models import Checkpoint
from mtbench.options import option
from mtbench.outside import Outside, stock, until_end
from mtbench.registry import METHODS


@METHODS.register("hf-generate")
@dataclass(frozen=True, kw_only=True)
class HFGenerate(Outside):
    """One token per forward, by transformers' loop."""

    cache: Literal["dynamic", "static"] = option("dynamic", "transformers' cache; static is compiled on CUDA")

    roles = ("ar",)
    reference = True
    claims = "lossless"

    def generate(
        self,
        checkpoint: Checkpoint,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        fixed_length: bool,
        stop: Sequence[Sequence[str]],
        room: int,
    ) -> list[list[int]]:
        model, longest = stock(checkpoint), max(map(len, prompts))
        eager = model.config._attn_implementation == "eager"
        if eager and model.dtype == torch.float64 and longest > min(map(len, prompts)):
            raise NotImplementedError("transformers' eager attention makes NaN of padding in float64; use float32")
        end_ids = [] if fixed_length else list(checkpoint.end_ids)
        pad = next(iter(checkpoint.end_ids), 0)
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(max_new_tokens),
            eos_token_id=end_ids or None,
            pad_token_id=pad,
            suppress_tokens=checkpoint.suppressed.tolist() or None,
        )
        length = max(room, longest + max(max_new_tokens))
        cache = {"past_key_values": StaticCache(model.config, max_cache_len=length)} if self.cache == "static" else {}
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([SaidStop(checkpoint, stop, longest)] if any(stop) else []),
            **cache,
        )
        answers = out[:, longest:].tolist()
        return [until_end(answer, n, end_ids) for answer, n in zip(answers, max_new_tokens, strict=True)]


class SaidStop(StoppingCriteria):  # type: ignore[misc]  # transformers is Any to mypy
    """Rows that said one of their stop strings; looks every few tokens."""

    def __init__(self, checkpoint: Checkpoint, stop: Sequence[Sequence[str]], prompt: int) -> None:
        self.tokenizer, self.stop, self.prompt = checkpoint.tokenizer, stop, prompt

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        said = [False] * len(self.stop)
        if (input_ids.shape[1] - self.prompt) % READ_EVERY == 0:
            for row, (ids, strings) in enumerate(zip(input_ids[:, self.prompt :].tolist(), self.stop, strict=True)):
                overlap = READ_EVERY + max((len(s.encode()) for s in strings), default=0)  # a token is at least a byte
                tail = text_of(self.tokenizer, ids[-overlap:])
                said[row] = any(s in tail for s in strings)
        return torch.tensor(said, device=input_ids.device)
