"""Load a checkpoint: any Hugging Face decoder with full or sliding attention, from safetensors, without remote code.

`random:SHAPE` has no files: its weights are drawn on the device, to measure speed without a download.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from mtbench.errors import UserError
from mtbench.models import gguf
from mtbench.models.architectures import attention_of
from mtbench.models.attention import OWN
from mtbench.models.checkpoint_files import CONFIG, GENERATION, Shapes, check_settings, stored_shapes
from mtbench.models.configuration import explained, load_config, max_positions, refuse_unreadable, refuse_unserved
from mtbench.models.families import RANDOM, RANDOM_TOKENIZER, SHAPES, locate, path_of, read_training_record

MASK = "<|mask|>"
# Fast-dLLM v2, and the first of 32 tokens of MTP via self-distillation; their tokenizers name no mask token.
MASKS = (MASK, "|<MASK>|", "<|mtp_special_token_0|>")
RANDOM_SEED = 0
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model ready to decode, with its tokenizer and special token ids."""

    source: str  # path or hub id, or random:SHAPE
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    mask_id: int | None
    suppressed: Tensor  # ids that no arm may emit: the mask and ids that the tokenizer cannot decode
    vocabulary: int  # rows of the LM head, including padding rows
    max_positions: int
    calls: "Calls"


def layer_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that a forward reads whole: not the LM head's, nor those that an embedding looks up."""
    looked_up = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    others = {id(weight) for weight in (*looked_up, model.get_output_embeddings().weight)}
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


class Calls:
    """Counts a checkpoint's forward passes by hooks, as a check of the count in `ModelRunner`.

    The counter is a tensor on the model's device, so that each replay of a CUDA graph counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros((), dtype=torch.long, device=device)

    @property
    def n(self) -> int:
        """Forward passes so far; on a GPU this synchronises."""
        return int(self._count)

    def watch(self, model: torch.nn.Module) -> None:
        """Count the forward passes of `model` too."""
        model.register_forward_hook(self._count_one)

    def _count_one(self, *_: Any) -> None:
        self._count += 1


@dataclass(frozen=True, eq=False)
class Inspected:
    """A checkpoint's tokenizer and configuration without its weights: enough to plan a run and to check it."""

    source: str
    tokenizer: PreTrainedTokenizerBase
    config: Any
    mask_id: int | None
    end_ids: tuple[int, ...]
    offline: bool  # use local files only
    flags: tuple[str, ...] = ()  # remarks on its settings

    @property
    def objective(self) -> str | None:
        """The training objective in its training record; None without one."""
        name = self._record.get("objective")
        return name if isinstance(name, str) else None

    @property
    def feeds_masks(self) -> bool:
        """Whether its training objective feeds mask tokens. True unless a training record names another."""
        return self._record.get("feeds_masks") is not False

    @property
    def declares_masks(self) -> bool:
        """Whether its training record, or an entry as in PARD's models, states training with mask tokens."""
        return self._record.get("feeds_masks") is True or pard_token(self.config) is not None

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None:
        """The variables of the chat template in its training; None without a record of them."""
        return self._record.get("chat_template_kwargs")

    @property
    def _record(self) -> dict[str, Any]:
        """The training record; empty if it is missing or invalid. `Family.training` reports an invalid one."""
        try:
            return read_training_record(Path(self.source))
        except UserError:
            return {}

    @property
    def vocabulary(self) -> int:
        """Rows of the embeddings, including padding rows."""
        size: int = self.config.get_text_config().vocab_size
        return size

    @property
    def largest_id(self) -> int:
        """Largest token id that it may emit. Random weights emit also ids that the tokenizer does not know."""
        if self.source.startswith(RANDOM):
            return self.vocabulary - 1
        ids: dict[str, int] = self.tokenizer.get_vocab()
        return max(i for i in ids.values() if i < self.vocabulary and i != self.mask_id)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the configuration allows."""
        return max_positions(self.config)


def inspect(source: str, *, offline: bool = False, needs_mask: bool = False) -> Inspected:
    """Read what every arm needs: tokenizer, chat template, configuration, end and mask tokens. It needs no weights.

    Of a GGUF file it reads the header. `refuse_undecodable` asks for more. Raises UserError for what cannot be read.
    """
    random, given, source = source.startswith(RANDOM), source, path_of(source)
    if gguf.is_gguf(source):
        config, tokenizer, *_ = gguf.header(source)
        settings, file = _generation_settings(source, config, offline)
    else:
        if Path(source).is_dir():
            check_settings(Path(source))
        config = load_config(source, offline=offline)
        tokenizer = _tokenizer(path_of(RANDOM_TOKENIZER) if random else source, config, offline)
        settings, file = _generation_settings(source, config, offline)
    if random and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{source!r} has {config.vocab_size} ids, fewer than the {len(tokenizer)} of the tokenizer used with "
            f"random weights; choose a larger shape: {', '.join(RANDOM + known for known in SHAPES)}."
        )
    rows = config.get_text_config().vocab_size
    with explained(source, "configuration", offline):
        mask_id = find_mask(tokenizer, rows, pard_token(config))
    if needs_mask and mask_id is None:
        raise UserError(
            f"checkpoint {given!r} has no mask token and no unused embedding row for one ({rows} rows, "
            "all in use); train one that has with `mtbench train … --mask-token TOKEN` (a reserved token of its "
            "tokenizer) or `--grow-vocabulary`, or give another checkpoint."
        )
    ends, flags = ((), ()) if random else _end_ids(settings, tokenizer, rows, file)
    return Inspected(source, tokenizer, config, mask_id, ends, offline, flags)


def _tokenizer(source: str, config: Any, offline: bool) -> PreTrainedTokenizerBase:
    with explained(source, "tokenizer", offline):
        unknown = config if type(config) is PretrainedConfig else None  # else transformers reads it again, and warns
        tokenizer = AutoTokenizer.from_pretrained(
            source, config=unknown, local_files_only=offline, trust_remote_code=False
        )
        if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():  # as without tokenizer.json
            raise OSError("no tokenizer files")
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r:.60}, not a number")
        return tokenizer


def pard_token(config: Any) -> int | None:
    """Return the mask token in the configuration of a PARD model, None of others.

    PARD's training (github.com/AMD-AIG-AIMA/PARD) writes -1 for a model without masks. Raises ValueError for other ids
    that no row of the embedding has.
    """
    token = getattr(config, "pard_token", None)
    if token in (None, -1):
        return None
    if type(token) is not int or not 0 <= token < config.vocab_size:
        raise ValueError(f"pard_token is {token!r:.60}, and the embedding has {config.vocab_size:,} rows")
    return token


def find_mask(tokenizer: PreTrainedTokenizerBase, rows: int, configured: int | None = None) -> int | None:
    """Return the mask token: `configured`, the tokenizer's, or the next free id if the embedding's `rows` have it."""
    if configured is not None:
        return configured
    ids = tokenizer.get_vocab()
    own: int | None = next((ids[token] for token in MASKS if token in ids), tokenizer.mask_token_id)
    if own is not None:
        return own if own < rows else None
    free = max(ids.values()) + 1
    return free if free < rows else None


def load(source: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", offline: bool = False) -> Checkpoint:
    """Load model and tokenizer. Raises UserError for a checkpoint that cannot be decoded exactly."""
    inspected = inspect(locate(source), offline=offline)
    stored, source = refuse_undecodable(inspected), inspected.source
    if source.startswith(RANDOM):
        with explained(source, "shape", offline):
            model = random_model(inspected.config, dtype, device)
        return prepare(model, inspected.tokenizer, source=source)
    refuse_other_sizes(inspected, stored)
    model = loaded_model(source, inspected.config, OWN, dtype=dtype, device=device, offline=offline)
    return prepare(model, inspected.tokenizer, source=source)


def loaded_model(
    source: str, config: Any, attention: str | None, *, dtype: torch.dtype, device: str, offline: bool
) -> PreTrainedModel:
    """Return transformers' model with the weights of a checkpoint. attention: None: the fastest of its class.

    Raises UserError for weights that are not there, not those of the configuration, or not finite.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with explained(source, "safetensors weights", offline):
        model, found = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=offline,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model = model.to(device)
    whole = [(name, weight) for name, weight in model.named_parameters() if weight.dtype in DTYPES.values()]
    faults = {
        "lacks {} weights of its configuration": found["missing_keys"],
        "has {} weights beyond those of its configuration": _beyond(found["unexpected_keys"], model),
        "has {} weights that are not finite": [name for name, weight in whole if not weight.isfinite().all()],
    }
    for fault, names in faults.items():
        if names:
            raise UserError(
                f"checkpoint {source!r} {fault.format(len(names))}, such as {min(names)!r}; give another checkpoint."
            )
    return model


def refuse_undecodable(inspected: Inspected) -> Shapes:
    """Return the shapes of the weights in a folder, none of a hub id.

    Raises UserError for a checkpoint that mtbench cannot decode exactly, or that transformers cannot read.
    """
    refuse_unreadable(inspected.source, inspected.config, offline=inspected.offline)
    refuse_unserved(inspected.config, inspected.source)
    folder = Path(inspected.source)
    return stored_shapes(folder) if folder.is_dir() else {}


def _beyond(names: Iterable[str], model: PreTrainedModel) -> list[str]:
    """Return the stored weights in a module or list of layers of `model`; others are parts of their own, as heads."""
    modules, beside = dict(model.named_modules()), ["", model.base_model_prefix]
    if getattr(model.config, "num_nextn_predict_layers", None):  # these layers follow the model's
        beside += [name for name, module in modules.items() if isinstance(module, torch.nn.ModuleList)]

    def owner(name: str) -> str:
        return name if name in modules else owner(name.rpartition(".")[0])

    packed = getattr(model.config, "quantization_config", None)  # its scales are the quantiser's
    return [] if packed else [name for name in names if owner(name) not in beside or ".lora_" in name]


def refuse_other_sizes(inspected: Inspected, stored: Shapes) -> None:
    """Raise UserError if stored weights have other shapes than the configuration gives them. Allocates no memory."""
    if not stored or getattr(inspected.config, "quantization_config", None) is not None:
        return  # not known, or packed
    with explained(inspected.source, "configuration", inspected.offline), torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(inspected.config).state_dict()
    for name, weight in expected.items():
        if name in stored and stored[name] != tuple(weight.shape):
            raise UserError(
                f"checkpoint {inspected.source!r} has {name} of shape {list(stored[name])}, and its config.json says "
                f"{list(weight.shape)}; give another checkpoint."
            )


def without_weights(source: str, *, offline: bool) -> PreTrainedModel:
    """Return a checkpoint's model on the meta device: its sizes, but no weights. Raises UserError as `load_config`."""
    config = load_config(locate(source), offline=offline)
    with explained(source, "configuration", offline), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def random_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Return a model with the architecture's own initialisation, drawn on `device` in `dtype` from a fixed seed."""
    gpus = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(gpus), torch.device(device):
        torch.manual_seed(RANDOM_SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=OWN)
    return model.to(device)


def prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, source: str) -> Checkpoint:
    """Return a loaded model ready to decode: its attention, end and mask tokens, suppressed ids.

    Random weights may emit every id but the mask, also ids unknown to the tokenizer, and have no end token.
    """
    random = source.startswith(RANDOM)
    refuse_unserved(model.config, source)
    model.eval().set_attn_implementation(str(attention_of(model.config)[0]))
    rows = model.get_output_embeddings().weight.shape[0]
    mask_id = find_mask(tokenizer, rows, pard_token(model.config))
    decodable = set(range(rows) if random else tokenizer.get_vocab().values())
    suppressed = [i for i in range(rows) if i not in decodable or i == mask_id]
    calls = Calls(model.device)
    calls.watch(model)
    return Checkpoint(
        source=source,
        model=model,
        tokenizer=tokenizer,
        end_ids=() if random else _end_ids(model.generation_config, tokenizer, rows)[0],
        mask_id=mask_id,
        suppressed=torch.tensor(suppressed, dtype=torch.long, device=model.device),
        vocabulary=rows,
        max_positions=max_positions(model.config),
        calls=calls,
    )


def generation_settings(source: str, *, offline: bool) -> tuple[GenerationConfig, str]:
    """Return a checkpoint's own settings, and the file that has them. Raises UserError if they cannot be read."""
    source = path_of(source)
    return _generation_settings(source, None if gguf.is_gguf(source) else load_config(source, offline=offline), offline)


def _generation_settings(source: str, config: Any, offline: bool) -> tuple[GenerationConfig, str]:
    with explained(source, "generation settings", offline):
        if gguf.is_gguf(source):
            header = gguf.header(source)
            return GenerationConfig(eos_token_id=header.end_ids, **header.sampling), Path(source).name
        try:
            return GenerationConfig.from_pretrained(source, local_files_only=offline), GENERATION
        except OSError:
            if (Path(source) / GENERATION).exists():  # it cannot be read
                raise
            return GenerationConfig.from_model_config(config), CONFIG


def _end_ids(settings: Any, tokenizer: Any, rows: int, file: str = "") -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids that end an answer, the tokenizer's and those of the checkpoint's generation settings, and flags.

    An id that no row of the embedding has cannot be emitted: it is ignored with a flag, as `generate` of transformers
    ignores it. `file`: where the settings are. All others are ignored, too (repetition penalty, temperature …).
    """
    configured = getattr(settings, "eos_token_id", None)
    if not isinstance(configured, list):
        configured = [configured]
    if wrong := [i for i in configured if i is not None and type(i) is not int]:
        raise UserError(
            f"the generation settings of checkpoint {tokenizer.name_or_path!r} have the end token {wrong[0]!r:.60}, "
            f"which is no token id; give another checkpoint."
        )
    sources = {tokenizer.eos_token_id: "the tokenizer", **dict.fromkeys(configured, file)}
    ids = sorted(i for i in sources if i is not None)
    known = tuple(i for i in ids if 0 <= i < rows)
    none = "" if known else "; no other is left, so no token ends an answer"
    return known, tuple(f"end id {i} of {sources[i]} has no row: ignored{none}" for i in ids if i not in known)
