"""The command `mtbench`: which commands it has, and that each is imported only when it is used."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import made_results, result_cell
from typer.testing import CliRunner

from mtbench.cli import main
from mtbench.experiments.run import EXPERIMENT
from mtbench.measure import executor
from mtbench.options.fields import read_options
from mtbench.plan.directory import RunDirectory
from mtbench.plan.request import Execution, RunSession

HEAVY = ("torch", "transformers", "pandas", "pydantic")
LOADED = f"print(sorted({{*{HEAVY}}} & set(sys.modules)))"
RUN = "main.app({}, standalone_mode=False)"


@pytest.mark.whole
@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import mtbench", []),
        ("from mtbench.cli import main; " + RUN.format(["--help"]), []),
        ("from mtbench.cli import main; " + RUN.format(["run", "--help"]), ["pydantic"]),
        ("from mtbench.cli import main; " + RUN.format(["ls", "suites"]), ["pydantic"]),
    ],
    ids=["import mtbench", "mtbench --help", "mtbench run --help", "mtbench ls suites"],
)
def test_heavy_libraries_are_imported_only_when_needed(code: str, loaded: list[str]) -> None:
    """Torch takes seconds to import, and help does not need it. (Typer imports pydantic for a command's options.)"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; {LOADED}"], capture_output=True, text=True, check=True
    )
    assert set(eval(done.stdout.splitlines()[-1])) <= set(loaded)


UNUSED = {"sklearn", "pandas", "pyarrow", "torchvision.transforms.v2", "transformers.video_processing_utils"}
UNUSED |= {"transformers.image_processing_backends", "datasets", "lm_eval", "ray", "gguf", "starlette", "uvicorn"}
UNUSED |= {"torch.utils.tensorboard", "mtbench.api", "mtbench.training.trainer"}


@pytest.mark.whole
def test_a_run_imports_what_it_uses_and_what_transformers_imports(tmp_path: Path) -> None:
    """A run reads no image and no video, trains nothing, and decodes a suite that needs no library of data."""
    options = ["--rounds", "1", "--limit", "1", "--max-new-tokens", "2", "--method", "ar", "--batch-size", "1"]
    code = (
        "import sys, transformers.models.qwen2.modeling_qwen2\nfrom transformers import AutoTokenizer\n"
        "before = set(sys.modules)\nfrom mtbench.cli import main\n"
        f"{RUN.format(['run', *options, '-o', str(tmp_path / 'run')])}\nprint({{*sys.modules}} - before & {UNUSED!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (tmp_path / "run" / "report.html").exists()
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_list_of_commands_agrees_with_their_own_help(name: str) -> None:
    """The list is written apart, so that it needs no import of the commands."""
    assert main.load(name).help.split("\n\n")[0].replace("\n", " ") == main.COMMANDS[name].help


@pytest.mark.parametrize("words", [["run"], ["gate"], ["train", "mars"], []])
def test_an_option_without_a_value_shows_no_type(words: list[str]) -> None:
    """`--offline true` is an error, so the help must not say `--offline <bool>`."""
    shown = CliRunner().invoke(main.app, [*words, "--help"], env={"COLUMNS": "120"}).output
    assert "--help" in shown
    assert "bool" not in shown


def test_what_only_one_execution_needs_is_not_in_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """`--workers`, `--ray` and `--peak-memory` reach the executor."""
    calls: list[Any] = []
    monkeypatch.setattr(executor, "generate", lambda run, progress, execution: calls.append(execution))
    monkeypatch.setattr("mtbench.plan.directory.RunDirectory.open", RunDirectory)
    monkeypatch.setattr("mtbench.plan.run.Run.locked", lambda _: nullcontext(SimpleNamespace(failures=[])))
    words = ["generate", str(tmp_path), "--workers", "2", "--data-dir", "data", "--peak-memory", "--server", "http://a"]
    result = CliRunner().invoke(main.app, words)
    assert result.exception is None, result.exc_info
    assert calls == [
        Execution(workers=2, data_dir=str(Path("data").resolve()), peak_memory=True, servers=frozenset({"http://a"}))
    ]


@pytest.mark.parametrize(
    ("cells", "fail_on", "code"),
    [
        ([{}], "divergent,void,failed", 0),
        ([{}, {"status": "failed"}], "divergent,void,failed", 1),
        ([{"status": "failed"}], "void", 0),
        ([{"void": ["counts do not add up"]}], "void", 1),
        ([{"status": "partial"}], "divergent,void,failed", 3),
        ([{"status": "partial"}, {"void": ["counts do not add up"]}], "void", 1),
    ],
)
def test_the_exit_code_says_what_is_wrong(cells: list[dict[str, Any]], fail_on: str, code: int) -> None:
    """1 for what `--fail-on` names, 3 for a run that its time budget ended; 2 stays for mistakes."""
    results = made_results([result_cell(**cell) for cell in cells])
    session = read_options({"fail_on": fail_on}, RunSession, "mtbench run --help")
    assert EXPERIMENT.exit_code(results, session) == code


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the nearest command."""
    monkeypatch.setattr(sys, "argv", ["mtbench", "rnu"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1
    assert "No such command 'rnu'. Did you mean 'run'" in error


def test_out_of_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where models are loaded; the line says how to resume."""
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def too_large(**_: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", too_large)
    monkeypatch.setattr(sys, "argv", ["mtbench", "generate", "run"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    said = capsys.readouterr().err
    assert (stopped.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: out of memory ({error})")
    assert said.endswith("what is complete is kept; resume with the same command\n")


def test_an_output_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output may be a file on a full disk."""

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(main, "app", full)
    monkeypatch.setattr(sys, "argv", ["mtbench", "ls"])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    said = capsys.readouterr().err
    assert (stopped.value.code, said) == (
        2,
        "error: cannot write the output: No space left on device; nothing was started\n",
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "mars", "--dry-run"], "Missing option '--base'. See `mtbench train mars --help`."),
        (["train", "--dry-run"], "--dry-run needs an objective or --recipe; see `mtbench train --help`."),
        (["schemas", ""], "--directory '' is not allowed: it is empty; leave it out, or give a value."),
    ],
)
def test_a_mistake_names_the_command_that_explains_it(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty text is no folder, no host and no model."""
    monkeypatch.setattr(sys, "argv", ["mtbench", *words])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
