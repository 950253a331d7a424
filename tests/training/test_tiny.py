"""The embedded family is what its recipe makes, and (slow) the recipe makes its checkpoints again."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.families import EMBEDDED, RECORD, TINY, family
from mtbench.training.recipes import RECIPES
from mtbench.training.train import TrainingRequest, train

UNSHIPPED = {"init", "sums", "draft_init"}  # only intermediate
LIMIT_BYTES = 30_000_000


def test_the_family_is_what_the_recipe_makes() -> None:
    """Every stage's checkpoint is embedded; its record has the objective, settings and data of today's recipe."""
    stages = {stage.name: stage for stage in RECIPES["tiny"] if stage.name not in UNSHIPPED}
    assert {source.removeprefix(EMBEDDED) for source in family("tiny").roles.values()} == set(stages)
    for name, stage in stages.items():
        record = json.loads((TINY / name / RECORD).read_text())
        assert stage.objective is not None
        assert record["objective"] == stage.objective.name, name
        for part, entry in ((stage.objective, "options"), (stage.settings, "settings")):
            given = {option: value for option, value in asdict(part).items() if value is not None}
            assert given.items() <= record[entry].items(), name
        assert record["data"]["examples"] == stage.to_read(), name
        for source, sha256 in ((stage.base, "base_sha256"), (stage.teacher, "teacher_sha256")):
            if source in stages:
                assert record[sha256] == weights_sha256(TINY / source), name
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_mars", "medusa", "mars_anchored"])
def test_the_recipe_makes_the_embedded_checkpoint_again(tmp_path: Path, name: str) -> None:
    """From the embedded base, on this machine: the same held-out loss within 2 %."""
    torch.set_num_threads(1)
    stage = next(stage for stage in RECIPES["tiny"] if stage.name == name)
    assert stage.objective is not None
    request = TrainingRequest(
        objective=stage.objective,
        base=f"embedded:tiny/{stage.base}",
        data=stage.data,
        examples=stage.examples,
        settings=stage.settings,
        out=tmp_path / name,
    )
    out = train(request)
    made, shipped = (json.loads((folder / RECORD).read_text())["evaluation"]["loss"] for folder in (out, TINY / name))
    print(f"{name}: {made}, embedded {shipped}")
    assert made == pytest.approx(shipped, rel=0.02)
