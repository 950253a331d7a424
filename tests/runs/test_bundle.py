"""Bundles: unpacked files equal the packed ones, damaged bundles are refused, and a run on a bundle uses its files."""

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from eagle_cases import FORMATS, write_draft
from made_up import write_lines
from small import save_small

from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.evaluation.suite import Suite
from mtbench.models import families
from mtbench.models.families import FAMILIES, RECORD, Family
from mtbench.runs import options
from mtbench.runs.bundle import MANIFEST, SCHEMA_VERSION, from_bundle, open_bundle, write_bundle
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.prompts import open_suite

QUESTIONS = [{"question_id": n, "category": "math", "turns": [f"a b {w}", "c d"]} for n, w in enumerate("efg")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint's folder that also has pickled files, notes and folders."""
    folder = save_small(tmp_path_factory.mktemp("checkpoints") / "small", 1)
    (folder / "optimizer.pt").write_bytes(b"pickled")
    (folder / "notes.md").write_text("mine")
    (folder / "runs").mkdir()
    (folder / "runs" / "log.json").write_text("{}")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_lines(tmp_path / "data/mt_bench/question.jsonl", QUESTIONS)
    write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])
    return tmp_path / "data"


def opened(*specs: str, data_dir: Path | None = None) -> dict[str, Suite]:
    request = RunRequest(suite=list(specs), data_dir=None if data_dir is None else str(data_dir), offline=True)
    return {spec: open_suite(spec, request) for spec in specs}


def bundle(path: Path, data: Path, weights: Path) -> Path:
    """Write a bundle of two suites and one checkpoint in two roles."""
    family = Family("small", {"ar": str(weights), "mars": str(weights)})
    write_bundle(path, opened("mt-bench", "arithmetic", data_dir=data), family, family.roles)
    return path


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def pack(path: Path, members: Sequence[tuple[str, bytes]], links: Sequence[tuple[str, str]] = ()) -> Path:
    """Write a tar with any members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def test_what_a_killed_fetch_left_is_removed(tmp_path: Path, data: Path, weights: Path) -> None:
    """It may be as large as the bundle, and it is not part of the next one."""
    whole = bundle(tmp_path / "whole.tar", data, weights).read_bytes()
    left = tmp_path / "again.tar.partial" / "data" / "stale.jsonl"
    left.parent.mkdir(parents=True)
    left.touch()
    assert bundle(tmp_path / "again.tar", data, weights).read_bytes() == whole
    assert not list(tmp_path.glob("*.partial"))


def manifest(contents: dict[str, bytes], **changes: Any) -> bytes:
    entries = {name: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in contents.items()}
    content = {"schema_version": SCHEMA_VERSION, "mtbench": "0", "suites": [], "family": None, "model": None}
    return json.dumps({**content, "checkpoints": {}, "files": entries, **changes}).encode()


# --- Round trips ---------------------------------------------------------------------------------------------------


def test_unpacked_files_equal_the_packed_ones(tmp_path: Path, data: Path, weights: Path) -> None:
    """Data have the layout of a data folder; a checkpoint of two roles is stored once, without pickled files."""
    unpacked = open_bundle(bundle(tmp_path / "x.tar", data, weights))

    assert (unpacked.data_dir / "mt_bench/question.jsonl").read_bytes() == (
        data / "mt_bench/question.jsonl"
    ).read_bytes()
    assert unpacked.checkpoints["ar"] == unpacked.checkpoints["mars"] == unpacked.model
    bundled = {path.name for path in Path(unpacked.checkpoints["ar"]).iterdir()}
    assert {path.name for path in weights.iterdir()} - bundled == {"optimizer.pt", "notes.md", "runs"}
    for name in bundled:
        assert (Path(unpacked.checkpoints["ar"]) / name).read_bytes() == (weights / name).read_bytes()
    assert (unpacked.family, Path(unpacked.checkpoints["ar"]).name) == (None, "small")


def test_a_draft_is_packed_without_a_tokenizer(tmp_path: Path, weights: Path) -> None:
    """A draft that reads the target's hidden states uses the target's."""
    draft = write_draft(tmp_path / "eagle", FORMATS["deepspec"])
    family = Family("small", {"ar": str(weights), "eagle": str(draft)})
    write_bundle(tmp_path / "x.tar", {}, family, family.roles)
    unpacked = Path(open_bundle(tmp_path / "x.tar").checkpoints["eagle"])

    assert {path.name for path in unpacked.iterdir()} == {"config.json", "model.safetensors"}


def test_the_same_content_is_the_same_bundle(tmp_path: Path, data: Path, weights: Path) -> None:
    """Two bundles of the same content are equal byte for byte and are unpacked into the same folder."""
    first, second = (bundle(tmp_path / name, data, weights) for name in ("first.tar", "second.tar"))

    assert first.read_bytes() == second.read_bytes()
    assert open_bundle(first) == open_bundle(second)
    assert len(list((tmp_path / "cache/mtbench/bundles").iterdir())) == 1


def test_an_unpacked_bundle_is_reused_and_repaired(tmp_path: Path, data: Path, weights: Path) -> None:
    """Opening it again writes nothing; a truncated or missing file is unpacked again."""
    path = bundle(tmp_path / "x.tar", data, weights)
    file = open_bundle(path).data_dir / "mt_bench/question.jsonl"
    written_at = file.stat().st_mtime_ns
    open_bundle(path)
    assert file.stat().st_mtime_ns == written_at

    content = file.read_bytes()
    file.write_bytes(content[:-9])
    open_bundle(path)
    assert file.read_bytes() == content
    shutil.rmtree(file.parent)
    open_bundle(path)
    assert file.read_bytes() == content


def test_training_options_known_by_name_are_bundled(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A released checkpoint's block size, which mtbench knows by its name, is in the folder's record."""
    shutil.copytree(weights, tmp_path / "blk4")
    known = Family("known", {"ar": str(weights), "mars": str(tmp_path / "blk4")}, {"mars": {"block_size": 4}})
    monkeypatch.setattr(families, "FAMILIES", {"known": known})
    monkeypatch.setattr("mtbench.runs.bundle.FAMILIES", {"known": known})
    write_bundle(tmp_path / "x.tar", {}, known, known.roles)
    unpacked = open_bundle(tmp_path / "x.tar")

    assert (unpacked.family, unpacked.model) == ("known", None)
    assert families.family("known", checkpoints=unpacked.checkpoints).training("mars") == {"block_size": 4}
    assert not (tmp_path / "blk4" / RECORD).exists()


@pytest.fixture
def hub(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create the hub's cache with the checkpoint `owner/small`, whose files are links to blobs."""
    snapshot = tmp_path / "hub/models--owner--small/snapshots" / ("0" * 40)
    blobs = tmp_path / "hub/models--owner--small/blobs"
    shutil.copytree(weights, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "hub/models--owner--small/refs").mkdir()
    (tmp_path / "hub/models--owner--small/refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_checkpoint_of_the_hub_is_bundled_as_files(tmp_path: Path, hub: Path) -> None:
    """The folder has the checkpoint's name and no links."""
    write_bundle(tmp_path / "x.tar", {}, Family("mine", {"ar": "owner/small"}), ["ar"], offline=True)
    (folder,) = open_bundle(tmp_path / "x.tar").checkpoints.values()

    assert Path(folder).name == "small"
    weights = Path(folder) / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (hub / "model.safetensors").read_bytes()
    assert not (Path(folder) / "optimizer.pt").exists()


def test_an_unavailable_checkpoint_has_a_remedy(tmp_path: Path, hub: Path) -> None:
    """The error is one line with the options to use."""
    with pytest.raises(UserError, match=r"^'owner/other' is not in the local cache [^\n]*`--no-checkpoints`\.$"):
        write_bundle(tmp_path / "x.tar", {}, Family("mine", {"ar": "owner/other"}), ["ar"], offline=True)


def test_embedded_and_random_checkpoints_are_not_bundled(tmp_path: Path) -> None:
    """Every installation has them; the family's name is enough."""
    write_bundle(tmp_path / "x.tar", opened("arithmetic"), FAMILIES["tiny"], FAMILIES["tiny"].roles)

    assert list(contents(tmp_path / "x.tar")) == [MANIFEST]
    unpacked = open_bundle(tmp_path / "x.tar")
    assert (unpacked.family, unpacked.model, unpacked.checkpoints) == ("tiny", None, {})
    assert unpacked.data_dir.is_dir()


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path, weights: Path) -> None:
    """Another machine could not use it. No file is left."""
    folder = tmp_path / "pickled"
    shutil.copytree(weights, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="pickled weights only"):
        write_bundle(tmp_path / "out" / "x.tar", {}, Family("mine", {"ar": str(folder)}), ["ar"])

    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """Also a file that is not a bundle."""
    (tmp_path / "x.tar").write_text("mine")
    with pytest.raises(UserError, match=r"x\.tar' exists and is never overwritten"):
        write_bundle(tmp_path / "x.tar", opened("arithmetic"), None)

    assert (tmp_path / "x.tar").read_text() == "mine"


def test_a_suite_without_write_data_is_refused(tmp_path: Path) -> None:
    """Otherwise the missing data would show only on the other machine."""

    class NoData(Suite):
        name = "no-data"

        def __init__(self) -> None: ...

    with pytest.raises(UserError, match="suite 'no-data' does not implement `write_data`"):
        write_bundle(tmp_path / "x.tar", {"no-data": NoData()}, None)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """A bundle stores the user's prompt files by name."""
    for folder, text in (("a", "Why?"), ("b", "How?")):
        write_lines(tmp_path / folder / "mine.jsonl", [{"prompt": text}])
    with pytest.raises(UserError, match=r"two files are called mine\.jsonl"):
        write_bundle(tmp_path / "x.tar", opened(*(f"prompts:{tmp_path}/{f}/mine.jsonl" for f in "ab")), None)


# --- Damaged bundles ----------------------------------------------------------------------------------------------

FILES = {"data/a/b.jsonl": b"{}\n"}


def listed(size: int) -> dict[str, Any]:
    return {"data/a/b.jsonl": {"bytes": size, "sha256": "0" * 64}}


def test_a_member_larger_than_its_entry_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by its size, before a byte of it is written."""
    path = pack(tmp_path / "x.tar", [(MANIFEST, manifest(FILES)), ("data/a/b.jsonl", bytes(1 << 20))])
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: pytest.fail("it was copied"))
    with pytest.raises(UserError, match="has another size"):
        open_bundle(path)


def test_a_bundle_that_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(UserError, match="it is not a plain file"):
        open_bundle(tmp_path / "x.tar")


def test_a_handmade_bundle_is_accepted(tmp_path: Path) -> None:
    """The damaged bundles below differ from this one."""
    path = pack(tmp_path / "x.tar", [(MANIFEST, manifest(FILES)), *FILES.items()])

    assert (open_bundle(path).data_dir / "a/b.jsonl").read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("members", "links", "reason"),
    [
        ([], [], r"bundle\.json: JSONDecodeError"),
        ([*FILES.items(), (MANIFEST, manifest(FILES))], [], r"bundle\.json: JSONDecodeError"),
        ([(MANIFEST, b"[]")], [], "TypeError"),
        ([(MANIFEST, b"{}")], [], "KeyError: 'schema_version'"),
        ([(MANIFEST, manifest(FILES, schema_version="1"))], [], "'schema_version' is not an integer"),
        ([(MANIFEST, manifest(FILES))], [], r"'data/a/b\.jsonl' is missing"),
        ([(MANIFEST, manifest(FILES)), ("data/a/b.jsonl", b"[]\n")], [], r"'data/a/b\.jsonl' does not match its hash"),
        ([(MANIFEST, manifest(FILES)), ("data/a/b.jsonl", b"[]\n" * 9)], [], r"'data/a/b\.jsonl' has another size"),
        ([(MANIFEST, manifest({}, files=listed(10**12)))], [], "lists more bytes than the file has"),
        ([(MANIFEST, manifest({}, files=listed(-1)))], [], "a file has no size"),
        ([(MANIFEST, manifest({}, files=listed(True)))], [], "a file has no size"),
        ([(MANIFEST, manifest({}, files=[]))], [], "'files' is not an object"),
        ([(MANIFEST, manifest({}, checkpoints=[]))], [], "AttributeError"),
        ([(MANIFEST, manifest({}, checkpoints={"ar": 5}))], [], "TypeError"),
        ([(MANIFEST, manifest({}, family=[]))], [], "TypeError"),
        ([(MANIFEST, b"[" * 100_000)], [], "RecursionError"),
        ([(MANIFEST, manifest(FILES)), *FILES.items(), *FILES.items()], [], "is an unexpected member"),
        ([(MANIFEST, manifest(FILES)), *FILES.items(), ("data/more", b"")], [], "'data/more' is an unexpected member"),
        ([(MANIFEST, manifest(FILES)), ("../../a", b"")], [], r"'\.\./\.\./a' is an unexpected member"),
        ([(MANIFEST, manifest(FILES))], [("data/a/b.jsonl", "/etc/passwd")], "is an unexpected member"),
        ([(MANIFEST, manifest(FILES))], [("data/a", "/tmp")], "'data/a' is an unexpected member"),
        ([(MANIFEST, manifest({"data/../../a": b""}))], [], "is a path outside the bundle"),
        ([(MANIFEST, manifest({"/etc/a": b""}))], [], "'/etc/a' is a path outside the bundle"),
        ([(MANIFEST, manifest({"data//a": b""}))], [], "is a path outside the bundle"),
        ([(MANIFEST, manifest({"data": b""}))], [], "'data' is a path outside the bundle"),
        ([(MANIFEST, manifest({"elsewhere/a": b""}))], [], "is a path outside the bundle"),
        ([(MANIFEST, manifest({}, checkpoints={"ar": "../../models"}))], [], "is a path outside the bundle"),
        ([(MANIFEST, manifest({}, model="/models"))], [], "is a path outside the bundle"),
        ([(MANIFEST, manifest({}, family="nobody's"))], [], 'family "nobody\'s" is not one of'),
        ([(MANIFEST, manifest({}, files={"data/a": 3}))], [], "TypeError"),
    ],
    ids=[
        *("empty", "manifest not first", "list", "no keys", "version", "missing", "hash", "size", "too large"),
        *("negative", "true", "files", "checkpoints", "folder of a number", "family of lists", "deep"),
        *("twice", "more", "outside"),
        *("link", "linked folder", "up", "absolute", "slashes", "folder", "elsewhere", "checkpoint", "model"),
        *("family", "entry"),
    ],
)
def test_a_damaged_bundle_is_refused_and_leaves_no_file(
    members: list[Any], links: list[Any], reason: str, tmp_path: Path
) -> None:
    """The error is one line that names the file; nothing is written, inside or outside the cache."""
    path = pack(tmp_path / "x.tar", members, links)
    with pytest.raises(UserError, match=reason) as caught:
        open_bundle(path)

    assert str(caught.value).startswith(f"{path} is damaged or not a bundle (")
    assert "\n" not in str(caught.value)
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_truncated_bundle_is_refused(share: float, tmp_path: Path, data: Path, weights: Path) -> None:
    """An interrupted copy leaves no file in the cache."""
    path = bundle(tmp_path / "x.tar", data, weights)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="is damaged or not a bundle"):
        open_bundle(path)

    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_one_flipped_bit_is_found(tmp_path: Path, data: Path, weights: Path) -> None:
    """The hash finds it in the weights."""
    path = bundle(tmp_path / "x.tar", data, weights)
    raw = bytearray(path.read_bytes())
    raw[raw.index((weights / "model.safetensors").read_bytes()[1000:1200])] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"model\.safetensors' does not match its hash"):
        open_bundle(path)


def test_a_missing_file_and_a_file_that_is_not_a_tar_are_named(tmp_path: Path) -> None:
    """The error has the path and the reason."""
    with pytest.raises(UserError, match=r"cannot open the bundle .*nothing\.tar: No such file"):
        open_bundle(tmp_path / "nothing.tar")
    (tmp_path / "page.tar").write_text("<html>not found</html>")
    with pytest.raises(UserError, match=r"page\.tar is damaged or not a bundle"):
        open_bundle(tmp_path / "page.tar")


def test_a_newer_bundle_asks_for_a_newer_mtbench(tmp_path: Path) -> None:
    """The error has the version that made it, and says to update."""
    path = pack(tmp_path / "x.tar", [(MANIFEST, manifest({}, schema_version=SCHEMA_VERSION + 1, mtbench="9.1"))])
    with pytest.raises(UserError, match=r"was made by mtbench 9\.1, .*; update mtbench"):
        open_bundle(path)


# --- On the command line ------------------------------------------------------------------------------------------


def request(**given: Any) -> RunRequest:
    """Return the request on a bundle for the given options."""
    return from_bundle(given.pop("bundle"), options.read(given, RunRequest, "mtbench run --help"))


def test_a_request_on_a_bundle_has_its_data_and_checkpoints(tmp_path: Path, data: Path, weights: Path) -> None:
    """A plan with the bundle equals a plan with the original files, except for their paths."""
    path = bundle(tmp_path / "x.tar", data, weights)
    bundled = make_plan(request(suite=["mt-bench"], bundle=path, offline=True, method=["ar", "mars"], max_new_tokens=8))
    original = RunRequest(
        suite=["mt-bench"],
        data_dir=str(data),
        offline=True,
        model=str(weights),
        checkpoint={"mars": str(weights)},
        method=["ar", "mars"],
        max_new_tokens=8,
    )

    assert bundled.suites == make_plan(original).suites
    assert {c.checkpoints["mars"] for c in bundled.cells if "mars" in c.checkpoints} == {bundled.request.model}


def test_named_checkpoints_replace_those_of_the_bundle(tmp_path: Path, data: Path, weights: Path) -> None:
    """One role's checkpoint, or all of them by a family, a model or random weights."""
    path = bundle(tmp_path / "x.tar", data, weights)
    unpacked = open_bundle(path)

    changed = request(bundle=path, checkpoint=["mars=./else"])
    assert changed.checkpoint == {"ar": unpacked.checkpoints["ar"], "mars": "./else"}
    for named in ({"family": "tiny"}, {"model": "./else"}, {"weights": "random:qwen2.5-7b"}):
        changed = request(bundle=path, **named)
        assert (changed.checkpoint, changed.data_dir) == ({}, str(unpacked.data_dir))
        assert {name: getattr(changed, name) for name in named} == named


def test_a_bundle_and_a_data_folder_are_refused_together(tmp_path: Path) -> None:
    """Both name the data."""
    with pytest.raises(UserError, match="--bundle and --data-dir both name the data"):
        request(bundle=tmp_path / "x.tar", data_dir=tmp_path)


def test_a_bundled_prompt_file_is_found_by_its_name(tmp_path: Path, data: Path) -> None:
    """An existing file at the given path has priority."""
    mine = tmp_path / "mine.jsonl"
    write_bundle(tmp_path / "x.tar", opened(f"prompts:{mine}"), None)
    assert request(bundle=tmp_path / "x.tar", suite=[f"prompts:{mine}"]).suite == [f"prompts:{mine}"]

    mine.rename(tmp_path / "away")
    bundled = open_bundle(tmp_path / "x.tar").data_dir / "prompts" / "mine.jsonl"
    for spec in (f"prompts:{mine}", "prompts:mine.jsonl"):
        assert request(bundle=tmp_path / "x.tar", suite=[spec]).suite == [f"prompts:{bundled}"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mtbench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_plan_uses_a_bundle_of_fetch(
    tmp_path: Path, data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The original files are deleted in between; the last line that `fetch` prints is the bundle's path."""
    path = tmp_path / "x.tar"
    mine = tmp_path / "small"
    shutil.copytree(weights, mine)
    fetch = ["fetch", "--suite", "mt-bench", "--model", str(mine), "--data-dir", str(data), "--offline"]
    assert run(monkeypatch, *fetch, "--bundle", str(path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    shutil.rmtree(mine)
    shutil.rmtree(data)

    plan_options = ["--suite", "mt-bench", "--method", "ar", "--max-new-tokens", "4", "--batch-size", "2"]
    assert run(monkeypatch, "plan", "--bundle", str(path), "--offline", *plan_options, "-o", str(tmp_path / "run")) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [item["item"] for item in plan["suites"][0]["items"]][:2] == ["math/0/0", "math/0/1"]
    assert plan["suites"][0]["family"] == "small"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--suite", "mt-bench", "--suite", "arithmetic"], "use different checkpoints by default"),
        (["--suite", "arithmetic", "--role", "ar", "--no-checkpoints"], "give one of them"),
        (["--suite", "arithmetic", "--role", "nobody"], "has no checkpoint in the role 'nobody'"),
        (["--suite", "arithmetic", "--checkpoint", "here"], "give ROLE=PATH_OR_ID"),
        (["--suite", "arithmetics"], "did you mean 'arithmetic'"),
    ],
)
def test_fetch_refuses_in_one_line(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with the value, the choices and a remedy; exit code 2; no file."""
    path = tmp_path / "x.tar"
    assert run(monkeypatch, "fetch", *arguments, "--data-dir", str(data), "--offline", "--bundle", str(path)) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert not path.exists()
