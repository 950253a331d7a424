"""The mask token of a checkpoint that has none: a reserved token of its tokenizer, or a new row of its embedding.

A mask token must never be text. A reserved token is a special token of the tokenizer that has no role in it and is not
in its chat template, such as `<filename>` of SmolLM2. Which token it is, is stored with the tokenizer.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from mtbench.errors import UserError, unknown
from mtbench.models.loading import MASK, Inspected

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ROWS = 64  # a grown embedding has a multiple of it: products of other sizes are slower on a GPU


def reserved_tokens(tokenizer: Any) -> list[str]:
    """Return the special tokens that stand for nothing: no end, start or padding, and not in the chat template."""
    used = {MASK, *(getattr(tokenizer, role) for role in ROLES)}
    template = str(tokenizer.chat_template)  # or several of them
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    return [token for token in special if token not in used and token not in template]


def with_mask(base: Inspected, mask_token: str | None, *, grow: bool) -> Inspected:
    """Return a checkpoint whose tokenizer has a mask token: `mask_token`, or with `grow` a new one.

    Raises UserError for a token that is not reserved, and if the checkpoint needs neither.
    """
    tokenizer = base.tokenizer
    if mask_token is None and not grow:
        if tokenizer.mask_token_id != base.mask_id:
            tokenizer.add_special_tokens({"mask_token": MASK})
        return base
    option = "--grow-vocabulary" if mask_token is None else f"--mask-token {mask_token}"
    if mask_token is not None and grow:
        raise UserError(f"{option} and --grow-vocabulary exclude each other; leave one out.")
    if base.mask_id is not None:
        raise UserError(f"{base.source!r} has a mask token or a free row for one already; leave out {option}.")
    if mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})
        return replace(base, mask_id=tokenizer.mask_token_id)
    reserved = reserved_tokens(tokenizer)
    if mask_token not in reserved:
        if not reserved:
            raise UserError(f"the tokenizer of {base.source!r} has no reserved token; use --grow-vocabulary.")
        raise unknown("reserved token", mask_token, reserved, "mtbench train --help")
    tokenizer.add_special_tokens({"mask_token": mask_token})
    return replace(base, mask_id=tokenizer.mask_token_id)


def refuse_mask_in_text(base: Inspected, tokens: torch.Tensor) -> None:
    """Raise UserError if the data hold the mask token as text."""
    if base.mask_id is not None and bool((tokens == base.mask_id).any()):
        raise UserError(
            f"the data hold {base.tokenizer.mask_token!r}, which is the mask token; take it out of them, or choose "
            "another with --mask-token."
        )


def grow_embedding(model: Any, mask_id: int) -> None:
    """Add the row of the mask token to a model's embedding and LM head. New rows are the mean of the others."""
    before = model.get_input_embeddings().weight.shape[0]
    rows = max(before, math.ceil((mask_id + 1) / ROWS) * ROWS)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[before:] = weight[:before].mean(0)
