"""P-EAGLE in serving engines: vLLM gets its option, others a reason."""

import json
from pathlib import Path

import pytest
from eagle_cases import FORMATS as SEQUENTIAL
from eagle_cases import eagle, write_draft
from parallel_eagle_cases import FORMATS

from mtbench.cli.export import app
from mtbench.clients.serving_engine import NO_PARALLEL, NO_TREE, ServingEngine, Setting
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.errors import UserError


@pytest.mark.parametrize("form", FORMATS)
def test_vllm_drafts_in_parallel_what_was_trained_so(form: str, tmp_path: Path) -> None:
    """It loads the checkpoint as it is; a draft of another kind in the same role drafts token by token."""
    folder, vllm = write_draft(tmp_path / "draft", FORMATS[form]), SERVING_ENGINES["vllm"]()
    setting = vllm.setting(eagle(ahead=5), {"eagle": str(folder)})
    assert isinstance(setting, Setting)
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5, "parallel_drafting": True}
    assert json.loads(setting.words[1]) == config
    assert not setting.exported
    with pytest.raises(UserError, match=r"vLLM needs nothing that .* lacks; give it the checkpoint as it is"):
        app([str(folder), "--for", "vllm", "--out", str(tmp_path / "out")], standalone_mode=False)
    other = write_draft(tmp_path / "other", SEQUENTIAL["speculators"])
    setting = vllm.setting(eagle(ahead=5), {"eagle": str(other)})
    assert isinstance(setting, Setting)
    assert "parallel_drafting" not in json.loads(setting.words[1])
    assert vllm.setting(eagle(ahead=2, tree="2x2"), {"eagle": str(folder)}) == NO_TREE


def test_engines_without_it_say_so(tmp_path: Path) -> None:
    folder = write_draft(tmp_path, FORMATS["peagle"])
    for name in ("sglang", "llamacpp"):
        engine: ServingEngine = SERVING_ENGINES[name]()
        assert engine.setting(eagle(), {"eagle": str(folder)}) == NO_PARALLEL
        assert isinstance(engine.setting(eagle(), {"eagle": "DRAFT"}), Setting)


def test_engines_draft_no_tree_of_the_likeliest_prefixes() -> None:
    for engine, method in (("vllm", "medusa"), ("vllm", "mtp"), ("sglang", "mtp"), ("llamacpp", "mtp")):
        assert SERVING_ENGINES[engine]().setting(METHODS[method](tree="best:4"), {}) == NO_TREE
