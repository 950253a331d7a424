"""Write a wheel (PEP 427) of a few files. A project may build itself with it, as a build backend (PEP 517)."""

import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(folder: Path, name: str, version: str, contents: Mapping[str, str]) -> str:
    """Write the wheel into `folder` and return its file name."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in {**contents, **{f"{stem}.dist-info/{k}": v for k, v in about.items()}}.items():
            wheel.writestr(file, text)
    return f"{stem}-py3-none-any.whl"
