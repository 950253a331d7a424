"""A load in its directory: it is scored as the suite scores, a killed load goes on, and what goes wrong is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_loads import PYTHON, answering, begun, line, load_run, point, request
from schemas import validator

from mtbench.document.html_page import write
from mtbench.errors import UserError
from mtbench.experiments.load.document import document, subject
from mtbench.experiments.load.format import LoadPlan
from mtbench.experiments.load.planning import run_request
from mtbench.experiments.load.runner import read_points, read_servers
from mtbench.experiments.load.summary import summarise
from mtbench.plan.prompts import open_suite
from mtbench.records import dump


def knowing(planned: LoadPlan, wrong: int = 0) -> Any:
    """A reply that is right for all items of the plan but the first `wrong` ones."""
    suite = open_suite("arithmetic", run_request(planned.request))
    known = {}
    for place, item in enumerate(planned.items):
        problem, _ = suite._problem(int(item.item.split("/")[1]))  # type: ignore[attr-defined]
        known[item.prompt] = problem.amounts[-1] + (place < wrong)
    return lambda prompt: (200, f"Okay. The answer is {known[prompt]}.")


def test_a_whole_load(tmp_path: Path) -> None:
    """Two servers answer the same requests; one is wrong on 2 of 6 items. All is stored as the schemas say."""
    planned = begun(tmp_path / "plan", request(url={"x": "http://h/v1"}))[1]
    with answering(knowing(planned)) as right, answering(knowing(planned, wrong=2)) as less:
        run, planned = begun(tmp_path / "load", request(url={"right": right.url, "less": less.url}))
        notes: list[str] = []
        load_run(run, planned, notes).send(PYTHON)
        assert len(notes) == 8
        measured = [body for body in right.asked if body["prompt"] in {i.prompt for i in planned.items}]
        warm_ups = 2 * planned.request.max_num_seqs
        assert len(measured) == 12 + warm_ups
        assert all(body["temperature"] == 0 and body["max_tokens"] == planned.max_new_tokens for body in measured)
    load_run(run, planned).score()
    found = summarise(run, planned)
    accuracy = {(c.arm, c.level): None if c.accuracy is None else c.accuracy.value for c in found.cells}
    assert accuracy == {(arm, lv): v for arm, v in (("right", 1.0), ("less", 4 / 6)) for lv in (1.0, 8.0)}
    differences = [c.accuracy_difference.value for c in found.comparisons if c.accuracy_difference]
    assert differences == [pytest.approx(-1 / 3)] * 2
    assert found.complete
    run.write_json("load.json", dump(found))
    write(run.path, "load", document(found))
    assert not (run.path / "work").exists()
    for name, kind in (("load.json", "load"), ("plan.json", "load_plan")):
        validator(kind).validate(json.loads((run.path / name).read_text()))
    for text in (run.path / "points.jsonl").read_text().splitlines():
        validator("load_point").validate(json.loads(text))


def test_every_request_has_the_fields_of_the_plan(tmp_path: Path) -> None:
    """The warm-up's, too: a server must not compile or cache another prompt."""
    with answering(lambda prompt: (200, "The answer is 7.")) as server:
        run, planned = begun(tmp_path / "load", request(url={"one": server.url}, rounds=1))
        load_run(run, planned.changed(fields={"add_special_tokens": False}, flags=["remark"])).send(PYTHON)
        assert {body["add_special_tokens"] for body in server.asked} == {False}
    found = summarise(run, planned.changed(flags=["remark"]))
    assert {cell.flags[0] for cell in found.cells} == {"remark"}


@pytest.mark.parametrize(
    "drawn", [{}, {"temperature": 0.6, "top_p": 0.95}, {"temperature": 1.0, "top_k": 20, "min_p": 0.1}]
)
def test_every_request_says_how_its_tokens_are_drawn(drawn: dict[str, Any], tmp_path: Path) -> None:
    """Servers have defaults of their own. The seeds of a request are the same for all arms."""
    with answering(lambda prompt: (200, "7.")) as one, answering(lambda prompt: (200, "7.")) as two:
        run, planned = begun(tmp_path / "load", request(url={"one": one.url, "two": two.url}, rounds=1, **drawn))
        load_run(run, planned).send(PYTHON)
    expected = {"top_p": 1.0, "top_k": -1, "min_p": 0.0} | drawn if drawn else {"temperature": 0}
    assert all({name: body.get(name) for name in expected} == expected for body in one.asked)
    seeds, same = ({(body["prompt"], body.get("seed")) for body in server.asked} for server in (one, two))
    assert seeds == same
    assert len({seed for _, seed in seeds}) > 1 if drawn else {seed for _, seed in seeds} == {None}
    assert ("sampled at temperature" in subject(summarise(run, planned))) == bool(drawn)


def test_a_full_server_and_a_broken_one(tmp_path: Path) -> None:
    """Their refusals are counted; they end nothing."""
    codes = iter([200, 200, 503, 500, 200, *[200] * 100])
    with answering(lambda prompt: (next(codes), "1")) as server:
        run, planned = begun(tmp_path / "load", request(url={"one": server.url}, request_rate=[4.0], rounds=1))
        load_run(run, planned).send(PYTHON)
    [ended] = read_points(run, planned)
    assert [sent.outcome for sent in ended.requests] == ["rejected", "failed", "ok"]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    run, planned = begun(tmp_path / "load", request(url={"one": "http://127.0.0.1:9/v1"}))
    with pytest.raises(UserError, match=r"--url one: .* cannot be reached"):
        load_run(run, planned).send(PYTHON)


def test_another_model_does_not_go_on(tmp_path: Path) -> None:
    with answering(lambda prompt: (200, "1")) as server:
        run, planned = begun(tmp_path / "load", request(url={"one": server.url}, rounds=1))
        run.write_json("servers.json", {"one": {"name": "one", "model": "big", "command": None, "url": server.url}})
        with pytest.raises(UserError, match="served the model 'big' before and serves 'served' now"):
            load_run(run, planned).send(PYTHON)


def test_a_point_of_another_plan(tmp_path: Path) -> None:
    run, planned = begun(tmp_path / "load", request(url={"one": "http://h/v1"}))
    first = planned.points[0]
    run.append("points.jsonl", [dump(point(1, [line(0)], point=first.point, arm="one", level=first.level))])
    with pytest.raises(UserError, match="not planned"):
        read_points(run, planned)


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_our_server_under_load(tmp_path: Path) -> None:
    """It is started, answers as a run decodes, tells its counts and tau, and is gone in the end."""
    asked = request(method=["mars:tau=0.95"], request_rate=[50.0], requests=4, rounds=1)
    run, planned = begun(tmp_path / "load", asked)
    load_run(run, planned).send(PYTHON)
    [ended], [started] = read_points(run, planned), read_servers(run).values()
    assert started.command is not None
    assert started.command[:4] == ["mtbench", "serve", "--family", "tiny"]
    assert {sent.outcome for sent in ended.requests} == {"ok"}
    assert all("The answer is" in (sent.text or "") for sent in ended.requests)
    assert all(sent.forwards for sent in ended.requests)
    load_run(run, planned).score()
    found = summarise(run, planned)
    assert found.cells[0].tokens_per_forward is not None
