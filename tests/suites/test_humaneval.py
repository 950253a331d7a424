"""HumanEval: its prompts, and scores as from lm-eval's own metric.

The questions are made up. Tests of the real ones need MTBENCH_DATA_DIR, a folder with humaneval/HumanEval.jsonl(.gz).
"""

import gzip
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from confinement import confined
from made_up import chat, write_lines

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.sandbox import unavailable
from mtbench.evaluation.suite import Prompt, Source, Suite

SUITE_NAMES = ("humaneval", "humaneval-paper")
REAL = os.environ.get("MTBENCH_DATA_DIR")
TEST = "\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"
ROWS = [
    {
        "task_id": f"MadeUp/{n}",
        "prompt": f'from typing import List\n\n\ndef {name}(x: int) -> int:\n    """ One more.\n    """\n',
        "entry_point": name,
        "canonical_solution": "    return x + 1\n",
        "test": TEST,
    }
    for n, name in enumerate(("plus_one", "successor", "next_number"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "humaneval/HumanEval.jsonl", ROWS)
    return folder


@cache
def open_suite(name: str, folder: Path) -> Suite:
    suite: Suite = SUITES[name]("", Source(data_dir=folder))
    return suite


def test_a_prompt_is_the_beginning_of_a_function(folder: Path) -> None:
    """humaneval has no chat template; code at the margin ends an answer, as in lm-eval."""
    suite = SUITES["humaneval"]("", Source(data_dir=folder, unsandboxed=True))
    prompts = suite.prompts(chat, 2)

    assert prompts == [
        Prompt(item=f"humaneval/{n}/0", text=ROWS[n]["prompt"], stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"))
        for n in range(2)
    ]
    assert suite.max_new_tokens == 1024
    assert (suite.task["chat_template"], suite.task["metric"], suite.task["sandbox"]) == (False, "pass@1", False)


def test_the_papers_prompt_includes_the_start_of_the_answer(folder: Path) -> None:
    """humaneval-paper has a turn of the chat, then the answer's first lines; the next code fence ends the answer."""
    suite = SUITES["humaneval-paper"]("", Source(data_dir=folder, unsandboxed=True))
    (prompt,) = suite.prompts(chat, 1)

    assert prompt.text == (
        "<user>Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        f"{ROWS[0]['prompt']}\n```\n</><assistant>Here is the completed function:\n```python"
    )
    assert prompt.stop == ("```",)
    assert suite.max_new_tokens == 256
    assert (suite.task["chat_template"], suite.task["num_fewshot"]) == (True, 0)


BODY = "    return x + 1\n"
WHOLE = "\ndef {name}(x):\n    return x + 1\n"


@pytest.mark.whole
@confined
@pytest.mark.parametrize(
    ("suite", "answer", "score"),
    [
        ("humaneval", BODY, 1),
        ("humaneval", "    print('chatter')\n    return x + 1\n", 1),
        ("humaneval", "    import os\n    os._exit(0)\n", 0),
        ("humaneval", "    return x + 1\n\nassert False\n", 0),
        ("humaneval", "    import mtbench\n    return x + 1\n", 0),
        ("humaneval-paper", WHOLE, 1),
        ("humaneval-paper", WHOLE + "```\nIt adds one. ```x = ```", 1),
    ],
)
def test_an_answer_scores_one_if_its_program_reaches_its_end(
    suite: str, answer: str, score: float, folder: Path
) -> None:
    """The program is the question's code, then the answer (for humaneval-paper up to the fence), then the tests."""
    opened = open_suite(suite, folder)
    item = opened.prompts(chat, 2)[1].item

    assert opened.score({item: answer.replace("{name}", ROWS[1]["entry_point"])}) == {item: score}


@pytest.mark.whole
@pytest.mark.parametrize("name", SUITE_NAMES)
def test_without_a_sandbox_the_suite_refuses(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the package; `--allow-unsandboxed-code` runs without a sandbox, which `task` records."""
    monkeypatch.setenv("PATH", "")
    unavailable.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^suite 'humaneval[^\n]*apt install bubblewrap[^\n]*--allow-unsandboxed-"):
            SUITES[name]("", Source(data_dir=folder))
        suite = SUITES[name]("", Source(data_dir=folder, unsandboxed=True))
    finally:
        unavailable.cache_clear()

    items = [prompt.item for prompt in suite.prompts(chat, 2)]
    assert suite.score({items[0]: BODY, items[1]: ""}) == {items[0]: 1, items[1]: 0}
    assert suite.task["sandbox"] is False


# --- HumanEval itself ---------------------------------------------------------------------------------------------

WRONG: list[Callable[[str], str]] = [
    lambda right: "",
    lambda right: f"{right}\nimport os\nos._exit(0)\n",
    lambda right: f"{right}\nraise KeyboardInterrupt\n",
    lambda right: f"    import random\n    return random.random()\n{right}",
    lambda right: f"{right}\ndef more(",
]


@pytest.mark.whole
@pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with humaneval/HumanEval.jsonl")
@confined
@pytest.mark.slow
@pytest.mark.parametrize("name", SUITE_NAMES)
def test_of_the_real_questions_the_reference_solutions_pass_and_wrong_ones_fail(name: str) -> None:
    """164 of 164, in either form; then each question with one kind of mistake."""
    folder = Path(REAL or "")
    packed = folder / "humaneval" / "HumanEval.jsonl.gz"
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else packed.with_suffix("").read_bytes()
    solutions = [json.loads(line)["canonical_solution"] for line in data.splitlines()]
    suite = SUITES[name]("", Source(data_dir=folder))
    items = [prompt.item for prompt in suite.prompts(chat, None)]
    wrong = {item: WRONG[n % len(WRONG)](solutions[n]) for n, item in enumerate(items)}

    assert list(suite.score(dict(zip(items, solutions, strict=True))).values()) == [1.0] * 164
    assert list(suite.score(wrong).values()) == [0.0] * 164
