"""The documents show what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_method_shown_is_the_file_whole() -> None:
    """The code that a reader copies is the code that runs."""
    assert f"```python\n{(ROOT / 'methods' / 'ar.py').read_text()}```" in README


def test_the_example_of_the_library_is_the_file_whole() -> None:
    """tests/cli/test_library.py runs the file."""
    assert f"```python\n{(ROOT / 'examples' / 'library.py').read_text()}```" in README


def test_the_tree_names_every_folder_of_the_core() -> None:
    """A folder that the tree does not name is missing there; a name without a folder is stale."""
    tree = README.partition("## What is where")[2].partition("```\n")[2].partition("```")[0]
    named = set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE))
    folders = {
        folder.name for folder in (ROOT / "mtbench").iterdir() if folder.is_dir() and folder.name != "__pycache__"
    }
    assert named == folders


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    """A file named in backticks is there, from the root or in a folder named before it."""
    text = (ROOT / document).read_text()
    files = {path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    named = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", text)}
    assert named <= files
