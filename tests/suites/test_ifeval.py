"""IFEval: answers that follow and that violate, for every kind of instruction; and what cannot be scored without NLTK.

Kinds that need NLTK's `punkt_tab` are tried where this machine has it.
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from made_up import write_lines

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite

REAL = os.environ.get("MTBENCH_DATA_DIR")
GERMAN = "Der schnelle braune Fuchs springt heute über den faulen Hund, und alle Kinder im Dorf freuen sich darüber."
ENGLISH = "The quick brown fox jumps over the lazy dog, and all the children in the village are happy about it today."

# kind: settings, an answer that follows, one that does not
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "keywords:existence": ({"keywords": ["apple", "pear"]}, "An Apple and a pear.", "An apple and a plum."),
    "keywords:frequency": (
        {"keyword": "cat", "relation": "at least", "frequency": 2},
        "One cat, another cat.",
        "One cat, another dog.",
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["dog"]}, "A cat in a doghouse.", "A Dog and a cat."),
    "keywords:letter_frequency": (
        {"letter": "z", "let_relation": "less than", "let_frequency": 2},
        "A zebra.",
        "Zebras are puzzling.",
    ),
    "language:response_language": ({"language": "de"}, GERMAN, ENGLISH),
    "length_constraints:number_sentences": (
        {"relation": "less than", "num_sentences": 3},
        "Dr. Smith came at 3 p.m. today. He left.",
        "He came. He saw. He left.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "One.\n***\nTwo.", "One.\n\nTwo."),
    "length_constraints:number_words": (
        {"relation": "at least", "num_words": 4},
        "Four words are here.",
        "Three words here.",
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First this.\n\nThen that.",
        "Then this.\n\nFirst that.",
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        "Dear [name], from [place].",
        "Dear [name], from here.",
    ),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\n\nP.S. Hello.", "Bye. Hello."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n* two", "* one\n* two\n* three"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 1}, "This is *bold*.", "This is bold."),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nOne.\nSECTION 2\nTwo.",
        "SECTION 1\nOne.",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1, 2]}\n```', '{"a": [1, 2}'),
    "detectable_format:title": ({}, "<<A title>>\nText.", "<A title>\nText."),
    "combination:two_responses": ({}, "One.\n******\nTwo.", "One.\n******\nOne."),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Say hello to me."},
        "Say hello to me. Hello!",
        "Hello! Say hello to me.",
    ),
    "startend:end_checker": ({"end_phrase": "That is all."}, "Hello. That is all.", "That is all. Hello."),
    "change_case:capital_word_frequency": (
        {"capital_relation": "at least", "capital_frequency": 2},
        "We SHOUT and YELL.",
        "We SHOUT and yell.",
    ),
    "change_case:english_capital": ({}, ENGLISH.upper(), ENGLISH),
    "change_case:english_lowercase": ({}, ENGLISH.lower(), ENGLISH),
    "punctuation:no_comma": ({}, "No. Not one.", "No, not one."),
    "startend:quotation": ({}, '"All of it."', '"Not all" of it.'),
}
NEED_PUNKT = ("change_case:capital_word_frequency", "length_constraints:number_sentences")
PLAIN = [kind for kind in KINDS if kind not in NEED_PUNKT]


def chat(messages: Messages) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


def row(key: int, *kinds: str) -> dict[str, Any]:
    settings = [KINDS[kind][0] for kind in kinds]
    return {"key": key, "prompt": "Say hello to me.", "instruction_id_list": list(kinds), "kwargs": settings}


def opened(folder: Path, **source: Any) -> Suite:
    suite: Suite = SUITES["ifeval"]("", Source(data_dir=folder, offline=True, **source))
    return suite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind once, in the order of KINDS, and then two together."""
    folder = tmp_path_factory.mktemp("data")
    rows = [row(key, kind) for key, kind in enumerate(KINDS)]
    write_lines(folder / "ifeval/input_data.jsonl", [*rows, row(99, "punctuation:no_comma", "startend:quotation")])
    return folder


@pytest.fixture(scope="module")
def suite(folder: Path) -> Suite:
    return opened(folder, skip_unscorable=True)


@pytest.fixture
def no_punkt(monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK finds no data on this machine."""
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])


def item(kind: str) -> str:
    return f"ifeval/{list(KINDS).index(kind)}/0"


# --- Kinds of instruction -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("suite")
def test_no_kind_is_missing_here() -> None:
    """What lm-eval can check is what is tried below."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert set(INSTRUCTION_DICT) == set(KINDS)


@pytest.mark.parametrize("kind", PLAIN)
def test_an_answer_that_follows_is_right_and_one_that_does_not_is_wrong(kind: str, suite: Suite) -> None:
    """And no answer at all is wrong, whatever was asked."""
    _, following, violating = KINDS[kind]

    assert suite.score({item(kind): following}) == {item(kind): 1.0}
    assert suite.score({item(kind): violating}) == {item(kind): 0.0}
    assert suite.score({item(kind): " \n"}) == {item(kind): 0.0}


@pytest.mark.parametrize("kind", NEED_PUNKT)
def test_kinds_that_count_by_nltk_are_scored_where_it_has_its_tables(kind: str, folder: Path) -> None:
    """An abbreviation ends no sentence: empty tables would not do."""
    try:
        suite = opened(folder)
    except UserError:
        pytest.skip("NLTK's punkt_tab is not on this machine")
    _, following, violating = KINDS[kind]

    assert "left_out" not in suite.task
    assert suite.score({item(kind): following}) == {item(kind): 1.0}
    assert suite.score({item(kind): violating}) == {item(kind): 0.0}


def test_all_instructions_must_be_followed_as_the_answer_stands(suite: Suite) -> None:
    """Strictly: one of two is not enough, and nothing is stripped from the answer first."""
    both = f"ifeval/{len(KINDS)}/0"

    assert suite.task["metric"] == "prompt_level_strict_acc"
    assert suite.score({both: '"Without a comma"'}) == {both: 1.0}
    assert suite.score({both: '"With, a comma"'}) == {both: 0.0}
    assert suite.score({both: 'Here it is:\n"Without a comma"'}) == {both: 0.0}


def test_scores_do_not_hang_on_dice_or_on_who_is_scored_beside(tmp_path: Path) -> None:
    """A language that is hard to tell and a letter that lm-eval draws anew score the same at every call."""
    drawn = row(0, "keywords:letter_frequency")
    drawn["kwargs"] = [{"letter": "#", "let_relation": "at least", "let_frequency": 4}]
    hard = row(1, "language:response_language")
    hard["kwargs"] = [{"language": "en"}]
    rows = [{**entry, "key": n} for n, entry in enumerate([drawn, hard] * 10)]
    write_lines(tmp_path / "ifeval/input_data.jsonl", rows)
    suite = opened(tmp_path)
    texts = ("ssss aaaa eeee qqqq ffff", "rum land hand")
    answers = {f"ifeval/{n}/0": texts[n % 2] for n in range(len(rows))}
    whole = suite.score(answers)

    assert all(len({whole[f"ifeval/{n}/0"] for n in range(start, len(rows), 2)}) == 1 for start in (0, 1))
    assert {one: suite.score({one: text})[one] for one, text in answers.items()} == whole


# --- What cannot be scored ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_punkt")
def test_without_its_tables_the_suite_refuses_and_says_why(folder: Path) -> None:
    """One line: how many, which kinds, what is missing, where it goes, and the way past."""
    with pytest.raises(UserError) as caught:
        opened(folder)

    message = str(caught.value)
    assert "\n" not in message
    said = (f"2 of {len(KINDS) + 1} prompts", *NEED_PUNKT, "punkt_tab", f"{folder}/nltk_data", "--skip-unscorable")
    for part in said:
        assert part in message


@pytest.mark.usefixtures("no_punkt")
def test_what_cannot_be_scored_is_left_out_and_counted(folder: Path) -> None:
    """The others keep their items and texts, under any limit; `task` says how many are missing, and why."""
    suite = opened(folder, skip_unscorable=True)
    left = [n for n, kind in enumerate(KINDS) if kind not in NEED_PUNKT] + [len(KINDS)]
    items = [p.item for p in suite.prompts(chat, None)]

    assert items == [f"ifeval/{n}/0" for n in left]
    assert [p.item for p in suite.prompts(chat, 9)] == items[:9]
    assert suite.task["left_out"] == {"items": 2, "needing": "punkt_tab", "instructions": list(NEED_PUNKT)}
    assert json.loads(json.dumps(suite.task)) == suite.task


@pytest.mark.usefixtures("no_punkt")
def test_a_file_that_needs_no_tables_is_scored_whole(tmp_path: Path) -> None:
    """Nothing is refused that can be scored."""
    write_lines(tmp_path / "ifeval/input_data.jsonl", [row(0, "punctuation:no_comma")])

    assert "left_out" not in opened(tmp_path).task


@pytest.mark.usefixtures("no_punkt")
def test_empty_tables_are_none(folder: Path, tmp_path: Path) -> None:
    """Files of that name that tell "Mr." from no end of a sentence would give scores of their own."""
    tables = tmp_path / "nltk_data/tokenizers/punkt_tab/english"
    tables.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (tables / name).touch()
    write_lines(tmp_path / "ifeval/input_data.jsonl", [row(0, "length_constraints:number_sentences")])
    with pytest.raises(UserError, match="1 of 1 prompts"):
        opened(tmp_path)


def test_where_there_is_a_network_the_tables_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NLTK's own download is tried, and what it could not get is said, once."""
    with suppress(UserError):
        opened(folder)
        pytest.skip("NLTK's punkt_tab is on this machine: nothing to fetch")
    asked: list[str] = []

    def nowhere(host: str, *args: Any, **kwargs: Any) -> None:
        asked.append(host)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(UserError, match="and cannot be fetched"):
        SUITES["ifeval"]("", Source(data_dir=folder))

    assert asked
    assert capfd.readouterr() == ("", "")


def test_offline_nobody_is_asked(folder: Path) -> None:
    """In a process of its own, where lm-eval's checkers are imported for the first time: no name is looked up."""
    code = f"""
import socket, sys
from pathlib import Path
asked = []
sys.addaudithook(lambda event, args: asked.append(args) if event in ("socket.getaddrinfo", "socket.connect") else None)
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source
suite = SUITES["ifeval"]("", Source(data_dir=Path({str(folder)!r}), offline=True, skip_unscorable=True))
suite.prompts(lambda messages: messages[-1]["content"], 3)
print(asked)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with ifeval/input_data.jsonl")
@pytest.mark.usefixtures("no_punkt")
def test_of_the_real_prompts_64_of_541_need_the_tables() -> None:
    """52 instructions to count sentences and 25 to count capital words."""
    suite = opened(Path(REAL or ""), skip_unscorable=True)
    prompts = suite.prompts(chat, None)

    assert suite.task["left_out"] == {"items": 64, "needing": "punkt_tab", "instructions": list(NEED_PUNKT)}
    assert len(prompts) == 541 - 64
    assert all(prompt.stop == () for prompt in prompts)
    assert set(suite.score(dict.fromkeys((p.item for p in prompts), "")).values()) == {0.0}
