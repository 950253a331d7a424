"""What every suite owes its caller, and what the questions and scores of lm-eval's tasks must be.

The contract runs on made-up questions; GSM8K itself is read where MTBENCH_DATA_DIR names a folder that holds
gsm8k/train.jsonl and gsm8k/test.jsonl (or .gz).
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from mtbench.errors import UserError
from mtbench.harness import HarnessSuite
from mtbench.registry import SUITES
from mtbench.suite import Messages, Prompt, Source, Suite

NAMES = list(SUITES)
SCORED = [name for name in NAMES if SUITES[name].metric]
HARNESS = [name for name in NAMES if issubclass(SUITES[name], HarnessSuite)]
GSM8K_ROWS = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"She has {n} + {n}.\n#### {2 * n}"}
    for n in range(1, 13)
]
REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with gsm8k/test.jsonl")


def chat(messages: Messages) -> str:
    """A chat template as plain as can be."""
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of our own for datasets; whoever goes offline comes back at the end."""
    import datasets.config
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setattr(datasets.config, name, True)
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with made-up questions. Its name would be a pattern, were it read as one."""
    folder = tmp_path_factory.mktemp("data") / "a [b] *"
    write_lines(folder / "gsm8k/train.jsonl", GSM8K_ROWS[:8])
    write_lines(folder / "gsm8k/test.jsonl", GSM8K_ROWS)
    write_lines(folder / "mine.jsonl", [{"prompt": f"Why {n}?"} for n in range(12)])
    asked = [{"question_id": n, "category": "qa" if n % 2 else "stem", "turns": ["Why?"]} for n in range(12)]
    write_lines(folder / "spec_bench/question.jsonl", asked)
    return folder


def make(name: str, folder: Path) -> Suite:
    rest = str(folder / "mine.jsonl") if name == "prompts" else ""
    suite: Suite = SUITES[name](rest, Source(data_dir=folder, offline=True))
    return suite


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_takes_the_first_items_and_changes_none(name: str, folder: Path) -> None:
    """Item ids, texts and stop strings are the same whatever the limit, and for a suite made anew."""
    some = make(name, folder).prompts(chat, 7)
    suite = make(name, folder)

    assert len(some) == 7
    assert suite.prompts(chat, 3) == some[:3]
    assert suite.prompts(chat, 7) == some


@pytest.mark.parametrize("name", NAMES)
def test_items_are_named_once_and_written_by_the_template(name: str, folder: Path) -> None:
    """Ids are unique and read `<task>/<doc id>/<turn>`; the text the template's if `task` says so; no stop is empty."""
    suite = make(name, folder)
    prompts = suite.prompts(chat, 12)

    assert len({p.item for p in prompts}) == len(prompts) == 12
    for prompt in prompts:
        task, doc, turn = prompt.item.split("/")
        assert task
        assert doc
        assert turn.isdigit()
        assert prompt.text.endswith("</><assistant>") == suite.task["chat_template"]
        assert all(prompt.stop)


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_says_what_it_asked(name: str, folder: Path) -> None:
    """`task` has a name and goes into JSON; the budget is positive; the file opens with a docstring."""
    suite = make(name, folder)

    assert SUITES[name].name == name
    assert suite.task["name"]
    assert json.loads(json.dumps(suite.task)) == suite.task
    assert suite.max_new_tokens > 0
    assert sys.modules[type(suite).__module__].__doc__


@pytest.mark.parametrize("name", SCORED)
def test_only_what_was_answered_is_scored(name: str, folder: Path) -> None:
    """`score` returns exactly the items it was given, in any order; none given, none returned; empty answers get 0."""
    suite = make(name, folder)
    items = [p.item for p in suite.prompts(chat, 6)]

    assert suite.score({items[5]: "", items[2]: ""}) == {items[2]: 0.0, items[5]: 0.0}
    assert suite.score({}) == {}


@pytest.mark.parametrize("name", [n for n in NAMES if n != "prompts"])
def test_a_suite_without_options_refuses_one(name: str, folder: Path) -> None:
    """What stands behind a colon is never ignored."""
    with pytest.raises(UserError, match="nonsense"):
        SUITES[name]("nonsense", Source(data_dir=folder, offline=True))


def test_suites_are_listed_without_the_libraries_that_serve_them() -> None:
    """Finding every suite imports neither lm-eval nor datasets nor torch: generation runs without the first two."""
    code = "import sys; from mtbench.registry import SUITES; list(SUITES)\n"
    code += "print({'lm_eval', 'datasets', 'torch', 'transformers'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# --- lm-eval's tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARNESS)
def test_prompts_are_those_of_lm_eval_itself(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, stop strings and scores are what `simple_evaluate` uses with a chat template and all else default."""
    import lm_eval.evaluator
    from lm_eval.api.model import LM

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # seconds of asking pip
    monkeypatch.setattr(lm_eval.evaluator, "get_git_commit_hash", lambda: None)
    seen: list[Any] = []

    class Spy(LM):  # type: ignore[misc]
        tokenizer_name = "spy"

        def generate_until(self, requests: list[Any]) -> list[str]:
            seen.extend(request.args for request in requests)
            return [f"Sure. #### {2 * (n + 1 + n % 2)}" for n in range(len(requests))]

        def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True) -> str:
            return chat(messages)

        loglikelihood = loglikelihood_rolling = generate_until

    suite = make(name, folder)
    assert isinstance(suite, HarnessSuite)
    prompts = suite.prompts(chat, 6)
    theirs = lm_eval.simple_evaluate(
        model=Spy(),
        tasks=list(suite._tasks.values()),
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        limit=6,
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    ours = suite.score({p.item: f"Sure. #### {2 * (n + 1 + n % 2)}" for n, p in enumerate(prompts)})

    assert [(p.text, list(p.stop)) for p in prompts] == [(text, settings["until"]) for text, settings in seen]
    (samples,) = theirs["samples"].values()
    assert list(ours.values()) == [s[suite.metric] for s in samples if s["filter"] == suite.filter]
    assert 0 < sum(ours.values()) < 6


@pytest.mark.parametrize("name", HARNESS)
def test_nothing_is_printed_or_written_beside_the_data(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No progress bar, no log line, and no cache file in the user's folder."""
    before = sorted(folder.rglob("*"))
    suite = make(name, folder)
    suite.score({p.item: "18" for p in suite.prompts(chat, 2)})

    assert capfd.readouterr() == ("", "")
    assert sorted(folder.rglob("*")) == before


def test_examples_are_turns_of_their_own(folder: Path) -> None:
    """gsm8k shows five question-and-answer turns before the question; gsm8k-paper asks the question alone."""
    shown, bare = (make(name, folder).prompts(chat, 1)[0].text for name in ("gsm8k", "gsm8k-paper"))

    assert (shown.count("<user>"), shown.count("<assistant>"), shown.count("####")) == (6, 6, 5)
    assert bare == "<user>Q: Ann has 1 pens and buys 1. How many?\nA:</><assistant>"


def test_a_data_folder_without_the_file_names_it(tmp_path: Path) -> None:
    """The error has the path that was looked for."""
    write_lines(tmp_path / "gsm8k/train.jsonl", GSM8K_ROWS)
    with pytest.raises(UserError) as caught:
        SUITES["gsm8k"]("", Source(data_dir=tmp_path, offline=True))

    assert str(tmp_path / "gsm8k" / "test.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", ""), ('{"question": ', "JSON"), ('{"Q": "?", "A": "!"}\n', "question")],
    ids=["empty", "torn", "other columns"],
)
def test_a_data_file_that_cannot_be_used_says_why(
    content: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line with the folder and the cause; nothing else is printed."""
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        SUITES["gsm8k-paper"]("", Source(data_dir=tmp_path, offline=True))

    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert reason in message
    assert capfd.readouterr() == ("", "")


def test_offline_asks_the_cache_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy in the cache, `--offline` fails in one line that names `--data-dir`; no name is looked up."""
    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: looked_up.append(args))
    with pytest.raises(UserError, match=r"^[^\n]*--data-dir DIR with gsm8k/test.jsonl[^\n]*without --offline$"):
        SUITES["gsm8k"]("", Source(offline=True))

    assert looked_up == []


def test_an_unreachable_hub_says_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the cause and the three ways out."""
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError) as caught:
        SUITES["gsm8k"]("", Source())

    message = str(caught.value)
    assert "\n" not in message
    for part in ("Couldn't reach", "--data-dir DIR with gsm8k/test.jsonl", "--offline", "--checkpoint"):
        assert part in message


# --- GSM8K itself -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gold() -> list[str]:
    """The reference answers, in order. The first three end in 18, 3 and 70000."""
    lines = Path(REAL or "", "gsm8k", "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


@pytest.fixture(scope="module")
def asked() -> dict[str, tuple[Suite, list[Prompt]]]:
    """Both protocols with their first twenty questions."""
    suites = {name: make(name, Path(REAL or "")) for name in ("gsm8k", "gsm8k-paper")}
    return {name: (suite, suite.prompts(chat, 20)) for name, suite in suites.items()}


@real
@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-paper"])
def test_reference_answers_are_right_and_shifted_ones_wrong(
    name: str, asked: dict[str, tuple[Suite, list[Prompt]]], gold: list[str]
) -> None:
    """Each question's own reference scores 1, the next question's scores 0."""
    suite, prompts = asked[name]

    assert set(suite.score({p.item: gold[n] for n, p in enumerate(prompts)}).values()) == {1.0}
    assert set(suite.score({p.item: gold[n + 1] for n, p in enumerate(prompts)}).values()) == {0.0}


@real
@pytest.mark.parametrize(
    ("name", "doc", "answer", "score"),
    [
        ("gsm8k", 0, "9 * 2 = 18\n#### 18", 1),
        ("gsm8k", 0, "#### 18.", 1),
        ("gsm8k", 0, "#### 18\n#### 19", 1),
        ("gsm8k", 2, "#### 70,000", 1),
        ("gsm8k", 2, "#### $70000", 0),
        ("gsm8k", 0, "####18", 0),
        ("gsm8k", 0, "#### 17", 0),
        ("gsm8k", 0, "#### -18", 0),
        ("gsm8k", 0, "The answer is 18.", 0),
        ("gsm8k", 0, " ", 0),
        ("gsm8k-paper", 0, "The answer is 18.", 1),
        ("gsm8k-paper", 0, r"So it is \boxed{18}", 1),
        ("gsm8k-paper", 2, "a profit of $70,000.", 1),
        ("gsm8k-paper", 0, "18 eggs for 2 dollars", 0),
        ("gsm8k-paper", 0, "The answer is eighteen.", 0),
        ("gsm8k-paper", 0, "18.0", 0),
    ],
)
def test_answers_are_read_as_lm_eval_reads_them(
    name: str, doc: int, answer: str, score: float, asked: dict[str, tuple[Suite, list[Prompt]]]
) -> None:
    """gsm8k wants the first number behind `#### `; gsm8k-paper takes the last number wherever it stands."""
    suite, prompts = asked[name]

    assert suite.score({prompts[doc].item: answer}) == {prompts[doc].item: score}


@real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-paper"])
def test_all_of_gsm8k_is_planned_and_scored_in_time(name: str, gold: list[str]) -> None:
    """1,319 questions: under 20 CPU seconds each way, and every reference answer is right."""
    began = time.process_time()
    suite = make(name, Path(REAL or ""))
    prompts = suite.prompts(chat, None)
    planned = time.process_time()
    scores = suite.score(dict(zip([p.item for p in prompts], gold, strict=True)))
    scored = time.process_time()

    assert len(scores) == 1319
    assert set(scores.values()) == {1.0}
    assert planned - began < 20
    assert scored - planned < 20


# --- prompts:FILE.jsonl -------------------------------------------------------------------------------------------


def test_own_prompts_are_read_in_order(tmp_path: Path) -> None:
    """A prompt is one user turn; ids are the file's or the line's; blank lines and other keys are left alone."""
    lines = [
        {"prompt": "Why?\u2028Really?", "category": "x"},
        {"id": "sky", "messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Why?"}]},
        {"id": 81, "prompt": "How?"},
    ]
    first, *others = (json.dumps(line, ensure_ascii=False) for line in lines)
    file = tmp_path / "mine.jsonl"
    file.write_text("\ufeff" + "\n\n".join([first, *others]), encoding="utf-8")
    suite = SUITES["prompts"](str(file), Source())

    assert suite.prompts(chat, None) == [
        Prompt(item="prompts/1/0", text="<user>Why?\u2028Really?</><assistant>"),
        Prompt(item="prompts/sky/0", text="<system>Brief.</><user>Why?</><assistant>"),
        Prompt(item="prompts/81/0", text="<user>How?</><assistant>"),
    ]
    assert suite.metric is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "Why?"', "not JSON"),
        ('"Why?"', "not an object"),
        ('{"promt": "Why?"}', "either 'prompt' or 'messages'"),
        ('{"prompt": "Why?", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": ""}', "empty or not a text"),
        ('{"prompt": ["Why?"]}', "empty or not a text"),
        ('{"messages": []}', "not a list of turns"),
        ('{"messages": "Why?"}', "not a list of turns"),
        ('{"messages": ["Why?"]}', "'role' is not one of"),
        ('{"messages": [{"role": "human", "content": "Why?"}]}', "'role' is not one of system, user, assistant"),
        ('{"messages": [{"role": "user"}]}', "empty or not a text"),
        ('{"messages": [{"role": "assistant", "content": "Why?"}]}', "the last turn is not the user's"),
        ('{"prompt": "Why?", "id": "a/b"}', "id 'a/b'"),
        ('{"prompt": "Why?", "id": null}', "id None"),
        ('{"prompt": "Why?", "id": true}', "id True"),
        ('{"prompt": "Why?", "id": 1}', "id 1 is that of line 1"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    """File, line number and reason in one line."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        SUITES["prompts"](str(file), Source())

    message = str(caught.value)
    assert f"{file}, line 3: " in message
    assert reason in message
    assert "\n" not in message


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """A file in another encoding is refused at the line where that shows."""
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match="line 2: not JSON"):
        SUITES["prompts"](str(file), Source())


@pytest.mark.parametrize(
    ("rest", "reason"),
    [("", "--suite prompts:FILE.jsonl"), ("{}/none.jsonl", "No such file"), ("{}", "Is a directory")],
)
def test_a_file_that_is_not_there_is_said_so(rest: str, reason: str, tmp_path: Path) -> None:
    """No file, a wrong path, a folder: one line each, from the suite and from the cell's name alike."""
    rest = rest.format(tmp_path)
    with pytest.raises(UserError, match=reason):
        SUITES["prompts"](rest, Source())
    with pytest.raises(UserError, match=reason):
        SUITES["prompts"].stem(rest)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    """Blank lines are no prompts."""
    file = tmp_path / "mine.jsonl"
    file.write_text("\n \n")
    with pytest.raises(UserError, match=r"mine\.jsonl has no prompts"):
        SUITES["prompts"](str(file), Source())


def test_a_template_that_refuses_is_named_with_the_line(tmp_path: Path) -> None:
    """Some checkpoints take no system turn; the user hears which line has one."""

    def picky(messages: Messages) -> str:
        raise TemplateError("System role not supported")

    suite = SUITES["prompts"](str(write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])), Source())
    with pytest.raises(UserError, match="line 1: the checkpoint's chat template refuses it"):
        suite.prompts(picky, None)


def test_an_edited_file_gets_cells_of_its_own(tmp_path: Path) -> None:
    """The cell's name holds the file's stem and a hash of its content."""
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])
    before = SUITES["prompts"].stem(str(file))
    write_lines(file, [{"prompt": "How?"}])

    assert before.startswith("prompts-mine-")
    assert SUITES["prompts"].stem(str(file)) != before
