"""Questions with turns: what is asked, what goes on from an answer, from which files, and what is refused."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtbench.errors import UserError
from mtbench.evaluation.multi_turn import QuestionSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Template
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan

REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with mt_bench/mt_bench__question.jsonl")
CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]

# Chat templates as released models have them, without tools and system prompts.
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
FORGETS = "{{ messages[-1].content }}\nassistant:"
REFUSES = "{% if messages | length > 1 %}{{ raise('one turn only') }}{% endif %}{{ messages[0].content }}"


def written(source: str) -> Template:
    """The conversation by a template, as transformers renders it."""
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.globals["raise"] = refuse
    compiled = environment.from_string(source)
    return lambda messages: compiled.render(messages=messages)


def plain(messages: Messages) -> str:
    """As planning writes a conversation for a tokenizer without a chat template."""
    return "\n\n".join(turn["content"] for turn in messages)


def rows() -> list[dict[str, Any]]:
    """Two questions of each category, category by category, each with two turns."""
    return [
        {"question_id": 81 + n, "category": category, "turns": [f"{category} {n}?", f" and {n}, now? "]}
        for n, category in enumerate(c for c in CATEGORIES for _ in range(2))
    ]


def write(folder: Path, lines: Sequence[Any], name: str = "mt_bench/question.jsonl") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return folder


def opened(folder: Path | None, name: str = "mt-bench", rest: str = "", **how: Any) -> QuestionSuite:
    made: QuestionSuite = SUITES[name](rest, Source(data_dir=folder, **how))
    return made


# --- Turns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_prompt_answer_and_later_turn_are_the_conversation(template: str, tmp_path: Path) -> None:
    """First prompt + what was answered + second text is what the template writes for the whole."""
    first, second = opened(write(tmp_path, rows())).prompts(written(template), 1)[:2]
    turns = ["writing 0?", "The answer.", " and 0, now? "]
    whole = [{"role": role, "content": text} for role, text in zip(["user", "assistant", "user"], turns, strict=True)]

    assert (first.item, first.follows) == ("writing/81/0", None)
    assert (second.item, second.follows) == ("writing/81/1", "writing/81/0")
    assert first.text + "The answer." + second.text == written(template)(whole)


def test_any_number_of_turns_goes_on(tmp_path: Path) -> None:
    """The third turn follows the second, whatever both were answered."""
    asked = [{"question_id": "a", "category": "math", "turns": ["One?", "Two?", "Three?"]}]
    prompts = opened(write(tmp_path, asked)).prompts(written(CHATML), None)
    roles = ["user", "assistant", "user", "assistant", "user"]
    texts = ["One?", "1", "Two?", "2", "Three?"]

    assert [p.follows for p in prompts] == [None, "math/a/0", "math/a/1"]
    whole = written(CHATML)([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    assert prompts[0].text + "1" + prompts[1].text + "2" + prompts[2].text == whole


@pytest.mark.parametrize(
    ("template", "text"),
    [(written(MISTRAL), "</s>[INST]  and 0, now? [/INST]"), (plain, "\n\n and 0, now? ")],
    ids=["mistral", "none"],
)
def test_blanks_before_an_answer_are_the_models(template: Template, text: str, tmp_path: Path) -> None:
    """A template that writes a blank where a model may write one too, or none at all, does not stop a conversation."""
    assert opened(write(tmp_path, rows())).prompts(template, 1)[1].text == text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REWRITES, "template writes an earlier turn otherwise"),
        (THINKS, "template writes an earlier turn otherwise"),
        (FORGETS, "template writes an earlier turn otherwise"),
        (REFUSES, "template refuses it (one turn only)"),
    ],
    ids=["rewrites", "thinks", "forgets", "refuses"],
)
def test_a_template_that_cannot_go_on_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    """What was read could not be what stands there; the first turn alone is no matter."""
    with pytest.raises(UserError) as caught:
        opened(write(tmp_path, rows())).prompts(written(template), 1)

    assert str(caught.value).startswith("writing/81/1: the checkpoint's chat ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_limit_counts_conversations_of_each_category(tmp_path: Path) -> None:
    """Both turns of so many questions of each, categories in turn; a smaller limit is the beginning of a larger one."""
    made = opened(write(tmp_path, rows()))
    one, both = made.prompts(written(CHATML), 1), made.prompts(written(CHATML), None)

    assert [p.item.split("/")[0] for p in one] == [c for c in CATEGORIES for _ in range(2)]
    assert both[:16] == one
    assert len({p.item for p in both}) == len(both) == 32


def test_subtasks_are_those_asked_for(tmp_path: Path) -> None:
    """And no others."""
    prompts = opened(write(tmp_path, rows()), subtasks=("math", "stem")).prompts(written(CHATML), None)

    assert Counter(p.item.split("/")[0] for p in prompts) == {"math": 4, "stem": 4}


# --- Files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is no question of MT-Bench (not JSON"),
        ({"question_id": 1, "category": "math"}, "line 2 is no question of MT-Bench (KeyError: 'turns')"),
        ({"question_id": 1, "category": "math", "turns": []}, "(ValueError: 'turns' is no list of texts, or empty)"),
        (
            {"question_id": 1, "category": "math", "turns": "Why?"},
            "(ValueError: 'turns' is no list of texts, or empty)",
        ),
        ({"question_id": 1, "category": "math", "turns": ["Why?", " "]}, "(ValueError: one of 'turns' is no text"),
        ({"question_id": 1, "category": "math", "turns": ["\ud800"]}, "(UnicodeEncodeError: "),
        ({"question_id": "1/2", "category": "math", "turns": ["?"]}, "(ValueError: 'question_id' '1/2' is empty"),
        ({"question_id": 1, "category": "maths", "turns": ["?"]}, "category 'maths' is none of writing, roleplay,"),
        ({"question_id": 81, "category": "writing", "turns": ["?"]}, "(question 81 is there twice)"),
        (["?"], "line 2 is no question of MT-Bench (TypeError"),
    ],
    ids=["json", "no turns", "none", "text", "blank", "surrogate", "id", "category", "twice", "list"],
)
def test_a_line_that_is_no_question_is_named(line: Any, reason: str, tmp_path: Path) -> None:
    """File, line and reason in one line."""
    with pytest.raises(UserError) as caught:
        opened(write(tmp_path, [rows()[0], line]))

    assert str(caught.value).startswith("suite 'mt-bench': mt_bench/question.jsonl, line 2 is no question")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "how", "reason"),
    [([], {}, "has no questions$"), (rows()[:2], {"subtasks": ("math",)}, "has no questions of math$")],
    ids=["none", "none of those"],
)
def test_a_file_without_questions_is_refused(lines: list[Any], how: Any, reason: str, tmp_path: Path) -> None:
    """Nothing to ask is said at once."""
    with pytest.raises(UserError, match=reason):
        opened(write(tmp_path, lines), **how)


def test_a_folder_without_the_file_names_it(tmp_path: Path) -> None:
    """The path that was looked for, what the folder is to hold, and where a person gets it."""
    with pytest.raises(UserError, match=r"cannot read .*question\.jsonl: No such file.* DIR holds mt_bench/.*FastChat"):
        opened(tmp_path)


def test_the_file_may_have_its_other_name(tmp_path: Path) -> None:
    """As a copy that says which benchmark it is from."""
    assert opened(write(tmp_path, rows(), "mt_bench/mt_bench__question.jsonl")).prompts(written(CHATML), 1)


@pytest.mark.parametrize("name", ["mt-bench", "spec-bench"])
def test_what_is_kept_is_read_again_as_it_was(name: str, tmp_path: Path) -> None:
    """Byte for byte, in the layout of a data folder."""
    folder = write(write(tmp_path / "a", rows()), rows(), "spec_bench/question.jsonl")
    made = opened(folder, name)
    made.keep(tmp_path / "b")
    again = opened(tmp_path / "b", name)

    assert again.task == made.task
    assert again.prompts(written(CHATML), None) == made.prompts(written(CHATML), None)


# --- SPEED-Bench --------------------------------------------------------------------------------------------------


def speed_rows(split: str = "qualitative") -> list[dict[str, Any]]:
    """As its card says they are: three of each of two categories, the last with three turns."""
    categories = ["coding", "rag"] if split == "qualitative" else ["low_entropy", "mixed"]
    return [
        {
            "question_id": f"{n:032x}",
            "category": category,
            "sub_category": None,
            "turns": [f"{category} {n}?", "Go on.", "And on."][: 3 if n % 3 == 2 else 1],
            "source": "https://huggingface.co/datasets/made-up",
            "src_id": str(n),
            "difficulty": "",
            "multiturn": n % 3 == 2,
        }
        for n, category in enumerate(c for c in categories for _ in range(3))
    ]


def write_speed(folder: Path, found: Sequence[Any], split: str = "qualitative") -> Path:
    from pyarrow import Table, parquet

    file = folder / "speed_bench" / "speed" / split / "test.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(Table.from_pylist(list(found)), file)
    return folder


@pytest.mark.parametrize(
    ("split", "tasks"),
    [("", ["coding", "rag"]), ("qualitative", ["coding", "rag"]), ("throughput_8k", ["low_entropy", "mixed"])],
)
def test_speed_bench_reads_what_its_script_wrote(split: str, tasks: list[str], tmp_path: Path) -> None:
    """The split asked for, all turns, its categories apart; the licence stands in the results."""
    folder = write_speed(tmp_path, speed_rows(split or "qualitative"), split or "qualitative")
    made = opened(folder, "speed-bench", split)
    prompts = made.prompts(written(CHATML), None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(tasks, 5)
    assert [p.item.split("/")[2] for p in prompts[4:]] == ["0", "1", "2", "0", "1", "2"]
    assert (made.task["split"], made.task["turns"]) == (split or "qualitative", "all")
    assert made.task["licence"] == "NVIDIA Evaluation Dataset License"
    made.keep(tmp_path / "kept")
    assert opened(tmp_path / "kept", "speed-bench", split).prompts(written(CHATML), None) == prompts


UNMADE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH\n\n{question}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found[1].update(turns=[UNMADE]), "row 2 is no question .*has not put it together: made by `pre"),
        (lambda found: found[1].update(turns=["?", UNMADE]), "row 2 is no question .*has not put it together"),
        (lambda found: [row.pop("turns") for row in found], "row 1 is no question of SPEED-Bench .KeyError: 'turns'"),
        (lambda found: found[2].update(category="mixed"), "row 3 .*category 'mixed' is none of the split's: coding,"),
    ],
    ids=["placeholder", "later placeholder", "columns", "category"],
)
def test_speed_bench_not_put_together_is_refused(change: Callable[[Any], Any], reason: str, tmp_path: Path) -> None:
    """What the hub serves without the script, or something else, is no prompt."""
    found = speed_rows()
    change(found)
    with pytest.raises(UserError, match=reason):
        opened(write_speed(tmp_path, found), "speed-bench")


def test_speed_bench_is_not_fetched_and_says_how_it_is_made(tmp_path: Path) -> None:
    """Its licence leaves that to the user: the script, its options, the folder. A file that is none is refused."""
    with pytest.raises(
        UserError, match=r"is not fetched: pass --data-dir DIR .*prepare_data\.py --config throughput_1k"
    ):
        opened(None, "speed-bench", "throughput_1k")
    folder = write_speed(tmp_path, speed_rows())
    (folder / "speed_bench/speed/qualitative/test.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"test\.parquet cannot be read \("):
        opened(folder, "speed-bench")


@pytest.mark.parametrize(
    ("rest", "subtasks", "reason"),
    [
        ("throughput_4k", (), r"unknown split .*throughput_4k.*did you mean"),
        (
            "throughput_8k",
            ("rag",),
            "--subtask 'rag' is none of speed-bench:throughput_8k, which has low_entropy, mixed,",
        ),
    ],
)
def test_a_split_has_its_own_subtasks(rest: str, subtasks: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    """Unknown splits and categories of another one are named with the choices."""
    with pytest.raises(UserError, match=reason):
        opened(tmp_path, "speed-bench", rest, subtasks=subtasks)


# --- The 80 themselves --------------------------------------------------------------------------------------------


@real
def test_all_questions_are_there() -> None:
    """80, ten of each category, both turns, the authors' file byte for byte."""
    made = opened(Path(REAL or ""))
    prompts = made.prompts(written(CHATML), None)

    assert Counter(p.item.split("/")[0] for p in prompts) == dict.fromkeys(CATEGORIES, 20)
    assert sum(p.follows is not None for p in prompts) == 80
    assert made.task["sha256"] == SUITES["mt-bench"].sha256
    assert made.task["turns"] == "all"


@real
def test_all_conversations_fit_the_embedded_family() -> None:
    """Both turns and twice the whole budget have room in its context; every second turn knows its first."""
    request = RunRequest(suite=["mt-bench"], family="tiny", method=["ar"], data_dir=REAL, offline=True)
    plan = make_plan(request).suites[0]

    assert len(plan.items) == 160
    for item in plan.items:
        before = None if item.follows is None else plan.items[item.follows].item
        assert before == (None if item.item.endswith("/0") else item.item.removesuffix("1") + "0")
