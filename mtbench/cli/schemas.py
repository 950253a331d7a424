"""`mtbench schemas DIR`: write the JSON Schemas of the files that mtbench writes, made of their records."""

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from mtbench.cli.parameters import command
from mtbench.cli.session import say
from mtbench.doctor.checks import Diagnosis
from mtbench.experiments.audit.format import Audit
from mtbench.experiments.gate.format import FloorFile, Gate
from mtbench.experiments.load.format import Load, LoadPlan, PointLine
from mtbench.files import write_json
from mtbench.options.common import OUTPUT
from mtbench.options.fields import option
from mtbench.plan.formats import GenerationLine, TimingLine
from mtbench.plan.plan import Plan
from mtbench.records import Record
from mtbench.results.across_runs import Comparison
from mtbench.results.decision_format import Decision
from mtbench.results.format import Results
from mtbench.results.publication import Published

app = typer.Typer()
DRAFT = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: dict[str, tuple[type[Record], str]] = {  # file stem -> the record and the title of its schema
    "audit": (Audit, "audit.json: why two outputs differ"),
    "comparison": (Comparison, "Runs side by side, as `mtbench compare --json` writes them"),
    "decision": (Decision, "decision.json: what to use at each batch size"),
    "doctor": (Diagnosis, "What `mtbench doctor --json` writes"),
    "floor": (FloorFile, "floor.json: the noise of machines, calibrated for the gate"),
    "gate": (Gate, "gate.json: one build against another"),
    "generation": (GenerationLine, "A line of generations/<cell>.jsonl"),
    "load": (Load, "load.json: servers under load"),
    "load_plan": (LoadPlan, "plan.json of a load"),
    "load_point": (PointLine, "A line of points.jsonl of a load"),
    "plan": (Plan, "plan.json"),
    "published": (Published, "A published table that `mtbench reproduce` runs"),
    "results": (Results, "results.json"),
    "timing": (TimingLine, "A line of timings/<cell>.jsonl"),
}


class Generator(GenerateJsonSchema):
    """Schemas without generated titles, in the order of the fields. The keys of a mapping are always checked."""

    schema_dialect = DRAFT

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        written = super().dict_schema(schema)
        for pattern, values in written.pop("patternProperties", {}).items():
            written |= {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return written


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of document."""
    record, title = SCHEMAS[kind]
    written = record.model_json_schema(schema_generator=Generator)
    return {"$schema": DRAFT, **written, "title": title}


@app.command()
@command
def schemas(
    directory: Annotated[
        Path, option("Folder to write; it is made if it is missing.", OUTPUT, metavar="DIR", argument=True)
    ],
) -> None:
    """Write the JSON Schemas of the files that mtbench writes.

    DIR gets NAME.schema.json (draft 2020-12) for each kind of file.
    """
    for kind in SCHEMAS:
        write_json(directory / f"{kind}.schema.json", schema(kind))
    say(directory)
