"""transformers' own greedy `generate`: what people run, and what our engine is measured against.

Wolf et al.: "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv 1910.03771.
An engine of its own: the stock attention, cache and loop, on the very weights the other arms use. Prompts are padded
on the left. With a static cache transformers compiles the model by itself where there is CUDA, for each length anew,
so it has the run's one length from the start.

Its assisted generation (Gante: "Assisted Generation", Hugging Face blog, 2023) drafts with a second model, as in
arXiv 2211.17192, or looks the draft up in the text so far (Saxena: "Prompt Lookup Decoding", 2023). Here a draft is
always as long as it is said to be, as in ours: no schedule, no threshold. It takes one prompt at a time, so the rows of
a batch go one after the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StaticCache, StoppingCriteria, StoppingCriteriaList

from mtbench.decoding.external import Answers, Outside, stock
from mtbench.decoding.loop import READ_EVERY
from mtbench.decoding.output import text_of
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models.loading import Checkpoint
from mtbench.options import option

AHEAD = 4  # drafts, unless said otherwise


@METHODS.register("hf-generate")
@dataclass(frozen=True, kw_only=True)
class HFGenerate(Outside):
    """By transformers' loop: one token per forward, or what a draft adds."""

    cache: Literal["dynamic", "static"] = option("dynamic", "its cache; static is compiled on CUDA", engine=True)
    draft: str | None = option(None, "the draft's role, for assisted generation; rows go one by one", role=True)
    ahead: int = option(AHEAD, "tokens it drafts", low=1)
    prompt_lookup: int = option(0, "tokens to look up instead of drafting; 0: none; rows go one by one", low=0)

    roles = ("ar",)
    reference = True
    claims = "lossless"

    def __post_init__(self) -> None:
        if self.draft and self.prompt_lookup:
            raise UserError("hf-generate drafts by draft or by prompt_lookup; give one. See `mtbench ls methods`.")
        if self.ahead != AHEAD and not self.draft:
            raise UserError(f"hf-generate: ahead={self.ahead} is for a draft; add `draft=ROLE`, or leave it out.")
        if self.assisted and self.cache == "static":
            raise UserError("hf-generate cannot rewind cache=static, so nothing can draft for it; leave that out.")

    @property
    def assisted(self) -> bool:
        return bool(self.draft or self.prompt_lookup)

    def generate(
        self,
        checkpoints: Mapping[str, Checkpoint],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        *,
        fixed_length: bool,
        stop: Sequence[Sequence[str]],
        room: int,
    ) -> Answers:
        if self.assisted and len(prompts) > 1:
            rows = zip(prompts, max_new_tokens, stop, strict=True)
            asked = [([prompt], [budget], [strings]) for prompt, budget, strings in rows]
            alone = [
                self.generate(checkpoints, p, n, fixed_length=fixed_length, stop=s, room=room) for p, n, s in asked
            ]
            return Answers([answers.token_ids[0] for answers in alone])
        checkpoint = next(iter(checkpoints.values()))
        model, longest = stock(checkpoint), max(map(len, prompts))
        eager = model.config._attn_implementation == "eager"
        if eager and model.dtype == torch.float64 and longest > min(map(len, prompts)):
            raise NotImplementedError("transformers' eager attention makes NaN of padding in float64; use float32")
        pad = next(iter(checkpoint.end_ids), 0)
        ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        suppressed, extra = checkpoint.suppressed.tolist(), dict[str, Any]()
        if self.cache == "static":
            length = max(room, longest + max(max_new_tokens))
            extra["past_key_values"] = StaticCache(model.config, max_cache_len=length)
        if self.draft:
            extra["assistant_model"] = self._assistant(model, checkpoints[self.draft])
            suppressed += range(checkpoint.vocabulary, checkpoints[self.draft].vocabulary)
        most = 1 + (self.ahead if self.draft else self.prompt_lookup)
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(max_new_tokens),
            eos_token_id=None if fixed_length else list(checkpoint.end_ids) or None,
            pad_token_id=pad,
            suppress_tokens=suppressed or None,
            prompt_lookup_num_tokens=self.prompt_lookup or None,
        )
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([SaidStop(checkpoint, stop, longest, most)] if any(stop) else []),
            **extra,
        )
        return Answers(out[:, longest:].tolist())

    def _assistant(self, model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
        """The draft, told how far to run ahead. Heads padded to other widths are of the same words all the same."""
        draft = stock(checkpoint)
        steady = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
        draft.generation_config = GenerationConfig(num_assistant_tokens=self.ahead, **steady)
        draft.config.vocab_size = model.config.vocab_size
        return draft


class SaidStop(StoppingCriteria):  # type: ignore[misc]  # transformers is Any to mypy
    """Rows that said one of their stop strings; looks every few tokens, of which a forward adds `most`.

    It keeps nothing in mind: transformers 5.17 asks it about drafts too.
    """

    def __init__(self, checkpoint: Checkpoint, stop: Sequence[Sequence[str]], prompt: int, most: int) -> None:
        self.tokenizer, self.stop, self.prompt, self.most = checkpoint.tokenizer, stop, prompt, most

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        said, new = [False] * len(self.stop), input_ids.shape[1] - self.prompt
        if new and new % READ_EVERY < self.most:
            for row, (ids, strings) in enumerate(zip(input_ids[:, self.prompt :].tolist(), self.stop, strict=True)):
                longest = max((len(s.encode()) for s in strings), default=0)  # a token is at least a byte
                tail = text_of(self.tokenizer, ids[-(READ_EVERY + self.most + longest) :])
                said[row] = any(s in tail for s in strings)
        return torch.tensor(said, device=input_ids.device)
