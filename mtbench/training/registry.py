"""The training objectives by name, each a command of `mtbench train`."""

from collections.abc import Mapping

from mtbench.training.block_objectives import BlockDraft, MarkovBlockDraft
from mtbench.training.draft_objectives import Eagle, Mtp
from mtbench.training.objectives import Ar, BlockDiffusion, Draft, Mars, Medusa, Objective
from mtbench.training.self_distillation import SelfDistill

DRAFTS = (Eagle, BlockDraft, MarkovBlockDraft, Mtp)
KINDS = (Ar, Mars, SelfDistill, BlockDiffusion, Draft, Medusa, *DRAFTS)
OBJECTIVES: Mapping[str, type[Objective]] = {kind.name: kind for kind in KINDS}
