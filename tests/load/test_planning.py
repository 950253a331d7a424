"""The plan of a load: the same requests for every arm, points in rounds, and what is refused before anything starts."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_loads import request
from small import TEMPLATES, save_beginning
from transformers import AutoTokenizer

from mtbench.errors import UserError
from mtbench.experiments.load import planning
from mtbench.experiments.load.request import parse_urls

URLS = {"one": "http://127.0.0.1:1/v1", "two": "http://127.0.0.1:2/v1"}


def test_arms_get_the_same_requests() -> None:
    planned = planning.plan(request(url=URLS))
    sent: dict[Any, Any] = {}
    for point in planned.points:
        entry = sent.setdefault((point.round, point.level), (point.items, point.seed))
        assert entry == (point.items, point.seed)
    assert len({seed for _, seed in sent.values()}) == len(sent)


def test_an_item_comes_again_only_when_all_were_sent() -> None:
    planned = planning.plan(request(url=URLS, limit=5))
    for level in planned.request.levels:
        points = sorted((p for p in planned.points if (p.arm, p.level) == ("one", level)), key=lambda p: p.round)
        order = [item for point in points for item in point.items]
        assert sorted(order[:5]) == list(range(5))
        assert order[5] == order[0]
    assert len(planning.plan(request(url=URLS)).items) == 6


def test_points_run_in_rounds_and_turns() -> None:
    """Every arm runs once per round, with one server for all its levels; the order changes with the seed."""
    points = planning.plan(request(url=URLS, rounds=3)).points
    assert [point.round for point in points] == sorted(point.round for point in points)
    turns = [(a.round, a.arm) for a, b in pairwise(points) if (a.round, a.arm) != (b.round, b.arm)]
    assert len(turns) == 5
    orders = {tuple(p.arm + f"{p.level}" for p in planning.plan(request(url=URLS, seed=s)).points) for s in range(4)}
    assert len(orders) > 1
    assert len({point.point for point in points}) == len(points)


def test_prompts_are_those_of_a_run() -> None:
    planned = planning.plan(request(method=["mars:tau=0.95"]))
    assert planned.items[0].prompt.startswith("<|im_start|>")
    assert planned.arms[0].method == "mars:tau=0.95,on=mars,engine=graph"
    assert planned.room >= planned.max_new_tokens + max(item.prompt_tokens for item in planned.items)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_server_makes_the_tokens_of_a_run_of_the_texts(name: str, ends: bool, tmp_path: Path) -> None:
    """It adds BOS, so the texts have none; where it would add what is not in the prompts, requests ask it not to."""
    folder = save_beginning(tmp_path / "model", TEMPLATES[name], ends=ends)
    (tmp_path / "p.jsonl").write_text('{"prompt": "d e"}')
    planned = planning.plan(request(url=URLS, suite=f"prompts:{tmp_path}/p.jsonl", model=str(folder)))
    asked, tokenizer = planned.items[0].prompt, AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(asked, **planned.fields).input_ids
    wanted = tokenizer("d e").input_ids
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "d e"}]
        wanted = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert (ids, len(ids)) == (wanted, planned.items[0].prompt_tokens)
    needed = bool(tokenizer.chat_template) and (ends or name == "writes no BOS")
    assert planned.fields == ({"add_special_tokens": False} if needed else {})
    assert [flag.partition(" ")[0] for flag in planned.flags][:1] == (
        ["raw"] if not tokenizer.chat_template else ["requests"] if needed else []
    )


def test_arms_are_those_of_a_run() -> None:
    found = planning.plan(request(method=["ar", "mars:tau=1|0.95,cache=block"])).arms
    assert [arm.name for arm in found] == ["ar", "mars:cache=block", "mars:tau=0.95,cache=block"]
    assert found[1].method == "mars:cache=block,on=mars,engine=graph"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"url": {}}, "no arm is given"),
        ({"concurrency": [2]}, "either --request-rate 1,2,4 .* or --concurrency"),
        ({"request_rate": [], "concurrency": [2], "requests": None}, "--concurrency needs --requests"),
        ({"request_rate": [2.0, 2.0]}, "--request-rate has 2 twice"),
        ({"method": ["openai:url=http://x/v1"]}, "external engine"),
        ({"method": ["mars:tau=0.9", "mars:tau=0.9"]}, "two arms have the name 'mars:tau=0.9'"),
    ],
)
def test_refusals(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        planning.plan(request(**{"url": URLS, **given}))


def test_conversations_are_refused(tmp_path: Any) -> None:
    folder = tmp_path / "data" / "mt_bench"
    folder.mkdir(parents=True)
    question = '{"question_id": 81, "category": "writing", "turns": ["Hello.", "Again."]}'
    (folder / "question.jsonl").write_text(question)
    with pytest.raises(UserError, match=r"follow an arm's own answers.*`--suite conversations:FILE`"):
        planning.plan(request(url=URLS, suite="mt-bench", family="tiny", data_dir=str(tmp_path / "data")))


def test_texts_are_those_of_the_turns_that_fit(tmp_path: Any) -> None:
    """A plan leaves out the turns of a conversation that do not fit the context; other items keep their texts."""
    said = [
        {"role": role, "content": text} for role, text in (("user", "1+1"), ("assistant", "2"), ("user", "1+" * 9000))
    ]
    (tmp_path / "mine.json").write_text(json.dumps([{"messages": said}, {"prompt": "2+2"}]))
    planned = planning.plan(request(url=URLS, suite=f"conversations:{tmp_path}/mine.json", family="tiny"))
    assert [(item.item, item.prompt.count("2+2")) for item in planned.items] == [
        ("conversations/1/0", 0),
        ("conversations/2/0", 1),
    ]


@pytest.mark.parametrize("text", ["x", "a=ftp://b/v1", "a=http://[", "a=http://u:p@h/v1"])
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--url"):
        parse_urls([text])


def test_a_key_is_the_name_of_a_variable() -> None:
    """The plan has the name, never the key."""
    assert parse_urls(["a=http://h/v1=KEY", "b=http://i/v1"]) == (
        {"a": "http://h/v1", "b": "http://i/v1"},
        {"a": "KEY"},
    )
    with pytest.raises(UserError, match=r"'sk-1' is no name of an environment variable; write NAME=URL=VARIABLE"):
        parse_urls(["a=http://h/v1=sk-1"])
