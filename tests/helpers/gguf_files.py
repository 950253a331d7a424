"""GGUF files with changes: what llama.cpp's converter writes into real files, and what a damaged one lacks."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def written(
    plain: Path,
    file: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
    quantised: str = "",
    tensors_a_part: int = 0,
) -> Path:
    """Write a GGUF file with other keys and tensors, and without those that begin so.

    `quantised`: the type of the matrices. `tensors_a_part`: split it into files of as many; return the first.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import quantize

    reader = GGUFReader(plain)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = fields.pop("general.architecture").contents()
    writer = GGUFWriter(file, architecture, split_max_tensors=tensors_a_part)
    for key, field in fields.items():
        if key not in (keys or {}):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for key, value in (keys or {}).items():
        if value is not None:
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(
                key, value, kind, GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            )
    for name, data in {**stored, **(tensors or {})}.items():
        if name.startswith(tuple(without)):
            continue
        if quantised and data.ndim == 2:
            stored_as = GGMLQuantizationType[quantised]
            writer.add_tensor(name, quantize(data, stored_as), raw_dtype=stored_as)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))), file)
