"""Bundles: what is carried comes out as it went in, or not at all; and a run on one is a run on what was carried."""

import hashlib
import inspect
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small import save_small

from mtbench.cli import main
from mtbench.cli.request_options import options, request_of
from mtbench.errors import UserError
from mtbench.evaluation.suite import Suite
from mtbench.models import families
from mtbench.models.families import FAMILIES, RECORD, Family
from mtbench.runs.bundle import LIST, SCHEMA_VERSION, open_bundle, write_bundle
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.prompts import open_suite

QUESTIONS = [{"question_id": n, "category": "math", "turns": [f"a b {w}", "c d"]} for n, w in enumerate("efg")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as they lie about: with pickles, notes and folders beside what is needed."""
    folder = save_small(tmp_path_factory.mktemp("checkpoints") / "small", 1)
    (folder / "optimizer.pt").write_bytes(b"pickled")
    (folder / "notes.md").write_text("mine")
    (folder / "runs").mkdir()
    (folder / "runs" / "log.json").write_text("{}")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "mt_bench" / "question.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Why?"}\n')
    return tmp_path / "data"


def opened(*specs: str, data_dir: Path | None = None) -> dict[str, Suite]:
    asked = RunRequest(suite=list(specs), data_dir=None if data_dir is None else str(data_dir), offline=True)
    return {spec: open_suite(spec, asked) for spec in specs}


def bundle(path: Path, data: Path, weights: Path) -> Path:
    """Two suites, one checkpoint in two roles."""
    family = Family("small", {"ar": str(weights), "mars": str(weights)})
    write_bundle(path, opened("mt-bench", "arithmetic", data_dir=data), family, family.roles)
    return path


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def pack(path: Path, members: Sequence[tuple[str, bytes]], links: Sequence[tuple[str, str]] = ()) -> Path:
    """A tar as anyone can make one."""
    with tarfile.open(path, "w") as tar:
        for name, inside in members:
            info = tarfile.TarInfo(name)
            info.size = len(inside)
            tar.addfile(info, io.BytesIO(inside))
        for name, where in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, where
            tar.addfile(info)
    return path


def listing(inside: dict[str, bytes], **changes: Any) -> bytes:
    entries = {name: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in inside.items()}
    listed = {"schema_version": SCHEMA_VERSION, "mtbench": "0", "suites": [], "family": None, "model": None}
    return json.dumps({**listed, "checkpoints": {}, "files": entries, **changes}).encode()


# --- There and back -----------------------------------------------------------------------------------------------


def test_what_is_opened_is_what_was_carried(tmp_path: Path, data: Path, weights: Path) -> None:
    """Data in the layout of a data folder; of a checkpoint what runs no code and is needed, once for both roles."""
    there = open_bundle(bundle(tmp_path / "x.tar", data, weights))

    assert (there.data_dir / "mt_bench/question.jsonl").read_bytes() == (data / "mt_bench/question.jsonl").read_bytes()
    assert there.checkpoints["ar"] == there.checkpoints["mars"] == there.model
    carried = {path.name for path in Path(there.checkpoints["ar"]).iterdir()}
    assert {path.name for path in weights.iterdir()} - carried == {"optimizer.pt", "notes.md", "runs"}
    for name in carried:
        assert (Path(there.checkpoints["ar"]) / name).read_bytes() == (weights / name).read_bytes()
    assert (there.family, Path(there.checkpoints["ar"]).name) == (None, "small")


def test_the_same_content_is_the_same_bundle(tmp_path: Path, data: Path, weights: Path) -> None:
    """Byte for byte, whenever it is made; and it is opened into the same folder."""
    one, two = (bundle(tmp_path / name, data, weights) for name in ("one.tar", "two.tar"))

    assert one.read_bytes() == two.read_bytes()
    assert open_bundle(one) == open_bundle(two)
    assert len(list((tmp_path / "cache/mtbench/bundles").iterdir())) == 1


def test_what_was_opened_is_used_again_and_mended(tmp_path: Path, data: Path, weights: Path) -> None:
    """A second opening writes nothing; a file that is cut or gone since is taken from the bundle again."""
    path = bundle(tmp_path / "x.tar", data, weights)
    kept = open_bundle(path).data_dir / "mt_bench/question.jsonl"
    before = kept.stat().st_mtime_ns
    open_bundle(path)
    assert kept.stat().st_mtime_ns == before

    whole = kept.read_bytes()
    kept.write_bytes(whole[:-9])
    open_bundle(path)
    assert kept.read_bytes() == whole
    shutil.rmtree(kept.parent)
    open_bundle(path)
    assert kept.read_bytes() == whole


def test_what_is_known_of_a_released_checkpoint_goes_along(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks of 4, which are known by its name alone, are those of the folder; the family keeps its name."""
    shutil.copytree(weights, tmp_path / "blk4")
    known = Family("known", {"ar": str(weights), "mars": str(tmp_path / "blk4")}, {"mars": {"block_size": 4}})
    monkeypatch.setattr(families, "FAMILIES", {"known": known})
    monkeypatch.setattr("mtbench.runs.bundle.FAMILIES", {"known": known})
    write_bundle(tmp_path / "x.tar", {}, known, known.roles)
    there = open_bundle(tmp_path / "x.tar")

    assert (there.family, there.model) == ("known", None)
    assert families.family("known", checkpoints=there.checkpoints).training("mars") == {"block_size": 4}
    assert not (tmp_path / "blk4" / RECORD).exists()


@pytest.fixture
def hub(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one checkpoint in it, `owner/small`, as its client lays it out: links to blobs."""
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


def test_a_checkpoint_of_the_hub_is_carried_as_files(tmp_path: Path, hub: Path) -> None:
    """Not as links; by its own name."""
    write_bundle(tmp_path / "x.tar", {}, Family("mine", {"ar": "owner/small"}), ["ar"], offline=True)
    (folder,) = open_bundle(tmp_path / "x.tar").checkpoints.values()

    assert Path(folder).name == "small"
    weights = Path(folder) / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (hub / "model.safetensors").read_bytes()
    assert not (Path(folder) / "optimizer.pt").exists()


def test_a_checkpoint_that_cannot_be_had_says_what_to_do(tmp_path: Path, hub: Path) -> None:
    """In one line."""
    with pytest.raises(UserError, match=r"^'owner/other' is not in the local cache [^\n]*`--no-checkpoints`\.$"):
        write_bundle(tmp_path / "x.tar", {}, Family("mine", {"ar": "owner/other"}), ["ar"], offline=True)


def test_embedded_and_random_checkpoints_are_not_carried(tmp_path: Path) -> None:
    """The other machine's mtbench has them; the family's name is enough."""
    write_bundle(tmp_path / "x.tar", opened("arithmetic"), FAMILIES["tiny"], FAMILIES["tiny"].roles)

    assert list(contents(tmp_path / "x.tar")) == [LIST]
    there = open_bundle(tmp_path / "x.tar")
    assert (there.family, there.model, there.checkpoints) == ("tiny", None, {})
    assert there.data_dir.is_dir()


def test_a_checkpoint_without_safetensors_is_refused_before_it_is_carried(tmp_path: Path, weights: Path) -> None:
    """The machine it would be carried to could not use it. Nothing is left behind."""
    folder = tmp_path / "pickled"
    shutil.copytree(weights, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="pickled weights only"):
        write_bundle(tmp_path / "out" / "x.tar", {}, Family("mine", {"ar": str(folder)}), ["ar"])

    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    """Whatever it is."""
    (tmp_path / "x.tar").write_text("mine")
    with pytest.raises(UserError, match=r"x\.tar' exists and is never overwritten"):
        write_bundle(tmp_path / "x.tar", opened("arithmetic"), None)

    assert (tmp_path / "x.tar").read_text() == "mine"


def test_a_suite_that_says_nothing_of_its_data_is_refused(tmp_path: Path) -> None:
    """A bundle that lacks what a run needs would be found out too late."""

    class Silent(Suite):
        name = "silent"

        def __init__(self) -> None: ...

    with pytest.raises(UserError, match="suite 'silent' does not say how its data are carried"):
        write_bundle(tmp_path / "x.tar", {"silent": Silent()}, None)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """One would stand for both."""
    for folder, text in (("a", "Why?"), ("b", "How?")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    with pytest.raises(UserError, match=r"two files are called mine\.jsonl"):
        write_bundle(tmp_path / "x.tar", opened(*(f"prompts:{tmp_path}/{f}/mine.jsonl" for f in "ab")), None)


# --- What is no bundle --------------------------------------------------------------------------------------------

FINE = {"data/a/b.jsonl": b"{}\n"}


def test_the_forgery_would_be_taken_if_it_were_none(tmp_path: Path) -> None:
    """What the cases below start from is a bundle."""
    path = pack(tmp_path / "x.tar", [(LIST, listing(FINE)), *FINE.items()])

    assert (open_bundle(path).data_dir / "a/b.jsonl").read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("members", "links", "reason"),
    [
        ([], [], r"bundle\.json: JSONDecodeError"),
        ([*FINE.items(), (LIST, listing(FINE))], [], r"bundle\.json: JSONDecodeError"),
        ([(LIST, b"[]")], [], "TypeError"),
        ([(LIST, b"{}")], [], "KeyError: 'schema_version'"),
        ([(LIST, listing(FINE, schema_version="1"))], [], "'schema_version' is no whole number"),
        ([(LIST, listing(FINE))], [], r"'data/a/b\.jsonl' is missing"),
        ([(LIST, listing(FINE)), ("data/a/b.jsonl", b"[]\n")], [], r"'data/a/b\.jsonl' has another hash"),
        ([(LIST, listing(FINE)), *FINE.items(), *FINE.items()], [], "is not what was put in"),
        ([(LIST, listing(FINE)), *FINE.items(), ("data/more", b"")], [], "'data/more' is not what was put in"),
        ([(LIST, listing(FINE)), ("../../a", b"")], [], r"'\.\./\.\./a' is not what was put in"),
        ([(LIST, listing(FINE))], [("data/a/b.jsonl", "/etc/passwd")], "is not what was put in"),
        ([(LIST, listing(FINE))], [("data/a", "/tmp")], "'data/a' is not what was put in"),
        ([(LIST, listing({"data/../../a": b""}))], [], "leads elsewhere"),
        ([(LIST, listing({"/etc/a": b""}))], [], "'/etc/a' leads elsewhere"),
        ([(LIST, listing({"data//a": b""}))], [], "leads elsewhere"),
        ([(LIST, listing({"data": b""}))], [], "'data' leads elsewhere"),
        ([(LIST, listing({"elsewhere/a": b""}))], [], "leads elsewhere"),
        ([(LIST, listing({}, checkpoints={"ar": "../../models"}))], [], "leads elsewhere"),
        ([(LIST, listing({}, model="/models"))], [], "leads elsewhere"),
        ([(LIST, listing({}, family="nobody's"))], [], 'family "nobody\'s" is none of'),
        ([(LIST, listing({}, files={"data/a": 3}))], [], "TypeError"),
    ],
    ids=[
        *("empty", "list not first", "list", "no keys", "version", "missing", "hash", "twice", "more", "outside"),
        *("link", "linked folder", "up", "absolute", "slashes", "folder", "elsewhere", "checkpoint", "model"),
        *("family", "entry"),
    ],
)
def test_what_is_no_bundle_is_refused_and_leaves_nothing(
    members: list[Any], links: list[Any], reason: str, tmp_path: Path
) -> None:
    """One line that names the file; no file is written, in the cache or out of it."""
    path = pack(tmp_path / "x.tar", members, links)
    with pytest.raises(UserError, match=reason) as caught:
        open_bundle(path)

    assert str(caught.value).startswith(f"{path} is damaged, or no bundle (")
    assert "\n" not in str(caught.value)
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_bundle_that_was_cut_is_refused(share: float, tmp_path: Path, data: Path, weights: Path) -> None:
    """As by a copy that was broken off; nothing of it is used."""
    path = bundle(tmp_path / "x.tar", data, weights)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="is damaged, or no bundle"):
        open_bundle(path)

    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_one_flipped_bit_is_found(tmp_path: Path, data: Path, weights: Path) -> None:
    """In the weights, which nothing else would notice."""
    path = bundle(tmp_path / "x.tar", data, weights)
    raw = bytearray(path.read_bytes())
    raw[raw.index((weights / "model.safetensors").read_bytes()[1000:1200])] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"model\.safetensors' has another hash"):
        open_bundle(path)


def test_a_file_that_is_not_there_or_no_tar_is_named(tmp_path: Path) -> None:
    """In one line."""
    with pytest.raises(UserError, match=r"cannot open the bundle .*nothing\.tar: No such file"):
        open_bundle(tmp_path / "nothing.tar")
    (tmp_path / "page.tar").write_text("<html>not found</html>")
    with pytest.raises(UserError, match=r"page\.tar is damaged, or no bundle"):
        open_bundle(tmp_path / "page.tar")


def test_a_newer_bundle_asks_for_a_newer_mtbench(tmp_path: Path) -> None:
    """Who made it, and what to do."""
    path = pack(tmp_path / "x.tar", [(LIST, listing({}, schema_version=SCHEMA_VERSION + 1, mtbench="9.1"))])
    with pytest.raises(UserError, match=r"was made by mtbench 9\.1, .*; update mtbench"):
        open_bundle(path)


# --- On the command line ------------------------------------------------------------------------------------------


def ask(**said: Any) -> RunRequest:
    """A request as the command line makes it."""
    defaults = {name: p.default for name, p in inspect.signature(options).parameters.items()}
    return request_of({**defaults, **said})


def test_a_request_on_a_bundle_has_its_data_and_checkpoints(tmp_path: Path, data: Path, weights: Path) -> None:
    """Plans alike, but for where things lie, with what was carried and with what it was carried from."""
    path = bundle(tmp_path / "x.tar", data, weights)
    carried = make_plan(ask(suite=["mt-bench"], bundle=path, offline=True, method=["ar", "mars"], max_new_tokens=8))
    own = RunRequest(
        suite=["mt-bench"],
        data_dir=str(data),
        offline=True,
        model=str(weights),
        checkpoint={"mars": str(weights)},
        method=["ar", "mars"],
        max_new_tokens=8,
    )

    assert carried.suites == make_plan(own).suites
    assert {c.checkpoints["mars"] for c in carried.cells if "mars" in c.checkpoints} == {carried.request.model}


def test_checkpoints_named_beside_a_bundle_come_first(tmp_path: Path, data: Path, weights: Path) -> None:
    """A role's; or all, by another family or model."""
    path = bundle(tmp_path / "x.tar", data, weights)
    there = open_bundle(path)

    asked = ask(bundle=path, checkpoint=["mars=./else"])
    assert asked.checkpoint == {"ar": there.checkpoints["ar"], "mars": "./else"}
    for named in ({"family": "tiny"}, {"model": "./else"}, {"weights": "random:qwen2.5-7b"}):
        asked = ask(bundle=path, **named)
        assert (asked.checkpoint, asked.data_dir) == ({}, str(there.data_dir))
        assert {name: getattr(asked, name) for name in named} == named


def test_a_bundle_and_a_data_folder_are_refused_together(tmp_path: Path) -> None:
    """They say the same thing."""
    with pytest.raises(UserError, match="--bundle and --data-dir both name the data"):
        ask(bundle=tmp_path / "x.tar", data_dir=tmp_path)


def test_files_of_prompts_are_found_where_they_were_carried_to(tmp_path: Path, data: Path) -> None:
    """By the name they had; a file that is here is taken instead."""
    mine = tmp_path / "mine.jsonl"
    write_bundle(tmp_path / "x.tar", opened(f"prompts:{mine}"), None)
    assert ask(bundle=tmp_path / "x.tar", suite=[f"prompts:{mine}"]).suite == [f"prompts:{mine}"]

    mine.rename(tmp_path / "away")
    there = open_bundle(tmp_path / "x.tar").data_dir / "prompts" / "mine.jsonl"
    for spec in (f"prompts:{mine}", "prompts:mine.jsonl"):
        assert ask(bundle=tmp_path / "x.tar", suite=[spec]).suite == [f"prompts:{there}"]


def run(monkeypatch: pytest.MonkeyPatch, *said: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mtbench", *said])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_fetch_makes_what_run_takes(
    tmp_path: Path, data: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one command to the other, with the sources gone in between; the last line is the bundle's path."""
    path = tmp_path / "x.tar"
    mine = tmp_path / "small"
    shutil.copytree(weights, mine)
    fetch = ["fetch", "--suite", "mt-bench", "--model", str(mine), "--data-dir", str(data), "--offline"]
    assert run(monkeypatch, *fetch, "--bundle", str(path)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(path)
    shutil.rmtree(mine)
    shutil.rmtree(data)

    wanted = ["--suite", "mt-bench", "--method", "ar", "--max-new-tokens", "4", "--batch-size", "2"]
    assert run(monkeypatch, "plan", "--bundle", str(path), "--offline", *wanted, "-o", str(tmp_path / "run")) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert [item["item"] for item in plan["suites"][0]["items"]][:2] == ["math/0/0", "math/0/1"]
    assert plan["suites"][0]["family"] == "small"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["--suite", "mt-bench", "--suite", "arithmetic"], "use different checkpoints by default"),
        (["--suite", "arithmetic", "--role", "ar", "--no-checkpoints"], "give one of them"),
        (["--suite", "arithmetic", "--role", "nobody"], "has no checkpoint in the role 'nobody'"),
        (["--suite", "arithmetic", "--checkpoint", "here"], "is not ROLE=PATH_OR_ID"),
        (["--suite", "arithmetics"], "did you mean 'arithmetic'"),
    ],
)
def test_fetch_refuses_in_one_line(
    said: list[str],
    reason: str,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The value, the choices, what to do; exit code 2, and no file."""
    path = tmp_path / "x.tar"
    assert run(monkeypatch, "fetch", *said, "--data-dir", str(data), "--offline", "--bundle", str(path)) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint
    assert complaint.count("\n") == 1
    assert not path.exists()
