"""Print as JSON which mtbench is installed in the Python that runs this file. `builds.py` runs it in every build.

Older and newer versions of mtbench must answer, so this file uses only mtbench's version and folder.
"""

import hashlib
import json
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PLUGINS = ("mtbench.methods", "mtbench.suites")  # entry-point groups, and the packages of our own methods and suites


def main(packages: list[str]) -> None:
    """Print the versions of mtbench, of `packages` and of plugins, and the hash of their code.

    Raises every error of mtbench's command line.
    """
    import mtbench

    for command in metadata.entry_points(group="console_scripts", name="mtbench"):
        command.load()
    entries = [entry for group in PLUGINS for entry in metadata.entry_points(group=group)]
    plugins = {entry.dist.name for entry in entries if entry.dist is not None}
    answer = {
        "mtbench": mtbench.__version__,
        "folder": str(Path(mtbench.__file__).parent),
        "code": _sha256({"mtbench", *PLUGINS, *(entry.module for entry in entries)}),
        "prefix": sys.prefix,
        "packages": {name: _version(name) for name in [*packages, *sorted(plugins)]},
    }
    print(json.dumps(answer))


def _place(module: str) -> Path | None:
    """Return the folder of a package or the file of a module; None if there is none."""
    try:
        spec = find_spec(module)
    except ImportError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _sha256(modules: set[str]) -> str:
    digest = hashlib.sha256()
    for name in sorted(modules):
        if (place := _place(name)) is not None:
            for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                digest.update(f"{name}/{file.relative_to(place)}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
