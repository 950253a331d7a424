"""Files that strangers hand over cost one line that names the file, or they work. Never a traceback, never a hang."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType

import pytest
import stages
from broken_files import ANSWERS, CHECKPOINTS, LINES, LOOKUP, OTHERS, PLANS, ROW_FILES, TIMES, Change, mutated
from rich.console import Console
from small import VOCABULARY, save_small
from stages import assemble
from thinned import one_in
from transformers import AutoTokenizer
from whole import Quiet, start

import mtbench
from mtbench.errors import UserError
from mtbench.experiments.run import EXPERIMENT
from mtbench.lineup.planner import make_plan
from mtbench.models.loading import load
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import Execution, RunRequest
from mtbench.records import dump
from mtbench.report.progress import RunProgress
from mtbench.training.conversations import prepare

pytestmark = pytest.mark.whole

LONGEST_S = 10


class TooSlow(BaseException):
    """A command took too long. No handler of an Exception can hide it."""


@contextmanager
def deadline() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


def refused(command: Callable[[], object]) -> str | None:
    """Run a command; return its one line of refusal, None if it worked."""
    with deadline():
        try:
            command()
        except UserError as error:
            line = str(error)
        else:
            return None
    assert "\n" not in line
    assert len(line) < 2000
    return line


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of the embedded family, with its pages."""
    request = RunRequest(
        method=("ar", "prompt-lookup:ahead=2"), batch_size=(2,), limit=4, rounds=2, max_new_tokens=8, device="cpu"
    )
    path = tmp_path_factory.mktemp("complete") / "run"
    run = start(path, request)
    with RunProgress(Console(quiet=True)) as progress:
        stages.finish(run, Execution(), progress)
    (path / "memory.json").write_text("{}")
    return path


def fresh(run: RunDirectory) -> None:
    """Generate the plan from the start."""
    for folder in ("generations", "timings", "lossless"):
        shutil.rmtree(run.path / folder, ignore_errors=True)
    stages.generate(run, Quiet())


COMMANDS: dict[str, Callable[[RunDirectory], object]] = {
    "report": assemble,
    "pages": stages.report,
    "score": stages.score,
    "reopen": lambda run: EXPERIMENT.stored(run.path),
    "generate": lambda run: stages.generate(run, Quiet()),
    "fresh": fresh,
    "load": lambda run: (mtbench.read(run.path).to_frame(), mtbench.read(run.path).items()),
}


def check(complete_run: Path, tmp_path: Path, change: Change, commands: tuple[str, ...], *expected: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    wrong = {}
    for name in commands:
        run = RunDirectory(tmp_path / "inside" / name / "run")
        shutil.copytree(complete_run, run.path)
        change(run.path)
        before = tree(outside)
        try:
            line = refused(lambda: COMMANDS[name](RunDirectory.open(run.path)))  # noqa: B023
        except (Exception, TooSlow) as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        finally:
            assert tree(outside) == before
        if line is not None and not any(word in line for word in expected):
            wrong[name] = f"names none of {expected}: {line}"
    assert not wrong


READERS = ("pages", "score", "generate", "load")
FILES: dict[str, tuple[str, ...]] = {  # with the commands that read them
    "plan.json": ("report", "score", "reopen", "fresh"),
    "results.json": ("load",),
    **dict.fromkeys((ANSWERS, TIMES, "environment.json", "scores.json", f"lossless/{LOOKUP}.json"), READERS),
}

# What an error about a plan names: the plan, or what the plan contradicts.
PLANNED = ("plan.json", "generations/", "timings/", "checkpoint", "--model PATH", "--device", "prompts of suite")


def named(change: str) -> str:
    """The file that an error must name."""
    whole = change.partition(": ")[0]
    if "." in whole:
        return Path(whole).name
    files = {"plan": "plan.json", "results": "results.json", "answers": "generations", "times": "timings"}
    return files.get(whole, whole)


@pytest.mark.parametrize("name", one_in(10, PLANS))
def test_a_plan(complete_run: Path, tmp_path: Path, name: str) -> None:
    check(complete_run, tmp_path, PLANS[name], FILES["plan.json"], *PLANNED)


@pytest.mark.parametrize("name", one_in(10, LINES))
def test_answers_and_times(complete_run: Path, tmp_path: Path, name: str) -> None:
    check(complete_run, tmp_path, LINES[name], READERS, named(name))


@pytest.mark.parametrize("name", one_in(10, OTHERS))
def test_other_files_of_a_run(complete_run: Path, tmp_path: Path, name: str) -> None:
    check(complete_run, tmp_path, OTHERS[name], READERS, named(name))


@pytest.mark.parametrize(("file", "number"), one_in(20, product(FILES, range(60))))
def test_a_value_that_is_odd_or_missing(complete_run: Path, tmp_path: Path, file: str, number: int) -> None:
    """Anywhere in a file of a run."""
    expected = PLANNED if file == "plan.json" else (Path(file).name,)
    check(complete_run, tmp_path, mutated(file, number), FILES[file], *expected)


def test_the_run_itself_works(complete_run: Path, tmp_path: Path) -> None:
    check(complete_run, tmp_path, lambda folder: None, tuple(COMMANDS), "")
    assert dump(assemble(RunDirectory(complete_run)))["cells"][0]["status"] == "ok"


@pytest.fixture(scope="session")
def complete_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with every file that may be in one, and prompts for it."""
    folder = save_small(tmp_path_factory.mktemp("complete") / "checkpoint")
    (folder / "mtbench_training.json").write_text('{"objective": "mars", "options": {"block_size": 4}}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} b ")
    (folder.parent / "prompts.jsonl").write_text('{"prompt": "a b c"}\n')
    return folder


# What an error about a checkpoint names, if not its folder.
PLANNED_WITH = ("training record", "chat template", "empty prompt", "guesses in a forward")


PARTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "mtbench_training.json")
BROKEN = CHECKPOINTS | {f"{file}: {n}": mutated(file, n) for file in PARTS for n in range(40)}


@pytest.mark.parametrize("name", one_in(15, BROKEN))
def test_a_checkpoint(complete_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """It is planned with, then loaded."""
    folder = tmp_path / "inside" / "checkpoint"
    shutil.copytree(complete_checkpoint, folder)
    BROKEN[name](folder)
    request = RunRequest(
        suite=(f"prompts:{complete_checkpoint.parent / 'prompts.jsonl'}",),
        checkpoint={"mars": str(folder)},
        family="tiny",
        method=("mars",),
        max_new_tokens=4,
        batch_size=(1,),
        device="cpu",
    )
    for line in (refused(lambda: make_plan(request)), refused(lambda: load(str(folder)))):
        assert line is None or any(word in line for word in (str(folder), *PLANNED_WITH))


def test_a_checkpoint_of_links_loads(complete_checkpoint: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links to files elsewhere."""
    folder = tmp_path / "snapshots" / "1"
    folder.mkdir(parents=True)
    for file in complete_checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    assert load(str(folder)).vocabulary == VOCABULARY


@pytest.mark.parametrize("name", one_in(5, ROW_FILES))
def test_prompts_and_conversations(complete_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """They are planned with, and read as training data."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("")
    ROW_FILES[name](folder)
    file = folder / "rows.jsonl"
    request = RunRequest(
        suite=(f"prompts:{file}",), model=str(complete_checkpoint), method=("ar",), max_new_tokens=4, device="cpu"
    )
    tokenizer = AutoTokenizer.from_pretrained(complete_checkpoint)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} b {% endfor %}"
    plan = refused(lambda: make_plan(request))
    data = refused(lambda: prepare(str(file), None, tokenizer, max_length=512, seed=0))
    for line in (plan, data):
        assert line is None or "rows" in line or "prompts/2/0" in line
