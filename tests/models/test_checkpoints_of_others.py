"""A checkpoint that somebody else made runs no code and reads nothing outside its folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError
from small import save_small
from transformers import AutoTokenizer

from mtbench.errors import UserError
from mtbench.models import chat_template
from mtbench.models.loading import load

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


def indexed(file: str) -> Callable[[Path], object]:
    """Return a change of a checkpoint: an index that names this file in place of the weights."""

    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
        (folder / "evil.bin").write_bytes(b"\x80\x04.")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))

    return change


def remote_code(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text()) | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


@pytest.mark.parametrize("change", [indexed("evil.bin"), indexed(f"../{WEIGHTS}"), remote_code])
def test_weights_and_code(tmp_path: Path, change: Callable[[Path], object]) -> None:
    folder = save_small(tmp_path / "checkpoint")
    change(folder)
    with pytest.raises(UserError, match=r"^[^\n]*checkpoint[^\n]*$"):
        load(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It reaches no object of this process, and its time is limited."""
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.5)
    tokenizer = AutoTokenizer.from_pretrained(save_small(tmp_path / "checkpoint"))
    tokenizer.chat_template = text
    with pytest.raises((UserError, SecurityError), match=r"takes more than|is unsafe"):
        chat_template.render(tokenizer, [{"role": "user", "content": "a"}], answer_follows=True)
