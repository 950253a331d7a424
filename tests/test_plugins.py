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
from small import END, VOCABULARY, save_small
from stored import stored_lines
from whole import finish, forget_plugin_files, start

from mtbench import plugins
from mtbench.cli import main
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Suite, Template
from mtbench.lineup.planner import make_plan
from mtbench.options import option
from mtbench.plan.checks import read_plan
from mtbench.plan.plan import RunRequest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "mtbench-example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small(tmp_path_factory.mktemp("checkpoints") / "ar", 1))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# --- The example --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a clean environment with the example installed; the rest is borrowed from this one."""
    root = tmp_path_factory.mktemp("clean")
    shutil.copytree(EXAMPLE, root / "example", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    quiet = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], **quiet)  # type: ignore[call-overload]
    python: Path = root / "venv" / "bin" / "python"
    where = f"import sysconfig; print(sysconfig.get_path({'purelib'!r}))"
    own = Path(subprocess.run([python, "-c", where], **quiet).stdout.strip())  # type: ignore[call-overload]
    (own / "borrowed.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", root / "example"]
    subprocess.run(pip, **quiet)  # type: ignore[call-overload]
    return python


def run_in(python: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`mtbench ARGS` in that environment, away from this repository."""
    env = {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": "", "HF_HUB_OFFLINE": "1"}
    where = python.parent.parent.parent
    command = [str(python), "-m", "mtbench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=where)


@pytest.mark.slow
@pytest.mark.whole
def test_an_installed_package_is_listed_and_runs(environment: Path, tmp_path: Path) -> None:
    """Its arm stands in one table with `ar`, on its suite, and is graded lossless as it claims."""
    assert "served" in run_in(environment, "ls", "engines").stdout
    assert "broken" not in run_in(environment, "ls", "methods").stdout
    described = run_in(environment, "ls", "methods", "bigram")
    assert "a whole number from 1 to 64" in " ".join(described.stdout.split())
    args = ["--suite", "echo", "--family", "tiny", "--method", "ar", "--method", "bigram", "--limit", "6"]
    done = run_in(environment, "run", *args, "--rounds", "1", "--batch-size", "1,2", "-o", str(tmp_path / "run"))

    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "run" / "results.json").read_text())["cells"]
    arms = [("ar", 1), ("bigram", 1), ("ar", 2), ("bigram", 2)]
    assert [(c["method"], c["batch_size"], c["status"]) for c in cells] == [(*arm, "ok") for arm in arms]
    assert {c["accuracy"]["metric"] for c in cells} == {"exact_match"}
    assert {c["lossless"]["grade"] for c in cells if c["method"] == "bigram"} == {"exact"}
    assert all(c["tokens_per_forward"] > 1 for c in cells if c["method"] == "bigram")


# --- What breaks when it is imported or registered -----------------------------------------------------------------

BROKEN = {
    "import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "taken": (
        "from mtbench import METHODS, Method\n@METHODS.register('ar')\nclass Ar(Method): ...",
        "method 'ar' is registered twice: mtbench.methods.ar and stranger",
    ),
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package `stranger` whose module says so much, for a process that has found none so far."""

    def install(source: str, group: str = "methods") -> None:
        for registry in (METHODS, SUITES):
            ours = {n: registry[n] for n in registry if registry[n].__module__.startswith("mtbench.")}
            monkeypatch.setattr(registry, "_classes", ours)
            monkeypatch.setattr(registry, "broken", {})
            monkeypatch.setattr(registry, "_loaded", False)
        (tmp_path / "stranger.py").write_text(source)
        about = tmp_path / "stranger-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[mtbench.{group}]\ngood = stranger\n")
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


@pytest.mark.parametrize("case", BROKEN)
def test_a_module_that_breaks_is_listed_with_its_reason(
    case: str,
    installed: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ls methods` shows it as broken beside all others; named in a run it is one line; nothing is half there."""
    source, reason = BROKEN[case]
    before = list(METHODS)
    installed(source)
    code, listed, _ = say(capsys, monkeypatch, "ls", "methods")

    assert code in (0, None)
    (row,) = [line for line in listed.splitlines() if "broken" in line and "good" in line]
    assert reason in row
    assert "stranger" in row
    assert list(METHODS) == before
    code, _, error = say(capsys, monkeypatch, "run", "-o", str(tmp_path / "run"), "--method", "good")
    assert code == 2
    assert error.count("\n") == 1
    assert error.startswith("error: method 'good' is installed but broken: ")
    assert reason in error
    assert "Repair or uninstall" in error


@pytest.mark.whole
def test_what_is_not_broken_goes_on(installed: Callable[..., None], checkpoint: str, tmp_path: Path) -> None:
    """A run of our own methods, named or by default, does not mind a broken stranger."""
    installed("import no_such_module")

    assert len(make_plan(RunRequest(limit=2)).cells) > 4
    cells = finish(start(tmp_path / "run", asked(checkpoint, method=["ar"])))["cells"]
    assert [c["status"] for c in cells] == ["ok"]
    with pytest.raises(UserError, match=r"unknown method 'marz' .* Broken: good\.$"):
        METHODS["marz"]


def test_every_class_of_ours_passes_what_strangers_must() -> None:
    """The rules are those our own methods and suites keep."""
    for registry in (METHODS, SUITES):
        for name in registry:
            for check in registry.checks:
                check(registry[name])


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
    return METHOD_FILE.replace(old, new)


BROKEN_FILES = {
    "syntax": ("x = 1\ndef", "line 2: SyntaxError: invalid syntax"),
    "import": ("\n\nimport no_such_module", "line 3: ModuleNotFoundError: No module named 'no_such_module'"),
    "raises": ("def f():\n    raise ValueError('odd')\nf()", "line 2: ValueError: odd"),
    "exits": ("raise SystemExit(3)", "line 1: SystemExit: 3"),
    "nothing": ("x = 1", "registers no method, suite or engine"),
    "taken": (method_with('"mine"', '"ar"'), "line 9: ValueError: method 'ar' is registered twice"),
    "unwritable": (method_with('"mine"', '"a:b"'), "method 'a:b' cannot be written on a command line"),
    "no dataclass": (method_with("@dataclass(frozen=True, kw_only=True)", ""), "Mine is not a @dataclass"),
    "no method": (method_with("(Method)", ""), "Mine is not a subclass of mtbench.decoding.method.Method"),
    "no family": (SUITE_FILE.replace('family = "tiny"', "family = None"), "Echoed.family is None"),
    "no roles": (method_with('("ar",)', "()"), "Mine.roles is ()"),
    "default arms": (method_with("    claims", '    default_arms = ("mine:k=3",)\n    claims'), "option of mine 'k'"),
}
FIELDS = {  # a field of the method
    "width: int = 3": "line 9: TypeError: Mine.width is a field without mtbench.options.option",
    "width: list[int] = option(None, 'w')": "Mine.width is of type list[int]",
    "width: 'Nothing' = option(None, 'w')": "name 'Nothing' is not defined",
}
BROKEN_FILES |= {
    field: (method_with("    claims", f"    {field}\n    claims"), reason) for field, reason in FIELDS.items()
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


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """Neither is a folder a plugin."""
    with pytest.raises(UserError, match=r"--plugin '.*none\.py' cannot be read: No such file"):
        plugins.load_file(tmp_path / "none.py")
    with pytest.raises(UserError, match="it is not a plain file"):
        plugins.load_file(tmp_path)


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


@pytest.mark.slow
def test_a_run_with_files_uses_workers_and_resumes(
    plugin: Callable[..., str], checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Two spawned workers import the file as it was read; a stage that is a command of its own must name it."""
    named = ["--plugin", plugin(METHOD_FILE), "--plugin", plugin(SUITE_FILE, "suite.py")]
    models = ["--checkpoint", f"ar={checkpoint}", "--device", "cpu"]
    what = ["--suite", "echoed", "--method", "ar", "--method", "mine", "--batch-size", "1", "--rounds", "1"]
    path = str(tmp_path / "run")
    code, _, error = say(capsys, monkeypatch, "plan", *named, *models, *what, "-o", path)
    assert code in (0, None), error
    forget_plugin_files()

    code, _, error = say(capsys, monkeypatch, "generate", path)
    assert code == 2
    assert error.count("\n") == 1
    assert "add `--plugin" in error
    code, _, error = say(capsys, monkeypatch, "run", "-o", path, "--resume", "--workers", "2", *named)
    assert code in (0, None), error
    cells = json.loads((tmp_path / "run" / "results.json").read_text())["cells"]
    assert [(c["method"], c["status"], c["accuracy"]["value"]) for c in cells] == [("ar", "ok", 1), ("mine", "ok", 1)]
    assert cells[1]["lossless"]["grade"] == "exact"


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


def like(rows: Rows, *shape: int, value: float = 1, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.full((len(rows.known), *shape), value, dtype=dtype)


def commits(**parts: Callable[[Rows], Any]) -> Callable[..., Any]:
    """An accept that returns what is right, but for some parts."""

    def accept(self: Method, state: State, rows: Rows, output: TargetOutput) -> Any:
        right: dict[str, Any] = {"tokens": output.choice, "count": like(rows), "kept": like(rows, value=0)}
        return Commit(**right | {name: part(rows) for name, part in parts.items()})

    return accept


def raises(*_: Any) -> Any:
    raise RuntimeError("this is broken\nin two lines")


def refuses(*_: Any) -> Any:
    raise UserError("odd needs another checkpoint.")


def exits(*_: Any) -> Any:
    raise SystemExit(3)


def proposes(*shape: int, **how: Any) -> dict[str, Any]:
    return {"propose": lambda self, state, rows, runners: like(rows, *shape, **how)}


def accepts(part: str, *shape: int, **how: Any) -> dict[str, Any]:
    return {"accept": commits(**{part: lambda rows: like(rows, *shape, **how)})}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    # of shape, type or range
    "proposal too wide": (proposes(3), "odd: propose() is of shape (1, 3) and torch.int64, not (1, 2) and torch.int64"),
    "proposal of no word": (
        proposes(2, value=VOCABULARY),
        f"odd: propose() has {VOCABULARY}, which is not from 0 to {VOCABULARY - 1}",
    ),
    "accept of nothing": ({"accept": lambda *_: None}, "odd: accept() returned None, not a Commit"),
    "count beyond N": (accepts("count", value=4), "odd: accept().count has 4, which is not from 0 to 3"),
    "path beyond G": (accepts("path", 2, value=2), "odd: accept().path has 2"),
    "state of one row": ({"start": lambda *_: {"own": torch.zeros(0)}}, "IndexError: "),
    "never commits": (accepts("count", value=0), "odd made 21 forwards for 6 tokens"),
    # raises
    "start raises": ({"start": raises}, "RuntimeError: this is broken (in raises, line "),
    "accept refuses": ({"accept": refuses}, "odd needs another checkpoint. (in refuses, line "),
    # at planning
    "window raises": ({"window": raises}, "odd: RuntimeError: this is broken (in raises, line "),
    "window of nothing": ({"window": lambda self: (1, 2, 3)}, "odd: window() returned a tuple, not a Window"),
    "pattern too small": (
        {"window": lambda self: Window(pending=1, guesses=2, commits=3, sees=torch.ones(1, 1, dtype=torch.bool))},
        "odd: window().sees is of shape (1, 1) and torch.bool, not (2, 2) and torch.bool",
    ),
    "claims the moon": ({"claims": "the moon"}, "odd: claims is 'the moon', not one of lossless, distribution, lossy"),
    "refuse raises": ({"refuse": raises}, "odd: RuntimeError: this is broken (in raises, line "),
}


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Register `odd`, which is sound but for some parts."""
    METHODS["ar"]
    return lambda parts: monkeypatch.setitem(METHODS._classes, "odd", odd("odd", parts))


def odd(name: str, parts: dict[str, Any]) -> type[Method]:
    """A method of this name that is sound but for some parts."""
    return dataclass(frozen=True)(type("Odd", (Sound,), {"name": name, "__module__": __name__, **parts}))


def asked(checkpoint: str, **changes: Any) -> RunRequest:
    given: dict[str, Any] = {"batch_size": (1,), "limit": 2, "rounds": 1, "max_new_tokens": 6}
    return RunRequest(checkpoint={"ar": checkpoint}, **{"method": ["ar", "odd"], **given, **changes})


@pytest.fixture(scope="module")
def beside_broken(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cells of a run of `ar` and all broken methods, by method."""
    METHODS["ar"]
    with pytest.MonkeyPatch.context() as patch:
        for case, (parts, _) in FAULTS.items():
            patch.setitem(METHODS._classes, named(case), odd(named(case), parts))
        run = start(tmp_path_factory.mktemp("broken") / "run", asked(checkpoint, method=["ar", *map(named, FAULTS)]))
        return {cell["method"]: cell for cell in finish(run)["cells"]}


def named(case: str) -> str:
    return f"odd{[*FAULTS].index(case)}"


@pytest.mark.whole
@pytest.mark.parametrize("case", FAULTS)
def test_a_method_that_breaks_costs_its_own_cells(case: str, beside_broken: dict[str, Any]) -> None:
    """The other arm is measured; each broken one failed, and says what was wrong in one line."""
    good, bad = beside_broken["ar"], beside_broken[named(case)]
    assert (good["status"], good["error"]) == ("ok", None)
    assert (bad["status"], bad["tokens_per_forward"]) == ("failed", None)
    assert bad["error"].startswith(re.sub("^odd(?=:| made)", named(case), FAULTS[case][1]))
    assert "\n" not in bad["error"]


@pytest.mark.whole
def test_a_method_that_does_not_stop_is_stopped(
    enter: Callable[[dict[str, Any]], None], checkpoint: str, tmp_path: Path
) -> None:
    """Whatever it commits behind its budget or an end token is cut by the loop."""
    endless = {"claims": "lossy", "accept": commits(count=lambda rows: like(rows, value=3))}
    enter(endless | {"propose": lambda self, state, rows, runners: like(rows, 2)})
    run = start(tmp_path / "run", asked(checkpoint, ignore_eos=True, max_new_tokens=7))

    assert [c["tokens"] for c in finish(run)["cells"]] == [14, 14]
    enter(endless | {"accept": commits(tokens=lambda rows: like(rows, 3, value=END), count=lambda r: like(r, value=3))})
    run = start(tmp_path / "again", asked(checkpoint))
    cells = finish(run)["cells"]
    assert (cells[1]["status"], cells[1]["tokens"], cells[1]["finish"]["end"]) == ("ok", 2, 2)


def test_an_option_that_a_method_does_not_take_is_one_line(
    enter: Callable[[dict[str, Any]], None], checkpoint: str
) -> None:
    """Whatever a stranger's constructor raises, the user reads the arm and the reason."""

    def check(self: Any) -> None:
        if self.width % 2:
            raise ValueError("width must be even")

    enter({"__annotations__": {"width": int}, "width": option(2, "w", low=1), "__post_init__": check})
    for text, reason in (
        ("width=3", r"odd:width=3 is refused: ValueError: width must be even. See `mtbench ls methods odd`\."),
        ("width=0", "odd: width='0' is not allowed; width is a whole number of at least 1, default 2"),
        ("widht=4", r"unknown option of odd 'widht' \(did you mean 'width'\?\)"),
    ):
        with pytest.raises(UserError, match=reason):
            make_plan(asked(checkpoint, method=["ar", f"odd:{text}"]))


# --- Suites ---------------------------------------------------------------------------------------------------------


class Pair(Suite):
    """Two prompts; its heirs break something."""

    name = "pair"
    task = {"name": "pair"}  # noqa: RUF012
    metric = "exact_match"
    max_new_tokens = 6

    def __init__(self, rest: str, source: Source) -> None: ...

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [Prompt(item=f"pair/{n}/0", text="a b c") for n in range(2)]

    def score(self, answers: Any) -> Any:
        return dict.fromkeys(answers, 1.0)


@pytest.mark.parametrize("part", ["__init__", "prompts"])
def test_a_suite_that_cannot_ask_is_one_line(part: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to run, and the user reads why."""
    SUITES["arithmetic"]
    monkeypatch.setitem(SUITES._classes, "pair", type("Odd", (Pair,), {part: raises}))
    with pytest.raises(UserError, match="suite 'pair' failed: RuntimeError: this is broken") as caught:
        make_plan(asked(checkpoint, suite=["arithmetic", "pair"], method=["ar"]))

    assert "\n" not in str(caught.value)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("score", "says"),
    [
        (raises, "suite 'pair' could not score it: RuntimeError: this is broken"),
        (lambda self, answers: {}, "suite 'pair' could not score it: ValueError: no score of pair/0/0"),
        (lambda self, answers: dict.fromkeys(answers, float("nan")), "pair/0/0 has the score nan, not 0 to 1"),
    ],
)
def test_a_suite_that_cannot_score_costs_its_own_cells(
    score: Any, says: str, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other suite's cells are whole, its own say what was wrong; a mended suite scores them without a model."""
    SUITES["arithmetic"]
    monkeypatch.setitem(SUITES._classes, "pair", type("Odd", (Pair,), {"score": score}))
    run = start(tmp_path / "run", asked(checkpoint, suite=["pair", "arithmetic"], method=["ar"]))
    bad, good = finish(run)["cells"]

    assert (good["status"], good["error"], good["accuracy"]["n"]) == ("ok", None, 2)
    assert (bad["status"], bad["accuracy"]) == ("failed", None)
    assert says in bad["error"]
    monkeypatch.setitem(SUITES._classes, "pair", Pair)
    mended, _ = finish(run)["cells"]
    assert (mended["status"], mended["error"], mended["accuracy"]["value"]) == ("ok", None, 1)


@pytest.mark.whole
def test_progress_is_told_of_a_failure_once(
    enter: Callable[[dict[str, Any]], None], checkpoint: str, tmp_path: Path
) -> None:
    """A cell that failed is not tried again: neither later in the run nor when it is resumed."""
    enter({"window": raises})
    run = start(tmp_path / "run", asked(checkpoint))
    finish(run)
    finish(run)

    assert [f["cell"] for f in stored_lines(run, "failures.jsonl")] == ["arithmetic.odd.ar.graph.b1"]
