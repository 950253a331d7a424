"""Files of acceptance lengths: each arm has the length for its number of drafts, and a fault is one line."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtbench.decoding.arms import Arm
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.lineup.acceptance_file import AcceptanceFile, curve_key
from mtbench.lineup.planner import make_plan
from mtbench.plan.plan import Plan, RunRequest

GOLDEN = """\
# dataset: coding | temperature: 1.0 | output_len: 4096
deepseek-v4-pro:
  thinking_on:
    1: 1.79
    3: 2.49
  thinking_off:
    1: 1.92
    3: 2.97
"""
RUN = """\
tiny/ar/eagle:
  thinking_off: {1: 1.7, 3: 2.6}
tiny/ar/eagle/llamacpp:
  thinking_off: {1: 1.6}
tiny/ar/eagle:tree=3x2:
  thinking_off: {3: 3.1}
mtbench:
- {key: tiny/ar/eagle, category: arithmetic}
"""
RECIPE = """\
prefill: &shared
  # SGLANG_SIMULATE_ACC_LEN: '9.9'
  env: [{TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS: "1.49"}]
decode: *shared
"""


def lengths(tmp_path: Path, text: str, part: str = "", engine: str = "graph", **variables: Any) -> list[float]:
    """Return the lengths of EAGLE with 1 and 3 drafts, as far as the file has them."""
    (path := tmp_path / "curves.yaml").write_text(text)
    file = AcceptanceFile.read(f"{path}{part}", variables)
    assert file
    found = []
    for ahead in (1, 3):
        with suppress(UserError):
            found.append(file.of_arm(Arm("eagle", engine=engine), METHODS["eagle"](ahead=ahead)).length)
    return found


@pytest.mark.parametrize(
    ("text", "part", "variables", "expected"),
    [
        (GOLDEN, "", {}, [1.79, 2.49]),
        (GOLDEN, "", {"enable_thinking": False}, [1.92, 2.97]),
        (GOLDEN, "", {"thinking_mode": "disabled"}, [1.92, 2.97]),
        (GOLDEN, "", {"thinking_mode": "enabled"}, [1.79, 2.49]),
        (GOLDEN, "#deepseek-v4-pro/thinking_off", {}, [1.92, 2.97]),
        (GOLDEN, "#deepseek-v4-pro", {"thinking": True}, [1.79, 2.49]),
        ("m: {1: 1.5, 3: 2}", "", {}, [1.5, 2.0]),
        ("m: [{1: 1.5}, {3: 2.25}]", "", {}, [1.5, 2.25]),
        ("m: {thinking_off: {3: 2.0}}", "", {"thinking": True}, [2.0]),  # the only mode
        ("a: {1: 1.5}\nb/c: {1: 1.6}", "#b/c", {}, [1.6]),
        (RUN, "", {}, [1.7, 2.6]),
        (RUN, "#tiny/ar/eagle:tree=3x2", {}, [3.1]),
        (RECIPE, "", {}, [2.49]),  # more than 1 draft gives
        ("env:\n  SGLANG_SIMULATE_ACC_LEN: '1.75'\n", "", {}, [1.75, 1.75]),
    ],
)
def test_a_method_has_the_length_of_its_number_of_drafts(
    text: str, part: str, variables: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """As the owners' reader looks them up: by key, then by mode, `thinking_on` unless told otherwise, then by K."""
    assert lengths(tmp_path, text, part, **variables) == pytest.approx(expected)


def length_in(text: str) -> float:
    """Return the length of EAGLE with one draft."""
    file = AcceptanceFile.read(text, {})
    assert file
    return file.of_arm(Arm("eagle"), METHODS["eagle"](ahead=1)).length


def test_a_curve_of_the_engine_goes_first(tmp_path: Path) -> None:
    assert lengths(tmp_path, RUN, engine="llamacpp") == [1.6]
    assert lengths(tmp_path, RUN, engine="vllm") == [1.7, 2.6]


@pytest.mark.parametrize(
    ("text", "part", "message"),
    [
        ("", "", "holds no lengths"),
        ("- 1\n- 2", "", "holds no lengths"),
        ("just words", "", "holds no lengths"),
        ("m: [1, 2]", "", "holds no lengths"),
        ("a: [", "", "holds no lengths"),
        ("a: !!python/object/apply:os.system [ls]", "", "holds no lengths.*could not determine a constructor"),
        ("a: !!timestamp x", "", "holds no lengths"),
        ("a: \x00", "", "holds no lengths"),
        ("a: {1: 1.5, 1: 1.6}", "", "line 1 begins a mapping whose keys repeat or merge"),
        ("a: &x {1: 1.5}\nb:\n  <<: *x", "", "line 3 begins a mapping whose keys repeat or merge"),
        ("#" * (1 << 20) + "\na: {1: 1.5}", "", r"has 1,048,588 bytes, and at most 1,048,576 are read\.$"),
        ("[" * 2000, "", "holds no lengths"),
        ("a: {2: 1.5}", "", r"has no length from 1 to 2 for K=1 \(eagle\): 'a' has {2: 1.5}"),
        ("a: {1: 2.01}", "", "has no length from 1 to 2"),
        ("a: {1: 0.99}", "", "has no length from 1 to 2"),
        ("a: {1: .nan}", "", "has no length from 1 to 2"),
        ("a: {1: '1.5'}", "", "has no length from 1 to 2"),
        ("a: {1: true}", "", "has no length from 1 to 2"),
        ("a: {thinking_on: 1.5}", "", "has no length from 1 to 2"),
        ("a: {1: 1.5}\nb: {1: 1.6}", "", r"has 2 curves of 'eagle'; add `#` and one of \['a', 'b'\]"),
        (
            GOLDEN,
            "#deepseek",
            r"no curves of 'deepseek'; .*'deepseek-v4-pro/thinking_on', 'deepseek-v4-pro/thinking_off'",
        ),
        (
            RUN.replace("eagle", "medusa"),
            "",
            "has no curves of 'eagle'; add `#` and one of .*tiny/ar/medusa/thinking_off",
        ),
        ("mtbench: []", "", "has no curves of 'eagle'"),
        ("".join(f"model-{n}: {{1: 1.5}}\n" for n in range(999)), "", "has 999 curves of 'eagle'"),
        (
            "x/eagle: {thinking_on: {1: 1}}\ny/eagle: {thinking_on: {1: 1}}\nz/a: 1\nmtbench: []",
            "",
            r"'y/eagle/thinking_on'\]\.$",
        ),
        ("A: {SGLANG_SIMULATE_ACC_LEN: 1.5}\nB: {SGLANG_SIMULATE_ACC_LEN: 1.6}", "", "has 2 curves .*LEN=1.6"),
    ],
)
def test_a_fault_is_one_line(text: str, part: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "curves.yml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        length_in(f"{path}{part}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text() | st.integers(), part),
    )
)
def test_no_file_breaks_more_than_a_line(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "curves.yaml"
    path.write_text(json.dumps(data))
    with suppress(UserError):
        assert 1 <= length_in(str(path)) <= 2


@pytest.mark.parametrize(
    ("name", "options", "engine", "key"),
    [
        ("eagle", {"ahead": 2}, "graph", "/eagle"),
        ("eagle", {"ahead": 2, "tree": "3x2"}, "llamacpp", "/eagle:tree=3x2/llamacpp"),
        ("dflash", {"ahead": 3, "draft": "dspark"}, "eager", "/dflash:draft=dspark/eager"),
        ("medusa", {"heads": 3}, "graph", "/medusa"),
        ("prompt-lookup", {"ahead": 3, "ngram": 4}, "graph", "/prompt-lookup:ngram=4"),
        ("speculative", {"ahead": "auto"}, "graph", "/speculative:ahead=auto"),  # no number of drafts
        ("mars", {"block_size": 8, "tau": 0.9}, "graph", "/mars:tau=0.9"),
    ],
)
def test_a_curve_is_of_all_numbers_of_drafts_and_of_no_other_option(
    name: str, options: dict[str, Any], engine: str, key: str
) -> None:
    assert curve_key(METHODS[name](**options), engine) == key


def planned(acceptance: str, *methods: str) -> Plan:
    options: dict[str, Any] = {"suite": ["synthetic:8x20"], "family": "tiny", "batch_size": (2,), "limit": 4}
    return make_plan(RunRequest(**options, method=methods, simulate_acceptance=acceptance))


def test_the_plan_holds_what_the_file_said(tmp_path: Path) -> None:
    """An arm without drafts is plain; the others have their own lengths, which a later change of the file leaves."""
    (path := tmp_path / "curves.yaml").write_text(GOLDEN)
    plan = planned(str(path), "ar", "eagle:ahead=1|3")
    path.unlink()
    plain, *drafting = Plan.model_validate_json(plan.model_dump_json()).cells
    assert plain.accept is not None
    assert plain.accept.probabilities is None
    key = f"{path}#deepseek-v4-pro/thinking_on, length="
    assert [cell.simulated and cell.simulated.accept for cell in drafting] == [f"{key}1.79", f"{key}2.49"]
    assert [cell.accept and cell.accept.probabilities for cell in drafting] == [
        pytest.approx([0.79, 0.0]),
        pytest.approx([1.0, 0.49, 0.0]),
    ]
