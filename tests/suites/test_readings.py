"""What suites read in answers: by the rule of the benchmark's owner, by value, and why there is nothing to read.

A case is an answer, then the score by the owner's rule, then the one by value (None: the suite has one reading), then a
word of the reason if it is unread.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any, ClassVar

import pytest
from made_up import Rows, bbh, write_csv, write_lines, write_parquet

from mtbench.evaluation.by_value import Case, first, letter, number
from mtbench.evaluation.code_tasks import program
from mtbench.evaluation.formulas import _formula, find_formula, same_formulas
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Reading, Source, Suite, Template

Expected = tuple[str, float, float | None, str | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    references = ("29", "1,450", "-3")
    rows: Rows = [{"question": "How many?", "answer": f"So.\n#### {reference}"} for reference in references]
    write_lines(folder / "gsm8k/train.jsonl", rows)
    write_lines(folder / "gsm8k/test.jsonl", rows)
    write_lines(folder / "mine.jsonl", rows)
    for kind, question, target in BBH_ROWS:
        write_lines(folder / f"bbh/bbh/{kind}.json", [{"examples": [{"input": question, "target": target}]}])
    options = [f"element {n}" for n in range(10)]
    row: dict[str, Any] = {"question": "Which?", "options": options, "category": "chemistry"}
    row["cot_content"] = "The answer is (A)."
    rows = [{**row, "question_id": n, "answer": letter} for n, letter in enumerate("BICD")]
    rows[3] |= {"options": options[:4]}
    for split in ("test", "validation"):
        write_parquet(folder / f"mmlu_pro/{split}-00000-of-00001.parquet", rows)
    wrong = {f"Incorrect Answer {n}": f"salt {n}" for n in (1, 2, 3)}
    write_csv(folder / "gpqa/gpqa_diamond.csv", [{"Question": "Which?", "Correct Answer": "water", **wrong}])
    write_lines(folder / "math500/test.jsonl", [_problem(reference) for reference, _ in FORMULAS])
    write_lines(folder / "aime25/train.jsonl", [{"problem": "How many?", "answer": "70"}] * len(AIME))
    write_lines(folder / "mbpp/test.jsonl", MBPP)
    write_lines(folder / "humaneval/HumanEval.jsonl", [HUMANEVAL])
    return folder


def _problem(reference: str) -> dict[str, str]:
    return {"problem": "Find it.", "solution": f"It is $\\boxed{{{reference}}}$.", "answer": reference}


@cache
def opened(name: str, folder: Path, *subtasks: str) -> Suite:
    variant = str(folder / "mine.jsonl") if name == "prompts" else ""
    source = Source(data_dir=folder, offline=True, subtasks=subtasks, unsandboxed=True)
    suite: Suite = SUITES[name](variant, source)
    return suite


def check(suite: Suite, item: str, case: Expected) -> None:
    text, score, by_value, unread = case
    reading = suite.read({item: text})[item]

    assert (reading.score, reading.by_value) == (score, by_value)
    assert (reading.unread or "").count(unread or "") if unread else reading.unread is None


# --- Numbers ------------------------------------------------------------------------------------------------------

RAN_ON = "She pays 29.\n#### 29\n\nQuestion: Tom has 2 pens and buys 2.\nAnswer: He has 4.\n#### 4"
NUMBERS: dict[str, list[Expected]] = {  # suite and document
    "gsm8k-paper: gsm8k_cot/0/0": [
        ("So she pays $29.00.", 0, 1, None),
        ("She pays 29 dollars. Tell me if you have another question...", 0, 1, "no number"),
        ("She pays 29 dollars, altogether.", 1, 1, None),
        (RAN_ON, 0, 1, None),
        ("The answer is 29 because 20 + 5 + 4 adds to 29, in 3 steps.", 0, 1, None),
        ("The cheaper option is 24 dollars, and with the tip she pays 29.", 1, 1, None),
        ("**Final answer:** **€29**\n\nThat is 24 + 5.", 0, 1, None),
        ("", 0, 0, "no number"),
    ],
    "gsm8k-paper: gsm8k_cot/1/0": [
        ("They sell 1,450 tickets.", 1, 1, None),
        ("They sell 1\u202f450 tickets.", 0, 1, None),
        ("So \\boxed{1{,}450}.", 0, 1, None),
    ],
    "gsm8k-paper: gsm8k_cot/2/0": [
        ("It is \u22123 degrees.", 0, 1, None),
        ("It is 3 degrees.", 0, 0, None),
        ("It is 10-3", 1, 0, None),
    ],
    "gsm8k: gsm8k/0/0": [
        ("24 + 5 = 29\n#### 29", 1, 1, None),
        ("24 + 5 = 29\n#### $29", 0, 1, "no number behind ####"),
        ("#### 29 dollars", 1, 1, None),
        ("#### 24 + 5 = 29", 0, 1, None),
        ("She pays 29.", 0, 1, "no number behind ####"),
    ],
    "gsm8k: gsm8k/2/0": [("#### \u22123", 0, 1, "no number behind ####"), ("#### -$3", 0, 1, "####")],
    "gsm8k-deepspec: gsm8k_cot/0/0": [
        ("So she pays \\boxed{29}.\n\nIn short: 3 rolls and a tip of 5.", 1, None, None),
        ("\\boxed{\\$29.00}", 1, None, None),
        ("\\boxed{24}. Adding the tip of 5 would be 29", 0, None, None),
    ],
    "prompts: prompts/1/0": [
        ("She pays 29 dollars. Tell me if you have another question...", 1, None, None),
        ("She pays twenty-nine dollars.", 0, None, "no number"),
        ("The answer is 29. It took 3 steps.", 0, None, None),  # the last number, as before
        (RAN_ON, 1, None, None),
    ],
    "prompts: prompts/3/0": [("It is \u22123 degrees.", 1, None, None), ("It is 3 degrees.", 0, None, None)],
}


@pytest.mark.parametrize(("item", "case"), [(item, case) for item, cases in NUMBERS.items() for case in cases])
def test_numbers_are_read(item: str, case: Expected, folder: Path) -> None:
    """In any notation; what the answer states before its last number; nothing of a further question."""
    name, _, item = item.partition(": ")
    check(opened(name, folder), item, case)


# --- Letters, and BBH ---------------------------------------------------------------------------------------------

NO_LETTER = "no letter"
LETTERS: dict[str, list[Expected]] = {  # document: its reference is B, I, C, D
    "chemistry/0/0": [
        ("The best answer is A mix of both at first sight. The answer is (B).", 0, 1, None),
        ("One could say the answer is (A). But neon is heavier, so the answer is (B).", 0, 1, None),
        ("ANSWER: B", 0, 1, NO_LETTER),
        ("Answer: B\n\nExplanation: A boron atom is heavier.", 0, 1, NO_LETTER),
        ("The answer is \\textbf{(B) Hydrogen}", 0, 1, NO_LETTER),
        ("The answer is Barium, choice (A).", 1, 0, None),
        ("The answer is (B) or (C).", 1, 0, None),
        ("The answer is not (A) but (B).", 0, 1, NO_LETTER),
        ("Hydrogen is light.", 0, 0, NO_LETTER),
        ("The answer is NOT (A), it is (B).", 0, 1, NO_LETTER),
        ("The answer is (B).\n\nQuestion: Which?\nThe answer is (A).", 1, 1, None),
    ],
    "chemistry/1/0": [
        ("The answer is I do not know.", 1, 0, None),
        ("The answer is I.", 1, 1, None),
    ],
    "chemistry/3/0": [("The answer is Difficult to say.", 1, 0, None), ("The answer is F, so (D).", 0, 1, None)],
}


@pytest.mark.parametrize(("item", "case"), [(item, case) for item, cases in LETTERS.items() for case in cases])
def test_letters_are_read(item: str, case: Expected, folder: Path) -> None:
    """By value the last stated choice, of those that the question has; a word or its first letter is none."""
    check(opened("mmlu-pro", folder, "chemistry"), item, case)


@pytest.mark.parametrize(
    ("answer", "score", "by_value"),
    [
        ("({right}) seems wrong. The answer is ({wrong}), not ({right})", 1, 0),
        ("({wrong}) is wrong, so it is ({right})", 1, 1),
        ("The answer is {right}", 0, 1),
        ("The answer is ({right}). It boils at ({wrong}).", 0, 1),
        ("It may be anything", 0, 0),
    ],
)
def test_letters_of_gpqa_are_read(answer: str, score: float, by_value: float, folder: Path) -> None:
    """The owner's rule takes the last bracket, wherever it is."""
    suite = opened("gpqa", folder)
    (prompt,) = suite.prompts(lambda turns, tools=(): turns[-1]["content"], None)
    place = prompt.text.index(") water") - 1
    right = prompt.text[place]
    text = answer.format(right=right, wrong="A" if right != "A" else "B")
    unread = None if "(" in text else "no choice"
    check(suite, prompt.item, (text, score, by_value, unread))


DATE = "Today is 03/03/2021. Tomorrow?\nOptions:\n(A) 03/03/2021\n(B) 03/04/2021\n(C) 03/05/2021"
BBH_ROWS = (
    ("date_understanding", DATE, "(B)"),
    ("navigate", "Do you return?", "Yes"),
    ("word_sorting", "Sort: quince pear apple", "apple pear quince"),
    ("dyck_languages", "Complete: [ ( {", "} ) ]"),
    ("object_counting", "How many?", "8"),
    ("formal_fallacies", "Is it valid?", "invalid"),
)
NO_SENTENCE = 'no "the answer is"'
BBH: dict[str, list[Expected]] = {
    "date_understanding": [
        ("Tomorrow is 03/04/2021. So the answer is (B).", 1, 1, None),
        ("Tomorrow is 03/04/2021. So the answer is (B)", 0, 1, None),
        ("The answer is (B).", 0, 1, NO_SENTENCE),
        ("So the answer is B: it is one day later.", 0, 1, None),
        ("So the answer is (A). No, so the answer is (B).", 0, 1, None),
        ("So the answer is (B).\n\nQ: Tomorrow?\nSo the answer is (A).", 1, 1, None),
    ],
    "navigate": [
        ("So the answer is Yes.\nTell me if you need more.", 1, 1, None),
        ("So the answer is Yes, because you turn back.", 0, 1, None),
        ("So the answer is No.", 0, 0, None),
        ("Yes", 0, 1, NO_SENTENCE),
    ],
    "word_sorting": [
        ("So the answer is apple, pear, quince.", 0, 1, None),
        ("The answer is:\n1. apple\n2. pear\n3. quince", 0, 1, NO_SENTENCE),
        ("So the answer is apple, quince, pear.", 0, 0, None),
    ],
    "dyck_languages": [("So the answer is } ) ].", 1, 1, None), ("So the answer is **})]**.", 0, 1, None)],
    "object_counting": [("So the answer is 8 objects.", 0, 1, None), ("So the answer is 18.", 0, 0, None)],
    "formal_fallacies": [("So the answer is Invalid.", 0, 1, None), ("So the answer is valid.", 0, 0, None)],
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in BBH.items() for case in cases])
def test_the_last_statement_of_bbh_is_read(kind: str, case: Expected, folder: Path) -> None:
    """By value in any notation; lm-eval reads the first one, without its last character."""
    check(opened("bbh", folder, *(kind for kind, *_ in BBH_ROWS)), f"{kind}/0/0", case)


# --- Formulas -----------------------------------------------------------------------------------------------------

FORMULAS: list[tuple[str, Expected]] = [  # reference, case
    ("-1,2", ("\\boxed{2,-1}", 0, 1, None)),
    ("4210_{5}", ("\\boxed{4210_6}", 0, 0, None)),
    ("3", ("First \\boxed{6}, no: \\boxed{3}", 1, 1, None)),
    ("3", ("First \\boxed{3}, no: \\boxed{6}", 0, 0, None)),
    ("3", ("\\boxed{}", 0, 0, "no box")),
    ("3", ("Half of $6$ is $\\boxed{6}$, not $3$.", 0, 0, None)),
    ("10{,}080", ("\\boxed{10080}", 0, 1, None)),
    ("\\frac{1}{4}", ("\\boxed{0.25}", 0, 1, None)),
    ("\\frac{2}{3}", ("\\boxed{0.666667}", 0, 0, None)),
    ("5\\text{ cm}", ("\\boxed{5\\,\\text{cm}}", 0, 1, None)),
    ("\\text{(B)}", ("\\boxed{B}", 0, 1, None)),
    ("90^\\circ", ("\\boxed{90°}", 0, 1, None)),
    ("(2,3)", ("\\boxed{(3, 2)}", 0, 0, None)),
    ("23", ("\\boxed{2*3}", 0, 0, None)),
    ("7", ("I put it in a \\boxed environment: \\boxed{7}", 1, 1, None)),
    ("7", ("It is $\\boxed 7$.", 1, 1, None)),
    ("7", ("The answer is $7$.", 1, 1, None)),
    ("7", ("The answer is \\(7\\).", 0, 1, "no box")),
    ("7", ("It is \\boxed{7}, no: \\boxed{8", 0, 0, "no box")),
    ("7", ("\\boxed{9^{9^{9^{9}}}}", 0, 0, None)),  # never computed to its end
    ("x^2-1", ("\\boxed{(x-1)(x+1)}", 0, 1, None)),  # the next one is compared all the same
]
AIME: list[Expected] = [
    ("\\boxed{70}", 1, 1, None),
    ("\\boxed{070}", 0, 1, None),
    ("First \\boxed{70}, no: \\boxed{71}", 0, 0, None),
    ("It is 71.", 0, 0, "no box"),
]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "task", "cases"),
    [("math500", "hendrycks_math500", [case for _, case in FORMULAS]), ("aime25", "aime25", AIME)],
)
def test_formulas_are_read(name: str, task: str, cases: list[Expected], folder: Path) -> None:
    """By value in any notation, with Math-Verify in its own process; the last box is the answer."""
    readings = opened(name, folder).read({f"{task}/{n}/0": text for n, (text, *_) in enumerate(cases)})

    assert list(readings.values()) == [Reading(score, unread, value) for _, score, value, unread in cases]


# --- Programs -----------------------------------------------------------------------------------------------------

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
COUNT = "def count(node):\n    n = 0\n    while node:\n        n, node = n + 1, node.next\n    return n\n"
NODE = "class Node:\n    def __init__(self, next=None):\n        self.next = next"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
MBPP: Rows = [
    {"task_id": 0, "text": "Add.", "code": ADD, "test_list": TESTS, "test_setup_code": ""},
    {
        "task_id": 1,
        "text": "Count.",
        "code": COUNT,
        "test_list": [f"assert count({'Node(' * n}None{')' * n}) == {n}" for n in range(3)],
        "test_setup_code": NODE,
    },
]
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def successor(x):\n    """Add 1."""\n',
    "entry_point": "successor",
    "canonical_solution": "    return x + 1\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
BODY, WHOLE = "    return x + 1\n", "def successor(x):\n    return x + 1\n"
FENCE = "```"
DOCSTRING = f"    '''Add.\n\n    {FENCE}\n    add(1, 2)\n    {FENCE}\n    '''\n"
PROGRAMS: dict[str, list[Expected]] = {
    "mbpp: mbpp_instruct/0/0": [
        (f"{ADD}{FENCE}\nIt adds.", 1, None, None),
        (f"{FENCE}\n\nHere is the function:\n\n{FENCE}python\n{ADD}{FENCE}", 1, None, None),
        (f"{ADD.replace(chr(10), chr(13) + chr(10))}{FENCE}", 1, None, None),
        (
            ADD.replace("    r", f"    '''Add.\n\n    {FENCE}\n    add(1, 2)\n    {FENCE}\n    '''\n    r") + FENCE,
            1,
            None,
            None,
        ),
        (f"{WRONG}{FENCE}\nNo:\n{FENCE}\n{ADD}{FENCE}\nUse it:\n{FENCE}\nprint(add(1, 2))\n{FENCE}", 1, None, None),
        (f"1. Write:\n   {FENCE}python\n   def add(a, b):\n       return a + b\n   {FENCE}\n", 1, None, None),
        (f"{WRONG}{FENCE}", 0, None, None),
        ("print(1)", 0, None, None),
        ("def add(a, b):\n    return (a +", 0, None, "no program that parses"),
    ],
    "mbpp: mbpp_instruct/1/0": [(f"{COUNT}{FENCE}", 1, None, None)],
    "humaneval-deepspec: humaneval_instruct/0/0": [
        (f"For example:\n{FENCE}\n>>> successor(1)\n2\n{FENCE}\nSo:\n{FENCE}python\n{WHOLE}{FENCE}", 1, None, None),
        (f"{FENCE}python\n{BODY}{FENCE}", 1, None, None),
        (f"{FENCE}\n{WHOLE}", 1, None, None),  # the budget cut the fence
        (f"{FENCE}python\ndef successor(x):\n    return x\n{FENCE}", 0, None, None),
        ("It adds one.", 0, None, "no program that parses"),
    ],
    "humaneval: humaneval/0/0": [
        (BODY, 1, 1, None),
        (f"{BODY}{FENCE}\n", 0, 1, "no program that parses"),
        ("", 0, 0, "no program that parses"),
    ],
    "humaneval-paper: humaneval_instruct/0/0": [
        (f"\n{WHOLE}{FENCE}\nIt adds one.", 1, 1, None),
        (f"\n{FENCE}\n{WHOLE}", 0, 1, None),
    ],
}


@pytest.mark.whole
@pytest.mark.parametrize(("item", "case"), [(item, case) for item, cases in PROGRAMS.items() for case in cases])
def test_programs_are_read(item: str, case: Expected, folder: Path) -> None:
    """The last block that is a program and has the tested function runs, with what its tests need."""
    name, _, item = item.partition(": ")
    check(opened(name, folder), item, case)


# --- The contract -------------------------------------------------------------------------------------------------


def _refuse(answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    if any("filter" in text for of_doc in answers for text in of_doc):
        raise ValueError("no")
    return [list(of_doc) for of_doc in answers]


def _results(doc: Mapping[str, Any], results: Sequence[object]) -> dict[str, int]:
    return {"exact_match": 1 // ("metric" not in str(results[0]))}


class Failing(HarnessSuite):
    name = "failing"
    tasks: ClassVar = {"gsm8k": {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"}}
    folder = "gsm8k"
    config: ClassVar = {
        "process_results": _results,
        "filter_list": [{"name": "own", "filter": [{"function": "custom", "filter_fn": _refuse}]}],
    }
    filter = "own"
    metric = "exact_match"


def test_an_error_of_the_rule_leaves_one_answer_unread(folder: Path) -> None:
    """It is not a wrong answer; the others have their scores. The score of each is the one that is read."""
    suite = Failing("", Source(data_dir=folder, offline=True))
    failed = Reading(0.0, "lm-eval raised an error")
    answers = {"gsm8k/0/0": "the metric fails", "gsm8k/1/0": "fine", "gsm8k/2/0": "the filter fails"}

    assert suite.read(answers) == {"gsm8k/0/0": failed, "gsm8k/1/0": Reading(1.0), "gsm8k/2/0": failed}
    assert suite.score(answers) == {"gsm8k/0/0": 0.0, "gsm8k/1/0": 1.0, "gsm8k/2/0": 0.0}


class Old(Suite):
    def __init__(self, variant: str, source: Source) -> None: ...

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return []

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        return dict.fromkeys(answers, 0.5)


def test_a_suite_that_only_scores_is_read(folder: Path) -> None:
    """Also one that replaces the score of another suite, or changes it; one without both has no score."""

    class Halved(Failing):
        def score(self, answers: Mapping[str, str]) -> dict[str, float]:
            return {item: score / 2 for item, score in super().score(answers).items()}

    for suite in (Old("", Source()), Halved("", Source(data_dir=folder, offline=True))):
        assert suite.read({"gsm8k/0/0": "x"}) == {"gsm8k/0/0": Reading(0.5)}
    with pytest.raises(NotImplementedError):
        Suite.score(object.__new__(Suite), {})


def test_answers_without_a_text_or_a_call_are_unread() -> None:
    """In `arithmetic` those without its sentence are."""
    suite = SUITES["arithmetic"]("", Source())
    readings = suite.read({"arithmetic/0/0": "It is 5.", "arithmetic/1/0": f"The answer is {'9' * 10_000}."})

    assert readings == {"arithmetic/0/0": Reading(0.0, 'no "The answer is N"'), "arithmetic/1/0": Reading(0.0)}


HOSTILE = {
    "digits": "9" * 100_000,
    "commas": "1,111" * 20_000,
    "boxes": "\\boxed{" * 14_000 + "}" * 14_000,
    "braces": "{" * 50_000,
    "fractions": "\\frac{1}{" * 11_000,
    "blanks": "\\boxed" + " " * 100_000 + "answer" + " " * 50_000,
    "questions": "Question:\n" * 10_000,
    "controls": "\u202e\u0000\u2066The answer is \ud800(B\u0300)\u202c." * 3_000,
    "fences": "```\n" * 25_000,
    "minus": "-" * 100_000,
    "backticks": "`" * 100_000 + ":",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_are_read_in_bounded_time(text: str) -> None:
    """Two seconds of processor time each, for every kind of reading by value; no error."""
    reads: list[Callable[[], object]] = [
        lambda: number(text),
        lambda: letter(text),
        lambda: bbh.same_answers([Case({}, row[2], text) for row in BBH_ROWS[1:]]),
        lambda: program(text, {"add"}, "def add(a):\n"),
        lambda: first(text, _formula),
        lambda: find_formula(text),
    ]
    for read in reads:
        started = process_time()
        read()
        assert process_time() - started < 2


@pytest.mark.whole
def test_hostile_formulas_are_compared() -> None:
    """Math-Verify's process outlives them; none equals the reference, and the next formula is compared."""
    texts = [*HOSTILE.values(), "\\boxed{4/2}"]
    assert same_formulas([Case({}, "2", text) for text in texts]) == [False] * len(HOSTILE) + [True]
    assert same_formulas([Case({}, "2", "")]) == [False]
