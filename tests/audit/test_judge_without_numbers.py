"""A judge whose logits are no numbers ends an audit in one line."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from planted_answers import AR, SPECULATIVE, honest_run, planted

import mtbench
from mtbench.errors import UserError
from mtbench.experiments import diagnosis
from mtbench.models.runner import ModelRunner
from mtbench.plan.formats import GenerationLine


def other_third_token(line: GenerationLine, _: int) -> dict[str, Any]:
    tokens = list(line.token_ids)
    tokens[2] = 300 + (tokens[2] == 300)
    return {"token_ids": tokens}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Plain decoding, and an arm with other tokens."""
    folder, cell = tmp_path_factory.mktemp("audit"), f"{SPECULATIVE}.b4"
    run = planted(honest_run(folder / "honest"), folder / "b", {cell: other_third_token})
    return f"{run}:{AR}.b4", f"{run}:{cell}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_judge_without_numbers_ends_the_audit(
    sides: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """As other unusable judges do; a run's sentence on a divergent arm is that line, too."""
    forward = ModelRunner.forward

    def spoilt(*given: Any, **how: Any) -> Any:
        out = forward(*given, **how)
        out.logits[..., 5] = value
        return out

    monkeypatch.setattr(ModelRunner, "forward", spoilt)
    said = "the judge's logits are not numbers (NaN or +inf) in float32: is the checkpoint damaged?"
    with pytest.raises(UserError, match=re.escape(said)):
        mtbench.audit(*sides, out=tmp_path / "audit", device="cpu")
    assert diagnosis.why(*sides, tmp_path / "why", offline=True).endswith(f"cannot say why: {said}")
