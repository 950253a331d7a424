"""Questions with several turns: their prompts, the continuation of a conversation, and their files."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from made_up import write_lines, write_parquet

from mtbench.errors import UserError
from mtbench.evaluation.multi_turn import QuestionSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Template

REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with mt_bench/mt_bench__question.jsonl")
CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]

# Chat templates of released models, without tools and system prompts.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA = (
    "<s>{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}<h>assistant</h>\n\n"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
REWRITES = "{{ messages | length }} turns\n" + CHATML
THINKS = CHATML.replace(
    "\n{{ m.content }}", "\n{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
)
REFUSES = "{% if messages | length > 1 %}{{ raise('one turn only') }}{% endif %}{{ messages[0].content }}"


def compiled(source: str) -> Template:
    """Return a chat template with the environment of transformers."""
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.globals["raise"] = refuse
    template = environment.from_string(source)
    return lambda messages: template.render(messages=messages)


def plain(messages: Messages) -> str:
    """Render a conversation as planning does for a tokenizer without a chat template."""
    return "\n\n".join(turn["content"] for turn in messages)


def rows() -> list[dict[str, Any]]:
    """Return two questions of each category, sorted by category, each with two turns."""
    return [
        {"question_id": 81 + n, "category": category, "turns": [f"{category} {n}?", f" and {n}, now? "]}
        for n, category in enumerate(c for c in CATEGORIES for _ in range(2))
    ]


def write(folder: Path, lines: Sequence[Any], name: str = "mt_bench/question.jsonl") -> Path:
    write_lines(folder / name, lines)
    return folder


def opened(folder: Path | None, name: str = "mt-bench", variant: str = "", **options: Any) -> QuestionSuite:
    suite: QuestionSuite = SUITES[name](variant, Source(data_dir=folder, **options))
    return suite


# --- Turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_prompts_and_answers_form_the_conversation(template: str, tmp_path: Path) -> None:
    """Of any number of turns: first prompt, answer, second prompt … equal the template's text for the whole."""
    lines = [{"question_id": "a", "category": "math", "turns": ["One?", " Two? ", "Three?"]}]
    prompts = opened(write(tmp_path, lines, "mt_bench/mt_bench__question.jsonl")).prompts(compiled(template), None)
    roles = ["user", "assistant", "user", "assistant", "user"]
    texts = ["One?", "1", " Two? ", "2", "Three?"]

    assert [(p.item, p.follows) for p in prompts] == [
        ("math/a/0", None),
        ("math/a/1", "math/a/0"),
        ("math/a/2", "math/a/1"),
    ]
    whole = compiled(template)([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    assert prompts[0].text + "1" + prompts[1].text + "2" + prompts[2].text == whole


@pytest.mark.parametrize(
    ("template", "text"),
    [(compiled(MISTRAL), "</s>[INST]  and 0, now? [/INST]"), (plain, "\n\n and 0, now? ")],
    ids=["mistral", "none"],
)
def test_blanks_before_an_answer_may_differ(template: Template, text: str, tmp_path: Path) -> None:
    """A template may write blanks before an earlier answer, because the model may write them itself or not."""
    assert opened(write(tmp_path, rows())).prompts(template, 1)[1].text == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REWRITES, "template rewrites an earlier turn"),
        (THINKS, "template rewrites an earlier turn"),
        (REFUSES, "template rejects it (one turn only)"),
    ],
    ids=["rewrites", "thinks", "refuses"],
)
def test_a_template_that_cannot_continue_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    """The second turn would change the tokens of the first."""
    with pytest.raises(UserError) as caught:
        opened(write(tmp_path, rows())).prompts(compiled(template), 1)

    assert str(caught.value).startswith("writing/81/1: the checkpoint's chat ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# --- Files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: not JSON ("),
        ({"question_id": 1, "category": "math"}, "line 2: not a question of MT-Bench (KeyError: 'turns')"),
        (
            {"question_id": 1, "category": "math", "turns": []},
            "(ValueError: 'turns' must be a list of texts that is not empty)",
        ),
        ({"question_id": 1, "category": "math", "turns": ["\ud800"]}, "(UnicodeEncodeError: "),
        (
            {"question_id": "1/2", "category": "math", "turns": ["?"]},
            "(ValueError: 'question_id' '1/2' must not be empty",
        ),
        ({"question_id": 1, "category": "maths", "turns": ["?"]}, "category 'maths' is not one of writing, roleplay,"),
        ({"question_id": 81, "category": "writing", "turns": ["?"]}, "question_id '81' occurs twice"),
    ],
    ids=["json", "no turns", "none", "surrogate", "id", "category", "twice"],
)
def test_an_invalid_line_is_named(line: Any, reason: str, tmp_path: Path) -> None:
    """The error has file, line and reason in one line."""
    with pytest.raises(UserError) as caught:
        opened(write(tmp_path, [rows()[0], line]))

    assert str(caught.value).startswith("suite 'mt-bench': mt_bench/question.jsonl, line 2: not ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "options", "reason"),
    [([], {}, "has no questions$"), (rows()[:2], {"subtasks": ("math",)}, "has no questions of math$")],
    ids=["none", "none of those"],
)
def test_a_file_without_questions_is_refused(lines: list[Any], options: Any, reason: str, tmp_path: Path) -> None:
    """An empty file, or one without the selected subtask, raises an error."""
    with pytest.raises(UserError, match=reason):
        opened(write(tmp_path, lines), **options)


# --- SPEED-Bench --------------------------------------------------------------------------------------------------


def speed_rows(categories: Sequence[str] = ("coding", "rag")) -> list[dict[str, Any]]:
    """Return three rows of each category, the last with three turns."""
    return [
        {"question_id": f"{n:032x}", "category": category, "turns": [f"{n}?", "Go on.", "And on."][: 3 if last else 1]}
        for n, (category, last) in enumerate((c, k == 2) for c in categories for k in range(3))
    ]


def write_speed(folder: Path, rows: Sequence[Any], split: str = "qualitative") -> Path:
    write_parquet(folder / "speed_bench" / "speed" / split / "test.parquet", list(rows))
    return folder


@pytest.mark.parametrize(("split", "tasks"), [("", ["coding", "rag"]), ("throughput_8k", ["low_entropy", "mixed"])])
def test_speed_bench_reads_the_files_of_its_script(split: str, tasks: list[str], tmp_path: Path) -> None:
    """It uses the given split with all turns, its categories are subtasks, and `task` names the licence."""
    suite = opened(write_speed(tmp_path, speed_rows(tasks), split or "qualitative"), "speed-bench", split)
    prompts = suite.prompts(compiled(CHATML), None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(tasks, 5)
    assert [p.item.split("/")[2] for p in prompts[4:]] == ["0", "1", "2", "0", "1", "2"]
    assert (suite.task["split"], suite.task["turns"]) == (split or "qualitative", "all")
    assert suite.task["licence"] == "NVIDIA Evaluation Dataset License"


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda rows: rows[1].update(turns=["?", PLACEHOLDER]),
            "row 2: not a question .*a placeholder; the file must be made by .*Model-Optimizer",
        ),
        (lambda rows: [row.pop("turns") for row in rows], "row 1: not a question of SPEED-Bench .KeyError: 'turns'"),
        (lambda rows: rows[2].update(category="mixed"), "row 3: .*category 'mixed' is not in this split: coding,"),
    ],
    ids=["placeholder", "columns", "category"],
)
def test_speed_bench_with_placeholders_is_refused(change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    """The published files without NVIDIA's script, and other invalid rows, raise an error."""
    rows = speed_rows()
    change(rows)
    with pytest.raises(UserError, match=reason):
        opened(write_speed(tmp_path, rows), "speed-bench")


def test_speed_bench_is_not_downloaded(tmp_path: Path) -> None:
    """The error has the script, its options and the folder. Another file, split or category is refused."""
    with pytest.raises(
        UserError, match=r"cannot be downloaded: pass --data-dir DIR .*prepare_data\.py --config throughput_1k"
    ):
        opened(None, "speed-bench", "throughput_1k")
    folder = write_speed(tmp_path, speed_rows())
    (folder / "speed_bench/speed/qualitative/test.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"test\.parquet, row 1: not readable as Parquet \("):
        opened(folder, "speed-bench")
    with pytest.raises(UserError, match=r"unknown split .*throughput_4k.*did you mean"):
        opened(folder, "speed-bench", "throughput_4k")
    with pytest.raises(UserError, match="--subtask 'rag' is not in speed-bench:throughput_8k, which has low_entropy,"):
        opened(folder, "speed-bench", "throughput_8k", subtasks=("rag",))


# --- The real questions -------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(
    ("name", "tasks", "prompts_each", "later_turns"),
    [
        ("mt-bench", CATEGORIES, 20, 80),
        ("spec-bench", ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"], 80, 0),
    ],
)
def test_all_questions_are_there(name: str, tasks: list[str], prompts_each: int, later_turns: int) -> None:
    """Of the authors' unchanged files: MT-Bench with both turns, and the first turns of Spec-Bench."""
    suite = opened(Path(REAL or ""), name)
    prompts = suite.prompts(compiled(CHATML), None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(tasks, prompts_each)
    assert sum(p.follows is not None for p in prompts) == later_turns
    assert suite.task["sha256"] == SUITES[name].sha256
