"""Where a serving engine is installed: in an environment of mtbench's, or an installation of the user's."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from mtbench.clients.engine_installation import RELEASE
from mtbench.clients.serving_engine import ServingEngine
from mtbench.errors import UserError
from mtbench.programs import environments


class Mine(ServingEngine):
    name = "mine"
    title = "Mine"
    package = "mine-cpu==1"
    distributions = ("rich",)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtbench.clients.engine_installation.cache_home", lambda: tmp_path)


def test_a_python_of_the_users_is_used_under_its_own_release() -> None:
    """A link is kept: it tells a Python its environment."""
    release = f"rich=={importlib.metadata.version('rich')}"
    assert Mine.state() == "mtbench fetch engine mine"
    assert Mine.use(Path(sys.executable)) == release
    assert Mine.python() == Path(sys.executable)
    assert Mine.release() == Mine.state() == release


def test_a_release_that_is_asked_for_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate compares two releases; the pinned one may be one of them."""
    Mine.use(Path(sys.executable))
    monkeypatch.setenv(RELEASE, "mine=mine-cpu==1")
    assert Mine.release() == "mine-cpu==1"
    assert Mine.installed() is None


def test_a_program_without_the_engine_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    Mine.use(Path(sys.executable))
    with pytest.raises(UserError, match="no-such: it is no program; give the Python that has Mine"):
        Mine.use(tmp_path / "no-such")
    (broken := tmp_path / "broken").write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="broken: Mine is not there"):
        Mine.use(broken)
    assert Mine.python() == Path(sys.executable)


def test_a_program_that_has_gone_is_named(tmp_path: Path) -> None:
    (program := tmp_path / "mine").write_text("#!/bin/sh\necho found 1 GPU\necho version: 7\n")
    program.chmod(0o755)
    assert Mine.use(program) == "version: 7"
    program.unlink()
    with pytest.raises(UserError, match=f"'{program}' is not there; run `mtbench fetch engine mine`"):
        Mine.python()


def test_a_package_is_found_however_its_name_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index writes my-drafts, and the package itself my_drafts, as arctic_inference does."""
    Mine.use(Path(sys.executable))
    monkeypatch.setattr(Mine, "needs", {"suffix": "my-drafts"})
    with pytest.raises(UserError, match="Mine needs the package 'my-drafts' for suffix"):
        Mine.refuse_missing("suffix")
    installed = environments.run
    path = {"PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr(
        environments, "run", lambda command, variables, **how: installed(command, variables | path, **how)
    )
    (info := tmp_path / "my_drafts-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_drafts\nVersion: 1\n")
    Mine.refuse_missing("suffix")
