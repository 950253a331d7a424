"""The compile caches of Inductor and Triton as one file, so that a later call on a fresh machine need not tune again.

Tuning and compiling the kernels of a 7B decoder takes three to four minutes. The caches are valid for the same versions
of torch and triton on the same kind of GPU; elsewhere they are ignored.
"""

import tarfile
from pathlib import Path

from mtbench import files

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def unpack(file: Path, folder: Path) -> dict[str, str]:
    """Fill an empty folder from `file`, if it exists; return the variables of a process that uses these caches."""
    if file.exists():
        with tarfile.open(file) as packed:
            packed.extractall(folder, filter="data")
    for name in VARIABLES.values():
        (folder / name).mkdir(exist_ok=True)
    return {variable: str(folder / name) for variable, name in VARIABLES.items()}


def pack(folder: Path, file: Path) -> None:
    """Write the folder's caches to `file`, whole or not at all, if they are newer."""
    if file.exists() and all(path.stat().st_mtime <= file.stat().st_mtime for path in folder.rglob("*")):
        return
    with files.atomic_write(file) as partial, tarfile.open(partial, "w:gz", compresslevel=3) as packed:
        for name in VARIABLES.values():
            packed.add(folder / name, arcname=name)
