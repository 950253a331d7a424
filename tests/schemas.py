"""The schemas that ship with mtbench."""

import json
from importlib.resources import files

from jsonschema import Draft202012Validator


def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((files("mtbench") / "schemas" / f"{kind}.schema.json").read_text()))
