"""Atomic writing: a file is complete or absent."""

import json
import os
from pathlib import Path

import pytest

from mtbench import files
from mtbench.errors import UserError


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    """Parent folders are made, others can read the file, nothing is left beside it."""
    path = tmp_path / "a" / "b.json"
    files.write_text(path, "ü")
    assert path.read_bytes() == "ü".encode()
    files.write_json(path, {"n": 1})
    assert json.loads(path.read_text()) == {"n": 1}
    assert path.read_text().endswith("}\n")
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """Whatever is raised while writing; the temporary file is removed."""
    path = tmp_path / "file"
    path.write_text("before")

    def interrupted() -> None:
        with files.atomic_write(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, float("nan"))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_the_disk_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, the reason and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^cannot write \S*file/x: [^\n]*; Free disk space[^\n]*$"):
        files.write_text(tmp_path / "file" / "x", "text")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"^cannot write \S*x: No space left on device; go on\.$"):
        files.write_text(tmp_path / "x", "text", advice="go on.")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_exists_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Except the run's own file with the same content, standard output and devices."""
    other, own = tmp_path / "other.json", tmp_path / "run" / "results.json"
    for allowed in (None, Path("-"), other, Path(os.devnull)):
        files.refuse_existing(allowed, own)
    files.write_text(other, "{}")
    files.write_text(own, "{}")
    files.refuse_existing(tmp_path / "run" / ".." / "run" / "results.json", own)
    for refused in (other, tmp_path):
        with pytest.raises(UserError, match=f"^'{refused}' exists and is never overwritten; choose another name"):
            files.refuse_existing(refused, own)
    with pytest.raises(UserError, match="exists"):
        files.refuse_existing(own)


def test_the_temporary_files_of_a_killed_process_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also below the folder; other hidden files stay."""
    others = {".mine.tmp", ".a.json.abcdefgh"}
    for name in others:
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt), files.atomic_write(tmp_path / "below" / "a.json"):
        raise KeyboardInterrupt
    monkeypatch.undo()
    assert len(list((tmp_path / "below").iterdir())) == 1
    files.remove_temporary(tmp_path)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == others
