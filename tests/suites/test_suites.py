"""The contract of every suite, and prompts and scores of lm-eval's tasks.

The data are made up (helpers/made_up.py); test_replay.py has real ones.
"""

import json
import random
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
from jinja2 import TemplateError
from made_up import COUNT, WRONG, answerable, chat, right, write_all, write_lines

from mtbench.errors import UserError
from mtbench.evaluation.code_tasks import ProgramSuite
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.sandbox import unavailable
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite
from mtbench.programs import network

NAMES = list(SUITES)
SCORED = [name for name in NAMES if SUITES[name].metric]
HARNESS = [name for name in NAMES if issubclass(SUITES[name], HarnessSuite)]
ADAPTED = [name for name in HARNESS if SUITES[name].config]  # lm-eval's tasks with other words or another filter
OWN = [name for name in HARNESS if not name.endswith("-paper") and name not in ADAPTED]  # -paper: only other settings
ANSWERED = list(answerable([*OWN, "gsm8k-paper", "mmlu-pro-paper", *ADAPTED]))
SAME_TASKS = ("bbh-paper", "ifeval-paper", "mmlu-pro-paper")  # load the same tasks as the suite without -paper
GROUPS = [name for name in HARNESS if SUITES[name].subtasks]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate cache for datasets, and restore the online settings at the end."""
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
    """Return a data folder whose name contains characters of file patterns."""
    return write_all(tmp_path_factory.mktemp("data") / "a [b] *")


def make(name: str, folder: Path, subtasks: tuple[str, ...] = ()) -> Suite:
    if issubclass(SUITES[name], ProgramSuite) and (reason := unavailable()):
        pytest.skip(reason)
    variant = str(folder / "mine.jsonl") if issubclass(SUITES[name], SUITES["prompts"]) else ""
    source = Source(data_dir=folder, offline=True, subtasks=subtasks, skip_unscorable=True)
    suite: Suite = SUITES[name](variant, source)
    return suite


opened = cache(make)  # for tests that may share a suite with others


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_selects_the_first_items_of_each_subtask_unchanged(name: str, folder: Path) -> None:
    """Item ids, texts and stop strings do not depend on the limit, and a new instance gives the same ones."""
    suite = opened(name, folder)
    some = suite.prompts(chat, 7)
    fewer = suite.prompts(chat, 3)
    conversations = Counter(task for task, _ in {tuple(p.item.split("/")[:2]) for p in some})

    assert set(conversations.values()) == {7}
    assert set(conversations) <= set(suite.subtasks) or (len(conversations) == 1 and not suite.subtasks)
    assert fewer == some[: len(fewer)]
    assert len(fewer) * 7 == len(some) * 3
    if name not in SAME_TASKS:
        assert make(name, folder).prompts(chat, 7) == some


@pytest.mark.parametrize("name", NAMES)
def test_items_and_task_are_described(name: str, folder: Path) -> None:
    """Ids are `<task>/<doc id>/<turn>`; prompts use the template if `task` says so; no stop string is empty."""
    suite = opened(name, folder)
    prompts = suite.prompts(chat, COUNT)

    assert SUITES[name].name == name
    assert suite.task["name"]
    assert json.loads(json.dumps(suite.task)) == suite.task
    assert suite.max_new_tokens > 0
    assert sys.modules[type(suite).__module__].__doc__
    assert len({p.item for p in prompts}) == len(prompts) >= COUNT
    for prompt in prompts:
        assert re.fullmatch(r"[^/]+/[^/]+/\d+", prompt.item)
        assert ("<assistant>" in prompt.text) == suite.task["chat_template"]
        assert all(prompt.stop)


@pytest.mark.parametrize("name", SCORED)
def test_exactly_the_given_answers_are_scored(name: str, folder: Path) -> None:
    """`score` returns the items that it was given, in any order, also none; an empty answer scores 0."""
    suite = opened(name, folder)
    items = [p.item for p in suite.prompts(chat, 6)]

    assert suite.score({items[5]: "", items[2]: ""}) == {items[2]: 0.0, items[5]: 0.0}
    assert suite.score({}) == {}


@pytest.mark.parametrize("name", [n for n in NAMES if not issubclass(SUITES[n], SUITES["prompts"])])
def test_an_unknown_variant_is_refused(name: str, folder: Path) -> None:
    """A suite without variants refuses any text behind the colon, the others refuse unknown ones."""
    with pytest.raises(UserError, match="nonsense"):
        SUITES[name]("nonsense", Source(data_dir=folder, offline=True))


@pytest.mark.parametrize("name", [n for n in NAMES if SUITES[n].subtasks and not n.endswith("-paper")])
def test_a_subtask_alone_has_the_same_prompts(name: str, folder: Path) -> None:
    """Selected subtasks have the same items and texts, in the same order, as among all; the others are absent."""
    whole = opened(name, folder).prompts(chat, 2)
    chosen = tuple(dict.fromkeys(p.item.split("/")[0] for p in whole))[1:3]

    assert opened(name, folder, chosen).prompts(chat, 2) == [p for p in whole if p.item.split("/")[0] in chosen]


@pytest.mark.whole
def test_listing_suites_imports_none_of_their_libraries() -> None:
    """It imports neither lm-eval nor datasets nor torch: generation runs without the first two."""
    code = "import sys; from mtbench.evaluation.registry import SUITES; print(len(list(SUITES)))\n"
    code += "print({'lm_eval', 'datasets', 'torch', 'transformers'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (process.stdout, process.stderr) == (f"{len(NAMES)}\nset()\n", "")


# --- lm-eval's tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ANSWERED)
def test_prompts_and_scores_are_those_of_lm_eval_itself(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts, stop strings and scores equal those of `simple_evaluate` with a chat template and default settings."""
    import lm_eval.evaluator
    from lm_eval.api.model import LM

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # it runs pip, which takes seconds
    monkeypatch.setattr(lm_eval.evaluator, "get_git_commit_hash", lambda: None)
    suite = opened(name, folder)
    assert isinstance(suite, HarnessSuite)
    prompts = suite.prompts(chat, 2)
    ours = {p.item: (p.text, list(p.stop)) for p in prompts}
    answers = {item: text if int(item.split("/")[1]) % 2 else WRONG for item, text in right(name, prompts).items()}
    short = {task.config.task: short for short, task in suite._tasks.items()}
    theirs = {}

    class Spy(LM):  # type: ignore[misc]
        tokenizer_name = "spy"

        def generate_until(self, requests: list[Any]) -> list[str]:
            items = [f"{short[request.task_name]}/{request.doc_id}/0" for request in requests]
            theirs.update({i: (r.args[0], r.args[1]["until"]) for i, r in zip(items, requests, strict=True)})
            return [answers[item] for item in items]

        def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True) -> str:
            return chat(messages)

        loglikelihood = loglikelihood_rolling = generate_until

    logged = lm_eval.simple_evaluate(
        model=Spy(),
        tasks=list(suite._tasks.values()),
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        limit=2,
        apply_chat_template=True,
        bootstrap_iters=0,
    )["samples"]
    scores = {
        f"{short[task]}/{sample['doc_id']}/0": float(sample[str(suite.metric)])
        for task, samples in logged.items()
        for sample in samples
        if sample["filter"] == suite.filter
    }

    assert ours == theirs
    assert suite.score(answers) == scores
    assert scores == {item: float(int(item.split("/")[1]) % 2) for item in scores}


@pytest.mark.parametrize("name", [*OWN, *ADAPTED])
def test_a_suite_has_no_side_effects(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It prints nothing, draws nothing from the caller's generator and writes no file to the data folder or cache."""
    import datasets.config

    files, state = sorted(folder.rglob("*")), random.getstate()
    suite = make(name, folder)
    suite.score({p.item: "18" for p in suite.prompts(chat, 2)})

    assert capfd.readouterr() == ("", "")
    assert sorted(folder.rglob("*")) == files
    assert [path for path in Path(datasets.config.HF_DATASETS_CACHE).rglob("*") if path.is_file()] == []
    assert random.getstate() == state


@pytest.mark.parametrize("name", OWN)
def test_settings_are_those_of_lm_evals_task(name: str) -> None:
    """The number of few-shot examples, the budget if the task names one, and the mean of the group are lm-eval's."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    suite = SUITES[name]
    folder = Path(lm_eval.__file__).parent / "tasks" / suite.folder
    index = TaskManager(include_defaults=False, include_path=folder).task_index
    for task in suite.tasks:
        config = load_yaml(index[task].yaml_path, resolve_func=False)
        assert config.get("num_fewshot", 0) == suite.num_fewshot
        assert config["generation_kwargs"].get("max_gen_toks", suite.max_new_tokens) == suite.max_new_tokens
    if suite.subtasks:
        group = load_yaml(index[suite.group].yaml_path, resolve_func=False)
        assert group["task"] == list(suite.tasks)
        assert [(m["metric"], m["filter_list"], m["weight_by_size"]) for m in group["aggregate_metric_list"]] == [
            (suite.metric, suite.filter, True)
        ]


@pytest.mark.parametrize(
    ("name", "task", "shots", "stop"),
    [
        ("bbh-paper", "bbh_cot_fewshot", 3, ["</s>", "Q", "\n\n"]),
        ("gpqa-paper", "gpqa_main_cot_zeroshot", 0, ["</s>"]),
        ("gsm8k-paper", "gsm8k_cot", 0, ["Q:", "</s>", "<|im_end|>"]),
        ("ifeval-paper", "ifeval", 0, []),
        ("mmlu-pro-paper", "mmlu_pro", 0, ["</s>", "Q:", "<|im_end|>", "Question:"]),
    ],
)
def test_paper_suites_have_the_papers_settings(name: str, task: str, shots: int, stop: list[str], folder: Path) -> None:
    """256 tokens, the paper's number of examples as turns of the chat, and its stop strings."""
    suite = opened(name, folder)
    (prompt, *_) = suite.prompts(chat, 1)

    assert (suite.max_new_tokens, suite.task["name"], suite.task["num_fewshot"]) == (256, task, shots)
    assert prompt.text.count("<user>") == shots + 1
    assert list(prompt.stop) == stop


@pytest.mark.parametrize("name", GROUPS)
def test_the_subtasks_of_a_group_are_interleaved(name: str, folder: Path) -> None:
    """The first item of each subtask comes before the second of any; ids have the subtask; `task` names the mean."""
    suite = opened(name, folder)
    items = [p.item for p in suite.prompts(chat, 2)]

    assert items == [f"{subtask}/{doc}/0" for doc in (0, 1) for subtask in suite.subtasks]
    assert suite.task["mean"] == "micro"
    assert opened(name, folder, suite.subtasks[:2]).task["subtasks"] == list(suite.subtasks[:2])


def test_only_the_files_of_selected_subtasks_are_needed(tmp_path: Path) -> None:
    """One file of BBH's 27 is enough for its subtask; for another subtask the error names the missing file."""
    (tmp_path / "bbh/bbh").mkdir(parents=True)
    (tmp_path / "bbh/bbh/snarks.json").write_text(json.dumps({"examples": [{"input": "?", "target": "(A)"}]}))

    assert [p.item for p in make("bbh", tmp_path, ("snarks",)).prompts(chat, None)] == ["snarks/0/0"]
    with pytest.raises(UserError, match=r"navigate\.json"):
        make("bbh", tmp_path, ("snarks", "navigate"))


def test_a_task_that_compares_likelihoods_is_refused(folder: Path) -> None:
    """It generates nothing to speed up; the error says so in one line."""

    class Compared(HarnessSuite):
        name = "compared"
        tasks: ClassVar = {"gpqa_main_zeroshot": {"train": "gpqa/gpqa_main.csv"}}
        folder = "gpqa/zeroshot"
        filter = "none"
        metric = "acc"

    with pytest.raises(UserError, match=r"^[^\n]*gpqa_main_zeroshot is of type multiple_choice[^\n]*nothing to"):
        Compared("", Source(data_dir=folder, offline=True))


@pytest.mark.parametrize("name", [n for n in OWN if n != "gsm8k"] + ["gsm8k-paper"])
def test_test_items_are_not_training_examples(name: str, folder: Path) -> None:
    """Suites without a training split raise an error; also GPQA, whose questions are in a split named "train"."""
    with pytest.raises(UserError, match="no training split"):
        opened(name, folder).examples(1, seed=0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "gsm8k/test.jsonl"), ("", ""), ('{"question": ', "JSON"), ('{"Q": "?", "A": "!"}\n', "question")],
    ids=["missing", "empty", "torn", "other columns"],
)
def test_an_unusable_data_file_has_its_reason(
    content: str | None, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line with the folder and the cause; mtbench prints nothing else."""
    (tmp_path / "gsm8k").mkdir()
    if content is not None:
        (tmp_path / "gsm8k" / "test.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        SUITES["gsm8k-paper"]("", Source(data_dir=tmp_path, offline=True))

    message = str(caught.value)
    assert "\n" not in message
    assert str(tmp_path) in message
    assert reason in message
    assert capfd.readouterr() == ("", "")


def test_offline_uses_the_cache_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a copy in the cache, `--offline` fails in one line that names `--data-dir`, without any DNS request."""
    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: looked_up.append(args))
    with pytest.raises(UserError, match=r"^[^\n]*--data-dir DIR with gsm8k/test.jsonl[^\n]*without --offline$"):
        SUITES["gsm8k"]("", Source(offline=True))

    assert looked_up == []


def test_an_error_of_the_hub_has_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the cause and what works without it."""
    import datasets

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for refusal, parts in (
        ("huggingface.co: no", r"huggingface\.co: no.*--data-dir DIR.*prompts:FILE"),
        (None, "Couldn't reach"),
    ):
        monkeypatch.setattr(network, "hub_refusal", lambda refusal=refusal: refusal)
        with pytest.raises(UserError, match=rf"^[^\n]*{parts}[^\n]*$"):
            SUITES["gsm8k"]("", Source())


# --- prompts:FILE.jsonl -------------------------------------------------------------------------------------------


def test_own_prompts_are_read_in_order(tmp_path: Path) -> None:
    """A prompt is one user turn; an id defaults to the line number; blank lines and other keys are ignored."""
    lines = [
        {"prompt": "Why?\u2028Really?", "category": "x"},
        {"id": "sky", "messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Why?"}]},
        {"id": 81, "prompt": "How?"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    suite = SUITES["prompts"](str(file), Source())

    assert suite.prompts(chat, None) == [
        Prompt(item="prompts/1/0", text="<user>Why?\u2028Really?</><assistant>"),
        Prompt(item="prompts/sky/0", text="<system>Brief.</><user>Why?</><assistant>"),
        Prompt(item="prompts/81/0", text="<user>How?</><assistant>"),
    ]
    assert suite.metric is None


Cases = list[tuple[str | None, str, float]]  # metric of --metric, generated text, score of `prompts/1/0`
ANSWERS: dict[str, Cases] = {  # by the line of the file
    '{"prompt": "1+1?", "answer": 2}': [
        (None, " 2. ", 1.0),
        (None, "It is 2", 0.0),
        ("contains", "It is 2, I think", 1.0),
        ("contains", "It is 12", 0.0),
        ("number", "1 + 1 = 2.0", 1.0),
    ],
    '{"prompt": "Capital?", "reference": ["Paris", "The city of\\nParis"]}': [
        ("exact", '"PARIS".', 1.0),
        ("exact", "the city  of Paris", 1.0),
    ],
    '{"question": "How many?", "answer": "48 + 24 = 72\\n#### 1,072"}': [
        (None, "It is 1072. That is all", 1.0),
        (None, "It is 72", 0.0),
        ("exact", "1,072", 1.0),
    ],
    '{"instruction": "Add.", "input": "1 1", "output": "x", "target": "2"}': [(None, "2", 1.0), (None, "x", 0.0)],
    '{"prompt": "How cold?", "answer": "-5"}': [(None, "5", 0.0)],
}


@pytest.mark.parametrize(("line", "metric", "text", "score"), [(f, *case) for f in ANSWERS for case in ANSWERS[f]])
def test_own_prompts_with_answers_are_scored(
    line: str, metric: str | None, text: str, score: float, tmp_path: Path
) -> None:
    """By exact match without case and punctuation around the text, or as --metric says; one of several suffices."""
    file = tmp_path / "mine.jsonl"
    file.write_text(line + "\n")
    suite = SUITES["prompts"](str(file), Source(metric=metric))

    default = "number" if "#### 1" in line else "exact_match"
    assert suite.metric == {None: default, "exact": "exact_match"}.get(metric, metric)
    assert suite.score({"prompts/1/0": text}) == {"prompts/1/0": score}


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    """Its lines need not be JSON; blank ones are left out. Another encoding is refused by its line."""
    file = tmp_path / "mine.txt"
    file.write_text('Why "so"?\n\n  How?\n')
    prompts = SUITES["prompts"](str(file), Source()).prompts(chat, None)

    assert [(p.item, p.text) for p in prompts] == [
        ("prompts/1/0", '<user>Why "so"?</><assistant>'),
        ("prompts/3/0", "<user>How?</><assistant>"),
    ]
    file.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"line 2: not UTF-8.*; a line is like"):
        SUITES["prompts"](str(file), Source())


SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
OPENAI = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, {"role": "assistant", "tool_calls": None}]
FORMS: dict[str, tuple[str, list[str], list[str]]] = {  # content of the file, names of its prompts "Why?", flags
    "null is no field": ('{"prompt": null, "messages": null, "question": "Why?", "id": null}', ["1"], []),
    "an array": (json.dumps([{"prompt": "Why?"}, {"id": "x", "question": "Why?"}], indent=1), ["1", "x"], []),
    "texts": ('["Why?", "Why?"]', ["1", "2"], []),
    "ShareGPT": (
        json.dumps([{"id": "a", "conversations": SHAREGPT}, {"id": "b", "conversations": SHAREGPT[1:]}]),
        ["a"],
        ["left out of mine.jsonl: 1 without a question"],
    ),
    "a request": (
        json.dumps({"messages": OPENAI, "stop": ["x"], "temperature": 0.5, "top_p": None, "tools": [{}]}),
        ["1"],
        ["not read in mine.jsonl: stop, temperature, tools"],
    ),
    "many columns": (
        json.dumps({"prompt": "Why?"} | {f"c{i:,}": i for i in range(40)} | {"system_prompt": "x", "a\u202e\ud800": 1}),
        ["1"],
        ["not read in mine.jsonl: system_prompt, c0, c1, c2, c3, c4, 36 more"],
    ),
    "an instruction": ('{"instruction": "Why?", "input": ""}', ["1"], []),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_files_that_people_have_are_read(name: str, tmp_path: Path) -> None:
    """Tables with null, arrays, ShareGPT's conversations and OpenAI's requests, behind a byte order mark."""
    content, names, flags = FORMS[name]
    file = tmp_path / "mine.jsonl"
    file.write_text("\ufeff" + content, encoding="utf-8")
    suite = SUITES["prompts"](str(file), Source())
    expected = [(f"prompts/{name}/0", "<user>Why?</><assistant>") for name in names]
    assert [(prompt.item, prompt.text) for prompt in suite.prompts(chat, None)] == expected
    assert suite.flags == flags


@pytest.mark.parametrize("none", [None, "", ["", None]])
def test_own_prompts_without_an_answer_are_marked(none: Any, tmp_path: Path) -> None:
    """They have no score; with --metric none, no prompt has."""
    lines = [{"prompt": "1+1?", "answer": 2}, {"prompt": "Why?", "answer": none}]
    file = write_lines(tmp_path / "mine.jsonl", lines)
    suite = SUITES["prompts"](str(file), Source())

    assert [prompt.scored for prompt in suite.prompts(chat, None)] == [True, False]
    assert SUITES["prompts"](str(file), Source(metric="none")).metric is None


def test_a_metric_without_answers_is_refused(tmp_path: Path) -> None:
    """Else the user would wait for an accuracy that never comes."""
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])
    with pytest.raises(UserError, match="has no answers, so `--metric contains` has nothing to compare with"):
        SUITES["prompts"](str(file), Source(metric="contains"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "Why?", "answer": {"a": 1}}', "'answer' is not a text, a number or a list of them"),
        ('{"prompt": "Why?"', "; a line is like {"),
        ('{"promt": "Why?"}', "has none of the fields 'messages', 'prompt', 'question', "),
        ('{"prompt": ""}', "the last one is empty"),
        ('{"prompt": [5, 6, 7]}', "a list of token ids is not read; give one text a line"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}', "not a text"),
        ('{"messages": []}', "not a list of turns"),
        (
            '{"messages": [{"role": "human", "content": "Why?"}]}',
            "'role' is not one of system, developer, user, assistant",
        ),
        ('{"messages": [{"role": "assistant", "content": "Why?"}]}', "the last turn is not the user's"),
        ('{"prompt": "Why?", "id": "a/b"}', "id 'a/b'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "('image_url') are not supported; leave",
        ),
        ('{"prompt": "Why?", "id": 1}', "id 1 is already that of "),
    ],
)
def test_an_invalid_line_is_named(line: str, reason: str, tmp_path: Path) -> None:
    """The error has file, line number and reason in one line."""
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        SUITES["prompts"](str(file), Source())

    message = str(caught.value)
    assert f"{file}, line 3: " in message
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("", "--suite prompts:FILE.jsonl"), ("{}/none.jsonl", "No such file"), ("{}", "has no .json or .jsonl file")],
)
def test_a_file_that_cannot_be_read_is_refused(variant: str, reason: str, tmp_path: Path) -> None:
    """No path, a wrong path and a folder raise the same one-line error from the suite and from its cell id."""
    variant = variant.format(tmp_path)
    with pytest.raises(UserError, match=reason):
        SUITES["prompts"](variant, Source())
    with pytest.raises(UserError, match=reason):
        SUITES["prompts"].cell_prefix(variant)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_file_of_another_format_is_told_what_is_read(suffix: str, tmp_path: Path) -> None:
    (file := tmp_path / f"mine.{suffix}").write_bytes(b"PAR1\x15,prompt\n- prompt\n")
    said = rf"a \.{suffix.rpartition('.')[2]} file is not read: give JSONL, a JSON array, or \.txt with a prompt a line"
    with pytest.raises(UserError, match=said):
        SUITES["prompts"](str(file), Source())


def test_a_conversation_that_the_template_rejects_is_named(tmp_path: Path) -> None:
    """Some chat templates accept no system turn; the error names the line that has one."""

    def reject(messages: Messages) -> str:
        raise TemplateError("System role not supported")

    suite = SUITES["prompts"](str(write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])), Source())
    with pytest.raises(UserError, match="line 1: the checkpoint's chat template rejects it"):
        suite.prompts(reject, None)


def test_an_edited_file_gets_other_cell_ids(tmp_path: Path) -> None:
    """The cell id contains the file's stem and a hash of its content."""
    file = write_lines(tmp_path / "mine.jsonl", [{"prompt": "Why?"}])
    before = SUITES["prompts"].cell_prefix(str(file))
    write_lines(file, [{"prompt": "How?"}])

    assert before.startswith("prompts-mine-")
    assert SUITES["prompts"].cell_prefix(str(file)) != before
