"""Find, check and load a draft that reads the target's hidden states, in any known format.

A draft is a folder or hub id with a config.json and safetensors weights, without a tokenizer; or a part of the target's
own checkpoint, written `SOURCE#PART` (mtbench/models/families.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from mtbench.errors import UnreadableCheckpoint, UserError, first_line
from mtbench.models import gguf
from mtbench.models.checkpoint_files import Shapes, check_sizes, stored_shapes, weight_files, weights_sha256
from mtbench.models.configuration import downloaded, explained
from mtbench.models.drafts import block_formats, eagle_draft, mtp
from mtbench.models.families import RANDOM, locate, path_of, read_training_record, split_part
from mtbench.models.feature_draft import DraftConfig, FeatureDraft, draft_checkpoint
from mtbench.models.loading import Checkpoint, Inspected

# Each takes config.json and the name of a part ("": the whole checkpoint). It returns None for other formats.
# It raises ValueError for a configuration of its format that it cannot run.
Recogniser = Callable[[Mapping[str, Any], str], DraftConfig | None]
FORMATS: list[Recogniser] = [eagle_draft.recognise, block_formats.recognise, mtp.recognise]


@cache
def draft_config(source: str, *, offline: bool = False) -> DraftConfig | None:
    """Return the configuration of a draft; None if the checkpoint is no draft of a known format.

    Raises UserError for a draft of a known format that cannot be run.
    """
    if source.startswith(RANDOM):
        return None
    location, part = split_part(source)
    with explained(location, "configuration", offline):
        if gguf.is_gguf(location):
            raw = gguf.header(location).config.to_dict()
        else:
            raw, _ = PretrainedConfig.get_config_dict(path_of(location), local_files_only=offline)
        check_sizes(raw)
        if (config := recognised(raw, part)) is not None:
            return config
    if part:
        folder = Path(path_of(location))
        with explained(location, "weights", offline):
            traces = mtp.traces(raw, stored_shapes(folder) if folder.is_dir() else ())
        raise (UnreadableCheckpoint if traces else UserError)(
            f"no {part!r} layers of a known format in the checkpoint {location!r} "
            f"({raw.get('model_type', 'no model_type')}{traces}); known: {', '.join(mtp.LAYOUTS)}; name a draft with "
            "`--checkpoint ROLE=PATH_OR_ID`."
        )
    return None


def recognised(raw: Mapping[str, Any], part: str = "") -> DraftConfig | None:
    """Return the configuration of a draft from its config.json, None for other models.

    Raises ValueError for a draft of a known format that cannot be run.
    """
    return next((config for recognise in FORMATS if (config := recognise(raw, part)) is not None), None)


def known_draft(source: str) -> DraftConfig | None:
    """Return a draft's configuration without the network; None of another checkpoint, or if it cannot be read."""
    try:
        return draft_config(source, offline=True)
    except UserError:
        return None


def inspect_draft(source: str, target: Inspected, *, offline: bool = False) -> Inspected | None:
    """Return a draft without its weights, with the tokenizer of its target; None if the checkpoint is no draft.

    Raises UserError for a draft that does not fit the target.
    """
    location, part = split_part(source)
    if part and source.startswith(RANDOM):
        raise UserError(
            f"{location!r} are random weights, and the method reads {source!r}, a part of a checkpoint; leave the "
            "method out, or give another checkpoint, which has the part."
        )
    if (config := draft_config(source, offline=offline)) is None:
        return None
    text = target.config.get_text_config()
    for what, expected, found in (
        ("reads hidden states of width", config.width, text.hidden_size),
        ("has a vocabulary of", config.vocabulary, text.vocab_size),
    ):
        if expected != found:
            raise _misfit(source, config, target.source, f"{what} {expected:,}, and the target's is {found:,}")
    try:
        config = config.for_target(text)
    except ValueError as error:
        raise _misfit(source, config, target.source, first_line(error)) from None
    if max(config.taps) > text.num_hidden_layers:
        layers = f"reads the output of layer {max(config.taps)}, and the target has {text.num_hidden_layers} layers"
        raise _misfit(source, config, target.source, layers)
    folder = Path(path_of(source))
    if folder.is_dir():
        names = stored_shapes(folder) if part else {}
        if part and all(config.rename(name) is None for name in names):
            raise UserError(
                f"checkpoint {location!r} has no weights of its part {part!r} ({config.name}{mtp.traces({}, names)}), "
                "though its config.json names it; give another checkpoint."
            )
        _refuse_other_sizes(source, config, target.config, folder, offline=offline)
    if folder.is_dir() and not part:
        trained_for = read_training_record(folder).get("base_sha256")
        sha256 = weights_sha256(Path(target.source)) if trained_for else None
        if sha256 is not None and trained_for != sha256:
            raise _misfit(source, config, target.source, "was trained for a target with other weights")
    return replace(target, source=source, config=config, mask_id=config.mask_id)


def load_draft(source: str, target: Checkpoint, *, offline: bool = False) -> Checkpoint:
    """Return a draft for a loaded target, on its device and in its dtype.

    Raises UserError if weights are missing, superfluous or of other shapes than in the configuration.
    """
    draft_format, folder = draft_config(source, offline=offline), downloaded(locate(source), offline=offline)
    assert draft_format is not None, "planning refuses other checkpoints"
    config = draft_format.for_target(target.model.config.get_text_config())
    _refuse_other_sizes(source, config, target.model.config, folder, offline=offline)
    stored = _weights(folder, config)
    with explained(locate(source), "weights", offline):
        draft = config.build(target.model)
        draft.settle(stored)
        _check_shapes(source, config, _shapes(draft), {name: tuple(tensor.shape) for name, tensor in stored.items()})
        _check_values(source, config, draft, stored)
        draft.load_state_dict({name: tensor.to(draft.device) for name, tensor in stored.items()})
    return draft_checkpoint(source, draft.eval().requires_grad_(False), target)


def _refuse_other_sizes(source: str, config: DraftConfig, target: Any, folder: Path, *, offline: bool) -> None:
    """Raise UserError if stored weights have other shapes than the configurations say. Allocates no memory."""
    with explained(locate(source), "configuration", offline), torch.device("meta"):
        draft = config.build(AutoModelForCausalLM.from_config(target))
    renamed = [(ours, shape) for name, shape in stored_shapes(folder).items() if (ours := config.rename(name))]
    if len(stored := dict(renamed)) < len(renamed):
        raise _unusable(source, config, "has a weight by two names")

    def certain(shapes: Shapes) -> Shapes:
        """Return those that do not depend on values, which `settle` reads."""
        return {name: shape for name, shape in shapes.items() if not name.startswith(draft.settled)}

    _check_shapes(source, config, certain(_shapes(draft)), certain(stored))


def _weights(folder: Path, config: DraftConfig) -> dict[str, Tensor]:
    tensors = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # safe_open is no mapping
                if (ours := config.rename(name)) is not None:
                    tensors[ours] = weights.get_tensor(name)
    return tensors


def _shapes(draft: FeatureDraft) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def _check_shapes(source: str, config: DraftConfig, expected: Shapes, stored: Shapes) -> None:
    reason = None
    if missing := sorted(expected.keys() - stored.keys()):
        reason = f"lacks {len(missing)} weights of its configuration, such as {missing[0]!r}"
    elif unknown := sorted(stored.keys() - expected.keys()):
        reason = f"has {len(unknown)} weights that its configuration has no place for, such as {unknown[0]!r:.80}"
    elif wrong := [name for name in expected if expected[name] != stored[name]]:
        found, configured = list(stored[wrong[0]]), list(expected[wrong[0]])
        reason = f"has {wrong[0]} of shape {found}, and its config.json says {configured}"
    if reason:
        raise _unusable(source, config, reason)


def _check_values(source: str, config: DraftConfig, draft: FeatureDraft, stored: Mapping[str, Tensor]) -> None:
    """Raise UserError for a tensor of whole numbers where fractions belong, or one with a NaN or an infinity."""
    for name, ours in draft.state_dict().items():
        dtype, values = str(stored[name].dtype).removeprefix("torch."), stored[name].to(ours.dtype)
        if ours.is_floating_point() and not stored[name].is_floating_point():
            raise _unusable(source, config, f"has {name} in {dtype}, and its weights are read unquantized")
        if not values.isfinite().all():
            raise _unusable(source, config, f"has values in {name} that are not finite")


def _unusable(source: str, config: DraftConfig, reason: str) -> UserError:
    return UnreadableCheckpoint(f"draft {source!r} ({config.name}) {reason}; give another checkpoint.")


def _misfit(source: str, config: DraftConfig, target: str, reason: str) -> UserError:
    return UserError(
        f"draft {source!r} ({config.name}) does not fit the target {target!r}: it {reason}; give another checkpoint, "
        "made for this target."
    )
