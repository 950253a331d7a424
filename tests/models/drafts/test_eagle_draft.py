"""EAGLE-3 drafts on disk: what each format means, and which configurations and weights are refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import parallel_eagle_cases
import pytest
import torch
from eagle_cases import FORMATS, IDS, SPECFORGE, Entry, Format, Pair, make_pair, stored, write_draft
from safetensors.torch import save_file
from small import VOCABULARY, save_small
from torch import Tensor
from transformers import LlamaConfig

from mtbench.errors import UserError
from mtbench.models.attention import AttentionMetadata
from mtbench.models.checkpoint_files import weights_sha256
from mtbench.models.drafts import loading
from mtbench.models.drafts.eagle_draft import recognise
from mtbench.models.drafts.loading import draft_config, inspect_draft, load_draft
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import inspect, load
from mtbench.models.runner import Forwarded

PEAGLE = parallel_eagle_cases.FORMATS["peagle"]
TEXT = [5, 9, 1, 7, 2, 30, 4, 4]
BARE = Format(SPECFORGE, (2, 1, 0), cut=False, heads=False)  # embedding and LM head are the target's
MADE = {**FORMATS, "bare": BARE}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return cache(lambda name: make_pair(tmp_path_factory.mktemp("pair"), MADE[name]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("form", MADE)
def test_logits_and_features_are_those_written_out(pairs: Callable[[str], Pair], form: str) -> None:
    """Of final entries and of two steps on its own feature, in the target's vocabulary."""
    pair = pairs(form)
    runners = pair.runners()
    runner = runners["eagle"]
    assert isinstance(runner, DraftRunner)
    ids, places = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    known = len(TEXT) - 1
    with torch.inference_mode():
        runners.target.reserve(1, 32, sorted(set(runner.taps)))
        runner.reserve(1, 32)
        runners.target.feed(ids, AttentionMetadata(places, places, places[:, -1] + 1, 16))
        at = AttentionMetadata(places[:, :-1], places[:, :-1], places[:, -1], 16)
        out = runner.step(ids[:, 1:], runner.read(places[:, :-1]), at, known)
        final = pair.reference.entries(TEXT)
        for i in range(known):
            check(pair.reference.predict(final[: i + 1]), out, i)
        own: list[Entry] = []
        feature = pair.reference.predict(final)[1]
        for step, token in enumerate((7, 12)):
            place = torch.tensor([[known + step]])
            at = AttentionMetadata(place, place, place[:, 0], 16)
            assert out.feature is not None
            out = runner.step(torch.tensor([[token]]), out.feature[:, -1:], at, 1, depth=1)
            own.append(Entry(feature, token, known + step))
            feature = pair.reference.predict(final + own)[1]
            check(pair.reference.predict(final + own), out)


def check(want: tuple[Tensor, Tensor], out: Forwarded, index: int = 0) -> None:
    assert out.feature is not None
    logits, feature = out.logits[0, index], out.feature[0, index]
    torch.testing.assert_close(logits, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(feature, want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("layers", "config", "taps"),
    [
        (32, SPECFORGE, (2, 16, 29)),
        (36, FORMATS["speculators"].config | {IDS: None}, (2, 18, 33)),
        (36, FORMATS["speculators"].config | {IDS: [2, 18, 33]}, (2, 18, 33)),
        (36, SPECFORGE | {"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
        (36, SPECFORGE | {IDS: [2, 18, 33]}, (2, 18, 33)),
        (36, FORMATS["deepspec"].config | {"target_layer_ids": [1, 9, 17, 25, 33]}, (2, 10, 18, 26, 34)),
    ],
)
def test_every_format_numbers_hidden_states_in_its_own_way(
    layers: int, config: dict[str, Any], taps: tuple[int, ...]
) -> None:
    """As transformers numbers them: i is the input of layer i."""
    made = recognise(config, "")
    assert made is not None
    assert made.for_target(text(layers)).taps == taps


def text(layers: int) -> Any:
    return LlamaConfig(num_hidden_layers=layers)


def test_parameters_of_a_forward_are_those_it_reads(pairs: Callable[[str], Pair]) -> None:
    """The LM head, whosever it is; an embedding is looked up."""
    for form, change in (("bare", VOCABULARY * 32), ("deepspec", -VOCABULARY * 32)):
        stored_numbers = sum(t.numel() for t in stored(pairs(form).folder).values())
        assert pairs(form).runners()["eagle"].model.num_parameters() == stored_numbers + change


def test_weights_of_a_whole_model_may_have_its_prefix(target: Path, tmp_path: Path) -> None:
    """As NeMo stores them: `model.fc.weight`, `model.layers.0.…`."""
    folder = write_draft(tmp_path, FORMATS["specforge"])
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in stored(folder).items()}
    tensors = {name if "2" in name or name[:2] == "lm" else f"model.{name}": t for name, t in tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    draft = load_draft(str(folder), loaded(target)).model
    assert torch.equal(draft.fc.weight.double(), tensors["model.fc.weight"].float().double())


def loaded(target: Path) -> Any:
    return load(str(target))


CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    (SPECFORGE | {"num_hidden_layers": 2}, "num_hidden_layers is 2, and drafts of one layer are supported"),
    (SPECFORGE | {"architectures": ["Gemma4Eagle3Model"]}, "architecture 'Gemma4Eagle3Model' is not supported; Llama"),
    (SPECFORGE | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    (SPECFORGE | {"norm_output": "no"}, "norm_output is 'no', not true or false"),
    (SPECFORGE | {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
    (
        PEAGLE.config | {"mask_token_id": None},
        "drafts in parallel and names no mask token; mask_token_id, pard_token, ptd",
    ),
    (SPECFORGE | {"ptd_token_id": VOCABULARY}, r"ptd_token_id is 40, and the ids are 0 to vocab_size - 1"),
]


@pytest.mark.parametrize(("config", "said"), CONFIGURATIONS, ids=[said for _, said in CONFIGURATIONS])
def test_a_configuration_that_cannot_be_run_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    """By one line that names the value and what to do."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(said, draft_config, str(tmp_path))


def refused(said: str, act: Callable[..., Any], *arguments: Any) -> None:
    loading.draft_config.cache_clear()
    with pytest.raises(UserError, match=said) as caught:
        act(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert "ive another checkpoint" in message


def test_a_draft_with_a_mask_token_is_parallel_whatever_its_layout(target: Path, tmp_path: Path) -> None:
    """vLLM's names of the token are tried in its order. `mask_hidden` may have two dimensions, and must be there."""
    for name, token in (("ptd_token_id", 3), ("pard_token", 2), ("mask_token_id", 1)):
        config = recognise(SPECFORGE | {"ptd_token_id": 3, "pard_token": 2, name: token}, "")
        assert config is not None
        assert (config.parallel, config.mask_id) == (True, min(token, 2))
        assert config.name == "P-EAGLE, SpecForge's format"
    assert not any(made.parallel for form in FORMATS.values() if (made := recognise(form.config, "")) is not None)
    folder = write_draft(tmp_path, PEAGLE)
    tensors = stored(folder)
    want = load_draft(str(folder), loaded(target)).model.mask_hidden
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    tensors["layers.1.hidden_norm.weight"] = torch.ones(32)  # vLLM's modules have it, and never apply it
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_draft(str(folder), loaded(target)).model.mask_hidden, want)
    del tensors["mask_hidden"]
    save_file(tensors, folder / "model.safetensors")
    refused("lacks 1 weights of its configuration, such as 'mask_hidden'", load_draft, str(folder), loaded(target))


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"target_hidden_size": 64}, "reads hidden states of width 64, and the target's is 32"),
    ({"vocab_size": 41}, "has a vocabulary of 41, and the target's is 40"),
    ({"eagle_config": {IDS: [0, 1, 2]}}, "reads the inputs of layers 1, 2, 3, and the target has 3"),
]


@pytest.mark.parametrize(("change", "said"), MISFITS, ids=[said for _, said in MISFITS])
def test_a_draft_of_another_target_is_refused(change: dict[str, Any], said: str, target: Path, tmp_path: Path) -> None:
    folder = write_draft(tmp_path, replace(FORMATS["specforge"], config=FORMATS["specforge"].config | change))
    refused(said, inspect_draft, str(folder), inspect(str(target)))


def test_a_draft_trained_for_other_weights_is_refused(target: Path, tmp_path: Path) -> None:
    folder = write_draft(tmp_path, FORMATS["specforge"])
    chosen = inspect(str(target))
    record = folder / "mtbench_training.json"
    record.write_text(json.dumps({"base_sha256": weights_sha256(target)}))
    assert inspect_draft(str(folder), chosen) is not None
    record.write_text(json.dumps({"base_sha256": "0" * 64, "options": {}}))
    refused("was trained for a target with other weights", inspect_draft, str(folder), chosen)
    unknown = replace(chosen, source="owner/name")  # weights on the hub, which are not here to compare
    assert inspect_draft(str(folder), unknown) is not None


Change = Callable[[dict[str, Tensor]], Any]
WEIGHTS: list[tuple[str, Change, str]] = [
    ("specforge", lambda t: t.pop("fc.weight"), "lacks 1 weights of its configuration, such as 'fc.weight'"),
    ("specforge", lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing, and the target's cannot take"),
    (
        "specforge",
        lambda t: t.update({"fc.weight": torch.ones(32, 160)}),
        r"fc.weight of shape \[32, 160\], and its config.json says \[32, 96\]",
    ),
    ("specforge", lambda t: t.update(d2t=torch.tensor([1] + [0] * 25)), "d2t gives two ids the same token"),
    (
        "specforge",
        lambda t: t.update({"norm.weight": torch.full((32,), float("nan"))}),
        "has values in norm.weight that are not finite",
    ),
    (
        "specforge",
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
        "has fc.weight in int8, and its weights are read unquantized",
    ),
]


@pytest.mark.parametrize(("form", "change", "said"), WEIGHTS, ids=[said for *_, said in WEIGHTS])
def test_other_weights_than_the_configuration_says_are_refused(
    form: str, change: Change, said: str, target: Path, tmp_path: Path
) -> None:
    folder = write_draft(tmp_path, FORMATS[form])
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    refused(said, load_draft, str(folder), loaded(target))


LARGE: dict[str, tuple[dict[str, Any], str]] = {  # for which no machine has memory
    "hidden states": (
        {"eagle_config": {IDS: [0] * 1_000_000}},
        r"has fc.weight of shape \[32, 96\], .* says \[32, 32000000\]",
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_configuration_of_other_weights_is_refused_at_planning(case: str, target: Path, tmp_path: Path) -> None:
    """By the headers of the files, before memory is allocated; at loading again, since files may have changed."""
    change, said = LARGE[case]
    model, chosen = loaded(target), inspect(str(target))
    folder = write_draft(tmp_path, replace(FORMATS["specforge"], config=FORMATS["specforge"].config | change))
    refused(said, inspect_draft, str(folder), chosen)
    refused(said, load_draft, str(folder), model)
