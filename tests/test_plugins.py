"""What other packages add: the example installs and runs; whatever breaks in one costs its own cells and says why."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small import VOCABULARY, save_small
from stored import stored_lines
from whole import finish, forget_plugin_files, start

from mtbench import plugins
from mtbench.cli import main
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.lineup.planner import make_plan
from mtbench.plan.checks import read_plan
from mtbench.plan.plan import RunRequest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "mtbench-example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small(tmp_path_factory.mktemp("checkpoints") / "ar", 1))


# --- The example --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.whole
def test_an_installed_package_is_listed_and_runs(tmp_path: Path) -> None:
    """In a clean environment, away from this repository, beside `ar`; it is graded lossless as it claims."""
    shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    python = tmp_path / "venv" / "bin" / "python"

    def run(*words: str | Path) -> str:
        env = {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": "", "HF_HUB_OFFLINE": "1"}
        return subprocess.run(words, check=True, capture_output=True, text=True, env=env, cwd=tmp_path).stdout

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "./example")
    assert "served" in run(python, "-m", "mtbench", "ls", "engines")
    assert "broken" not in run(python, "-m", "mtbench", "ls", "methods")
    asked = "--suite echo --family tiny --method ar --method bigram --limit 6 --rounds 1 --batch-size 2 -o run"
    run(python, "-m", "mtbench", "run", *asked.split())
    plain, bigram = json.loads((tmp_path / "run" / "results.json").read_text())["cells"]
    assert [(c["method"], c["status"], c["accuracy"]["metric"]) for c in (plain, bigram)] == [
        (name, "ok", "exact_match") for name in ("ar", "bigram")
    ]
    assert (bigram["lossless"]["grade"], bigram["tokens_per_forward"] > 1) == ("exact", True)


# --- What breaks when it is imported or registered -----------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package `stranger` whose module says so much, for a process that has found none so far."""

    def install(source: str) -> None:
        for registry in (METHODS, SUITES):
            ours = {n: registry[n] for n in registry if registry[n].__module__.startswith("mtbench.")}
            monkeypatch.setattr(registry, "_classes", ours)
            monkeypatch.setattr(registry, "broken", {})
            monkeypatch.setattr(registry, "_loaded", False)
        (tmp_path / "stranger.py").write_text(source)
        about = tmp_path / "stranger-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text("[mtbench.methods]\ngood = stranger\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "stranger", raising=False)

    return install


def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Any, str, str]:
    """What `mtbench ARGS` exits with, prints and complains."""
    monkeypatch.setattr(sys, "argv", ["mtbench", *args])
    monkeypatch.setattr("mtbench.cli.ls.out", Console(width=10_000))
    with pytest.raises(SystemExit) as stopped:
        main.main()
    return stopped.value.code, *capsys.readouterr()


def test_a_module_that_breaks_is_listed_with_its_reason(
    installed: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """`ls methods` shows it beside all others; named in a run it is one line; plans of our own do not mind it."""
    installed("import no_such_module")
    code, listed, _ = say(capsys, monkeypatch, "ls", "methods")
    reason = "ModuleNotFoundError: No module named 'no_such_module'"

    assert code in (0, None)
    (row,) = [line for line in listed.splitlines() if "broken" in line and "good" in line]
    assert reason in row
    assert "stranger" in row
    code, _, error = say(capsys, monkeypatch, "run", "-o", str(tmp_path / "run"), "--method", "good")
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: method 'good' is installed but broken: {reason}")
    assert len(make_plan(RunRequest(limit=2)).cells) > 4
    with pytest.raises(UserError, match=r"unknown method 'marz' .* Broken: good\.$"):
        METHODS["marz"]


# --- A file named on the command line: `--plugin FILE.py` -------------------------------------------------------------

METHOD_FILE = """
from dataclasses import dataclass

import torch

from mtbench import Commit, METHODS, Method, Window, option


@METHODS.register("mine")
@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    \"\"\"One token per forward, as `ar`.\"\"\"

    roles = ("ar",)
    claims = "lossless"

    def window(self):
        return Window(pending=1, guesses=0, commits=1)

    def accept(self, state, rows, output):
        return Commit(output.choice, count=torch.ones_like(rows.known), kept=torch.zeros_like(rows.known))
"""
SUITE_FILE = """
from mtbench import Prompt, SUITES, Suite


@SUITES.register("echoed")
class Echoed(Suite):
    metric = "exact_match"
    family = "tiny"
    max_new_tokens = 4

    def __init__(self, variant, source):
        self.task = {"name": "echoed"}

    def prompts(self, template, limit):
        return [Prompt(item=f"echoed/{n}/0", text="a b c") for n in range(4)][:limit]

    def score(self, answers):
        return {item: 1.0 for item in answers}
"""


def method_with(old: str, new: str) -> str:
    assert old in METHOD_FILE
    return METHOD_FILE.replace(old, new, 1)


BROKEN_FILES = {  # how the file differs from a sound one, and what is said
    "syntax": ("x = 1\ndef", "line 2: SyntaxError: invalid syntax"),
    "import": ("\n\nimport no_such_module", "line 3: ModuleNotFoundError: No module named 'no_such_module'"),
    "nothing": ("x = 1", "registers no method, suite or engine"),
    "taken": (method_with('"mine"', '"ar"'), "line 9: ValueError: method 'ar' is registered twice"),
    "no method": (method_with("(Method)", ""), "Mine is not a subclass of mtbench.decoding.method.Method"),
    "no roles": (method_with('("ar",)', "()"), "Mine.roles is ()"),
    "no option": (method_with("claims", "width: int = 3\n    claims"), "field without mtbench.options.option"),
    "no family": (SUITE_FILE.replace('family = "tiny"', "family = None"), "Echoed.family is None"),
}


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Write a plugin file and return its path. What is imported in the test is forgotten after it."""

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(source)
        return str(tmp_path / name)

    yield write
    forget_plugin_files()


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_one_line_with_file_and_line(case: str, plugin: Callable[..., str]) -> None:
    """And nothing of it is registered."""
    source, reason = BROKEN_FILES[case]
    path, before = plugin(source), list(METHODS)
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        plugins.load_file(path)

    assert str(caught.value).startswith("--plugin ")
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(METHODS) == before
    assert not plugins.loaded()


def test_a_file_that_changed_replaces_what_it_registered(plugin: Callable[..., str]) -> None:
    """As one edits a method between two runs of a notebook. The same content twice is one plugin."""
    plugins.load_file(plugin(METHOD_FILE))
    plugins.load_file(plugin(METHOD_FILE, "copy.py"))
    plugins.load_file(plugin(METHOD_FILE.replace('"mine"', '"yours"')))

    assert "yours" in METHODS
    assert "mine" not in METHODS
    assert len(plugins.loaded()) == 1


def test_a_plan_holds_the_files_that_it_needs(plugin: Callable[..., str], checkpoint: str, tmp_path: Path) -> None:
    """By SHA-256: a file that is not named, or that changed, is refused in one line; the same file elsewhere is not."""
    path = plugin(METHOD_FILE)
    file = plugins.load_file(path)
    plugins.load_file(plugin(SUITE_FILE, "unused.py"))
    run = start(tmp_path / "run", asked(checkpoint, method=["ar", "mine"]))

    assert json.loads((run.path / "plan.json").read_text())["plugins"] == {path: file.sha256}
    forget_plugin_files()
    with pytest.raises(UserError, match=rf"needs the plugin '{path}', .* add `--plugin {path}`\."):
        read_plan(run)
    plugins.load_file(plugin(METHOD_FILE + "# edited"))
    with pytest.raises(UserError, match=r"mine\.py' changed since the plan was made .*; restore it, or"):
        read_plan(run)
    plugins._forget(plugins.loaded()[0])
    plugins.load_file(plugin(METHOD_FILE, "elsewhere.py"))
    assert read_plan(run).plugins == {path: file.sha256}


# --- What breaks when it is planned or run --------------------------------------------------------------------------


class Sound(Method):
    """Guesses two fixed tokens and commits one of the model's own. Its heirs each break something."""

    roles = ("ar",)

    @property
    def claims(self) -> Any:
        return "lossless"

    def window(self) -> Any:
        return Window(pending=1, guesses=2, commits=3)

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Any:
        return torch.ones_like(rows.tokens[:, :2])

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Any:
        return Commit(output.choice, torch.ones_like(rows.known), torch.zeros_like(rows.known))


def raises(*_: Any) -> Any:
    raise RuntimeError("this is broken\nin two lines")


def refuses(*_: Any) -> Any:
    raise UserError("odd needs another checkpoint.")


def proposes(value: int, width: int) -> dict[str, Any]:
    return {"propose": lambda self, state, rows, runners: rows.known.new_full((len(rows.known), width), value)}


def counts(value: int) -> dict[str, Any]:
    def accept(self: Method, state: State, rows: Rows, output: TargetOutput) -> Any:
        return Commit(output.choice, torch.full_like(rows.known, value), torch.zeros_like(rows.known))

    return {"accept": accept}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    # of shape, type or range
    "proposal too wide": (proposes(1, 3), "odd: propose() is of shape (1, 3) and torch.int64, not (1, 2)"),
    "proposal of no word": (proposes(VOCABULARY, 2), f"odd: propose() has {VOCABULARY}, which is not from 0 to "),
    "count beyond N": (counts(4), "odd: accept().count has 4, which is not from 0 to 3"),
    "never commits": (counts(0), "odd made 21 forwards for 6 tokens"),
    # raises
    "start raises": ({"start": raises}, "RuntimeError: this is broken (in raises, line "),
    "accept refuses": ({"accept": refuses}, "odd needs another checkpoint. (in refuses, line "),
    # at planning
    "window raises": ({"window": raises}, "odd: RuntimeError: this is broken (in raises, line "),
    "claims the moon": ({"claims": "the moon"}, "odd: claims is 'the moon', not one of lossless, distribution, lossy"),
}


def odd(name: str, parts: dict[str, Any]) -> type[Method]:
    """A method of this name that is sound but for some parts."""
    return dataclass(frozen=True)(type("Odd", (Sound,), {"name": name, "__module__": __name__, **parts}))


def asked(checkpoint: str, **changes: Any) -> RunRequest:
    given: dict[str, Any] = {"batch_size": (1,), "limit": 2, "rounds": 1, "max_new_tokens": 6}
    return RunRequest(checkpoint={"ar": checkpoint}, **{"method": ["ar", "odd"], **given, **changes})


@pytest.mark.whole
def test_a_method_that_breaks_costs_its_own_cells(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of `ar` and all broken methods: each says what was wrong in one line, once, also when it is resumed."""
    METHODS["ar"]
    names = [f"odd{number}" for number in range(len(FAULTS))]
    for name, (parts, _) in zip(names, FAULTS.values(), strict=True):
        monkeypatch.setitem(METHODS._classes, name, odd(name, parts))
    run = start(tmp_path / "run", asked(checkpoint, method=["ar", *names]))
    good, *bad = finish(run)["cells"]

    assert (good["status"], good["error"]) == ("ok", None)
    for name, cell, (_, says) in zip(names, bad, FAULTS.values(), strict=True):
        assert (cell["method"], cell["status"], cell["tokens_per_forward"]) == (name, "failed", None)
        assert cell["error"].startswith(re.sub("^odd(?=:| made)", name, says))
        assert "\n" not in cell["error"]
    finish(run)
    assert sorted(line["cell"] for line in stored_lines(run, "failures.jsonl")) == sorted(c["cell"] for c in bad)


# --- Suites ---------------------------------------------------------------------------------------------------------


def suite_with(name: str, old: str, new: str) -> str:
    assert old in SUITE_FILE
    return SUITE_FILE.replace(old, new).replace("echoed", name)


def test_a_suite_that_cannot_ask_is_one_line(plugin: Callable[..., str], checkpoint: str) -> None:
    """There is nothing to run, and the user reads why."""
    plugins.load_file(
        plugin(suite_with("pair", "return [Prompt", r"raise RuntimeError('this is broken\nin two lines') #"))
    )
    with pytest.raises(UserError, match="suite 'pair' failed: RuntimeError: this is broken") as caught:
        make_plan(asked(checkpoint, suite=["arithmetic", "pair"], method=["ar"]))
    assert "\n" not in str(caught.value)


@pytest.mark.whole
def test_a_suite_that_cannot_score_costs_its_own_cells(
    plugin: Callable[..., str], checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other suite's cells are whole, its own say what was wrong; a mended suite scores them without a model."""
    faults = {
        "raise RuntimeError('this is broken')": "could not score it: RuntimeError: this is broken",
        "return {}": "could not score it: ValueError: no score of pair",
        "return dict.fromkeys(answers, float('nan'))": "has the score nan, not 0 to 1",
    }
    names = [f"pair{number}" for number in range(len(faults))]
    for name, fault in zip(names, faults, strict=True):
        plugins.load_file(plugin(suite_with(name, "return {item: 1.0 for item in answers}", fault), f"{name}.py"))
    run = start(tmp_path / "run", asked(checkpoint, suite=[*names, "arithmetic"], method=["ar"]))
    *bad, good = finish(run)["cells"]

    assert (good["status"], good["error"], good["accuracy"]["n"]) == ("ok", None, 2)
    for cell, says in zip(bad, faults.values(), strict=True):
        assert (cell["status"], cell["accuracy"]) == ("failed", None)
        assert says in cell["error"]
    monkeypatch.setattr(SUITES[names[0]], "score", lambda self, answers: dict.fromkeys(answers, 1.0))
    mended, *_ = finish(run)["cells"]
    assert (mended["status"], mended["error"], mended["accuracy"]["value"]) == ("ok", None, 1)
