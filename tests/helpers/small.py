"""Small models made on the spot, a tokenizer to go with them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from mtbench.models.loading import Checkpoint, prepare
from mtbench.models.runner import ModelRunner

VOCABULARY = 40
WORDS = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(VOCABULARY - 4)]  # a … z, aa …
END, PAD, MASK = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 2  # the last row is padding no token stands for


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; `decode` puts nothing between them."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<|im_end|>", "<|endoftext|>", "<|mask|>"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|mask|>"],
    )


BEGIN = "<|endoftext|>"
CHAT = "{% for turn in messages %}{% if loop.index is odd %}b {% endif %}{{ turn.content }} {% endfor %}"
TEMPLATES = {  # of checkpoints, by whether and by whom the beginning of a text is written twice
    "writes BOS": "{{ bos_token }}" + CHAT,
    "writes no BOS": CHAT,
    "named": {"default": "{{ bos_token }}" + CHAT, "tool_use": "x"},
    "empty": "",
    "none": None,
}


def beginning_tokenizer(template: Any = None, *, ends: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer that writes BOS before a text, as Llama's and Gemma's do, and with `ends` EOS behind it."""
    tokenizer = small_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = BEGIN, template
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {'<|im_end|>' if ends else ''}".strip(),
        special_tokens=[(BEGIN, PAD), ("<|im_end|>", END)],
    )
    return tokenizer


def small_config(config: type[PretrainedConfig] = Qwen2Config, **changes: Any) -> PretrainedConfig:
    """The smallest shape that still has several layers, several key heads and a group of query heads."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "initializer_range": 0.3,  # wide: predictions differ from position to position
    }
    return config(**(shape | changes))


def small_checkpoint(config: PretrainedConfig | None = None, seed: int = 0) -> Checkpoint:
    """A random model in float64."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or small_config(), attn_implementation="eager").double()
    return prepare(model, small_tokenizer(), source="random")


class ScriptedModel(torch.nn.Module):
    """Predicts what a script says: at position p of row r the token `script[r, p]`, sure of it or not.

    It wants the mask id where the script says so; decoding must then take id 0, as sure as the script is.
    """

    device, dtype = torch.device("cpu"), torch.float32
    config = small_config()
    generation_config = None

    def __init__(self, script: Tensor, sure: Tensor) -> None:
        super().__init__()
        self.script, self.sure = script, sure
        self.head = torch.nn.Linear(1, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def set_attn_implementation(self, name: str) -> None: ...

    def forward(self, position_ids: Tensor, logits_to_keep: int, **_: Any) -> SimpleNamespace:
        predicted = (position_ids[:, -logits_to_keep:] + 1).clamp(max=self.script.shape[1] - 1)
        token = self.script.gather(1, predicted)
        height = torch.where(self.sure.gather(1, predicted), 20.0, 1.0)
        logits = torch.zeros(*token.shape, VOCABULARY)
        logits[..., 0] = torch.where(token == MASK, height, 0.0)
        logits.scatter_(2, token[..., None], torch.where(token == MASK, 2 * height, height)[..., None])
        return SimpleNamespace(logits=logits)


def scripted_lane(script: Tensor, sure: Tensor) -> ModelRunner:
    return ModelRunner(prepare(ScriptedModel(script, sure), small_tokenizer(), source="scripted"))


def save_small(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint on disk, as `--checkpoint ROLE=PATH` takes it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(max_position_embeddings=1024, **changes))
    model.save_pretrained(folder)
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{{ messages | map(attribute='content') | join('\n\n') }}"
    tokenizer.save_pretrained(folder)
    return folder


def save_beginning(folder: Path, template: Any = None, *, ends: bool = False, **changes: Any) -> Path:
    """A random checkpoint on disk whose tokenizer is `beginning_tokenizer`."""
    save_small(folder, config=LlamaConfig, **changes)
    (folder / "chat_template.jinja").unlink()
    beginning_tokenizer(template, ends=ends).save_pretrained(folder)
    return folder
