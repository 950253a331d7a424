"""IFEval: an answer that follows and one that violates each kind of instruction; prompts that need NLTK's tables.

Tests of instructions that need NLTK's `punkt_tab` run where this machine has it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import chat, write_lines

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source, Suite

ROWS = [json.loads(line) for line in Path(__file__).with_name("ifeval_answers.jsonl").read_text("utf-8").splitlines()]
# kind -> settings, an answer that follows, an answer that violates
KINDS = {row["kind"]: (row["settings"], row["follows"], row["violates"]) for row in ROWS}
NEED_PUNKT = ("change_case:capital_word_frequency", "length_constraints:number_sentences")
PLAIN = [kind for kind in KINDS if kind not in NEED_PUNKT]


def row(key: int, *kinds: str) -> dict[str, Any]:
    settings = [KINDS[kind][0] for kind in kinds]
    return {"key": key, "prompt": "Say hello to me.", "instruction_id_list": list(kinds), "kwargs": settings}


def opened(folder: Path, **source: Any) -> Suite:
    suite: Suite = SUITES["ifeval"]("", Source(data_dir=folder, offline=True, **source))
    return suite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data folder with each kind once, in the order of KINDS, and then a prompt with two instructions."""
    folder = tmp_path_factory.mktemp("data")
    rows = [row(key, kind) for key, kind in enumerate(KINDS)]
    write_lines(folder / "ifeval/input_data.jsonl", [*rows, row(99, "punctuation:no_comma", "startend:quotation")])
    return folder


@pytest.fixture(scope="module")
def suite(folder: Path) -> Suite:
    return opened(folder, skip_unscorable=True)


@pytest.fixture
def no_punkt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NLTK find no data on this machine."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])


def item(kind: str) -> str:
    return f"ifeval/{list(KINDS).index(kind)}/0"


# --- Kinds of instruction -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("suite")
def test_every_kind_of_instruction_is_tested() -> None:
    """KINDS has all instructions of lm-eval."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert set(INSTRUCTION_DICT) == set(KINDS)


@pytest.mark.parametrize("kind", PLAIN)
def test_following_scores_one_and_violating_scores_zero(kind: str, suite: Suite) -> None:
    """A blank answer also scores 0, for every instruction."""
    _, following, violating = KINDS[kind]

    assert suite.score({item(kind): following}) == {item(kind): 1.0}
    assert suite.score({item(kind): violating}) == {item(kind): 0.0}
    assert suite.score({item(kind): " \n"}) == {item(kind): 0.0}


@pytest.mark.parametrize("kind", NEED_PUNKT)
def test_instructions_that_need_nltk_are_scored_with_its_tables(kind: str, folder: Path) -> None:
    """An abbreviation does not end a sentence, which empty tables would get wrong."""
    try:
        suite = opened(folder)
    except UserError:
        pytest.skip("NLTK's punkt_tab is not on this machine")
    _, following, violating = KINDS[kind]

    assert "left_out" not in suite.task
    assert suite.score({item(kind): following}) == {item(kind): 1.0}
    assert suite.score({item(kind): violating}) == {item(kind): 0.0}


def test_the_unchanged_answer_must_follow_all_instructions(suite: Suite) -> None:
    """One of two is not enough, and the metric strips nothing from the answer."""
    both = f"ifeval/{len(KINDS)}/0"

    assert suite.task["metric"] == "prompt_level_strict_acc"
    assert suite.score({both: '"Without a comma"'}) == {both: 1.0}
    assert suite.score({both: '"With, a comma"'}) == {both: 0.0}
    assert suite.score({both: 'Here it is:\n"Without a comma"'}) == {both: 0.0}


def test_scores_are_deterministic_and_independent_of_other_items(tmp_path: Path) -> None:
    """An ambiguous language and a letter that lm-eval draws at random score the same at every call."""
    random_letter = row(0, "keywords:letter_frequency")
    random_letter["kwargs"] = [{"letter": "#", "let_relation": "at least", "let_frequency": 4}]
    ambiguous = row(1, "language:response_language")
    ambiguous["kwargs"] = [{"language": "en"}]
    rows = [{**entry, "key": n} for n, entry in enumerate([random_letter, ambiguous] * 10)]
    write_lines(tmp_path / "ifeval/input_data.jsonl", rows)
    suite = opened(tmp_path)
    texts = ("ssss aaaa eeee qqqq ffff", "rum land hand")
    answers = {f"ifeval/{n}/0": texts[n % 2] for n in range(len(rows))}
    whole = suite.score(answers)

    assert all(len({whole[f"ifeval/{n}/0"] for n in range(start, len(rows), 2)}) == 1 for start in (0, 1))
    assert {name: suite.score({name: text})[name] for name, text in answers.items()} == whole


# --- Without the tables -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_punkt")
def test_without_the_tables_the_suite_refuses(folder: Path) -> None:
    """One line with the number of prompts, the instructions, the missing tables, their folder and the option."""
    with pytest.raises(UserError) as caught:
        opened(folder)

    message = str(caught.value)
    assert "\n" not in message
    parts = (f"2 of {len(KINDS) + 1} prompts", *NEED_PUNKT, "punkt_tab", f"{folder}/nltk_data", "--skip-unscorable")
    for part in parts:
        assert part in message


@pytest.mark.usefixtures("no_punkt")
def test_unscorable_prompts_are_left_out_and_counted(folder: Path) -> None:
    """The others keep their ids, under any limit; `task` has the number of prompts left out and the reason."""
    suite = opened(folder, skip_unscorable=True)
    remaining = [n for n, kind in enumerate(KINDS) if kind not in NEED_PUNKT] + [len(KINDS)]
    items = [p.item for p in suite.prompts(chat, None)]

    assert items == [f"ifeval/{n}/0" for n in remaining]
    assert [p.item for p in suite.prompts(chat, 9)] == items[:9]
    assert suite.task["left_out"] == {"items": 2, "needing": "punkt_tab", "instructions": list(NEED_PUNKT)}
    assert json.loads(json.dumps(suite.task)) == suite.task


@pytest.mark.usefixtures("no_punkt")
def test_empty_tables_count_as_missing(folder: Path, tmp_path: Path) -> None:
    """With empty files in their place, NLTK would end a sentence after "Mr." and give wrong scores."""
    tables = tmp_path / "nltk_data/tokenizers/punkt_tab/english"
    tables.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (tables / name).touch()
    write_lines(tmp_path / "ifeval/input_data.jsonl", [row(0, "length_constraints:number_sentences")])
    with pytest.raises(UserError, match="1 of 1 prompts"):
        opened(tmp_path)


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_offline_nothing_is_requested(folder: Path) -> None:
    """Importing lm-eval's checkers for the first time, in a new process, makes no DNS request and no connection."""
    code = f"""
import socket, sys
from pathlib import Path
for name in list(sys.modules):
    if name.partition(".")[0] in ("lm_eval", "nltk", "langdetect"):
        del sys.modules[name]
requested = []
events = ("socket.getaddrinfo", "socket.connect")
sys.addaudithook(lambda event, args: requested.append(args) if event in events else None)
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
suite = SUITES["ifeval"]("", Source(data_dir=Path({str(folder)!r}), offline=True, skip_unscorable=True))
suite.prompts(lambda messages: messages[-1]["content"], 3)
print(requested)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (process.stdout, process.stderr) == ("[]\n", "")
