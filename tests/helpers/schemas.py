"""The schemas of the files that mtbench writes."""

from jsonschema import Draft202012Validator

from mtbench.cli.schemas import schema


def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(schema(kind))
