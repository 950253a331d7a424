"""A file of rows as a data set in memory: JSON, JSON lines, Parquet or CSV, the texts packed with gzip or not.

Not by `datasets.load_dataset`: that leaves a copy of every file in the user's cache, where what must not be spread
would stay, and takes types for what they look like (a column of digits for numbers, a date for no text).
"""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast


def rows(path: Path, field: str | None = None) -> Any:
    """A `datasets.Dataset`. `field`: where in a JSON object its rows stand.

    Raises whatever the file's reader does, and ValueError if there are no rows.
    """
    form = Path(path.name.removesuffix(".gz")).suffix
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return read(cast("BinaryIO", file), form, field)


def read(file: BinaryIO, form: str, field: str | None = None) -> Any:
    """As `rows`, of an open file; `form` is one of READERS."""
    found = READERS[form](file, field)
    if not len(found):
        raise ValueError("no rows")
    return found


def write(data: Any, path: Path, field: str | None = None) -> None:
    """A data set as a file that `rows` reads. Raises ValueError for a form that nobody needed so far."""
    if path.suffix == ".parquet":
        data.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(data) if field is None else {field: list(data)}), encoding="utf-8")
    else:
        raise ValueError(f"{path.name}: no such form is written")


def _json_lines(file: BinaryIO, field: str | None) -> Any:
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in file if line.strip()])


def _json(file: BinaryIO, field: str | None) -> Any:
    from datasets import Dataset

    data = json.load(file)
    return Dataset.from_list(data if field is None else data[field])


def _parquet(file: BinaryIO, field: str | None) -> Any:
    from datasets import Dataset
    from pyarrow import parquet

    return Dataset(parquet.read_table(file))


def _csv(file: BinaryIO, field: str | None) -> Any:
    """All columns are text; what counts as missing is pandas' own idea, as it is when the hub serves a CSV file."""
    import pandas
    from datasets import Dataset

    return Dataset.from_pandas(pandas.read_csv(file, dtype=str), preserve_index=False)


READERS: Mapping[str, Callable[[BinaryIO, str | None], Any]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
}
