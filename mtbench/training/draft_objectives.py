"""Training objectives of drafts that read the target's hidden states (mtbench/models/feature_draft.py).

The target is frozen, its embedding and LM head are shared. Its hidden states are computed on the way, in the forward
pass of each batch. Sources: EAGLE-3's training-time test (arXiv 2503.01840, section 3.2); multi-token prediction
(DeepSeek-V3, arXiv 2412.19437, section 2.2; FastMTP, arXiv 2509.18362); blocks: block_objectives.py. The checkpoint
holds the draft alone; for multi-token prediction it is a copy of the target with the layer added.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen3Config

from mtbench.errors import UserError
from mtbench.models.drafts import mtp
from mtbench.models.drafts.eagle_draft import EagleDraft
from mtbench.models.drafts.loading import recognised
from mtbench.models.feature_draft import DraftConfig, FeatureDraft
from mtbench.options import option
from mtbench.training.draft_attention import DraftMask, StepKeys
from mtbench.training.draft_vocabulary import coverage, most_frequent
from mtbench.training.linear_cross_entropy import TeacherOutput
from mtbench.training.objectives import (
    EXACT,
    HeadInput,
    Model,
    Objective,
    Special,
    Stored,
    TargetStates,
    clean_stream,
    first_target,
)
from mtbench.training.packing import AttentionMask, Example, Examples, Packed, TrainingSequence

TAPS = 5  # layers that a draft reads, at most


@dataclass(frozen=True, kw_only=True)
class DraftObjective(Objective):
    """A draft learns from the hidden states of a frozen target. Its layers are Qwen3's, of the target's sizes."""

    freezes_model: ClassVar[bool] = True
    stored: ClassVar[Stored] = "alone"
    architecture: ClassVar[str]  # in config.json

    @property
    def draft_layers(self) -> int:
        return 1

    def settings(self, special: Special, taps: Sequence[int]) -> Mapping[str, Any]:
        """Return the entries of config.json that this draft has beside its sizes. `taps`: the layers that it reads."""
        return {"target_layer_ids": taps}

    def attach(self, model: Model, special: Special) -> None:
        """Freeze the model; add the draft, with random weights from a fixed seed."""
        model.requires_grad_(False)
        config = model.config.get_text_config()
        model.draft = self.format(model, special).for_target(config).build(model)
        self.settle(model.draft, special)
        initialise(model.draft, config.initializer_range)

    def settle(self, draft: FeatureDraft, special: Special) -> None:
        """Give the draft the modules that it shares with the target."""
        draft.settle({})

    def format(self, model: Model, special: Special) -> DraftConfig:
        """Return the configuration of the draft. Raises UserError for a target that cannot have one."""
        config = model.config.get_text_config()
        layers = config.num_hidden_layers
        own = {"architectures": [self.architecture], "num_target_layers": layers}
        try:
            found = recognised({**self.layer_config(config), **own, **self.settings(special, tapped_layers(layers))})
        except ValueError as error:
            raise UserError(f"{self.name} does not fit the base: {error}; give another value.") from None
        assert found is not None
        return found

    def layer_config(self, config: Any) -> dict[str, Any]:
        """Return the configuration of the draft's layers, given the target's. Raises UserError as `format` does."""
        if config.num_hidden_layers == 1:
            raise UserError(f"{self.name} reads layers before the last, and the base has one; give another `--base`.")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        kept = ("head_dim", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling")
        given = {name: getattr(config, name) for name in (*sizes, *kept) if getattr(config, name, None) is not None}
        given.setdefault("head_dim", config.hidden_size // config.num_attention_heads)
        return dict(Qwen3Config(**given, num_hidden_layers=self.draft_layers, tie_word_embeddings=False).to_dict())

    def taps(self, model: Model) -> tuple[int, ...]:
        taps: tuple[int, ...] = model.draft.format.taps
        return taps

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        tensors: dict[str, Tensor] = model.draft.state_dict()
        del model.draft
        return tensors

    def checkpoint_config(self, model: Model) -> Mapping[str, Any]:
        raw: Mapping[str, Any] = model.draft.format.raw
        return raw


def tapped_layers(layers: int) -> list[int]:
    """Return the layers whose outputs a draft reads: five, from the second to the third last; of a few, not the last.

    (As in the drafts of arXiv 2607.05147: 1, 9, 17, 25, 33 of 36.)
    """
    if layers <= TAPS + 2:
        return list(range(min(layers - 1, TAPS)))
    return [round(1 + k * (layers - 4) / (TAPS - 1)) for k in range(TAPS)]


def initialise(draft: FeatureDraft, spread: float) -> None:
    """Draw the weights of matrices that learn from a normal distribution; norms are ones, biases zeros."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for name, parameter in draft.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=spread)
            else:
                torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


@dataclass(frozen=True, kw_only=True)
class SequentialDraft(DraftObjective):
    """A draft that reads its own output learns in several steps from each position, as it decodes.

    Step s feeds every position the output of step s - 1 with the next token. It attends to the first step's keys up to
    its place, and to its own position in the steps since: what decoding has.
    """

    decay: ClassVar[float]  # weight of a step's loss, of the weight of the step before
    learns_distribution: ClassVar[bool]  # of the target; else the tokens of the text

    steps: int = option(3, "steps of a draft: tokens that it learns to draft in a row", low=1)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"step_{step}" for step in range(1, self.steps + 1))

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the sequence. A prediction's predictor is the token before its target, from which the target predicts
        it, too; step s = `ahead` - 1 makes it from the hidden states `ahead` tokens before that.
        """
        count = len(example.ids)
        predictor = torch.arange(max(first_target(example.prompt), 2) - 1, count - 1)
        ahead = torch.arange(1, self.steps + 1)[:, None].expand(-1, len(predictor))
        exists = predictor >= ahead
        weight = torch.diag(self.decay ** torch.arange(self.steps, dtype=EXACT)) / max(1, len(predictor))
        predictor = predictor.expand(self.steps, -1)[exists]
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            predictor=predictor,
            target=example.ids[predictor + 1],
            weight=weight[:, None].expand(-1, exists.shape[1], -1)[exists],
            ahead=ahead[exists],
        )

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        draft, keys = model.draft, StepKeys()
        feature = torch.cat([states.features[tap] for tap in draft.format.taps], -1)
        clean = AttentionMask(batch).dense()
        own = torch.eye(clean.shape[1], dtype=torch.bool, device=clean.device).expand_as(clean)
        head, drafted = draft.get_output_embeddings().weight, draft.drafted_ids
        target_head = model.get_output_embeddings().weight
        if drafted is not None:
            target_head = target_head[drafted]
            among = torch.isin(batch.target, drafted)
        for step in range(self.steps):
            ids = batch.ids.roll(-1 - step, 1)
            metadata = DraftMask(batch.position + step, torch.cat((clean, *[own] * step), -1))
            read, feature = draft.advance(ids, feature, metadata, keys, ids.shape[1], depth=step)
            of_step = batch.ahead == step + 1
            rows = (of_step if drafted is None else of_step & among).nonzero().squeeze(1)
            hidden = read.flatten(0, 1)[batch.predictor[rows] - step - 1]
            wanted = (states.predicting[rows], target_head) if self.learns_distribution else None
            yield HeadInput(rows, hidden, head, wanted, drafted)


@dataclass(frozen=True, kw_only=True)
class Eagle(SequentialDraft):
    """EAGLE-3: the draft learns the target's distributions from its hidden states, then from its own (training-time
    test).

    The loss is the divergence from the target's distribution, whose gradient is that of the paper's soft cross-entropy.
    Step s has the weight 0.8 to the power of s. Mean over labelled tokens, then over conversations. The draft begins
    as the last hidden state that it reads, to which its layer adds nothing yet (our choice). With a trimmed
    vocabulary the distribution is that among its tokens, and other tokens of the text are not learned, as in the
    authors' code, which leaves out positions where the target's choice cannot be drafted.
    """

    name: ClassVar[str] = "eagle"
    role: ClassVar[str] = "eagle"
    architecture: ClassVar[str] = "Qwen3Eagle3Model"
    decay: ClassVar[float] = 0.8
    learns_distribution: ClassVar[bool] = True

    steps: int = option(7, "steps of the training-time test: tokens that the draft learns to draft in a row", low=1)
    draft_vocabulary: int | None = option(
        None, "tokens that the draft can draft, those most frequent in the answers; default: all", low=2
    )

    def settings(self, special: Special, taps: Sequence[int]) -> Mapping[str, Any]:
        trimmed = {} if self.draft_vocabulary is None else {"draft_vocab_size": self.draft_vocabulary}
        return {**super().settings(special, taps), "ttt_length": self.steps, **trimmed}

    def settle(self, draft: FeatureDraft, special: Special) -> None:
        if self.draft_vocabulary is None or not isinstance(draft, EagleDraft):
            super().settle(draft, special)
        else:
            draft.trim(most_frequent(special.examples, self.draft_vocabulary, draft.format.vocabulary))

    def attach(self, model: Model, special: Special) -> None:
        super().attach(model, special)
        fc, layer = model.draft.fc.weight, model.draft.layers[0]
        with torch.no_grad():
            for weight in (fc, layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.zero_()
            fc[:, -len(fc) :].fill_diagonal_(1)

    def note(self, model: Model, data: Sequence[Examples]) -> str | None:
        draft = model.draft
        if draft.drafted_ids is None:
            return None
        shares = [f"{coverage(draft.drafted_ids, part, draft.format.vocabulary):.1%}" for part in data if part]
        of = " (learned and held out)" if len(shares) > 1 else ""
        return f"the draft has {self.draft_vocabulary:,} tokens: {' and '.join(shares)} of the answers' tokens{of}"

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        ids, vocabulary, tensors = model.draft.drafted_ids, model.draft.format.vocabulary, dict(super().detach(model))
        if ids is not None:
            tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids.cpu(), True)
        return tensors


@dataclass(frozen=True, kw_only=True)
class Mtp(SequentialDraft):
    """Multi-token prediction: one more layer of a frozen target learns to draft, fed its own output as in decoding.

    As in FastMTP: three steps, since the layer is repeated in decoding and a layer trained for one step drafts one
    token well; cross-entropy of the text, as in DeepSeek-V3; step s has the weight 0.6 to the power of s. So train it
    on the target's own answers (`mtbench train answers`). Mean over labelled tokens, then over conversations. The
    checkpoint is a copy of the target with the layer in MiMo's format: `mtbench run --model OUT --method mtp`.
    """

    name: ClassVar[str] = "mtp"
    role: ClassVar[str] = "ar"
    stored: ClassVar[Stored] = "inside"
    decay: ClassVar[float] = 0.6
    learns_distribution: ClassVar[bool] = False
    entries: ClassVar[Mapping[str, Any]] = {mtp.ADDED.counted_by: 1}  # of config.json

    def format(self, model: Model, special: Special) -> DraftConfig:
        raw = model.config.to_dict()
        if mtp.has_layers(raw):
            raise UserError("the base has a layer for multi-token prediction already; decode with it: `--method mtp`.")
        if "rms_norm_eps" not in raw:
            raise UserError(
                f"mtp adds a layer of the base's kind with RMSNorm, and {raw['model_type']} has none; give another "
                "`--base`."
            )
        found = recognised(raw | self.entries, mtp.NAME)
        assert found is not None
        return found

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        # With gradient checkpointing transformers' layer would drop the keys of the steps before.
        model.draft.block.gradient_checkpointing = False
        yield from super().head_inputs(model, states, batch, teacher)

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        stored_name = model.draft.format.stored_name
        return {stored_name(name): tensor for name, tensor in super().detach(model).items()}

    def checkpoint_config(self, model: Model) -> Mapping[str, Any]:
        return self.entries
