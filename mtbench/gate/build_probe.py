"""Print what the Python that runs this file has installed of mtbench, as JSON. `builds.py` runs it in every build.

Older and newer versions of mtbench must answer, so this file uses nothing of mtbench but its version and its folder.
"""

import json
import sys
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "multi-token-bench"
PLUGINS = ("mtbench.methods", "mtbench.suites")  # entry-point groups


def main(packages: list[str]) -> None:
    """Print versions of mtbench, of `packages` and of plugins. Raises whatever mtbench's command line raises."""
    import mtbench

    for command in metadata.entry_points(group="console_scripts", name="mtbench"):
        command.load()
    plugins = {p.dist.name for group in PLUGINS for p in metadata.entry_points(group=group) if p.dist is not None}
    answer = {
        "mtbench": mtbench.__version__,
        "folder": str(Path(mtbench.__file__).parent),
        "prefix": sys.prefix,
        "commit": _commit(),
        "packages": {name: _version(name) for name in [*packages, *sorted(plugins)]},
    }
    print(json.dumps(answer))


def _commit() -> str | None:
    """Return the commit that pip installed from a repository's address (PEP 610), or None."""
    try:
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    commit = origin.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
