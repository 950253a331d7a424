"""Count what trainings take, before they start: steps, conversations and tokens fed.

Each conversation counts with the maximum length, so nothing is tokenised or fetched.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtbench.errors import UserError
from mtbench.evaluation.suite import Source
from mtbench.training.conversations import HUB, is_on_hub, read
from mtbench.training.recipes import Stage

ROWS = {"allenai/Dolci-Instruct-SFT": 2_152_112}  # conversations of data sets of the hub, from their pages
NOTE = "at most: each conversation counts with the maximum length"


def table(stages: Sequence[Stage], *, data_dir: Path | None = None, offline: bool = False) -> Table:
    """Return a table with a row per stage. Raises UserError if data cannot be read or their size is unknown."""
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows.add_column("stage", no_wrap=True)
    for column in ("steps", "examples", "tokens fed"):
        rows.add_column(column, justify="right", no_wrap=True)
    for stage in stages:
        cells = ["untrained"]
        if stage.objective is not None:
            source = Source(data_dir=data_dir, offline=offline, seed=stage.settings.seed)
            examples = math.ceil(_conversations(stage, source) * stage.settings.epochs)
            steps = math.ceil(examples / stage.settings.batch_size)
            tokens = examples * stage.objective.max_fed_tokens(stage.settings.max_length, 0)
            cells = [f"{count:,}" for count in (steps, examples, tokens)]
        rows.add_row(escape(stage.name), *cells)
    return rows


def _conversations(stage: Stage, source: Source) -> int:
    """Return how many conversations are trained on."""
    if stage.examples is not None and any(map(is_on_hub, stage.data)):
        return stage.examples * len(stage.data)
    found = sum(_size(data, stage.to_read(), source) for data in stage.data)
    return found - min(stage.settings.held_out, found // 10)


@cache
def _size(data: str, count: int | None, source: Source) -> int:
    if not is_on_hub(data):
        return sum(1 for _ in read(data, count, source))
    match = HUB.fullmatch(data)
    if match is None or match["id"] not in ROWS:
        raise UserError(f"the size of {data} is not known without fetching it; give `--examples N`.")
    return ROWS[match["id"]]
