"""Which arms can be raced on some checkpoints, and why the others cannot."""

from pathlib import Path

import pytest
from small import save_small

from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments.choose.candidates import candidates
from mtbench.plan.request import RunRequest


def test_the_embedded_family_serves_nearly_all_methods() -> None:
    """Plain decoding is the reference on the checkpoint that one would deploy; it is no candidate."""
    found = candidates(RunRequest(family="tiny"))
    plain, *arms = found.lineup.arms
    assert str(plain) == "ar@ar/graph"
    methods = {arm.method for arm in arms}
    assert {"mars", "eagle", "medusa", "speculative", "prompt-lookup", "block-diffusion"} <= methods
    assert methods | found.refused.keys() | {"ar"} == {name for name in METHODS if not METHODS[name].served_only}
    assert set(found.refused) == {"hf-generate", "openai", "mtp", "fast-dllm-v2"}


def test_a_model_alone_serves_what_needs_no_training(tmp_path: Path) -> None:
    """The reasons name the role that is missing."""
    found = candidates(RunRequest(model=str(save_small(tmp_path / "model", 1))))
    assert {arm.method for arm in found.lineup.arms[1:]} == {"jacobi", "lookahead", "prompt-lookup", "suffix"}
    assert "--checkpoint eagle=PATH_OR_ID" in found.refused["eagle"]
    assert "'mars'" in found.refused["mars"]


def test_named_candidates_are_raced_or_refused() -> None:
    found = candidates(RunRequest(family="tiny", method=("ar", "mars:tau=0.9|0.5")))
    assert [str(arm) for arm in found.lineup.arms[1:]] == ["mars:tau=0.9@mars/graph", "mars:tau=0.5@mars/graph"]
    with pytest.raises(UserError, match="cannot be raced: it runs in another engine"):
        candidates(RunRequest(family="tiny", method=("hf-generate:prompt_lookup=3",)))
    with pytest.raises(UserError, match="'ar@mars/graph' cannot be raced: every arm is compared with ar@ar/graph"):
        candidates(RunRequest(family="tiny", method=("ar:on=mars", "mars:tau=0.9")))


def test_a_checkpoint_in_a_role_that_no_arm_has_is_refused(tmp_path: Path) -> None:
    """A misspelt role would leave the draft out of the race."""
    named = {"daft": str(tmp_path)}
    with pytest.raises(UserError, match=r"'daft' \(did you mean 'draft'\?\)"):
        candidates(RunRequest(family="tiny", checkpoint=named))
    with pytest.raises(UserError, match="cannot be raced: checkpoint"):
        candidates(RunRequest(family="tiny", checkpoint=named, method=("speculative:draft=daft",)))
