"""The mask token of a checkpoint that has none: a reserved token of its tokenizer.

A mask token must never be text. A reserved token is a special token of the tokenizer that has no role in it and is not
in its chat template, such as `<filename>` of SmolLM2. Which token it is, is stored with the tokenizer.
"""

from dataclasses import replace
from typing import Any

import torch

from mtbench.errors import UserError, unknown
from mtbench.models.loading import MASK, Inspected

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def reserved_tokens(tokenizer: Any) -> list[str]:
    """Return the special tokens that stand for nothing: no end, start or padding, and not in the chat template."""
    used = {MASK, *(getattr(tokenizer, role) for role in ROLES)}
    template = tokenizer.chat_template or ""
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    return [token for token in special if token not in used and token not in template]


def with_mask(base: Inspected, mask_token: str | None) -> Inspected:
    """Return a checkpoint whose tokenizer has a mask token: `mask_token`, if its own has none.

    Raises UserError for a token that is not reserved, and if the checkpoint needs none.
    """
    tokenizer = base.tokenizer
    if mask_token is None:
        if tokenizer.mask_token_id != base.mask_id:
            tokenizer.add_special_tokens({"mask_token": MASK})
        return base
    if base.mask_id is not None:
        raise UserError(f"{base.source!r} has a mask token or a free row for one already; leave out --mask-token.")
    reserved = reserved_tokens(tokenizer)
    if not reserved:
        raise UserError(f"the tokenizer of {base.source!r} has no reserved token; give another `--base`.")
    if mask_token not in reserved:
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
