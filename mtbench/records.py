"""Records: the base class of mtbench's JSON files, their reading and their writing.

The records themselves are beside their writers: mtbench/plan/plan.py and formats.py (a run), results/format.py
(results.json), the format.py of each experiment. `mtbench schemas DIR` writes their JSON Schemas.

A reader gets a record of the right shape or one UserError in one line, which names the file, the line of a JSONL file,
the field, the value found and the values allowed. A JSON number stored as an integer is read as a float where a field
holds a float; nothing else is converted.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, core_schema, from_json

from mtbench import files
from mtbench.errors import UserError, printable

RESTORE = "restore it or start a new run."
APPEND_ONLY = "this file is append-only, so something else changed it. Restore it, or delete the run and start anew."
LONGEST_VALUE = 60  # characters of a refused value that an error repeats

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = NonNegative
# Figures of untrusted files are bounded, so that their sums, products and ratios remain finite.
MOST = 1 << 50
StoredNumber = Annotated[int, Field(ge=-MOST, le=MOST)]
StoredCount = Annotated[int, Field(ge=0, le=MOST)]
StoredSize = Annotated[int, Field(ge=1, le=MOST)]
StoredQuantity = Annotated[float, Field(ge=0, le=1e30)]
StoredSeconds = Annotated[float, Field(ge=0, le=1e9)]
HIGHEST_PRICE = 1e9  # per hour, in any currency
Price = Annotated[float, Field(gt=0, le=HIGHEST_PRICE)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
LONGEST_NAME = 200  # bytes of a cell's name, from which names of files are made
CellName = Annotated[str, StringConstraints(pattern=f"^[A-Za-z0-9_=+-][A-Za-z0-9._=+-]{{0,{LONGEST_NAME - 1}}}$")]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("input should be a number")
    return value


VersionOne = Annotated[Literal[1], BeforeValidator(_no_truth_value)]  # True == 1, but true is no version


class NotNull:
    """Mark of a field that may be absent from the file, and is None then, but may not be null in it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_refuse_null, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        nullable: Any = schema
        return handler(nullable["schema"]["schema"])


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise ValueError("null is not allowed; leave the key out")
    return value


class Record(BaseModel):
    """A JSON object with a fixed set of keys. It cannot be changed once made.

    A field without a default must be in the file. A field with a default may be absent from the file, and is always
    written. Keys are written in the order of the fields.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, **changes: Any) -> Self:
        """A copy in which some fields have other values. The copy is validated."""
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | changes)


ROOT = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)  # of a record that is a mapping with free keys


class Sparse(Record):
    """A record that leaves out keys: a field with a default is written only if it was given."""

    @model_serializer(mode="wrap")
    def _given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        whole: dict[str, Any] = handler(self)
        fields, given = type(self).model_fields, self.model_fields_set
        return {k: v for k, v in whole.items() if k in given or (k in fields and fields[k].is_required())}


M = TypeVar("M", bound=BaseModel)


def dump(record: BaseModel) -> dict[str, Any]:
    """The JSON object of a record: its keys in the order of the file."""
    return record.model_dump()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested objects, each under its own name behind those of the objects that it is in.

    >>> flat({"speedup": {"value": 1.5, "verdict": {"word": "faster"}}})
    {'speedup.value': 1.5, 'speedup.verdict.word': 'faster'}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def cleaned(record: M) -> M:
    """The record without control characters, for what people read: its texts are untrusted input."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return printable(value)
        if isinstance(value, dict):
            return {printable(name): clean(entry) for name, entry in value.items()}
        return [clean(entry) for entry in value] if isinstance(value, list) else value

    return type(record).model_validate(clean(dump(record)))


def read_json(path: Path, kind: type[M], advice: str = RESTORE) -> M:
    """The record in a JSON file. `advice` ends the error message: the user's next step.

    Raises UserError if the file is missing, too large or not plain, is not JSON, or holds another record.
    """
    try:
        data = files.read_bytes(path)
    except FileNotFoundError:
        begun_with = path.name in ("environment.json", "plan.json")  # no stage makes them anew
        remedy = advice if begun_with else f"`mtbench run -o {path.parent} --resume` makes it."
        raise UserError(f"{path} is missing; {remedy}") from None
    return parse(data, kind, str(path), advice)


def read_lines(path: Path, kind: type[M], advice: str = APPEND_ONLY) -> list[M]:
    """The records of a JSONL file, none if it is absent. A last line without its newline is torn and left out.

    Raises UserError with the line's number for any other line that is not a record of this kind.
    """
    return [record for _, record in iterate_lines(path, kind, advice)]


def iterate_lines(path: Path, kind: type[M], advice: str = APPEND_ONLY) -> Iterator[tuple[str, M]]:
    """Yield each line's place, as an error names it, and its record. Raises as `read_lines` does."""
    where = f"{path}, line 1"
    try:
        with files.open_plain(path) as file:
            for number, line in enumerate(files.read_lines(file), start=1):
                if not line.endswith(b"\n"):
                    return
                yield where, parse(line[:-1], kind, where, advice)
                where = f"{path}, line {number + 1}"
    except FileNotFoundError:
        return
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {error}; {advice}") from None


def parse(data: bytes | str, kind: type[M], where: str, advice: str = RESTORE) -> M:
    """The record in some JSON text; `where` names the text in an error. NaN and infinities are not JSON."""
    if not data:
        raise UserError(f"{where}: empty line; {advice}")
    try:
        stored = from_json(data, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); {advice}") from None
    return validate(stored, kind, where, advice)


def validate(stored: Any, kind: type[M], where: str, advice: str = RESTORE) -> M:
    """The record of a parsed JSON value. Raises UserError in one line."""
    try:
        return kind.model_validate(stored)
    except ValidationError as error:
        raise refusal(error, kind, where, advice) from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; {advice}") from None


def refusal(error: ValidationError, kind: type[BaseModel], where: str, advice: str = RESTORE) -> UserError:
    """The first finding of a validation as one line: place, field, value, allowed values.

    A wrong or missing `schema_version` comes before everything else, since it explains the rest.
    """
    errors = error.errors(include_url=False)
    types = "literal_error", "missing"
    version = next((e for e in errors if e["loc"] == ("schema_version",) and e["type"] in types), None)
    if version is not None:
        [readable] = get_args(kind.model_fields["schema_version"].annotation)
        has = "no schema version" if version["type"] == "missing" else f"schema version {_shown(version['input'])}"
        return UserError(f"{where} has {has}; this mtbench reads {readable}; {advice}")
    return UserError(f"{where}: {finding(error)}; {advice}")


def finding(error: ValidationError) -> str:
    """The first finding of a validation: field, value, allowed values; and the number of further ones."""
    errors = error.errors(include_url=False)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{_finding(errors[0])}{more}"


def field_path(location: Sequence[int | str]) -> str:
    """A place in a record as it is written in code.

    >>> field_path(("cells", 3, "speedup", 0, "verdict"))
    'cells[3].speedup[0].verdict'
    """
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]"]
    return "".join(parts).removeprefix(".") or "the record"


def _finding(error: ErrorDetails) -> str:
    field, kind, value = field_path(error["loc"]), error["type"], _shown(error["input"])
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f"{field} is not known to this version of mtbench"
    if kind == "literal_error":
        return f"{field} is {value}, allowed: {error['ctx']['expected']}"
    reason = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{field} is {value}: {reason[:1].lower()}{reason[1:]}"


def _shown(value: Any) -> str:
    """A value in one line of bounded length; of an object or an array only its kind."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = "null" if value is None else repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
