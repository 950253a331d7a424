"""A line of a text file or a stream ends at a line feed, not at what else Unicode or Python calls a line's end."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import small
from hypothesis import given, settings
from hypothesis import strategies as some
from live_server import events, serving, small_served
from made_records import generation_line, timing_line
from pydantic import BaseModel
from server_corpus import EVENTS, NOWHERE, answered, choice

from mtbench.clients.openai_client import Server
from mtbench.decoding.registry import METHODS
from mtbench.evaluation import dataset_files
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source
from mtbench.experiments.audit.format import JudgedLine, NoiseLine, SideJudged
from mtbench.experiments.load.format import PointLine, RequestLine
from mtbench.models.families import TINY
from mtbench.models.runner import ModelRunner
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Disturbed, Elimination, FailureLine, PreparationLine, ReadingLine
from mtbench.results.answers import read_answers
from mtbench.training import distillation_data
from mtbench.training.conversations import read_conversations
from mtbench.training.distillation_data import Answered, write_answers

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # where str.splitlines ends a line
TEXTS = some.lists(some.text(some.sampled_from([*ENDS, '"', "\\", "a"])).map("<{}>".format), min_size=2, max_size=4)
few = settings(max_examples=15, deadline=None)


def request_line(text: str) -> RequestLine:
    times: dict[str, Any] = dict.fromkeys(("e2e_s", "ttft_s", "tpot_s", "tokens", "forwards"))
    return RequestLine(position=0, item=text, outcome="failed", error=text, start_s=0.0, text=text, **times)


def point_line(text: str) -> PointLine:
    place: dict[str, Any] = {"point": text, "round": 1, "arm": text, "level": 1.0, "started": text}
    return PointLine(**place, window_s=1.0, energy_j=None, requests=[request_line(text)])


def judged_line(text: str) -> JudgedLine:
    side = SideJudged(text=text, probabilities=[], short={text: 1.0}, endless=None)
    return JudgedLine(pair=0, item=text, first=0, side_a=side, side_b=side)


OWN: dict[str, Callable[[str], BaseModel]] = {
    "generations/a.jsonl": lambda text: generation_line(item=text, text=text, special=[(0, text)]),
    "timings/a.jsonl": lambda text: timing_line(
        dropped=text, reported_by=text, disturbed=[Disturbed(wall_s=1.0, cpu_s=1.0, reason=text)]
    ),
    "preparation.jsonl": lambda text: PreparationLine(session=1, cell="a", preparation_s=1.0, server=text),
    "failures.jsonl": lambda text: FailureLine(cell="a", error=text),
    "eliminated.jsonl": lambda text: Elimination(cell="a", block=0, lost=True, reason=text),
    "lossless/readings.jsonl": lambda text: ReadingLine(key=text, item=text, short={text: 1.0}, logits=[]),
    "points.jsonl": point_line,
    "judged.jsonl": judged_line,
    "noise.jsonl": lambda text: NoiseLine(dtype=text, positions=1, spread=None),
}


@pytest.mark.parametrize("name", OWN)
@few
@given(texts=TEXTS)
def test_lines_of_a_run_come_back(tmp_path_factory: pytest.TempPathFactory, name: str, texts: list[str]) -> None:
    """As they were, also from another program's JSON, which need not escape; a torn last line is left out."""
    run, records = RunDirectory(tmp_path_factory.mktemp("run")), [OWN[name](text) for text in texts]
    run.append(name, (record.model_dump() for record in records[:1]))
    run.append(name, (record.model_dump() for record in records[1:]))
    assert run.read_lines(name, type(records[0])) == records
    raw = "".join(f"{json.dumps(record.model_dump(), ensure_ascii=False)}\n" for record in records)
    (run.path / name).write_bytes((raw + raw[: raw.index("\n")]).encode())
    assert run.read_lines(name, type(records[0])) == records


def of_suite(name: str) -> Callable[[Path], list[str]]:
    """Return what reads the last user turn of each prompt."""

    def last(turns: Messages, **_: Any) -> str:
        return str(turns[-1]["content"])

    def read(file: Path) -> list[str]:
        suite = SUITES[name]("" if name == "mt-bench" else str(file), Source(data_dir=file.parents[1]))
        return [prompt.text for prompt in suite.prompts(last, None)]

    return read


Maker = Callable[[str], dict[str, Any]]
SOURCES: dict[str, tuple[str, Maker, Callable[[Path], list[str]]]] = {
    "prompts": ("p.jsonl", lambda text: {"prompt": text}, of_suite("prompts")),
    "conversations": (
        "c.jsonl",
        lambda text: {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]},
        of_suite("conversations"),
    ),
    "questions of several turns": (
        "question.jsonl",
        lambda text: {"question_id": text, "category": "writing", "turns": [text]},
        of_suite("mt-bench"),
    ),
    "training data": (
        "t.jsonl",
        lambda text: {"prompt": text, "completion": "b"},
        lambda file: [turns[0]["content"] for turns in read_conversations(str(file), None, 0)],
    ),
    "data sets of lm-eval": (
        "test.jsonl",
        lambda text: {"question": text, "answer": "#### 1"},
        lambda file: list(dataset_files.load(file)["question"]),
    ),
    "answers of other tools": (
        "a.jsonl",
        lambda text: {"prompt": text, "output": text},
        lambda file: [str(answer.output) for answer in read_answers(file)],
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
@few
@given(texts=TEXTS)
def test_a_source_has_its_texts(tmp_path_factory: pytest.TempPathFactory, kind: str, texts: list[str]) -> None:
    name, line, read = SOURCES[kind]
    texts = [f"{number}{text}" for number, text in enumerate(texts)]
    file = tmp_path_factory.mktemp("source") / "mt_bench" / name
    file.parent.mkdir()
    file.write_bytes("\r\n".join(json.dumps(line(text), ensure_ascii=False) for text in texts).encode())
    assert read(file) == texts


@few
@given(texts=TEXTS)
def test_a_line_of_a_text_file_is_a_prompt(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    file, texts = tmp_path_factory.mktemp("source") / "p.txt", [text.replace("\n", "") for text in texts]
    file.write_bytes("\n".join(texts).encode())
    assert of_suite("prompts")(file) == texts


@few
@given(texts=TEXTS)
def test_a_teachers_answers_are_kept_and_become_training_data(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    """Its process dies behind the first answer; the same call goes on with the second."""
    out, asked = tmp_path_factory.mktemp("answers") / "answers.jsonl", list[str]()
    teacher = SimpleNamespace(tokenizer=small.small_tokenizer())

    def answer(_: Any, conversations: Iterator[Messages], *__: Any) -> Iterator[Answered]:
        for number, turns in enumerate(conversations):
            if number == 1 and len(asked) == 1:
                raise KeyboardInterrupt
            asked.append(text := turns[0]["content"])
            yield Answered([*turns[:-1], {"role": "assistant", "content": text, "token_ids": [1]}], True)

    def write() -> tuple[int, int]:
        conversations = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in texts]
        return write_answers(str(TINY / "ar"), conversations, out, max_new_tokens=8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation_data, "answered", answer)
        patch.setattr(distillation_data, "load", lambda *_, **__: teacher)
        with pytest.raises(KeyboardInterrupt):
            write()
        assert write() == (len(texts), 0)
    assert asked == texts
    assert [[turn["content"] for turn in turns] for turns in read_conversations(str(out), None, 0)] == [
        [text, text] for text in texts
    ]


@few
@given(texts=TEXTS, cuts=some.lists(some.integers(1, 400)))
def test_an_event_of_a_server_is_whole(texts: list[str], cuts: Sequence[int]) -> None:
    """However the network cuts the bytes."""
    pieces = [choice(text=text, finish_reason=None) for text in texts] + [choice(text="", finish_reason="length")]
    data = "".join(f"data: {json.dumps(piece, ensure_ascii=False)}\n\n" for piece in pieces).encode()
    places = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]

    async def stream() -> Any:
        for begin, end in pairwise(places):
            yield data[begin:end]

    with answered(lambda _: httpx.Response(200, headers={"content-type": EVENTS}, content=stream())):
        [reply] = Server(NOWHERE, None, 5.0).complete([{"max_tokens": len(pieces)}])
    assert reply.text == "".join(texts)


def test_our_server_streams_what_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """To our client, and to that of the tests."""
    monkeypatch.setattr(small, "WORDS", [word + ENDS[len(word) :] for word in small.WORDS])
    body: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
    with serving(small_served(METHODS["ar"](), ModelRunner(small.small_checkpoint()))) as running:
        text = running.complete(**body)["choices"][0]["text"]
        [reply] = Server(running.url, None, 30.0).complete([body])
        with running.client() as client, client.stream("POST", "/completions", json=body | {"stream": True}) as stream:
            messages = events(stream)
    assert reply.text == text == "".join(piece["text"] for message in messages for piece in message["choices"])
    assert all(end in text for end in ENDS[2:])
