"""The README shows what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_method_shown_is_the_file_whole() -> None:
    """What a reader would copy is what runs."""
    assert f"```python\n{(ROOT / 'methods' / 'ar.py').read_text()}```" in README


def test_the_file_tree_names_every_file_of_the_core() -> None:
    """A file that is not in the tree is missing there; a name without a file is stale."""
    tree = README.partition("## What is where")[2].partition("```\n")[2].partition("```")[0]
    core = tree.partition("mtbench/")[2].partition("methods/")[0]
    named = set(re.findall(r"\b\w+\.py\b", core))
    there = {p.name for p in (ROOT / "mtbench").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == there
