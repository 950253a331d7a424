"""Training: conversations to tokens, `transformers.Trainer` over an objective, a checkpoint that tells how it was made.

The labels lie on the last assistant turn only, with its end token and the newline behind it; earlier turns are prompt
(the released code of MARS, arXiv 2604.07023). The defaults of `Settings` are that paper's (appendix A).
"""

import hashlib
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtbench.errors import UserError
from mtbench.families import RECORD
from mtbench.objectives import IGNORE, Ar, Batch, Example, Mars, Objective, collate
from mtbench.suite import Messages

CHUNK = 1000  # conversations tokenised at once
MASK = "<|mask|>"
SAVED = ("bfloat16", "float32")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train. The effective batch is `batch_size` conversations; the paper's is 384 of at most 512 tokens."""

    learning_rate: float = 5e-6
    epochs: float = 5.0
    batch_size: int = 384
    warmup: float = 0.03  # share of the steps
    max_length: int = 512  # tokens of a conversation; longer answers are cut on the right
    seed: int = 42
    dtype: str = "bfloat16"  # of the saved weights; they are trained in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Tokenised conversations, and what the training record says of them."""

    examples: list[Example]
    description: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """Of the token ids and labels, in order."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(repr(example).encode())
        return digest.hexdigest()


def read_conversations(data: str, examples: int | None, seed: int) -> Iterable[Messages]:
    """The training split of a suite, or the rows of a local JSONL file; `examples` None: all there are.

    Raises UserError if `data` is neither, if a suite has no training split, or at a row of no known schema.
    """
    from mtbench.registry import SUITES
    from mtbench.suite import Source

    name, _, rest = data.partition(":")
    if name in SUITES:
        suite = SUITES[name](rest, Source(seed=seed))
        if not hasattr(suite, "examples"):
            raise UserError(f"suite {name!r} has no training split; known: arithmetic, FILE.jsonl")
        if examples is None:
            raise UserError(f"suite {name!r} makes as many examples as are wanted; say how many with `--examples N`")
        conversations: Iterable[Messages] = suite.examples(examples, seed)
        return conversations
    path = Path(data)
    if path.suffix != ".jsonl" or not path.is_file():
        raise UserError(f"no data {data!r}; known: a suite ({', '.join(SUITES)}) or a file FILE.jsonl")
    return islice(read_jsonl(path), examples)


def read_jsonl(path: Path) -> Iterator[Messages]:
    """The rows of a JSONL file as conversations; raises UserError with the line number at the first that is none."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield as_conversation(json.loads(line))
            except (json.JSONDecodeError, UserError) as error:
                raise UserError(f"{path}, line {number}: {error}") from None


def as_conversation(row: Any) -> Messages:
    """A row with `messages`, `prompt` and `completion`, or `question` and `answer`; the assistant has the last turn."""
    if not isinstance(row, dict):
        raise UserError(f"a row must be an object, this is a {type(row).__name__}")
    for asked, answered in (("prompt", "completion"), ("question", "answer")):
        if asked in row and answered in row:
            row = {
                "messages": [{"role": "user", "content": row[asked]}, {"role": "assistant", "content": row[answered]}]
            }
    if "messages" not in row:
        raise UserError(f"columns {sorted(row)}; known: messages, prompt and completion, question and answer")
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and is_turn(m) for m in messages):
        raise UserError("`messages` must be a list of objects with the texts `role` and `content`")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError("a conversation has at least two turns and ends with the assistant's")
    return messages


def is_turn(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def tokenise(conversations: Iterable[Messages], tokenizer: Any, max_length: int) -> tuple[list[Example], int, int]:
    """Examples, how many conversations were dropped for a prompt that fills max_length, how many answers were cut."""
    examples, dropped, cut = [], 0, 0
    stream = iter(conversations)
    while chunk := list(islice(stream, CHUNK)):
        whole = [tokenizer.apply_chat_template(c, tokenize=False) for c in chunk]
        asked = [tokenizer.apply_chat_template(c[:-1], tokenize=False, add_generation_prompt=True) for c in chunk]
        encode = {"add_special_tokens": False, "return_attention_mask": False}
        both = zip(tokenizer(whole, **encode).input_ids, tokenizer(asked, **encode).input_ids, strict=True)
        for ids, prompt in both:
            if ids[: len(prompt)] != prompt:
                raise UserError(
                    "this chat template changes a prompt when its answer follows; its labels cannot be told"
                )
            if len(prompt) >= max_length:
                dropped += 1
                continue
            cut += len(ids) > max_length
            labels = [IGNORE] * len(prompt) + ids[len(prompt) :]
            examples.append(Example(ids[:max_length], labels[:max_length]))
    return examples, dropped, cut


def prepare(data: str, count: int | None, tokenizer: Any, settings: Settings) -> Data:
    """Read and tokenise; raises UserError if nothing is left to train on."""
    conversations = read_conversations(data, count, settings.seed)
    examples, dropped, cut = tokenise(conversations, tokenizer, settings.max_length)
    if not examples:
        raise UserError(f"{data!r} holds no conversation shorter than max_length {settings.max_length}")
    description = {"data": data, "examples": len(examples), "seed": settings.seed, "dropped": dropped, "cut": cut}
    return Data(examples=examples, description=description)


def train(
    objective: str, base: str, data: str, count: int | None, settings: Settings, out: Path, *, block_size: int = 1
) -> Path:
    """Train the checkpoint `base` on `count` conversations of `data` and write the result to `out`.

    `out` must not exist yet; the checkpoint there is complete or absent. `block_size` is for objectives with blocks.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mtbench.models import inspect

    refuse_existing(out)
    if settings.dtype not in SAVED:
        raise UserError(f"unknown dtype {settings.dtype!r}; known: {', '.join(SAVED)}")
    found = inspect(base, needs_mask=objective == "mars")
    tokenizer = found.tokenizer
    aim: Objective = Ar()
    if objective == "mars":
        if set(getattr(found.config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
            raise UserError(f"{base!r} has layers without full attention; mars trains checkpoints with full attention")
        tokenizer.add_special_tokens({"mask_token": MASK})
        aim = Mars(block_size=block_size, mask_id=tokenizer.mask_token_id)
    prepared = prepare(data, count, tokenizer, settings)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )
    figures = fit(model, aim, prepared, settings, tokenizer)
    record = {
        "objective": objective,
        "options": {} if objective == "ar" else {"block_size": block_size},
        "settings": asdict(settings),
        "data": {**prepared.description, "sha256": prepared.sha256},
        "base": base,
        "base_sha256": weights_sha256(Path(base)),
        **figures,
    }
    write_checkpoint(out, model, tokenizer, settings.dtype, record)
    return out


def fit(model: Any, objective: Objective, data: Data, settings: Settings, tokenizer: Any) -> dict[str, Any]:
    """Train `model` in place; returns the figures of the training record."""
    import torch
    from transformers import Trainer, TrainingArguments

    class ObjectiveTrainer(Trainer):  # type: ignore[misc] # transformers is not type-checked here
        """A Trainer whose loss is the objective's and whose log has its parts, averaged since the last line."""

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.parts: dict[str, list[torch.Tensor]] = {}
            self.tokens_seen = 0

        def compute_loss(
            self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
        ) -> torch.Tensor:
            losses = objective(model, Batch(**inputs))
            for name, value in losses.parts.items():
                self.parts.setdefault(name, []).append(value)
            self.tokens_seen += int((inputs["labels"] != IGNORE).sum())
            return losses.total

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            means = {name: round(torch.stack(values).mean().item(), 5) for name, values in self.parts.items()}
            self.parts.clear()
            super().log({**logs, **means}, *args, **kwargs)

    def collator(rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        examples = [Example(row["input_ids"], row["labels"]) for row in rows]
        batch = collate(
            examples,
            multiple=objective.multiple,
            end_id=tokenizer.eos_token_id,
            pad_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        )
        return batch._asdict()

    steps = math.ceil(math.ceil(len(data.examples) / settings.batch_size) * settings.epochs)
    with TemporaryDirectory() as scratch:  # a Trainer wants a folder, even to write nothing
        trainer = ObjectiveTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                per_device_train_batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=math.ceil(settings.warmup * steps),
                max_steps=steps,
                optim="adamw_torch",
                seed=settings.seed,
                # Not by length, as the paper: batches of one length hold problems of one size, and small models
                # learn far slower from them.
                train_sampling_strategy="random",
                remove_unused_columns=False,
                save_strategy="no",
                report_to="none",
                use_cache=True,  # what the checkpoint's config will say; the objectives ask for none
                logging_steps=max(1, min(50, steps // 20)),
                use_cpu=not torch.cuda.is_available(),
                dataloader_pin_memory=False,
            ),
            train_dataset=[example._asdict() for example in data.examples],
            data_collator=collator,
        )
        result = trainer.train()
    last = trainer.state.log_history[-2] if len(trainer.state.log_history) > 1 else {}
    return {
        "steps": result.global_step,
        "labelled_tokens_seen": trainer.tokens_seen,
        "final": {name: value for name, value in last.items() if name.startswith("loss")},
        "train_s": round(result.metrics["train_runtime"], 1),
    }


def initialise(data: str, count: int, settings: Settings, out: Path, **shape: int) -> Path:
    """Write an untrained Qwen2 checkpoint with a tokenizer of its own, learned from `data`, to `out`.

    `shape` is `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads` and `max_position_embeddings`.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

    refuse_existing(out)
    tokenizer = learn_tokenizer(read_conversations(data, count, settings.seed), shape["vocab_size"])
    set_seed(settings.seed)
    config = Qwen2Config(
        **{**shape, "vocab_size": math.ceil(len(tokenizer) / 16) * 16},
        initializer_range=shape["hidden_size"] ** -0.5,  # the usual 0.02 is for large widths and learns slower here
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    record = {
        "objective": None,
        "options": {},
        "settings": asdict(settings),
        "data": {"data": data, "examples": count, "seed": settings.seed},
        "base": None,
        "base_sha256": None,
    }
    write_checkpoint(out, Qwen2ForCausalLM(config), tokenizer, "float32", record)
    return out


def learn_tokenizer(conversations: Iterable[Messages], vocab_size: int) -> Any:
    """Byte-level BPE with Qwen's splitting (every digit a token of its own), chat template and mask token."""
    from transformers import Qwen2TokenizerFast

    texts = (f"{turn['role']}\n{turn['content']}\n" for turns in conversations for turn in turns)
    tokenizer = Qwen2TokenizerFast(unk_token=None).train_new_from_iterator(
        texts, vocab_size, new_special_tokens=["<|im_start|>", "<|im_end|>", MASK], show_progress=False
    )
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "mask_token": MASK})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_checkpoint(out: Path, model: Any, tokenizer: Any, dtype: str, record: Mapping[str, Any]) -> None:
    """Model, tokenizer and training record, written aside and then renamed: complete or absent."""
    import torch

    partial = out.with_name(out.name + ".partial")
    model.to(getattr(torch, dtype)).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    packages = ("multi-token-bench", "torch", "transformers", "accelerate", "tokenizers")
    made_with = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
    (partial / RECORD).write_text(json.dumps({**record, **made_with}, indent=1) + "\n", encoding="utf-8")
    partial.rename(out)


def refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another `--out`")


def weights_sha256(folder: Path) -> str | None:
    """Of a local checkpoint's safetensors files, in the order of their names; None for a checkpoint of the hub."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else None
