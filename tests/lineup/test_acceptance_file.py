"""Files of acceptance lengths: each arm has the length for its number of drafts, and a fault is one line."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mtbench.decoding.arms import Arm
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.acceptance_file import AcceptanceFile, curve_key
from mtbench.lineup.planner import make_plan
from mtbench.plan.plan import Plan, RunRequest

GOLDEN = "# dataset: coding\ndsv4:\n  thinking_on: {1: 1.79, 3: 2.49}\n  thinking_off:\n    1: 1.92\n    3: 2.97\n"
RUN = (
    "t/eagle: {thinking_off: {1: 1.7, 3: 2.6}}\nt/eagle/llamacpp: {thinking_off: {1: 1.6}}\nmtbench: [{key: t/eagle}]\n"
)
TREE = "t/eagle:tree=3x2: {thinking_off: {3: 3.1}}\n"


def length(text: str, ahead: int = 1, engine: str = "graph", **variables: Any) -> float:
    """Return the length of EAGLE by the file that a text names."""
    file = AcceptanceFile.read(text, variables)
    assert file
    return file.of_arm(Arm("eagle", engine=engine), METHODS["eagle"](ahead=ahead)).length


@pytest.mark.parametrize(
    ("text", "part", "given", "expected"),
    [
        (GOLDEN, "", {}, [1.79, 2.49]),
        (GOLDEN, "", {"enable_thinking": False}, [1.92, 2.97]),
        (GOLDEN, "#dsv4/thinking_off", {}, [1.92, 2.97]),
        (GOLDEN, "#dsv4", {"thinking": True}, [1.79, 2.49]),
        ("m: {1: 1.5, 3: 2}", "", {}, [1.5, 2.0]),
        ("m: {thinking_off: {3: 2.0}}", "", {"thinking": True}, [2.0]),  # the only mode
        ("a: {1: 1.5}\nb/c: {1: 1.6}", "#b/c", {}, [1.6]),
        ("a/b: {1: 1.5}\na: {1: 1.6}", "#a", {}, [1.6]),
        (RUN + TREE, "", {}, [1.7, 2.6]),
        (RUN + TREE, "#t/eagle:tree=3x2", {}, [3.1]),
    ],
)
def test_a_method_has_the_length_of_its_number_of_drafts(
    text: str, part: str, given: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """As the owners' reader looks them up: by key, by mode, `thinking_on` if nothing else is known, and by K: 1, 3."""
    (path := tmp_path / "curves.yaml").write_text(text)
    found = []
    for ahead in (1, 3):
        with suppress(UserError):
            found.append(length(f"{path}{part}", ahead, **given))
    assert found == pytest.approx(expected)


FAULTS = {
    "holds no lengths": ["", "- 1\n- 2", "a: [", "a: !!python/object/apply:os.system [ls]"],
    "line 1 begins a mapping whose keys repeat": ["a: {1: 1.5, 1: 1.6}", "a: {1: 1.5, 0x1: 1.6}"],
    "constructor for the tag 'tag:yaml.org,2002:merge'": ["a: &x {1: 1.5}\nb:\n  <<: *x"],
    r"has 1,048,588 bytes, and at most 1,048,576 are read\.$": ["#" * (1 << 20) + "\na: {1: 1.5}"],
    r"for K=1 \(eagle\): 'a' has {2: 1.5}": ["a: {2: 1.5}"],
    "has no length from 1 to 2": [f"a: {{1: {value}}}" for value in ("2.01", "0.99", ".nan", "'1.5'", "[1, 2]")],
    "has 2 curves of 'eagle.*'; add `#` and one of a, b": ["a: {1: 1.5}\nb: {1: 1.6}"],
    "no curves of 'eagle.*'; add `#` and one of .*t/medusa/thinking_off": [RUN.replace("eagle", "medusa")],
}


@pytest.mark.parametrize(("message", "text"), [(fault, text) for fault, texts in FAULTS.items() for text in texts])
def test_a_fault_is_one_line(message: str, text: str, tmp_path: Path) -> None:
    (path := tmp_path / "curves.yml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        length(str(path))
    assert len(str(error.value)) < 600 * ("\n" not in str(error.value))


@pytest.mark.parametrize(
    ("name", "options", "engine", "key"),
    [
        ("eagle", {"ahead": 2}, "graph", "/eagle"),
        ("eagle", {"ahead": 2, "tree": "3x2"}, "llamacpp", "/eagle:tree=3x2/llamacpp"),
        ("prompt-lookup", {"ahead": 3, "ngram": 4}, "eager", "/prompt-lookup:ngram=4/eager"),
        ("speculative", {"ahead": "auto"}, "graph", "/speculative:ahead=auto"),  # no number of drafts
    ],
)
def test_a_curve_is_of_every_number_of_drafts(name: str, options: dict[str, Any], engine: str, key: str) -> None:
    """Another option is another curve."""
    assert curve_key(METHODS[name](**options), engine) == key


def test_the_plan_holds_what_the_file_said(tmp_path: Path) -> None:
    """An arm without drafts is plain; the others have their own lengths, which a later change of the file leaves."""
    (path := tmp_path / "curves.yaml").write_text(GOLDEN)
    asked: dict[str, Any] = {"suite": ["synthetic:8x20"], "family": "tiny", "method": ["ar", "eagle:ahead=1|3"]}
    plan = make_plan(RunRequest(**asked, limit=4, batch_size=(2,), simulate_acceptance=str(path)))
    path.unlink()
    scripts = [cell.accept for cell in Plan.model_validate_json(plan.model_dump_json()).cells]
    assert [script and script.source.partition("=")[2] for script in scripts] == ["", "1.79", "2.49"]
    expected = [None, pytest.approx([0.79, 0.0]), pytest.approx([1.0, 0.49, 0.0])]
    assert [script and script.probabilities for script in scripts] == expected
