"""The compile caches of Inductor and Triton as one file, so that a later call on a fresh machine need not tune again.

Tuning and compiling the kernels of a 7B decoder takes three to four minutes. The caches are valid for the same versions
of torch and triton on the same kind of GPU; elsewhere they are ignored.
"""

import os
import tarfile
import tempfile
from pathlib import Path

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def unpack(file: Path | None) -> Path:
    """Return a new folder of caches, filled from `file`, and make this process use it."""
    folder = Path(tempfile.mkdtemp(prefix="caches-"))
    if file is not None:
        with tarfile.open(file) as packed:
            packed.extractall(folder, filter="data")
    for variable, name in VARIABLES.items():
        (folder / name).mkdir(exist_ok=True)
        os.environ[variable] = str(folder / name)
    return folder


def pack(folder: Path, file: Path) -> int:
    """Write the folder's caches to `file`, whole or not at all; return its bytes."""
    partial = file.with_name(file.name + ".partial")
    with tarfile.open(partial, "w:gz", compresslevel=3) as packed:
        for name in VARIABLES.values():
            packed.add(folder / name, arcname=name)
    partial.replace(file)
    return file.stat().st_size
