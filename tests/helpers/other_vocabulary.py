"""A draft whose tokenizer is not its target's: other ids for the same words, and words that one of them lacks."""

import copy

import torch
from small import MASK, VOCABULARY, WORDS, small_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mtbench.decoding.method import ModelRunners
from mtbench.models.loading import prepare
from mtbench.models.runner import ModelRunner
from mtbench.models.vocabularies import TranslatedRunner

# The letters in reverse order; of the words of two letters only `cc` and `ee`, so that `aa` is spelled `a`, `a`.
OTHER_WORDS = [*reversed(WORDS[:26]), "ee", "zzz", "cc", "qq"]
OTHER_END, OTHER_MASK = 30, 31
SPELLED = {
    token: [OTHER_WORDS.index(word)] if word in OTHER_WORDS else [OTHER_WORDS.index(letter) for letter in word]
    for token, word in enumerate(WORDS)
}
SHARED = {token: spelled[0] for token, spelled in SPELLED.items() if len(spelled) == 1}


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the draft. Its end token has another name than the target's."""
    vocabulary = {word: i for i, word in enumerate([*OTHER_WORDS, "</s>", "<|mask|>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", extra_special_tokens=["<|mask|>"])


def spelled(token: int) -> list[int]:
    """Return a token of the target in the draft's, as plain Python finds it; what has no letters is the end token."""
    return SPELLED.get(token, [OTHER_MASK if token == MASK else OTHER_END])


def translated() -> ModelRunners:
    """A target, and a draft much like it that reads other ids."""
    target = small_checkpoint()
    model = copy.deepcopy(target.model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            theirs = weight.clone()
            for token in range(VOCABULARY - 4):
                weight[SPELLED[token][0]] = theirs[token]
            weight[OTHER_MASK] = theirs[MASK]
    draft = ModelRunner(prepare(model, other_tokenizer(), source="other"))
    runner = ModelRunner(target)
    return ModelRunners("any", {"any": runner, "draft": TranslatedRunner(draft, runner)})
