"""HumanEval: what is asked, which answers are right, and that they are run as lm-eval's own metric would judge them.

Made-up questions everywhere; the real ones where MTBENCH_DATA_DIR names a folder with humaneval/HumanEval.jsonl(.gz).
"""

import gzip
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.sandbox import unavailable
from mtbench.evaluation.suite import Messages, Prompt, Source, Suite

SUITE_NAMES = ("humaneval", "humaneval-paper")
REAL = os.environ.get("MTBENCH_DATA_DIR")
real = pytest.mark.skipif(not REAL, reason="MTBENCH_DATA_DIR names no folder with humaneval/HumanEval.jsonl")
confined = pytest.mark.skipif(
    bool(unavailable()) and not os.environ.get("CI"), reason=f"no sandbox on this machine: {unavailable()}"
)

TEST = "\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n"
Replay = Callable[[Mapping[int, str]], dict[int, float]]
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


def chat(messages: Messages) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "humaneval").mkdir()
    (folder / "humaneval/HumanEval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def made_up(folder: Path) -> Callable[[str], tuple[Suite, list[Prompt]]]:
    """A suite with the made-up questions."""
    suites: dict[str, tuple[Suite, list[Prompt]]] = {}

    def make(name: str) -> tuple[Suite, list[Prompt]]:
        if name not in suites:
            suite = SUITES[name]("", Source(data_dir=folder))
            suites[name] = suite, suite.prompts(chat, None)
        return suites[name]

    return make


def test_the_beginning_of_a_function_is_asked_as_it_is(folder: Path) -> None:
    """humaneval: no template; what ends an answer is code at the margin, as lm-eval has it."""
    suite = SUITES["humaneval"]("", Source(data_dir=folder, unsandboxed=True))
    prompts = suite.prompts(chat, 2)

    assert prompts == [
        Prompt(item=f"humaneval/{n}/0", text=ROWS[n]["prompt"], stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"))
        for n in range(2)
    ]
    assert suite.max_new_tokens == 1024
    assert (suite.task["chat_template"], suite.task["metric"], suite.task["sandbox"]) == (False, "pass@1", False)


def test_the_paper_begins_the_answer_up_to_its_fence(folder: Path) -> None:
    """humaneval-paper: a turn of the chat, then the answer's first line; the next fence ends it."""
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


@confined
@pytest.mark.parametrize(
    ("suite", "answer", "score"),
    [
        ("humaneval", BODY, 1),
        ("humaneval", "    return sum([x, 1])", 1),
        ("humaneval", "    return (lambda: x + 1)()\n\n\nhelper = 1\n", 1),
        ("humaneval", "    print('chatter')\n    return x + 1\n", 1),
        ("humaneval", "", 0),
        ("humaneval", "    pass\n", 0),
        ("humaneval", "    return x\n", 0),
        ("humaneval", "    return abs(x) + 1\n", 0),
        ("humaneval", "  return x + 1\n", 0),
        ("humaneval", "    return x + 1\n```\n", 0),
        ("humaneval", "    return x +\n", 0),
        ("humaneval", "    return y + 1\n", 0),
        ("humaneval", "    import os\n    os._exit(0)\n", 0),
        ("humaneval", "    raise SystemExit(0)\n", 0),
        ("humaneval", "    return x + 1\n\nimport sys\nsys.exit()\n", 0),
        ("humaneval", "    return x + 1\n\nassert False\n", 0),
        ("humaneval", "    return int(input()) + 1\n", 0),
        ("humaneval", "    import mtbench\n    return x + 1\n", 0),
        ("humaneval-paper", BODY, 1),
        ("humaneval-paper", WHOLE, 1),
        ("humaneval-paper", WHOLE + "```\nIt adds one. ```x = ```", 1),
        ("humaneval-paper", "\nimport math" + WHOLE, 1),
        ("humaneval-paper", "", 0),
        ("humaneval-paper", "\n```\n" + WHOLE, 0),
        ("humaneval-paper", "\ndef another(x):\n    return x + 1\n", 0),
        ("humaneval-paper", " I would say: x + 1.", 0),
        ("humaneval-paper", WHOLE + "print({name}(1)\n", 0),
    ],
)
def test_an_answer_is_right_if_its_program_comes_to_the_end(
    suite: str, answer: str, score: float, made_up: Callable[[str], tuple[Suite, list[Prompt]]]
) -> None:
    """What is run is the question's code, then the answer (in the paper's form up to the fence), then its tests."""
    made, prompts = made_up(suite)
    item = prompts[1].item

    assert made.score({item: answer.replace("{name}", ROWS[1]["entry_point"])}) == {item: score}


@confined
def test_one_wrong_answer_costs_its_own_item(made_up: Callable[[str], tuple[Suite, list[Prompt]]]) -> None:
    """Each item has the score of its own program, in whatever order they are given."""
    suite, prompts = made_up("humaneval")
    first, second, third = (prompt.item for prompt in prompts)

    assert suite.score({third: BODY, first: BODY, second: "    while True: pass\n"}) == {first: 1, second: 0, third: 1}
    assert suite.score({}) == {}


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_without_a_sandbox_it_refuses(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that says what to install; `--allow-unsandboxed-code` is the only way past, and is on record."""
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


@pytest.mark.parametrize("name", SUITE_NAMES)
def test_nothing_is_fetched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's metric is not asked for: no name is looked up, with or without --offline."""
    looked_up: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: looked_up.append(asked))
    SUITES[name]("", Source(data_dir=folder, unsandboxed=True)).prompts(chat, 1)

    assert looked_up == []


# --- HumanEval itself ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    folder = Path(REAL or "", "humaneval")
    packed = folder / "HumanEval.jsonl.gz"
    data = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / "HumanEval.jsonl").read_bytes()
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture(scope="module", params=SUITE_NAMES)
def replay(request: pytest.FixtureRequest, rows: list[dict[str, str]]) -> Replay:
    """The scores of answers, by the question's number."""
    suite = SUITES[request.param]("", Source(data_dir=Path(REAL or "")))
    items = [prompt.item for prompt in suite.prompts(chat, None)]

    def scores(answers: Mapping[int, str]) -> dict[int, float]:
        found = suite.score({items[n]: answer for n, answer in answers.items()})
        return {n: found.pop(items[n]) for n in answers}

    return scores


@real
@confined
def test_all_reference_solutions_pass(replay: Replay, rows: list[dict[str, str]]) -> None:
    """164 of 164, in either form; a model that says the whole function again is run alike."""
    again = [f"\n{row['prompt']}" if number % 2 else "" for number, row in enumerate(rows)]

    scores = replay({n: again[n] + row["canonical_solution"] for n, row in enumerate(rows)})

    assert list(scores.values()) == [1.0] * 164


WRONG: dict[str, Callable[[str], str]] = {
    "empty": lambda right: "",
    "pass": lambda right: "    pass\n",
    "nothing but words": lambda right: "    The function is complete.\n",
    "leaves early": lambda right: f"{right}\nimport os\nos._exit(0)\n",
    "exits": lambda right: f"{right}\nraise SystemExit(0)\n",
    "stops in the middle": lambda right: f"{right}\nraise KeyboardInterrupt\n",
    "another result": lambda right: f"    import random\n    return random.random()\n{right}",
    "cut off": lambda right: f"{right}\ndef more(",
}


@real
@confined
def test_no_wrong_solution_passes(replay: Replay, rows: list[dict[str, str]]) -> None:
    """Every fourth question, each kind in turn: none of 41."""
    ways = list(WRONG.values())
    wrong = {n: ways[n // 4 % len(ways)](row["canonical_solution"]) for n, row in enumerate(rows) if n % 4 == 0}

    assert replay(wrong) == dict.fromkeys(wrong, 0.0)


@real
@confined
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_no_solution_passes_once_it_is_made_wrong(name: str, replay: Replay, rows: list[dict[str, str]]) -> None:
    """Every question, every way."""
    scores = replay({n: WRONG[name](row["canonical_solution"]) for n, row in enumerate(rows)})

    assert list(scores.values()) == [0.0] * 164


@real
@confined
@pytest.mark.slow
def test_endless_solutions_cost_their_own_items(replay: Replay, rows: list[dict[str, str]]) -> None:
    """Every tenth never ends; the others are right."""
    loop = "    while True: pass\n"
    scores = replay({n: (n % 10 == 0) * loop + row["canonical_solution"] for n, row in enumerate(rows)})

    assert scores == {n: float(n % 10 != 0) for n in range(164)}
