"""Fixtures every test file may use."""

from collections.abc import Callable

import pytest
from small import small_checkpoint
from transformers import PretrainedConfig

from mtbench.lane import Lane


@pytest.fixture(scope="session")
def lane() -> Lane:
    return Lane(small_checkpoint())


@pytest.fixture(scope="session")
def make_lane() -> Callable[..., Lane]:
    def make(config: PretrainedConfig | None = None, seed: int = 0) -> Lane:
        return Lane(small_checkpoint(config, seed))

    return make
