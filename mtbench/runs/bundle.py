"""A bundle: one tar that carries suites' data and checkpoints to a machine without a network.

    bundle.json             what is in it: versions, suites, family, checkpoints by role, size and SHA-256 of every file
    data/…                  laid out as `--data-dir` reads it
    checkpoints/<name>/…    safetensors, tokenizer and configuration; embedded checkpoints stay where they are

`bundle.json` comes first and speaks for all else, so its own hash names the folder that a bundle is opened into, and
one opened before is found again without reading its gigabytes. Of the tar nothing but plain files is ever written,
under names that were checked, and each only if it is what the list says.
"""

import fnmatch
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from mtbench import __version__
from mtbench.cache import cache_home
from mtbench.errors import UserError, first_line
from mtbench.evaluation.suite import Suite, answering
from mtbench.models.families import EMBEDDED, FAMILIES, RANDOM, RECORD, Family
from mtbench.models.loading import inspect

SCHEMA_VERSION = 1
LIST = "bundle.json"
DATA, CHECKPOINTS = "data", "checkpoints"
MOST_LISTED_BYTES = 1 << 26
CHUNK = 1 << 22  # bytes
# Of a checkpoint: weights that run no code when loaded, tokenizer, configuration, record, terms.
CARRIED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A bundle on this machine."""

    data_dir: Path
    family: str | None  # the one its checkpoints belong to, if it is one that mtbench knows
    model: str | None  # else the folder that stands for `--model`
    checkpoints: Mapping[str, str]  # role -> folder


# --- Making one ---------------------------------------------------------------------------------------------------


def write_bundle(
    out: Path, suites: Mapping[str, Suite], family: Family | None, roles: Iterable[str] = (), *, offline: bool = False
) -> dict[str, int]:
    """A bundle at `out` with the suites' data and the family's checkpoints in these roles; its files, in bytes.

    Where the family is one that mtbench knows, the bundle stands for it; else its first role stands for `--model`.
    Written aside and renamed. Raises UserError if something cannot be had, or if there is something at `out`.
    """
    _refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            stage = Path(folder)
            (stage / DATA).mkdir()
            for spec, suite in suites.items():
                with answering(spec):
                    suite.keep(stage / DATA)
            files = {path.relative_to(stage).as_posix(): path for path in _files(stage / DATA)}
            places = _collect(family, list(roles), stage, files, offline=offline) if family else {}
            name = None if family is None else _known(family)
            first = next(iter(family.roles), "") if family and name is None else ""
            sizes = {name: path.stat().st_size for name, path in files.items()}
            listed = {
                "schema_version": SCHEMA_VERSION,
                "mtbench": __version__,
                "suites": list(suites),
                "family": name,
                "model": places.get(first),
                "checkpoints": places,
                "files": {
                    name: {"bytes": files[name].stat().st_size, "sha256": _sha256(files[name])} for name in files
                },
            }
            (stage / LIST).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
            with tarfile.open(stage / "whole.tar", "w") as tar:
                for name, path in {LIST: stage / LIST, **files}.items():
                    _add(tar, name, path)
            _refuse_existing(out)
            os.replace(stage / "whole.tar", out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or first_line(error)}; nothing is left of it.") from None
    return sizes


def _known(family: Family) -> str | None:
    """Its name, if that alone says which checkpoints it has."""
    named = FAMILIES.get(family.name)
    return family.name if named is not None and set(named.roles) <= set(family.roles) else None


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{str(out)!r} exists and is never overwritten; choose another `--bundle FILE.tar`.")


def _collect(family: Family, roles: list[str], stage: Path, files: dict[str, Path], *, offline: bool) -> dict[str, str]:
    """Add the checkpoints' files to `files`; role -> folder in the bundle. What needs no carrying has none."""
    places: dict[str, str] = {}
    of_source: dict[str, str] = {}
    for role in roles:
        source = family.checkpoint(role)
        if source.startswith((EMBEDDED, RANDOM)):
            continue
        if source not in of_source:
            folder = _checkpoint(source, offline=offline)
            inspect(str(folder), offline=True)  # what cannot be served there is refused here
            place = f"{CHECKPOINTS}/{Path(source).name or role}"
            while place in of_source.values():
                place += "+"
            of_source[source] = place
            carried = [p for p in _files(folder, deep=False) if any(fnmatch.fnmatch(p.name, kind) for kind in CARRIED)]
            files |= {f"{place}/{path.name}": path for path in carried}
            if role in family.trained and f"{place}/{RECORD}" not in files:  # what is known of it by its name alone
                record = stage / f"{role}.json"
                record.write_text(
                    json.dumps({"options": dict(family.trained[role]), "source": source}, indent=1) + "\n"
                )
                files[f"{place}/{RECORD}"] = record
        places[role] = of_source[source]
    return places


def _checkpoint(source: str, *, offline: bool) -> Path:
    """Its folder, downloaded if it is on the hub."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(source, allow_patterns=list(CARRIED), ignore_patterns=["*/*"], local_files_only=offline)
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        where = "is not in the local cache" if offline else "cannot be loaded from the hub"
        raise UserError(
            f"{source!r} {where} ({first_line(error)}); give a folder with `--checkpoint ROLE=PATH`, carry fewer with "
            "`--role ROLE`, or none with `--no-checkpoints`."
        ) from None


def _files(folder: Path, *, deep: bool = True) -> list[Path]:
    return sorted(path for path in (folder.rglob("*") if deep else folder.iterdir()) if path.is_file())


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    """The same content is the same tar, whoever made it and when."""
    info = tarfile.TarInfo(name)
    info.size = path.stat().st_size
    with path.open("rb") as file:
        tar.addfile(info, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Opening one --------------------------------------------------------------------------------------------------


def open_bundle(path: Path) -> Opened:
    """The bundle in mtbench's cache, whole and as it was made. Raises UserError for what is none, or no longer."""
    with _explained(path), tarfile.open(path, "r:") as tar:
        raw = _first(tar)
        listed = _read(path, raw)
        home = cache_home() / "bundles" / hashlib.sha256(raw).hexdigest()
        if not _is_whole(home, listed["files"]):
            _extract(path, tar, listed["files"], home)
    model = listed["model"]
    return Opened(
        data_dir=home / DATA,
        family=listed["family"],
        model=None if model is None else str(home / model),
        checkpoints={role: str(home / place) for role, place in listed["checkpoints"].items()},
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot open the bundle {path}: {error.strerror or first_line(error)}.") from None
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise _damaged(path, first_line(error)) from None


def _damaged(path: Path, how: str) -> UserError:
    return UserError(f"{path} is damaged, or no bundle ({how}); make it anew with `mtbench fetch --bundle FILE.tar`.")


def _first(tar: tarfile.TarFile) -> bytes:
    """What `bundle.json` says; b"" if it does not come first."""
    member = tar.next()
    if member is None or member.name != LIST or not member.isreg() or member.size > MOST_LISTED_BYTES:
        return b""
    return _reader(tar, member).read()


def _reader(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    file = tar.extractfile(member)
    assert file is not None  # it is a plain file
    return file  # type: ignore[return-value]


def _read(path: Path, raw: bytes) -> dict[str, Any]:
    """The list, checked: nothing in it leads out of the folder that the bundle is opened into."""
    try:
        listed = json.loads(raw)
        version = listed["schema_version"]
        if type(version) is not int:
            raise TypeError("'schema_version' is no whole number")
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{path} was made by mtbench {listed.get('mtbench')}, whose bundles this version cannot read; "
                "update mtbench, or make it anew with this one."
            )
        places = [*listed["checkpoints"].values(), *([] if listed["model"] is None else [listed["model"]])]
        for name in [*listed["files"], *places]:
            parts = PurePosixPath(name).parts
            plain = parts[:1] in ((DATA,), (CHECKPOINTS,)) and len(parts) > 1 and "/".join(parts) == name
            if not plain or ".." in parts or set(name) & {"\\", "\0", ":"}:
                raise ValueError(f"{name!r} leads elsewhere")
        for entry in listed["files"].values():
            if type(entry["bytes"]) is not int or type(entry["sha256"]) is not str:
                raise TypeError("a file without size and hash")
        if listed["family"] is not None and listed["family"] not in FAMILIES:
            raise ValueError(f"family {listed['family']!r} is none of {', '.join(FAMILIES)}")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{LIST}: {type(error).__name__}: {first_line(error)}") from None
    return dict(listed)


def _is_whole(home: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """It was checked when it was written; this finds what was deleted or cut since."""
    try:
        return (home / LIST).is_file() and all((home / f).stat().st_size == files[f]["bytes"] for f in files)
    except OSError:
        return False


def _extract(path: Path, tar: tarfile.TarFile, files: Mapping[str, Mapping[str, Any]], home: Path) -> None:
    """All files, written aside; the folder is there when every one is what the list says."""
    home.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name[:8]}."))
    try:
        (aside / DATA).mkdir()
        left = set(files)
        for member in tar:
            if member.name == LIST:
                continue
            if member.name not in left or not member.isreg():
                raise _damaged(path, f"{member.name!r} is not what was put in")
            left.remove(member.name)
            target = aside / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if _write(_reader(tar, member), target) != files[member.name]["sha256"]:
                raise _damaged(path, f"{member.name!r} has another hash")
        if left:
            raise _damaged(path, f"{min(left)!r} is missing")
        (aside / LIST).write_text(json.dumps({"files": dict(files)}, indent=1) + "\n", encoding="utf-8")
        aside.chmod(0o755)
        shutil.rmtree(home, ignore_errors=True)
        try:
            aside.rename(home)
        except OSError:
            if not _is_whole(home, files):  # else another process was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(source: BinaryIO, target: Path) -> str:
    """Copy; the sha256 of what was copied."""
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
