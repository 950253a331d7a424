"""Imported results as records: what `mtbench import --json` writes.

An imported figure keeps its tool's name, value and unit. `meaning` says what it is: two figures with the same meaning
have the same definition, and only these stand in one row. No ratio and no verdict is formed with an imported figure.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtbench.records import CellName, Record, Sha256, Size, Text, VersionOne

SCHEMA_VERSION: Literal[1] = 1

MEANING = "what the figure is; figures with the same meaning have the same definition"


class ImportedFigure(Record):
    """A figure of another tool, under its owner's definition."""

    name: Text = Field(description="the tool's own name of the figure")
    value: float = Field(description="value as the tool stores it, not converted")
    unit: Text = Field(description="unit of the value, such as ms, percent or tokens/s")
    meaning: Text = Field(description=MEANING)
    definition: Text = Field(description="how the tool computes it, in one sentence")
    ours: str | None = Field(
        description="field of a cell of results.json that holds the same figure by the same formula; null: none does"
    )


class ImportedResult(Record):
    """One result in a file of another tool. A file may hold several, such as one for each load or task."""

    file: str = Field(description="file, as it was given")
    sha256: Sha256 = Field(description="SHA-256 of the file")
    format: Text = Field(description="format of the file, as mtbench names it")
    tool: Text = Field(description="tool that wrote the file")
    version: str | None = Field(description="version of the tool; null: the file does not record it")
    model: str | None = Field(description="model, as the file names it; null: the file does not record it")
    part: str | None = Field(description="which result of the file this is; null: the only one")
    settings: dict[str, str] = Field(description="settings of the measurement, by the tool's own names")
    figures: Annotated[list[ImportedFigure], Field(min_length=1)] = Field(description="figures, in the tool's order")


class OurFigure(Record):
    """A figure of a run of mtbench that an imported figure equals by definition."""

    name: Text = Field(description="field of a cell of results.json")
    value: float = Field(description="value, in `unit`")
    unit: Text = Field(description="unit of the imported figure, to which the value is converted")
    meaning: Text = Field(description=MEANING)


class OurCell(Record):
    """A cell of a run of mtbench that stands beside the imported results."""

    run: str = Field(description="run directory, as it was given")
    run_id: str = Field(description="12 digits that name the run")
    cell: CellName = Field(description="cell of the run")
    suite: str = Field(description="suite of the cell")
    arm: str = Field(description="arm of the cell")
    batch_size: Size = Field(description="requests decoded side by side")
    simulated: bool = Field(description="true: weights or acceptance are simulated")
    figures: list[OurFigure] = Field(description="figures that an imported one equals by definition; empty: none")


class Imported(Record):
    """Results of other tools side by side, each figure under its owner's definition."""

    schema_version: VersionOne = Field(description="version of this format")
    results: Annotated[list[ImportedResult], Field(min_length=1)] = Field(description="imported results")
    beside: list[OurCell] = Field(description="cells of our run that stand beside them; empty: no run was given")
