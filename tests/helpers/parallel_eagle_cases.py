"""P-EAGLE drafts in both layouts, and what they say by plain Python, without a cache: every forward is recomputed.

Written from the paper (arXiv 2602.01469) and from what vLLM feeds; shares no code with `mtbench.models.drafts` or the
decode loop.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from decoding_cases import PROMPTS
from eagle_cases import (
    CUT,
    IDS,
    LAYER,
    SPECFORGE,
    WIDTH,
    Entry,
    Format,
    Pair,
    Reference,
    stored,
    texts_of,
    write_draft,
)
from safetensors.torch import save_file
from small import MASK, VOCABULARY, save_small
from torch import Tensor

from mtbench.models.loading import load
from mtbench.models.runner import ModelRunner

PAD_TOKEN, OTHER = 11, 12  # the token of the masks, and one that is not
FORMATS = {
    "peagle": Format(
        {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "speculators_config": {
                "algorithm": "peagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "made", "architectures": ["Qwen2ForCausalLM"]},
            },
            "transformer_layer_config": {"model_type": "qwen3", **LAYER, "num_hidden_layers": 3},
            "draft_vocab_size": len(CUT),
            "norm_before_residual": True,
            "norm_before_fc": True,
            "mask_token_id": PAD_TOKEN,
            IDS: [0, 1, 2],
        },
        (0, 1, 2),
        prefix="layers.0",
        embeds=True,
        head_norms=True,
        flags=frozenset({"norm_before_fc", "norm_before_residual"}),
        layers=3,
        mask=PAD_TOKEN,
    ),
    "p-eagle of vllm": Format(
        {**SPECFORGE, "num_hidden_layers": 2, "ptd_token_id": PAD_TOKEN, "draft_vocab_size": VOCABULARY},
        (2, 1, 0),
        cut=False,
        layers=2,
        mask=PAD_TOKEN,
    ),
}


class ParallelReference(Reference):
    """A draft written out, in float64: the last entry and masks behind it predict, and all is recomputed each time."""

    def masked(self, final: Sequence[Entry], masks: int) -> list[Entry]:
        """Entries and masks behind them: the mask token, and `mask_hidden` in place of hidden states."""
        assert self.form.mask is not None
        feature, after = self.fused(self.t["mask_hidden"].flatten()), final[-1].position + 1
        return [*final, *(Entry(feature, self.form.mask, after + k) for k in range(masks))]

    def final(self, text: Sequence[int]) -> list[Entry]:
        """The final entries of a text; of a single token one of zeros."""
        zeros = torch.zeros(len(self.form.taps) * WIDTH).double()
        return self.entries(text) if len(text) > 1 else [Entry(self.fused(zeros), 0, 0)]

    def drafted(self, text: Sequence[int], count: int) -> Tensor:
        """The logits of the next tokens, (count, VOCABULARY)."""
        read = self.layers(self.masked(self.final(text), count - 1))[0][-count:]
        logits = self.norm(read, "norm") @ self.t["lm_head.weight"].T
        if self.form.cut:
            logits = torch.full((count, VOCABULARY), float("-inf")).double().index_copy(1, torch.tensor(CUT), logits)
        return self.allowed(logits)


def fitted(reference: ParallelReference, texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Tensor:
    """An LM head that is often right: by least squares to these texts, over three depths."""
    inputs: list[Tensor] = []
    wanted: list[int] = []
    for text, prompt in zip(texts, prompts, strict=True):
        final = reference.entries(text)
        for known in range(max(2, len(prompt)), len(text) - 3):
            inputs += reference.norm(reference.layers(reference.masked(final[: known - 1], 2))[0][-3:], "norm")
            wanted += text[known : known + 3]
    likely = torch.eye(VOCABULARY).double()[wanted]
    head: Tensor = torch.linalg.lstsq(torch.stack(inputs), likely, driver="gelsd").solution.T
    head[MASK] = 2 * head.sum(0)  # an id no arm may say, which the draft likes best
    return (head[CUT] if reference.form.cut else head).contiguous()


def make_pair(folder: Path, form: Format) -> Pair:
    """Write target and draft to a folder."""
    target = ModelRunner(load(str(save_small(folder / "target")), dtype=torch.float64))
    draft = write_draft(folder / "draft", form)
    tensors = stored(draft)
    reference = ParallelReference(form, tensors, target)
    tensors["lm_head.weight"] = fitted(reference, texts_of(target), PROMPTS)
    save_file(tensors, draft / "model.safetensors")
    return Pair(target, draft, reference)
