"""The tokenizer of an untrained checkpoint."""

from typing import Any

import pytest

from mtbench.training.init_model import learn_tokenizer

TALK = [
    [{"role": "user", "content": f"What is {n} times {n}?"}, {"role": "assistant", "content": f"It is {n * n}."}]
    for n in range(100, 140)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return learn_tokenizer(TALK, 400)


def test_the_tokenizer_has_single_digits_and_its_special_tokens(tokenizer: Any) -> None:
    """Numbers have one token per digit; the end of a turn is the end token; the mask is one token."""
    assert tokenizer.tokenize("147 shells")[:3] == ["1", "4", "7"]
    assert not any(len(token) > 1 and any(map(str.isdigit, token)) for token in tokenizer.get_vocab())
    named = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token)
    assert named == ("<|im_end|>", "<|endoftext|>", "<|mask|>")
    assert len(tokenizer("<|mask|><|im_end|>").input_ids) == 2


@pytest.mark.parametrize("text", ["Größe 3½ ≤ 4", "日本語", "\n\n  x\t", "naïve 🙂"])
def test_the_tokenizer_decodes_any_text_unchanged(tokenizer: Any, text: str) -> None:
    """It works on bytes, so no text is unknown."""
    assert tokenizer.decode(tokenizer(text).input_ids) == text
