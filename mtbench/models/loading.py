"""Loading a checkpoint: any Hugging Face decoder with full or sliding attention, safetensors, no remote code.

`random:SHAPE` is no file: its weights are made where they are needed, for the speed of a model nobody has yet.
What cannot be served exactly is refused by name: layers that cannot rewind (recurrent ones), and rope types
`dynamic` and `longrope`, whose angles depend on the longest row of the batch.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)
from transformers.utils import logging

from mtbench.errors import UserError, first_line
from mtbench.models.attention import ATTENTION
from mtbench.models.families import RANDOM, RANDOM_TOKENIZER, RECORD, locate
from mtbench.models.random_shapes import SHAPES

MASK = "<|mask|>"
RANDOM_SEED = 0
OTHER_CHECKPOINT, OTHER_WEIGHTS = "--checkpoint ROLE=PATH_OR_ID", f"--weights {RANDOM}SHAPE"
MISREAD = (OSError, ValueError, AttributeError, StrictDataclassError, SafetensorError)  # by transformers, of bad files
SERVED_LAYERS = {"full_attention", "sliding_attention"}
SERVED_ROPES = {"default", "linear", "llama3", "yarn"}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model ready to decode, with what decoding needs to know of its tokenizer."""

    source: str  # path or hub id, or random:SHAPE
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    mask_id: int | None
    suppressed: Tensor  # ids no arm may emit: the mask and what the tokenizer cannot decode
    max_positions: int
    calls: "Calls"

    @property
    def vocabulary(self) -> int:
        """Rows of the LM head, padding rows included."""
        size: int = self.model.get_output_embeddings().weight.shape[0]
        return size


class Calls:
    """Counts forwards of a checkpoint by hooks of its own, to hold the lanes' count against.

    The count is kept on the model's device, so that a replayed forward counts as one.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.long, device=device)

    @property
    def n(self) -> int:
        return int(self._count)

    def watch(self, model: torch.nn.Module) -> None:
        """Count the forwards of `model` too."""
        model.register_forward_hook(self._saw)

    def _saw(self, *_: Any) -> None:
        self._count += 1


@dataclass(frozen=True, eq=False)
class Inspected:
    """A checkpoint looked at without its weights: enough to plan with, and to refuse what would fail later."""

    source: str
    tokenizer: PreTrainedTokenizerBase
    config: Any
    mask_id: int | None
    end_ids: tuple[int, ...]
    offline: bool  # what else there is to know of it must be here already

    @property
    def objective(self) -> str | None:
        """What it was trained for, if its record says so."""
        name = self._record.get("objective")
        return name if isinstance(name, str) else None

    @property
    def feeds_masks(self) -> bool:
        """Was it trained by an objective that feeds masks? One whose record does not say so may have been."""
        return self._record.get("feeds_masks") is not False

    @property
    def _record(self) -> dict[str, Any]:
        """The training record; empty if there is none, or a broken one, which planning reports."""
        file = Path(self.source) / RECORD
        try:
            record = json.loads(file.read_text()) if file.is_file() else {}
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    @property
    def max_positions(self) -> int:
        return getattr(self.config, "max_position_embeddings", 1 << 30)


def inspect(source: str, *, offline: bool = False, needs_mask: bool = False) -> Inspected:
    """Tokenizer and configuration. Raises UserError, in one line, for whatever cannot be served."""
    random, source = source.startswith(RANDOM), locate(source)
    words = locate(RANDOM_TOKENIZER) if random else source
    with _explained(words, "tokenizer", offline):
        tokenizer = AutoTokenizer.from_pretrained(words, local_files_only=offline, trust_remote_code=False)
        if len(tokenizer) < 2:  # transformers makes up an empty one where the files are missing
            raise OSError("no tokenizer files")
    config = load_config(source, offline=offline)
    refuse_unserved(config, source)
    if random and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{source!r} has {config.vocab_size} ids, fewer than the {len(tokenizer)} of the tokenizer that goes with "
            f"random weights; choose a larger shape, such as {RANDOM}{next(iter(SHAPES))}."
        )
    if Path(source).is_dir():
        refuse_pickles(Path(source))
    mask_id = find_mask(tokenizer, config.vocab_size)
    if needs_mask and mask_id is None:
        raise UserError(
            f"checkpoint {source!r} has no mask token and no unused embedding row for one ({config.vocab_size} rows, "
            "all in use); give a checkpoint trained for it with `--checkpoint ROLE=PATH_OR_ID`."
        )
    end_ids = () if random else _end_ids(_generation_settings(source, config, offline), tokenizer)
    return Inspected(source, tokenizer, config, mask_id, end_ids, offline)


def find_mask(tokenizer: PreTrainedTokenizerBase, rows: int) -> int | None:
    """The tokenizer's own mask token; else the next free id, if the embedding has that row."""
    known = tokenizer.get_vocab()
    own = known.get(MASK, tokenizer.mask_token_id)
    free = max(known.values()) + 1
    return own if own is not None else free if free < rows else None


def load(source: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", offline: bool = False) -> Checkpoint:
    """Load model and tokenizer. Raises UserError for whatever cannot be served, naming it."""
    inspected = inspect(source, offline=offline)
    source = inspected.source
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if source.startswith(RANDOM):
        return prepare(random_model(inspected.config, dtype, device), inspected.tokenizer, source=source)
    with _explained(source, "safetensors weights", offline):
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=inspected.config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=offline,
            trust_remote_code=False,
        )
    return prepare(model.to(device), inspected.tokenizer, source=source)


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The architecture's own initialisation, always the same one, made on the device in its type."""
    here = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(here), torch.device(device):
        torch.manual_seed(RANDOM_SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device)


def prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, source: str) -> Checkpoint:
    """Make a loaded model ready: our attention, end and mask tokens, suppressed ids.

    Random weights may say every id but the mask, whether or not the tokenizer has a word for it, and never end.
    """
    random = source.startswith(RANDOM)
    refuse_unserved(model.config, source)
    model.eval().set_attn_implementation(ATTENTION)
    rows = model.get_output_embeddings().weight.shape[0]
    mask_id = find_mask(tokenizer, rows)
    decodable = set(range(rows) if random else tokenizer.get_vocab().values())
    suppressed = [i for i in range(rows) if i not in decodable or i == mask_id]
    calls = Calls(model.device)
    calls.watch(model)
    return Checkpoint(
        source=source,
        model=model,
        tokenizer=tokenizer,
        end_ids=() if random else _end_ids(model.generation_config, tokenizer),
        mask_id=mask_id,
        suppressed=torch.tensor(suppressed, dtype=torch.long, device=model.device),
        max_positions=getattr(model.config, "max_position_embeddings", 1 << 30),
        calls=calls,
    )


def load_config(source: str, *, offline: bool = False, other: str = OTHER_CHECKPOINT) -> Any:
    """The checkpoint's configuration; `a2d-qwen2`, which is Qwen2 under another name, is read as Qwen2."""
    shape = source.removeprefix(RANDOM)
    if shape != source:
        if shape in SHAPES:
            return AutoConfig.for_model(**SHAPES[shape])
        return load_config(locate(shape), offline=True, other=OTHER_WEIGHTS)
    with _explained(source, "configuration", offline, other):
        raw, _ = PretrainedConfig.get_config_dict(source, local_files_only=offline)
        if raw.get("model_type") == "a2d-qwen2":
            raw = {k: v for k, v in raw.items() if k not in {"model_type", "auto_map", "architectures"}}
            return Qwen2Config(**raw)
        return AutoConfig.from_pretrained(source, local_files_only=offline, trust_remote_code=False)


def refuse_unserved(config: Any, source: str) -> None:
    """Raise UserError if a layer or rope type of `config` cannot be decoded exactly with ragged rows."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not hasattr(config, "num_attention_heads"):
        layers = {config.model_type}
    if odd := sorted(layers - SERVED_LAYERS):
        raise UserError(
            f"checkpoint {source!r} has layers of type {', '.join(odd)}, which cannot rewind; "
            f"served: {', '.join(sorted(SERVED_LAYERS))}. See `mtbench ls families`."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [r for r in rope.values() if isinstance(r, Mapping)] or [rope]  # per layer type, or one for all
    kinds = {str(r.get("rope_type", r.get("type", "default"))) for r in nested}
    if odd := sorted(kinds - SERVED_ROPES):
        raise UserError(
            f"checkpoint {source!r} uses rope type {', '.join(odd)}, whose angles depend on the batch; "
            f"served: {', '.join(sorted(SERVED_ROPES))}."
        )


def _generation_settings(source: str, config: Any, offline: bool) -> GenerationConfig:
    """The checkpoint's generation settings, as its loaded model would have them."""
    try:
        return GenerationConfig.from_pretrained(source, local_files_only=offline)
    except OSError:  # it has none
        return GenerationConfig.from_model_config(config)


def _end_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's, and those of the checkpoint's generation settings.

    Nothing else of those settings (repetition penalty, temperature …) ever reaches decoding.
    """
    configured = getattr(settings, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return tuple(sorted(i for i in ids if i is not None))


def refuse_pickles(folder: Path) -> None:
    """Raise UserError if a checkpoint's weights are there only in a format that can run code when loaded."""
    files = sorted(os.listdir(folder))
    pickled = [f for f in files if f.endswith((".bin", ".pt", ".pth"))]
    if not any(f.endswith(".safetensors") for f in files):
        found = f"pickled weights only ({pickled[0]}), which can run code when loaded" if pickled else "no weights"
        raise UserError(
            f"checkpoint {str(folder)!r} has {found}; mtbench reads safetensors. "
            "Convert it, or give another with `--checkpoint ROLE=PATH_OR_ID`."
        )


class _explained:
    """Turns what transformers raises while looking for `what` in `source` into one line for the user."""

    def __init__(self, source: str, what: str, offline: bool, other: str = OTHER_CHECKPOINT) -> None:
        self.source, self.what, self.offline, self.other = source, what, offline, other

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, MISREAD) or isinstance(error, UserError):
            return
        if Path(self.source).is_dir():
            files = sorted(os.listdir(self.source))
            raise UserError(
                f"checkpoint {self.source!r} has no usable {self.what}: {first_line(error)} "
                f"(it holds: {', '.join(files[:8]) or 'nothing'}). Give another with `{self.other}`."
            ) from None
        reason = "is not in the local cache" if self.offline else "cannot be loaded from the hub"
        raise UserError(
            f"{self.source!r} {reason} ({self.what}: {first_line(error)}); pass `--checkpoint ROLE=PATH` for a local "
            "folder, `--offline` if it is cached, or `--family tiny` for the embedded checkpoints."
        ) from None
