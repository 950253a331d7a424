"""Environments with mtbench and the method `planted`, with a fault or without one. They borrow every package."""

import subprocess
import sys
import sysconfig
from pathlib import Path

READS = 'FAULT = ""'
METHOD = Path(__file__).with_name("planted_method.py")


def environment(folder: Path, fault: str = "") -> Path:
    """Make a virtual environment in `folder` whose method `planted` has this fault; return its folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    python = folder / "bin" / "python"
    own = Path(subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    text = METHOD.read_text()
    assert READS in text
    (own / "planted_method.py").write_text(text.replace(READS, f"FAULT = {fault!r}"))
    distribution("planted", "1.0", own, "[mtbench.methods]\nplanted = planted_method\n")
    if fault == "torch":
        distribution("torch", "9.9.9", own)
    (own / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder


def distribution(name: str, version: str, folder: Path, entry_points: str = "") -> None:
    """Write the metadata of an installed distribution."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (metadata / "entry_points.txt").write_text(entry_points)
