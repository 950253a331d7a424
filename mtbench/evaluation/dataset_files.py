"""Read data files: JSON lines (JSONL), JSON, Parquet and CSV; text files may be packed with gzip.

`read_rows` gives plain rows, one at a time. `load` gives a whole data set as `datasets.Dataset` in memory.
`datasets.load_dataset` is not used: it leaves a copy of every file in the user's cache, also of private data, and
infers types (a column of digits becomes numbers, a date is no longer text).
"""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mtbench import files
from mtbench.errors import first_line

LONGEST_ROW = 1 << 22  # bytes of a line: a text of a million tokens
PARQUET_BATCH = 1000  # rows decoded at once


class RowError(ValueError):
    """A row that cannot be read. `number` counts from 1, in lines of a JSONL file."""

    def __init__(self, unit: str, number: int, reason: str) -> None:
        super().__init__(f"{unit} {number}: {reason}")
        self.number = number
        self.reason = reason


def read_rows(file: BinaryIO, suffix: str) -> Iterator[tuple[str, Any]]:
    """Yield place (such as `line 3`) and value of each row of an open .jsonl or .parquet file. Raise RowError."""
    unit, rows = ("row", read_parquet(file)) if suffix == ".parquet" else ("line", read_json_lines(file))
    for number, value in rows:
        yield f"{unit} {number}", value


def read_json_lines(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of each line that is not blank.

    Raise RowError if one is not JSON or has over LONGEST_ROW bytes.
    """
    lines = files.read_lines(file, LONGEST_ROW)
    for number in itertools.count(1):
        try:
            line = next(lines, None)
            value = json.loads(line) if line and line.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("line", number, f"not JSON ({first_line(error)})") from None
        if line is None:
            return
        if line.strip():
            yield number, value


def read_parquet(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and the value of each row. Raise RowError where the file cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(PARQUET_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ArrowException) as error:
        raise RowError("row", number + 1, f"not readable as Parquet ({first_line(error)})") from None


def load(path: Path, field: str | None = None) -> Any:
    """Read a file, packed (.gz) or not, as a `datasets.Dataset`. `field`: the key of the rows in a JSON object.

    Raise ValueError if there are no rows, and whatever the format's reader raises.
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix
    with files.open_plain(path) as file:
        return load_stream(cast("BinaryIO", gzip.open(file)) if path.suffix == ".gz" else file, suffix, field)


def load_stream(file: BinaryIO, suffix: str, field: str | None = None) -> Any:
    """Read an open file as `load` does. In a CSV file every column is text, and missing values are those of pandas."""
    import pandas
    from datasets import Dataset
    from pyarrow import parquet

    match suffix:
        case ".parquet":
            dataset = Dataset(parquet.read_table(file))
        case ".csv":
            dataset = Dataset.from_pandas(pandas.read_csv(file, dtype=str), preserve_index=False)
        case ".json":
            data = json.load(file)
            dataset = Dataset.from_list(data if field is None else data[field])
        case _:
            dataset = Dataset.from_list([row for _, row in read_json_lines(file)])
    if not len(dataset):
        raise ValueError("no rows")
    return dataset
