"""Bundles: a bundle is one tar file with suites' data and checkpoints, for a machine without a network.

    bundle.json             the manifest: versions, suites, family, checkpoints by role, size and SHA-256 of every file
    data/…                  laid out for `--data-dir`
    checkpoints/<name>/…    safetensors, tokenizer and configuration; embedded checkpoints are not included

The manifest is the first member and determines the rest. So the folder of an unpacked bundle is named by the hash of
its manifest, and mtbench finds it without reading the other members. Unpacking writes only plain files with checked
names, and only if size and hash match the manifest.
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
from typing import Any, BinaryIO, TypeVar

from mtbench import network
from mtbench.errors import UserError, first_line
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Suite, suite_errors
from mtbench.files import cache_home, flush, open_plain, refuse_existing, write_errors, write_json
from mtbench.models.checkpoint_files import CHECKPOINT_FILES
from mtbench.models.drafts.loading import draft_config
from mtbench.models.families import EMBEDDED, FAMILIES, PART, RANDOM, RECORD, Family, split_part
from mtbench.models.loading import inspect
from mtbench.runs.run_request import DecodingRequest
from mtbench.version import __version__

SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
INCOMPLETE = "the incomplete file was removed."
DATA, CHECKPOINTS = "data", "checkpoints"
MAX_MANIFEST_BYTES = 1 << 26

R = TypeVar("R", bound=DecodingRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundle:
    """A bundle on this machine."""

    data_dir: Path
    family: str | None  # the family of the checkpoints, if its name is known to mtbench
    model: str | None  # otherwise the folder to use as `--model`
    checkpoints: Mapping[str, str]  # role -> folder


# --- Writing ------------------------------------------------------------------------------------------------------


def write_bundle(
    out: Path, suites: Mapping[str, Suite], family: Family | None, roles: Iterable[str] = (), *, offline: bool = False
) -> dict[str, int]:
    """Write a bundle with the suites' data and the family's checkpoints in these roles; return its files' sizes.

    A run on the bundle uses the family by name if mtbench knows it; otherwise its first role serves as `--model`.
    `out` is complete or absent. Raise UserError if something is not available, or if `out` exists.
    """
    stage = out.with_name(out.name + ".partial")
    shutil.rmtree(stage, ignore_errors=True)  # of a killed command
    refuse_existing(out)
    with write_errors(out, INCOMPLETE):
        (stage / DATA).mkdir(parents=True)
        try:
            for spec, suite in suites.items():
                with suite_errors(spec):
                    suite.write_data(stage / DATA)
            files = {
                path.relative_to(stage).as_posix(): path for path in sorted((stage / DATA).rglob("*")) if path.is_file()
            }
            folders: dict[str, str] = {}
            if family is not None:
                folders = _add_checkpoints(files, family, list(roles), stage, offline=offline)
            manifest = _manifest(list(suites), family, folders, files)
            (stage / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            with tarfile.open(stage / "whole.tar", "w") as tar:
                _add_file(tar, MANIFEST, stage / MANIFEST)
                for name, path in files.items():
                    _add_file(tar, name, path)
            sizes = {name: path.stat().st_size for name, path in files.items()}
            refuse_existing(out)
            flush(stage / "whole.tar")
            shutil.rmtree(stage / DATA)  # a command that is killed after the next line leaves little behind
            os.replace(stage / "whole.tar", out)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return sizes


def _manifest(
    suites: list[str], family: Family | None, folders: Mapping[str, str], files: Mapping[str, Path]
) -> dict[str, Any]:
    """Return the content of bundle.json; `folders`: role -> folder in the bundle, `files`: name -> path."""
    family_name = model = None
    if family is not None:
        if _is_known(family):
            family_name = family.name
        else:
            model = folders.get(next(iter(family.roles), ""))
    return {
        "schema_version": SCHEMA_VERSION,
        "mtbench": __version__,
        "suites": suites,
        "family": family_name,
        "model": model,
        "checkpoints": dict(folders),
        "files": {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()},
    }


def _is_known(family: Family) -> bool:
    """Return whether the family's name is enough for mtbench to find its checkpoints."""
    known = FAMILIES.get(family.name)
    return known is not None and set(known.roles) <= set(family.roles)


def _add_checkpoints(
    files: dict[str, Path], family: Family, roles: list[str], stage: Path, *, offline: bool
) -> dict[str, str]:
    """Add the checkpoints' files to `files`; return role -> folder in the bundle.

    Embedded and random checkpoints need no files and get no folder.
    """
    folder_of_role: dict[str, str] = {}
    folder_of_source: dict[str, str] = {}
    for role in roles:
        source, part = split_part(family.checkpoint(role))
        if source.startswith((EMBEDDED, RANDOM)):
            continue
        if source not in folder_of_source:
            path = _checkpoint_folder(source, offline=offline)
            if draft_config(str(path), offline=True) is None:  # a draft has no tokenizer
                inspect(str(path), offline=True)  # raises UserError if mtbench cannot use the checkpoint
            name = f"{CHECKPOINTS}/{Path(source).name or role}"
            while name in folder_of_source.values():
                name += "+"
            folder_of_source[source] = name
            for file in sorted(path.iterdir()):
                if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in CHECKPOINT_FILES):
                    files[f"{name}/{file.name}"] = file
            if role in family.trained and f"{name}/{RECORD}" not in files:
                files[f"{name}/{RECORD}"] = _write_record(stage / f"{role}.json", family, role)
        folder_of_role[role] = folder_of_source[source] + (PART + part if part else "")
    return folder_of_role


def _write_record(path: Path, family: Family, role: str) -> Path:
    """Write a training record for a checkpoint without one; the family knows its training options."""
    record = {"options": dict(family.trained[role]), "source": family.checkpoint(role)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _checkpoint_folder(source: str, *, offline: bool) -> Path:
    """Return a checkpoint's folder, downloaded if it is on the hub. Raise UserError if it is not available."""
    if Path(source).is_dir():
        return Path(source)
    if not offline:
        network.hub_refusal()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                source, allow_patterns=list(CHECKPOINT_FILES), ignore_patterns=["*/*"], local_files_only=offline
            )
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        where = "is not in the local cache" if offline else "cannot be loaded from the hub"
        raise UserError(
            f"{source!r} {where} ({first_line(error)}); give a folder with `--checkpoint ROLE=PATH`, bundle "
            "fewer checkpoints with `--role ROLE`, or none with `--no-checkpoints`."
        ) from None


def _add_file(tar: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file without owner, mode and time: the same content always gives the same tar."""
    info = tarfile.TarInfo(name)
    info.size = path.stat().st_size
    with path.open("rb") as file:
        tar.addfile(info, file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Unpacking ----------------------------------------------------------------------------------------------------


def open_bundle(path: Path) -> UnpackedBundle:
    """Unpack a bundle into mtbench's cache, unless it is there already. Raise UserError for a damaged bundle."""
    with _tar_errors(path), open_plain(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        raw = _read_first_member(tar)
        manifest = _parse_manifest(path, raw)
        if sum(entry["bytes"] for entry in manifest["files"].values()) > path.stat().st_size:
            raise _damaged(path, f"{MANIFEST} lists more bytes than the file has")
        home = cache_home() / "bundles" / hashlib.sha256(raw).hexdigest()
        if not _is_complete(home, manifest["files"]):
            _unpack(path, tar, manifest["files"], home)
    model = manifest["model"]
    return UnpackedBundle(
        data_dir=home / DATA,
        family=manifest["family"],
        model=None if model is None else str(home / model),
        checkpoints={role: str(home / folder) for role, folder in manifest["checkpoints"].items()},
    )


@contextmanager
def _tar_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading the tar into a one-line UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot open the bundle {path}: {error.strerror or first_line(error)}.") from None
    except (tarfile.TarError, EOFError, UnicodeError) as error:
        raise _damaged(path, first_line(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} is damaged or not a bundle ({reason}); make it again with `mtbench fetch --bundle FILE.tar`."
    )


def _read_first_member(tar: tarfile.TarFile) -> bytes:
    """Return the content of bundle.json; b"" if it is not the first member."""
    member = tar.next()
    if member is None or member.name != MANIFEST or not member.isreg() or member.size > MAX_MANIFEST_BYTES:
        return b""
    return _open_member(tar, member).read()


def _open_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    file = tar.extractfile(member)
    assert file is not None  # the member is a plain file
    return file  # type: ignore[return-value]


def _parse_manifest(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the manifest. Raise UserError if it is not valid or names a path outside the bundle's folder."""
    try:
        manifest = json.loads(raw)
        version = manifest["schema_version"]
        if type(version) is not int:
            raise TypeError("'schema_version' is not an integer")
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{path} was made by mtbench {manifest.get('mtbench')}, whose bundles this version cannot read; "
                "update mtbench, or make the bundle again with this version."
            )
        if not isinstance(manifest["files"], dict):
            raise TypeError("'files' is not an object")
        folders = list(manifest["checkpoints"].values())
        if manifest["model"] is not None:
            folders.append(manifest["model"])
        for name in [*manifest["files"], *folders]:
            if not _is_safe(name):
                raise ValueError(f"{name!r} is a path outside the bundle")
        for entry in manifest["files"].values():
            if type(entry["bytes"]) is not int or entry["bytes"] < 0 or type(entry["sha256"]) is not str:
                raise TypeError("a file has no size or no hash")
        if manifest["family"] is not None and manifest["family"] not in FAMILIES:
            raise ValueError(f"family {manifest['family']!r} is not one of {', '.join(FAMILIES)}")
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{MANIFEST}: {type(error).__name__}: {first_line(error)}") from None
    return dict(manifest)


def _is_safe(name: str) -> bool:
    """Return whether a name is a plain relative path below data/ or checkpoints/, on every operating system."""
    parts = PurePosixPath(name).parts
    below_folder = len(parts) > 1 and parts[0] in (DATA, CHECKPOINTS)
    return below_folder and "/".join(parts) == name and ".." not in parts and not set(name) & {"\\", "\0", ":"}


def _is_complete(home: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all files exist in their full size. Their hashes were checked when they were unpacked."""
    try:
        return (home / MANIFEST).is_file() and all(
            (home / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except OSError:
        return False


def _unpack(path: Path, tar: tarfile.TarFile, files: Mapping[str, Mapping[str, Any]], home: Path) -> None:
    """Unpack all files into `home`. It appears only if all files match the manifest; else raise UserError."""
    home.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name[:8]}."))
    try:
        (stage / DATA).mkdir()
        missing = set(files)
        for member in tar:
            if member.name == MANIFEST:
                continue
            if member.name not in missing or not member.isreg():
                raise _damaged(path, f"{member.name!r} is an unexpected member")
            missing.remove(member.name)
            if member.size != files[member.name]["bytes"]:
                raise _damaged(path, f"{member.name!r} has another size")
            target = stage / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                shutil.copyfileobj(_open_member(tar, member), file)
            if _sha256(target) != files[member.name]["sha256"]:
                raise _damaged(path, f"{member.name!r} does not match its hash")
        if missing:
            raise _damaged(path, f"{min(missing)!r} is missing")
        write_json(stage / MANIFEST, {"files": dict(files)})
        stage.chmod(0o755)
        shutil.rmtree(home, ignore_errors=True)
        try:
            stage.rename(home)
        except OSError:
            if not _is_complete(home, files):  # otherwise another process unpacked it meanwhile
                raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def from_bundle(path: Path, request: R) -> R:
    """Return a request with a bundle's data, and with its checkpoints unless the request names others."""
    if request.data_dir is not None:
        raise UserError("--bundle and --data-dir both name the data; give one of them.")
    bundle = open_bundle(path)
    suites = []
    for spec in request.suite:
        name, colon, rest = spec.partition(":")
        suites.append(f"{name}{colon}{SUITES[name].resolve_variant(rest, bundle.data_dir)}")
    bundled = request.changed(data_dir=str(bundle.data_dir), suite=suites)
    if request.model or getattr(request, "weights", None) or request.family not in (None, bundle.family):
        return bundled
    roles = {**bundle.checkpoints, **request.checkpoint}
    return bundled.changed(family=bundle.family, model=bundle.model, checkpoint=roles)
