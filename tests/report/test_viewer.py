"""The viewer of generations: where reasoning ends and a stop string begins, and which items come first."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from browsers import BROWSER, opened
from made_runs import AR, MARS, Answer, MadeRun
from stages import assemble, write_report
from stored import keep_lines, stored_lines
from tokenizer_kinds import KINDS, tokenizer

from mtbench.decoding.output import finish
from mtbench.models.token_text import exact_text, special_ids
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run
from mtbench.report import figures
from mtbench.report.generation_viewer import ITEMS, _place, split, viewer

UNREAD = {"unread": "no number behind ####"}
BY_VALUE = {"by_value": 0.0}  # of an answer that the score calls right


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(), ("x +",), ("return",), ("</s>",), (" return", "</s>")])
@pytest.mark.parametrize(
    "text", ["<think>the x</think> return  x + 1 1", "the é 日本 return x 1", "<think>the é x", "return"]
)
def test_pieces_make_up_the_exact_text_behind_the_prompt_and_show_its_parts(
    kind: str, stop: tuple[str, ...], text: str
) -> None:
    """The first space belongs to the text; a stop string that is a special token is cut, too."""
    own = tokenizer(kind)
    prompt, ids = (own(of, add_special_tokens=False)["input_ids"] for of in ("the x", text))
    line = finish(own, [*ids, own.eos_token_id], [own.eos_token_id], stop, prompt)
    pieces = split(line.token_ids, prompt, partial(exact_text, own))
    assert "".join(pieces) == exact_text(own, line.token_ids, prompt)
    special = [place for place, token in enumerate(line.token_ids) if token in special_ids(own)]

    def before(place: tuple[int, int]) -> str:
        whole = [piece for n, piece in enumerate(pieces[: place[0]]) if n not in special]
        return "".join(whole) + "".join(pieces[place[0] : place[0] + 1])[: place[1]]

    begins = _place(pieces, special, line.reasoning)
    assert before(begins) == line.text[: line.reasoning]
    if line.finish_reason == "stop":
        cut = _place(pieces, special, len(line.text), stop=True)
        assert before(cut) == line.text
        assert cut[0] < len(pieces)


def made(folder: Path, read: dict[int, dict[str, Any]], count: int = 2 * ITEMS) -> RunDirectory:
    """A run of two arms, whose second one's answers are read like this, by number."""
    plain = [Answer([4 + n % 90], [1]) for n in range(count)]
    arm = [Answer([5 + n % 90], [1], float("unread" not in read.get(n, {})), read.get(n, {})) for n in range(count)]
    return RunDirectory(MadeRun({AR: plain, MARS: arm}).write(folder / "run"))


@pytest.mark.parametrize(
    ("read", "first"),
    [
        ({}, [0, 1, 2]),
        ({70: UNREAD, 75: BY_VALUE}, [70, 75, 0]),
        ({70: {"by_value": 1.0}}, [0, 1, 2]),  # the readings agree
        (dict.fromkeys(range(30, 80), UNREAD), [*range(30, 50), *range(20)]),  # half of those that the page holds
    ],
)
def test_items_with_unread_answers_or_readings_that_differ_come_first(
    read: dict[int, dict[str, Any]], first: list[int], tmp_path: Path
) -> None:
    directory = made(tmp_path, read)
    cells = assemble(directory)
    arms = [cell.arm for cell in cells.cells]
    with Run.locked(directory) as run:
        shown = viewer(run, cells, {arm: n for n, arm in enumerate(arms, 1)}, dict(zip(arms, arms, strict=True)))
    [group] = shown.groups
    assert [int(item.item.split("/")[1]) for item in group.items][: len(first)] == first
    assert len(group.items) == ITEMS
    marked = {int(item.item.split("/")[1]) for item in group.items if item.marked}
    assert marked == {n for n in first if n in read and read[n] != {"by_value": 1.0}}
    assert shown.marked == bool(marked)
    of_arm = {int(item.item.split("/")[1]): item.answers[1] for item in group.items}
    for number, reading in read.items():
        if (answer := of_arm.get(number)) is not None:
            assert (answer.unread, answer.by_value) == (reading.get("unread"), reading.get("by_value"))


@BROWSER
def test_reasoning_and_readings_in_a_browser(
    small_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning stands apart from the answer; unread answers are named, framed and can be found."""
    monkeypatch.setattr(figures, "draw", lambda scene: [])
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))
    cell = "arithmetic.ar.ar.graph.b1"
    lines = stored_lines(run, f"generations/{cell}.jsonl")
    keep_lines(run, f"generations/{cell}.jsonl", [line | {"reasoning": 3} for line in lines])
    run.write_json("readings.json", {cell: {lines[-1]["item"]: {"unread": "no <b>number</b>", "by_value": 1.0}}})
    write_report(run, assemble(run))
    with opened((run.path / "report.html").resolve().as_uri()) as (page, wrong):
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        page.locator("#viewer-group").select_option(index=0)
        page.locator("#viewer-item").select_option(index=0)
        shown = page.locator(".answer").first
        assert page.locator("#viewer-status").inner_text().startswith(f"Item 1 of 7: {lines[-1]['item']}")
        assert shown.get_attribute("class") == "answer marked"
        assert "correct by value · unread: no <b>number</b>" in shown.locator(".counts").inner_text()
        assert shown.locator(".part").all_inner_texts() == ["Reasoning", "Answer"]
        assert "".join(shown.locator(".reasoning").all_inner_texts()) == lines[-1]["text"][:3]
        page.locator("#viewer-marked").check()
        assert page.locator("#viewer-item option").count() == 1
        page.locator("#viewer-group").select_option(index=1)
        assert page.locator("#viewer-item option").count() == 7
        assert page.locator("#viewer-marked").is_disabled()
        assert page.locator(".marked").count() == 0
        assert wrong == []
