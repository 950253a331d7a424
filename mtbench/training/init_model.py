"""Make an untrained checkpoint: a Qwen2 with random weights and a tokenizer learned from data."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtbench.evaluation.suite import Messages
from mtbench.files import refuse_existing
from mtbench.models.loading import MASK
from mtbench.training.checkpoint import write_checkpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def initialise(conversations: Iterable[Messages], out: Path, *, seed: int, data: dict[str, Any], **shape: int) -> Path:
    """Write an untrained Qwen2 checkpoint to `out`, with a tokenizer learned from `conversations`.

    `shape` is `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads` and `max_position_embeddings`; `data` is the source of the conversations, for the record.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed
    from transformers.utils import logging

    refuse_existing(out)
    logging.disable_progress_bar()
    tokenizer = learn_tokenizer(conversations, shape["vocab_size"])
    set_seed(seed)
    config = Qwen2Config(
        **{**shape, "vocab_size": math.ceil(len(tokenizer) / 16) * 16},
        initializer_range=shape["hidden_size"]
        ** -0.5,  # the usual 0.02 suits large widths; small models learn more slowly with it
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    record = {"objective": None, "options": {}, "settings": {"seed": seed}, "data": data, "base": None}
    write_checkpoint(out, Qwen2ForCausalLM(config), tokenizer, "float32", record)
    return out


def learn_tokenizer(conversations: Iterable[Messages], vocab_size: int) -> Any:
    """Learn a byte-level BPE tokenizer with Qwen's splitting (one token per digit), chat template and mask token."""
    from transformers import Qwen2TokenizerFast

    texts = (f"{turn['role']}\n{turn['content']}\n" for turns in conversations for turn in turns)
    tokenizer = Qwen2TokenizerFast(unk_token=None).train_new_from_iterator(
        texts, vocab_size, new_special_tokens=["<|im_start|>", "<|im_end|>", MASK], show_progress=False
    )
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": MASK})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
