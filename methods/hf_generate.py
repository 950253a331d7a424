"""transformers' own `generate`: a widely used loop, as a baseline for our engine.

Wolf et al.: "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020, arXiv 1910.03771.
An external engine: the stock attention, cache and loop, on the weights that the other arms use. Prompts are padded on
the left. On CUDA with a static cache, transformers compiles the model for each cache length and records CUDA graphs,
which hold the cache's address. So every call of a run gets the same length, and calls of one shape share one cache.
Sampled tokens are drawn by its own random numbers, from the first request's seed.

Its assisted generation (Gante: "Assisted Generation", Hugging Face blog, 2023) drafts with a second model, as in arXiv
2211.17192, or copies drafts from the text so far (Saxena: "Prompt Lookup Decoding", 2023). As in our methods, every
draft has the given length. Assisted generation decodes row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from mtbench.decoding.external import Answers, ExternalEngine, Sound, static_cache, stock, target_of
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.decoding.run_state import READ_EVERY, contains
from mtbench.errors import UserError
from mtbench.models.loading import Checkpoint
from mtbench.options import option
from mtbench.options.common import heat

AHEAD = 4  # drafts by default


@METHODS.register("hf-generate")
@dataclass(frozen=True, kw_only=True)
class HFGenerate(ExternalEngine):
    """transformers' loop: one token per forward, or more with assisted generation."""

    cache: Literal["dynamic", "static"] = option("dynamic", "its cache; static is compiled on CUDA", engine=True)
    draft: str | None = option(None, "the draft's role, for assisted generation; decodes row by row", role=True)
    ahead: int = option(AHEAD, "tokens it drafts", low=1)
    prompt_lookup: int = option(0, "tokens to look up instead of drafting; 0: none; decodes row by row", low=0)

    title = "transformers generate"
    roles = ("ar",)
    reference = True
    draws = True
    claims = "lossless"

    def __post_init__(self) -> None:
        if self.draft and self.prompt_lookup:
            raise UserError("hf-generate drafts with draft or prompt_lookup; give one. See `mtbench ls methods`.")
        if self.ahead != AHEAD and not self.draft:
            raise UserError(f"hf-generate: ahead={self.ahead} needs a draft; add `draft=ROLE`, or leave out ahead.")
        if self.assisted and self.cache == "static":
            raise UserError("hf-generate: drafting needs cache=dynamic; leave out cache=static.")

    @property
    def assisted(self) -> bool:
        return bool(self.draft or self.prompt_lookup)

    def generate(
        self, checkpoints: Mapping[str, Checkpoint], requests: Sequence[Request], *, ignore_eos: bool, room: int
    ) -> Answers:
        sampling = requests[0].sampling
        if len(requests) > 1 and (self.assisted or any(request.sampling != sampling for request in requests)):
            alone = [self.generate(checkpoints, [r], ignore_eos=ignore_eos, room=room) for r in requests]
            return Answers([answers.token_ids[0] for answers in alone])
        checkpoint = target_of(checkpoints)
        model, pad = stock(checkpoint), next(iter(checkpoint.end_ids), 0)
        ids, mask = _left_padded(model, requests, pad)
        prompt, budget = ids.shape[1], max(request.max_new_tokens for request in requests)
        drawn = heat(sampling.temperature) > 0
        suppressed, sound = checkpoint.suppressed.tolist(), Sound(model.dtype, drawn=drawn)
        extra: dict[str, Any] = {"logits_processor": [sound]}
        graphs, compiled, known = torch._dynamo.utils.counters["stats"], 0, True  # transformers compiles
        if self.cache == "static":
            extra["past_key_values"], known = static_cache(model, len(requests), max(room, prompt + budget))
            compiled = graphs["unique_graphs"]
        if self.draft:
            extra["assistant_model"] = self._assistant(model, checkpoints[self.draft])
            suppressed += range(checkpoint.vocabulary, checkpoints[self.draft].vocabulary)
        if any(request.stop for request in requests):
            most = 1 + (self.ahead if self.draft else self.prompt_lookup)
            extra["stopping_criteria"] = StoppingCriteriaList([StopStrings(checkpoint, requests, prompt, most)])
        settings = GenerationConfig(
            do_sample=drawn,
            max_new_tokens=budget,
            eos_token_id=None if ignore_eos else list(checkpoint.end_ids) or None,
            pad_token_id=pad,
            suppress_tokens=suppressed or None,
            prompt_lookup_num_tokens=self.prompt_lookup or None,
            **(asdict(sampling) if drawn else {}),
        )
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(requests[0].seed)
            out = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings, **extra
            )
        new = graphs["unique_graphs"] > compiled or (model.device.type == "cuda" and not known)
        answers = out[:, prompt:].tolist()
        sound.refuse_others(requests, prompt, answers, () if ignore_eos else checkpoint.end_ids)
        return Answers(answers, prepared=self.cache == "static" and new)

    def _assistant(self, model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
        """Return the draft model with its draft length. (LM heads may be padded to other widths.)"""
        draft = stock(checkpoint)
        steady = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
        draft.generation_config = GenerationConfig(num_assistant_tokens=self.ahead, **steady)
        draft.config.vocab_size = model.config.vocab_size
        return draft


def _left_padded(model: PreTrainedModel, requests: Sequence[Request], pad: int) -> tuple[Tensor, Tensor]:
    """Return the prompts' ids and their attention mask, (R, longest) each."""
    lengths = [len(request.prompt_ids) for request in requests]
    longest = max(lengths)
    eager = model.config._attn_implementation == "eager"
    if eager and model.dtype == torch.float64 and longest > min(lengths):
        raise NotImplementedError("transformers' eager attention gives NaN for padding in float64; use float32")
    ids = [[pad] * (longest - length) + list(r.prompt_ids) for r, length in zip(requests, lengths, strict=True)]
    mask = [[0] * (longest - length) + [1] * length for length in lengths]
    return torch.tensor(ids), torch.tensor(mask)


class StopStrings(StoppingCriteria):  # type: ignore[misc]  # transformers is Any to mypy
    """Ends rows whose text contains a stop string. It keeps no state: transformers 5.17 also calls it for drafts."""

    def __init__(self, checkpoint: Checkpoint, requests: Sequence[Request], prompt: int, most: int) -> None:
        self.tokenizer, self.prompt, self.most = checkpoint.tokenizer, prompt, most  # of a forward
        self.stop = [request.stop for request in requests]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        stopped, new = [False] * len(self.stop), input_ids.shape[1] - self.prompt
        if new and new % READ_EVERY < self.most:
            for row, (ids, strings) in enumerate(zip(input_ids.tolist(), self.stop, strict=True)):
                searched = len(ids) - READ_EVERY - self.most
                stopped[row] = contains(self.tokenizer, ids, strings, self.prompt, searched)
        return torch.tensor(stopped, device=input_ids.device)
