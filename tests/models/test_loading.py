"""Which checkpoints load, which are rejected, and what is read from them."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import PROMPTS, ar, run
from small import END, MASK, VOCABULARY, save_small, small_checkpoint, small_config, small_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    MambaConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.models import loading
from mtbench.models.architectures import attention_of
from mtbench.models.attention import AttentionMetadata, windowed_attention
from mtbench.models.configuration import refuse_unserved
from mtbench.models.families import EMBEDDED, RANDOM, SHAPES, existing, family
from mtbench.models.loading import Checkpoint, Inspected, inspect, load, prepare
from mtbench.models.runner import ModelRunner


@pytest.mark.parametrize(
    ("rope", "name"), [({"rope_type": "dynamic", "factor": 2.0}, "dynamic"), ({"rope_type": "longrope"}, "longrope")]
)
def test_rope_types_that_depend_on_the_batch_are_rejected(rope: dict[str, object], name: str) -> None:
    """The angles of `dynamic` and `longrope` depend on the longest row, so rows would not be independent."""
    config = small_config()
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    with pytest.raises(UserError, match=f"uses rope type {name}"):
        refuse_unserved(config, "somewhere")


@pytest.mark.parametrize(
    ("config", "name"), [(MambaConfig(), "mamba"), (Qwen3NextConfig(num_hidden_layers=4), "linear_attention")]
)
def test_recurrent_layers_are_rejected(config: object, name: str) -> None:
    """A recurrent state cannot undo a rejected draft token."""
    with pytest.raises(UserError, match=name):
        refuse_unserved(config, "somewhere")


def test_a_released_mars_checkpoint_is_read_as_qwen2(tmp_path: Path) -> None:
    """`a2d-qwen2` is Qwen2 under another name; its remote code is not loaded."""
    path = save_small(tmp_path / "mars")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "a2d-qwen2", "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "architectures": ["A2D"]}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = load(str(path))
    assert isinstance(checkpoint.model.config, Qwen2Config)
    assert checkpoint.mask_id == MASK


def test_a_released_self_distilled_checkpoint_feeds_its_own_mask(tmp_path: Path) -> None:
    """Its tokenizer names no mask token, and padding rows of its embedding would be taken for one."""
    path = save_small(tmp_path / "mtp-lm", vocab_size=128)
    config = json.loads((path / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        (path / name).write_text(text.replace("<|mask|>", "<|mtp_special_token_0|>"))
    assert inspect(str(path), needs_mask=True).mask_id == load(str(path)).mask_id == MASK


def test_a_configuration_without_a_longest_sequence_allows_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned or loaded; a configuration of several models may have it in that of its text model."""
    model = small_checkpoint().model
    monkeypatch.setattr(loading, "refuse_unserved", lambda *_: None)  # these two make a model of the configuration,
    monkeypatch.setattr(loading, "attention_of", lambda _: ("eager", None))  # and Qwen2's must have the entry
    for text, longest in ((None, 1 << 30), (small_config(), 256)):
        vars(model.config).update(max_position_embeddings=None, text_config=text)
        loaded = prepare(model, small_tokenizer(), source="folder")
        planned = Inspected("folder", loaded.tokenizer, model.config, None, (), offline=True)
        assert loaded.max_positions == planned.max_positions == longest


def test_suppressed_ids_and_end_tokens(tmp_path: Path) -> None:
    """The mask and ids without a token are suppressed; end tokens are the tokenizer's and the generation settings'."""
    path = save_small(tmp_path / "model")
    generation = {"eos_token_id": [END, 7], "repetition_penalty": 1.1, "temperature": 0.7, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load(str(path))
    assert checkpoint.suppressed.tolist() == [MASK, VOCABULARY - 1]
    assert checkpoint.end_ids == (7, END)


@pytest.mark.parametrize(
    ("config", "generation", "ends", "flags"),
    [
        ({}, {"eos_token_id": -1}, (END,), ["end id -1 of generation_config.json has no row: ignored"]),
        ({"eos_token_id": [7, 100]}, None, (7, END), ["end id 100 of config.json has no row: ignored"]),
        (
            {"vocab_size": END},
            {"eos_token_id": [END + 1]},
            (),
            [
                f"end id {i} of {source} has no row: ignored; no other is left, so no token ends an answer"
                for i, source in ((END, "the tokenizer"), (END + 1, "generation_config.json"))
            ],
        ),
        ({"pad_token_id": 100, "bos_token_id": 100}, {"eos_token_id": 7, "pad_token_id": 100}, (7, END), []),
    ],
)
def test_an_id_that_no_row_has_is_ignored(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[int, ...], flags: list[str], tmp_path: Path
) -> None:
    """As `generate` of transformers ignores an end id that is never emitted; a plan says so, and the model decodes."""
    path = save_small(tmp_path / "model", pad_token_id=None, vocab_size=config.get("vocab_size", VOCABULARY))
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "eos_token_id": 7, **config}))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    inspected = inspect(str(path))
    assert (inspected.end_ids, list(inspected.flags)) == (ends, flags)
    checkpoint = load(str(path))
    assert checkpoint.end_ids == ends
    assert run(ar(), ModelRunner(checkpoint), [[1, 2]], budget=4)


@pytest.mark.parametrize("ends", ["2", 2.0, True, [[2]], [2, None, "x"]])
def test_an_end_token_that_is_no_id_is_refused(ends: Any, tmp_path: Path) -> None:
    path = save_small(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match=r"have the end token .*, which is no token id; give another"):
        inspect(str(path))


def test_a_tokenizer_without_a_mask_gets_the_next_free_id(tmp_path: Path) -> None:
    """For example Qwen2.5: the id after its last token is an unused embedding row."""
    path = save_small(tmp_path / "model")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|mask|>"]
    del tokenizer["model"]["vocab"]["<|mask|>"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in settings.items() if "extra" not in k and "added" not in k}
    (path / "tokenizer_config.json").write_text(json.dumps(kept))
    assert inspect(str(path), needs_mask=True).mask_id == MASK


def test_a_role_of_a_family_can_be_replaced(tmp_path: Path) -> None:
    """`--checkpoint` replaces a role; the published training options no longer apply."""
    path = str(save_small(tmp_path / "mine"))
    mine = family("qwen2.5-0.5b", checkpoints={"mars": path})
    assert (mine.checkpoint("mars"), mine.training("mars")) == (path, {})
    assert family("qwen2.5-0.5b").training("mars") == {"block_size": 4}
    assert family("qwen2.5-0.5b", model=path).roles == {"ar": path}


def test_a_checkpoint_of_a_family_is_named_by_its_role() -> None:
    """FAMILY:ROLE, as base of a training or in a role of a run. What names nothing gets what names one."""
    assert existing("tiny:mars") == f"{EMBEDDED}mars"
    assert family("qwen2.5-0.5b", checkpoints={"ar": "tiny:ar"}).checkpoint("ar") == f"{EMBEDDED}ar"
    with pytest.raises(UserError, match="'tiny' has no checkpoint in the role 'marz'; it has: ar"):
        existing("tiny:marz")
    with pytest.raises(UserError, match=r"'tiny' does not exist; give a folder, a GGUF file, a hub id .*tiny:ar"):
        existing("tiny")


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    """Exactly the published number, counted without allocating weights."""
    model = load(RANDOM + name, dtype=torch.bfloat16, device="meta").model
    assert model.num_parameters() == PUBLISHED[name]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("shape", [EMBEDDED + "ar", "folder"])
def test_random_weights_take_only_the_shape_of_a_checkpoint(shape: str, tmp_path: Path) -> None:
    """The weights are reproducible and not the folder's; only the mask is suppressed, and no id ends an answer."""
    save_small(tmp_path / "folder")
    config = json.loads((tmp_path / "folder/config.json").read_text()) | {"vocab_size": 600}
    (tmp_path / "folder/config.json").write_text(json.dumps(config))
    source = RANDOM + shape.replace("folder", str(tmp_path / "folder"))
    state = torch.random.get_rng_state()
    first, second = load(source), load(source)
    weight = first.model.get_input_embeddings().weight
    assert weight.equal(second.model.get_input_embeddings().weight)
    assert weight.std().item() == pytest.approx(first.model.config.initializer_range, rel=0.05)
    assert torch.random.get_rng_state().equal(state)
    assert first.suppressed.tolist() == [first.mask_id]
    assert first.end_ids == ()


def test_an_error_on_a_checkpoint_names_no_option(tmp_path: Path) -> None:
    """Each command has its own: `--model`, `--base`, `--weights`."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no usable configuration: .*Give another checkpoint\.$"):
        inspect(f"random:{tmp_path}")


def test_an_encoder_is_called_one() -> None:
    config = AutoConfig.for_model("bert")
    with pytest.raises(UserError, match=r"'mine' \(bert\) is an encoder, which continues no text; give a decoder"):
        refuse_unserved(config, "mine")
    config.is_decoder = True
    refuse_unserved(config, "mine")


def test_a_shape_with_fewer_ids_than_the_tokenizer_is_rejected(tmp_path: Path) -> None:
    """Prompts are tokenised by the embedded tokenizer, and the shape must have all of its ids."""
    with pytest.raises(UserError, match="has 40 ids, fewer than the"):
        inspect(f"random:{save_small(tmp_path / 'small')}")


# --- Architectures: their tokens are those of `generate`, or they are refused while planning --------------------------

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Their classes have no SDPA.
    "bloom": {},
    "codegen": {**GPT, "n_ctx": 256, "rotary_dim": 4},
    "gemma2": {"head_dim": 16, "sliding_window": 6},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "rope_parameters": None,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "local"], 1]], "window_size": 6},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite_swa": {"sliding_window": 6},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "openai-gpt": GPT,
    "vaultgemma": {"head_dim": 16, "sliding_window": 6},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32},
    # Their attention drops keyword arguments, asks the cache for more, or changes its mask.
    "afmoe": {"head_dim": 8, "sliding_window": 6, **EXPERTS, "num_local_experts": 4},
    "doge": {"keep_window_size": 4},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "nemotron": {"partial_rotary_factor": 0.5},
    "stablelm": {},
    # Learned positions, parallel layers, biases, no positions in some layers, latent attention, one key head.
    "bert": {},
    "cohere2": {"sliding_window": 6, "head_dim": 8},
    "deepseek_v3": LATENT | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "olmo2": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "phi": {"partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "starcoder2": {"sliding_window": 6},
}
DECODED, REFUSED = "these answer as transformers' `generate` does: ", "Refused while planning: "
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ALWAYS = ("bloom", "doge", "gemma2", "gemma4_text", "gpt_oss", "stablelm")


def generated(checkpoint: Checkpoint, prompt: list[int]) -> list[int]:
    """The greedy tokens of transformers' `generate`, by the class's own attention and cache."""
    model = copy.deepcopy(checkpoint.model)
    for module in model.modules():
        module._forward_hooks.clear()
    model.set_attn_implementation("eager")
    how = {"eos_token_id": list(checkpoint.end_ids), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 16}
    model.generation_config = GenerationConfig(**how, suppress_tokens=checkpoint.suppressed.tolist())
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()
    return tokens


def decodes(name: str) -> bool:
    """Whether an architecture is decoded, as `generate` does, or refused in one line by its configuration alone."""
    config = AutoConfig.for_model(**small_config().to_diff_dict() | ARCHITECTURES[name] | {"model_type": name})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if attention_of(config)[0] is None:
        with pytest.raises(UserError, match=rf"^checkpoint 'folder' \({name}\) cannot be decoded exactly: [^\n]*$"):
            refuse_unserved(config, "folder")
        return False
    checkpoint = prepare(model, small_tokenizer(), source="folder")
    expected = [generated(checkpoint, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for method, engine in (("ar", "eager"), ("prompt-lookup", "graph")):
        runner = ENGINES[engine]().runner(checkpoint)
        answers = run(METHODS[method](), runner, PROMPTS, 16, rows=2)
        assert [list(answer.token_ids) for answer in answers] == expected, (name, method, engine)
    return True


def listed(sentence: str) -> list[str]:
    """The names that docs/troubleshooting.md lists behind the words of a sentence."""
    text = " ".join(PAGE.read_text().split())
    return re.findall(r"`([\w-]+)`", text.partition(sentence)[2].partition(". ")[0])


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES])
def test_an_architecture_decodes_as_generate_does_or_is_refused_as_documented(name: str) -> None:
    """Plain and with drafts, rows of different lengths, in both engines; docs/troubleshooting.md says which."""
    assert sorted(listed(DECODED) + listed(REFUSED)) == sorted(ARCHITECTURES)
    assert name in listed(DECODED if decodes(name) else REFUSED)


def test_what_attention_would_swallow_is_refused() -> None:
    """Sinks, or a bias of a class's own: a keyword with numbers that our attention does not compute with."""
    query, slots = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, dtype=torch.long)
    sees = AttentionMetadata(slots, slots, slots[0], 1)
    with pytest.raises(TypeError, match="takes no 's_aux'"):
        windowed_attention(torch.nn.Identity(), query, query, query, None, metadata=sees, s_aux=torch.ones(1))
