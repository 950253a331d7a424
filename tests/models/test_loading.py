"""What a checkpoint must be to be served, and what is taken from it."""

import json
from pathlib import Path

import pytest
import torch
from decoding_cases import ar, run
from small import END, MASK, VOCABULARY, save_small, small_config
from torch import Tensor
from transformers import LlamaConfig, MambaConfig, Qwen2Config, Qwen3NextConfig

from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.families import EMBEDDED, RANDOM, family
from mtbench.models.loading import inspect, load, refuse_unserved
from mtbench.models.random_shapes import SHAPES
from mtbench.models.runner import Forwarded, ModelRunner


@pytest.mark.parametrize(
    ("rope", "name"), [({"rope_type": "dynamic", "factor": 2.0}, "dynamic"), ({"rope_type": "longrope"}, "longrope")]
)
def test_rope_that_depends_on_the_batch_is_refused_by_name(rope: dict[str, object], name: str) -> None:
    """`dynamic` and `longrope` change with the longest row, so a row would depend on its neighbours."""
    config = small_config()
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    with pytest.raises(UserError, match=f"uses rope type {name}"):
        refuse_unserved(config, "somewhere")


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_other_rope_types_are_served(rope: str) -> None:
    """Their angles depend on the position alone."""
    config = small_config()
    config.rope_parameters = {"rope_theta": 10000.0, "rope_type": rope}
    refuse_unserved(config, "somewhere")


@pytest.mark.parametrize(
    ("config", "name"), [(MambaConfig(), "mamba"), (Qwen3NextConfig(num_hidden_layers=4), "linear_attention")]
)
def test_layers_that_cannot_rewind_are_refused_by_name(config: object, name: str) -> None:
    """A recurrent state cannot take back a rejected guess."""
    with pytest.raises(UserError, match=name):
        refuse_unserved(config, "somewhere")


def test_a_released_mars_checkpoint_is_read_as_qwen2(tmp_path: Path) -> None:
    """`a2d-qwen2` is Qwen2 under another name; no remote code is asked for."""
    path = save_small(tmp_path / "mars")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "a2d-qwen2", "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "architectures": ["A2D"]}
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = load(str(path))
    assert isinstance(checkpoint.model.config, Qwen2Config)
    assert checkpoint.mask_id == MASK


def test_what_no_arm_may_emit(tmp_path: Path) -> None:
    """The mask and the rows no token stands for are suppressed; end tokens are the tokenizer's and the config's."""
    path = save_small(tmp_path / "model")
    generation = {"eos_token_id": [END, 7], "repetition_penalty": 1.1, "temperature": 0.7, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load(str(path))
    assert checkpoint.suppressed.tolist() == [MASK, VOCABULARY - 1]
    assert checkpoint.end_ids == (7, END)


def test_a_tokenizer_without_a_mask_gets_the_next_free_id(tmp_path: Path) -> None:
    """As Qwen2.5: the id after its last token is an unused row of the embedding."""
    path = save_small(tmp_path / "model")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|mask|>"]
    del tokenizer["model"]["vocab"]["<|mask|>"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    kept = {k: v for k, v in settings.items() if "extra" not in k and "added" not in k}
    (path / "tokenizer_config.json").write_text(json.dumps(kept))
    assert inspect(str(path), needs_mask=True).mask_id == MASK


def test_a_family_takes_one_role_from_elsewhere(tmp_path: Path) -> None:
    """`--checkpoint` overrides a role and forgets how the published one was trained."""
    path = str(save_small(tmp_path / "mine"))
    mine = family("qwen2.5-0.5b", checkpoints={"mars": path})
    assert (mine.checkpoint("mars"), mine.training("mars")) == (path, {})
    assert family("qwen2.5-0.5b").training("mars") == {"block_size": 4}
    assert family("qwen2.5-0.5b", model=path).roles == {"ar": path}


def test_an_architecture_of_another_house_loads_from_disk(tmp_path: Path) -> None:
    """A Llama checkpoint is served like any other, in the type asked for."""
    from small import small_tokenizer
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(small_config(LlamaConfig)).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert load(str(tmp_path), dtype=torch.bfloat16).model.dtype == torch.bfloat16


PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_its_model_has(name: str) -> None:
    """To the last one, as published; nothing is made to find that out."""
    model = load(RANDOM + name, dtype=torch.bfloat16, device="meta").model
    assert model.num_parameters() == PUBLISHED[name]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("shape", [EMBEDDED + "ar", "folder"])
def test_random_weights_take_a_checkpoints_shape_and_nothing_else(shape: str, tmp_path: Path) -> None:
    """Always the same weights, none of the folder's; the mask alone is never said, and no id ends an answer."""
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


def test_random_weights_decode_in_bfloat16_and_what_they_say_has_a_text() -> None:
    """Every step has finite logits to choose from; ids that the borrowed tokenizer does not know are no words."""
    checkpoint = load(f"{RANDOM}{EMBEDDED}ar", dtype=torch.bfloat16)

    class Watched(ModelRunner):
        def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int, *, hidden: bool = False) -> Forwarded:
            out = super().forward(ids, metadata, judged, hidden=hidden)
            assert out.logits.isfinite().sum(-1).eq(checkpoint.vocabulary - 1).all()
            return out

    generations = run(ar(), Watched(checkpoint), [[30, 40, 50], [60]], 12)
    assert [len(g.token_ids) for g in generations] == [12, 12]
    unknown = checkpoint.vocabulary - 1
    assert unknown not in checkpoint.tokenizer.get_vocab().values()
    assert checkpoint.tokenizer.decode([unknown, 10**6]) == ""


def test_random_weights_fill_every_role(tmp_path: Path) -> None:
    """Whatever a method asks for; each role may have a shape of its own; a folder is known by its absolute path."""
    all_random = family("", weights="random:qwen2.5-7b", roles=("ar", "mars"))
    assert set(all_random.roles.values()) == {"random:qwen2.5-7b"}
    mixed = {"ar": "random:qwen2.5-7b", "draft": "random:qwen2.5-0.5b"}
    assert family("tiny", checkpoints=mixed).roles.items() >= mixed.items()
    save_small(tmp_path)
    assert family("", weights=f"random:{tmp_path}/../{tmp_path.name}", roles=("ar",)).roles == {
        "ar": f"random:{tmp_path}"
    }


@pytest.mark.parametrize("config", ["{", "{}", "[]", '{"model_type": "qwen2", "hidden_size": "many"}'])
def test_a_broken_shape_is_answered_with_another_shape(config: str, tmp_path: Path) -> None:
    """Not with another checkpoint: none was given."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=r"no usable configuration: .*Give another with `--weights random:SHAPE`"):
        inspect(f"random:{tmp_path}")


@pytest.mark.parametrize("weights", ["random:qwen2.5-8b", "qwen2.5-7b", "random:no/such/folder", "random:"])
def test_weights_of_no_known_shape_are_refused_with_the_choices(weights: str) -> None:
    """In the same words for `--weights` and for `--checkpoint`."""
    with pytest.raises(UserError, match=r"are not known; choose random:qwen2.5-0.5b.*or random:FOLDER"):
        family("", weights=weights, roles=("ar",))


def test_a_shape_without_room_for_the_borrowed_words_is_refused(tmp_path: Path) -> None:
    """Prompts are tokenised by the embedded tokenizer, whose ids the shape must have."""
    with pytest.raises(UserError, match="has 40 ids, fewer than the"):
        inspect(f"random:{save_small(tmp_path / 'small')}")
