"""BBH: 6,511 questions of 27 kinds that earlier language models found hard, with three few-shot examples.

Paper: "Challenging BIG-Bench Tasks and Whether Chain-of-Thought Can Solve Them", Suzgun et al., arXiv 2210.09261.
Data: github.com/suzgunmirac/BIG-Bench-Hard (MIT); lm-eval takes it from the hub's SaylorTwift/bbh.
Task: lm-eval's `bbh_cot_fewshot`. The examples are the paper's own, each a turn of the chat that ends with "So the
answer is (A)."; the filter reads the first such sentence, by value the last one counts. Up to 1,024 new tokens. The
score is the mean over all questions (146 to 250 of each kind).

    mtbench run --suite bbh --limit 20                   # of each kind
    mtbench run --suite bbh --subtask snarks --subtask navigate
    mtbench run --suite bbh --offline --data-dir DIR     # DIR/bbh/bbh/snarks.json, …, or .gz
"""

import re
from collections.abc import Sequence
from typing import ClassVar

from mtbench.evaluation.by_value import Case, first, last_line, letter, number, statements
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES

KINDS = (
    *("boolean_expressions", "causal_judgement", "date_understanding", "disambiguation_qa"),
    *("dyck_languages", "formal_fallacies", "geometric_shapes", "hyperbaton"),
    *("logical_deduction_five_objects", "logical_deduction_seven_objects"),
    *("logical_deduction_three_objects", "movie_recommendation", "multistep_arithmetic_two", "navigate"),
    *("object_counting", "penguins_in_a_table", "reasoning_about_colored_objects", "ruin_names"),
    *("salient_translation_error_detection", "snarks", "sports_understanding", "temporal_sequences"),
    *("tracking_shuffled_objects_five_objects", "tracking_shuffled_objects_seven_objects"),
    *("tracking_shuffled_objects_three_objects", "web_of_lies", "word_sorting"),
)
TOKEN = re.compile(r"\b(?!and\b)[^\W\d_]+(?:['’-][^\W\d_]+)*|[][(){}<>]")  # a word, or a bracket
LIST_END = re.compile(r"(?<!\d)[.!]|\n(?!\s*[\d*-])")  # "1." is the number of a line


def same_answers(cases: Sequence[Case]) -> list[bool]:
    """Return for each case whether the last statement is the reference: a choice, a number, brackets or words."""
    return [_is_same(case) for case in cases]


def _is_same(case: Case) -> bool:
    if re.fullmatch(r"\([A-Z]\)", case.reference):
        return letter(case.text) == case.reference[1]
    if re.fullmatch(r"-?\d+", case.reference):
        return number(case.text) == int(case.reference)
    stated = first(case.text, lambda part: next(statements(part), None)) or last_line(case.text)
    wanted, given = (TOKEN.findall(LIST_END.split(of.lower(), maxsplit=1)[0]) for of in (case.reference, stated))
    if case.reference.isalpha():
        return given[:1] == wanted and "or" not in given[1:2]
    return given == wanted


@SUITES.register("bbh")
class Bbh(HarnessSuite):
    subtasks = KINDS
    tasks: ClassVar = {f"bbh_cot_fewshot_{kind}": {"test": f"bbh/bbh/{kind}.json"} for kind in KINDS}
    group = "bbh_cot_fewshot"
    folder = "bbh/cot_fewshot"
    field = "examples"
    num_fewshot = 3
    filter = "get-answer"
    nothing = 'no "the answer is"'
    same_values = staticmethod(same_answers)
    metric = "exact_match"
    max_new_tokens = 1024
