"""Recipes: ordered trainings of one family; each starts from a checkpoint that an earlier one makes.

`tiny` makes the embedded family (mtbench/tiny/README.md). `mars-qwen2.5-…` are the trainings behind the tables of the
MARS paper (arXiv 2604.07023, section 4.1 and appendix A, table 7). `eagle-cpu` is an EAGLE-3 draft of a model of 135 M
parameters, on the model's own answers, in about two hours of one core; `--base` and `--data` name your own.
`equal-cost` trains MARS, its rivals and plain next-token training from one base on one data set, each at the same
FLOPs; `equal-cost-135m` does so for a model of that size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtbench.errors import UserError
from mtbench.training.block_objectives import MarkovBlockDraft
from mtbench.training.draft_objectives import Eagle
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Mars, Medusa, Objective
from mtbench.training.self_distillation import SelfDistill
from mtbench.training.trainer import Settings

HELD_OUT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One training. `base` and `teacher` name an earlier stage or a checkpoint, `data` may name an earlier stage.

    No objective: an untrained model; or, with `answer_tokens`, the teacher's answers to the data, of as many tokens at
    most, which are kept if they are cut.
    """

    name: str  # also of its folder or file
    objective: Objective | None
    base: str | None = None
    data: tuple[str, ...]
    examples: int | None = None  # conversations trained on; None: all there are
    settings: Settings = field(default_factory=Settings)
    teacher: str | None = None
    shape: Mapping[str, int] = field(default_factory=dict)  # of the untrained checkpoint
    answer_tokens: int | None = None
    mask_token: str | None = None  # reserved token of a base that has no mask token

    @property
    def feeds_masks(self) -> bool:
        return self.objective is not None and self.objective.needs_mask

    def to_read(self) -> int | None:
        """Return how many conversations to read of each of `data` (None: all), so that `examples` are trained on.

        `train` holds out a tenth of what is read, or `held_out` if that is less, of each of `data` in proportion. So
        `examples` of each, or one more, remain for training; fewer if one holds fewer, or if some are dropped.
        """
        if self.examples is None:
            return None
        sources = len(self.data)
        return self.examples + math.ceil(min(self.settings.held_out, sources * self.examples // 9) / sources)


def _tiny() -> tuple[Stage, ...]:
    """Return two stages of next-token training, then every objective from the same checkpoint on the same data.

    `ar_long` and `mars_anchored` get more conversations, so that they cost as many FLOPs as `mars`.
    """
    data, count = ("arithmetic",), 10_000
    body = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "vocab_size": 512}
    whole = {**body, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    small = {**body, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    first = Settings(learning_rate=1.5e-3, epochs=1, batch_size=32, seed=42, held_out=HELD_OUT)
    second = replace(first, seed=43)
    in_float32 = replace(first, dtype="float32")

    def from_ar(name: str, objective: Objective, examples: int = count) -> Stage:
        return Stage(name=name, objective=objective, base="ar", data=data, examples=examples, settings=second)

    return (
        Stage(name="init", objective=None, data=data, examples=20_000, settings=first, shape=whole),
        Stage(
            name="sums", objective=Ar(), base="init", data=("arithmetic:sums",), examples=32_000, settings=in_float32
        ),
        Stage(name="ar", objective=Ar(), base="sums", data=data, examples=32_000, settings=first),
        from_ar("ar_long", Ar(), 15_600),
        from_ar("mars", Mars(block_size=4)),
        from_ar("mars_b8", Mars(block_size=8)),
        from_ar("mars_b16", Mars(block_size=16)),
        from_ar("mars_anchored", Mars(block_size=4, layout="anchored"), 11_000),
        from_ar("mars_no_sft", Mars(block_size=4, ar_weight=0.0)),
        from_ar("mars_no_sft_b8", Mars(block_size=8, ar_weight=0.0)),
        from_ar("mars_no_sft_b16", Mars(block_size=16, ar_weight=0.0)),
        from_ar("self_distill", SelfDistill(block_size=4)),
        from_ar("block_diffusion", BlockDiffusion(block_size=4)),
        from_ar("medusa", Medusa(heads=4)),
        from_ar("eagle", Eagle()),
        from_ar("dspark", MarkovBlockDraft(layers=2, markov_rank=32, anchors=32)),
        Stage(name="draft_init", objective=None, data=data, examples=20_000, settings=first, shape=small),
        Stage(
            name="draft",
            objective=Draft(distil="logits"),
            base="draft_init",
            teacher="ar",
            data=data,
            examples=32_000,
            settings=replace(first, learning_rate=3e-3),
        ),
        Stage(
            name="draft_mars", objective=Mars(block_size=4), base="draft", data=data, examples=count, settings=second
        ),
    )


def _paper(size: str, rows: int, *, ablated: bool) -> tuple[Stage, ...]:
    """Return five epochs of next-token training, then five of every objective, 384 conversations of 512 tokens a step.

    The paper has its ablations and baselines (`ar_long` is ten epochs in all) only at the smaller size.
    """
    data, settings = ("allenai/Dolci-Instruct-SFT",), Settings(rows=rows)
    base = f"Qwen/Qwen2.5-{size}-Instruct"

    def from_ar(name: str, objective: Objective) -> Stage:
        return Stage(name=name, objective=objective, base="ar", data=data, settings=settings)

    blocks = {"": 4, "_b8": 8, "_b16": 16}
    main = (
        Stage(name="ar", objective=Ar(), base=base, data=data, settings=settings),
        *(from_ar(f"mars{suffix}", Mars(block_size=block)) for suffix, block in blocks.items()),
    )
    ablations = (
        from_ar("ar_long", Ar()),
        *(
            from_ar(f"mars_no_sft{suffix}", Mars(block_size=block, ar_weight=0.0, timestep_weight=True))
            for suffix, block in blocks.items()
        ),
        from_ar("block_diffusion", BlockDiffusion(block_size=4)),
    )
    return (*main, *ablations) if ablated else main


def _eagle_cpu() -> tuple[Stage, ...]:
    """Return the answers, and a draft that learns them once or twice: on a CPU, more data pays more than more epochs.

    Half of the answers to questions that vary reach 160 tokens. A vocabulary of 8,192 tokens covers nearly all.
    """
    base = "HuggingFaceTB/SmolLM2-135M-Instruct"
    settings = Settings(learning_rate=2e-3, epochs=1.75, batch_size=4, rows=4, max_length=768, held_out=24)
    return (
        Stage(name="answers", objective=None, teacher=base, data=("gsm8k",), examples=768, answer_tokens=160),
        Stage(
            name="eagle",
            objective=Eagle(steps=3, draft_vocabulary=8192),
            base=base,
            data=("answers",),
            settings=settings,
        ),
    )


def _equal_cost(
    settings: Settings, base: str, data: str, examples: int | None, mask_token: str | None = None
) -> tuple[Stage, ...]:
    """Return a training by each objective that changes the whole model, all of blocks of 4 tokens."""
    objectives = {
        "ar": Ar(),
        "mars": Mars(block_size=4),
        "mars_no_sft": Mars(block_size=4, ar_weight=0.0),
        "self_distill": SelfDistill(block_size=4),
        "block_diffusion": BlockDiffusion(block_size=4),
    }
    return tuple(
        Stage(
            name=name,
            objective=objective,
            base=base,
            data=(data,),
            examples=examples,
            settings=settings,
            mask_token=mask_token if objective.needs_mask else None,
        )
        for name, objective in objectives.items()
    )


def seeded(stages: Sequence[Stage], seeds: int) -> tuple[Stage, ...]:
    """Return the stages for each of so many random seeds, which are in their names: `mars-1`, `mars-2` …"""
    names = {stage.name for stage in stages}

    def named(source: str | None, number: int) -> str | None:
        return f"{source}-{number}" if source in names else source

    return tuple(
        replace(
            stage,
            name=f"{stage.name}-{number}",
            base=named(stage.base, number),
            teacher=named(stage.teacher, number),
            data=tuple(f"{each}-{number}" if each in names else each for each in stage.data),
            settings=replace(stage.settings, seed=stage.settings.seed + number - 1),
        )
        for number in range(1, seeds + 1)
        for stage in stages
    )


def changed(
    stages: Sequence[Stage],
    base: str | None,
    data: tuple[str, ...],
    *,
    flops: float | None = None,
    mask_token: str | None = None,
) -> tuple[Stage, ...]:
    """Return the stages with another base, and other data, wherever they name no stage. None, (): as they are.

    `flops`: of each training that has a budget of FLOPs. `mask_token`: of the other base. Raises UserError for a base
    with the name of a stage.
    """
    names = {stage.name for stage in stages}
    if base in names:
        raise UserError(f"--base {base} is the name of a stage; give a folder as ./{base}.")

    def model(source: str | None) -> str | None:
        return source if source is None or source in names else base or source

    return tuple(
        replace(
            stage,
            base=model(stage.base),
            teacher=model(stage.teacher),
            data=stage.data if names.intersection(stage.data) else data or stage.data,
            settings=replace(stage.settings, flops=stage.settings.flops and (flops or stage.settings.flops)),
            mask_token=(mask_token or (stage.mask_token if base is None else None)) if stage.feeds_masks else None,
        )
        for stage in stages
    )


RECIPES: Mapping[str, tuple[Stage, ...]] = {
    "tiny": _tiny(),
    "mars-qwen2.5-0.5b": _paper("0.5B", rows=8, ablated=True),
    "mars-qwen2.5-7b": _paper("7B", rows=2, ablated=False),
    "eagle-cpu": _eagle_cpu(),
    "equal-cost": _equal_cost(
        Settings(learning_rate=1.5e-3, flops=1e13, batch_size=32, seed=43, held_out=HELD_OUT),
        "tiny:ar",
        "arithmetic",
        30_000,
    ),
    "equal-cost-135m": _equal_cost(
        Settings(learning_rate=3e-4, flops=5e13, batch_size=4, rows=4, held_out=24),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "gsm8k",
        None,
        "<filename>",
    ),
}
