"""A chat template that reads the clock gets one time, which the plan stores (`--chat-template-date`)."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small import beginning_tokenizer
from stages import begin_run, open_plan

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Source, Suite, Template
from mtbench.lineup import planner
from mtbench.lineup.planner import make_plan
from mtbench.models import chat_template
from mtbench.models.chat_template import Clock
from mtbench.models.families import TINY
from mtbench.options.fields import read_options
from mtbench.plan.checks import read_plan
from mtbench.plan.plan import Plan, RunRequest
from mtbench.records import dump

SAID = "{{ messages[0].content }}"
SECONDS = "{{ strftime_now('%d %b %Y %H:%M:%S') }} " + SAID
MACRO = (  # as Mistral's: several formats, by a macro, and a test of whether there is a clock
    "{% macro day(form) %}{{ strftime_now(form) }}{% endmacro %}"
    "{% if strftime_now is defined %}{% set today = day('%Y-%m-%d') %}{% endif %}"
    "{{ today }} {{ day('%A') }} " + SAID
)
LLAMA = (  # as Llama 3.2's
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}"
    "{% endif %}{% endif %}{{ date_string }} " + SAID
)
UNREAD = "{# strftime_now('%Y') #}{% if messages | length > 9 %}{{ strftime_now('%Y') }}{% endif %}" + SAID
ASKED = [{"role": "user", "content": "d e"}]


class Letter(Suite):
    """One question of a chat, private."""

    name = "letter"
    family = "tiny"
    max_new_tokens = 4
    private = True

    def __init__(self, rest: str, source: Source) -> None:
        self.task = {"name": "letter", "chat_template": True}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [Prompt(item="letter/0/0", text=template([{"role": "user", "content": "d e f"}]))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small checkpoint, whose template the tests replace."""
    folder = tmp_path_factory.mktemp("model") / "ar"
    shutil.copytree(TINY / "ar", folder)
    return folder


@contextmanager
def day(of: str) -> Iterator[None]:
    """The machine's clock is at a day, as plans read it."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "date", SimpleNamespace(today=lambda: date.fromisoformat(of)))
        yield


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> RunRequest:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "d e"}\n{"prompt": "f g"}\n')
    suite, limit = f"prompts:{tmp_path}/mine.jsonl", 2
    return RunRequest(suite=(suite,), model=str(model), method=("ar",), limit=limit, max_new_tokens=4)


def planned(request: RunRequest, template: str, **changes: Any) -> Plan:
    """Return the plan of a request with this template."""
    Path(str(request.model), "chat_template.jinja").write_text(template)
    return make_plan(request.changed(**changes))


@contextmanager
def rendered() -> Iterator[list[str]]:
    """Collect what templates write."""
    texts: list[str] = []
    render = chat_template.render

    def noted(*given: Any, **named: Any) -> str:
        texts.append(render(*given, **named))
        return texts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "render", noted)
        yield texts


def test_plans_of_a_day_are_equal_and_say_its_date(asked: RunRequest) -> None:
    """To the byte, though the template writes seconds: the default has no time. Another day gives other prompts."""
    with day("2031-11-28"), rendered() as texts:
        first, second = (planned(asked, SECONDS) for _ in range(2))
    assert texts == ["28 Nov 2031 00:00:00 d e", "28 Nov 2031 00:00:00 f g"] * 2
    assert dump(first) == dump(second)
    assert first.request.chat_template_date == first.suites[0].task["template_date"] == "2031-11-28"
    says = "the chat template reads the clock: 2031-11-28 is in every prompt (`--chat-template-date`)"
    assert first.suites[0].flags == [says]
    assert says in first.cells[0].flags


@pytest.mark.parametrize(
    ("given", "stored", "text"),
    [
        ("2031-11-28", "2031-11-28", "28 Nov 2031 00:00:00"),
        ("2031-11-28 00:00", "2031-11-28", "28 Nov 2031 00:00:00"),
        ("1999-12-31T23:59:59+01:00", "1999-12-31T23:59:59+01:00", "31 Dec 1999 23:59:59"),
    ],
)
def test_a_given_date_is_in_the_prompts_on_any_day(asked: RunRequest, given: str, stored: str, text: str) -> None:
    """The same date gives the same plan."""
    with rendered() as texts:
        found = []
        for today in ("2031-11-28", "2031-12-24"):
            with day(today):
                found.append(planned(asked, SECONDS, chat_template_date=given))
    assert texts == [f"{text} d e", f"{text} f g"] * 2
    assert dump(found[0]) == dump(found[1])
    assert found[0].request.chat_template_date == stored


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [(MACRO, {}, "2031-11-28 Friday"), (LLAMA, {}, "28 Nov 2031"), (LLAMA, {"date_string": "1 May"}, "1 May")],
)
def test_the_clock_is_read_where_the_template_calls_it(
    asked: RunRequest, template: str, options: dict[str, Any], text: str
) -> None:
    """By a macro, or as a fallback. A variable in its place is no reading, and the plan has no date."""
    with day("2031-11-28"), rendered() as texts:
        plan = planned(asked, template, chat_template_kwargs=options)
    read = not options
    assert texts[0] == f"{text} d e"
    assert any("reads the clock: 2031-11-28" in flag for flag in plan.suites[0].flags) == read
    assert ("chat_template_date" in dump(plan)["request"], "template_date" in plan.suites[0].task) == (read, read)


def test_a_function_that_is_not_called_is_not_read(asked: RunRequest) -> None:
    """The plan has no trace of the day."""
    with day("2031-11-28"):
        before = planned(asked, UNREAD)
    with day("2031-11-29"):
        after = planned(asked, UNREAD)
    assert dump(before) == dump(after)
    assert (before.suites[0].flags, "chat_template_date" in dump(before)["request"]) == ([], False)


def test_a_plan_made_again_the_next_day_has_the_same_prompts(
    asked: RunRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its stored request, as an audit makes it, and where the prompts of a private suite are loaded again."""
    list(SUITES)
    monkeypatch.setitem(SUITES._classes, "letter", Letter)
    with day("2031-11-28"), rendered() as texts:
        run = begin_run(tmp_path / "run", planned(asked, SECONDS, suite=("letter",), batch_size=(1,)))
    with day("2031-11-29"), rendered() as again:
        opened = open_plan(run)
        remade = make_plan(read_plan(run).request)
    assert again == texts * 2
    assert opened.suites[0].prompt(0)
    assert opened.suites[0].digest() == opened.suites[0].withheld == remade.suites[0].withheld


@pytest.mark.parametrize("given", ["yesterday", "2031-13-01"])
def test_other_text_is_refused(given: str, asked: RunRequest) -> None:
    """In one line with examples, on the command line and in a stored plan."""
    with pytest.raises(
        UserError, match=rf"^--chat-template-date '{given}' is not allowed; give a date, such as [^\n]*$"
    ):
        read_options({"chat_template_date": given}, RunRequest, "mtbench run --help")
    with pytest.raises(ValueError, match="give a date, such as 2026-11-28, or"):
        asked.changed(chat_template_date=given)


def test_without_a_date_the_clock_is_the_machines() -> None:
    """Training and a server's chat; what others render by the tokenizer has its own clock before and afterwards."""
    tokenizer = beginning_tokenizer("{{ strftime_now('%Y') }} {{ messages[0].content }}{{ 1 // fault }}")
    year = f"{datetime.now().year} d e"
    for fault in (1, 0):  # with 0 the template fails
        try:
            assert (
                chat_template.render(tokenizer, ASKED, options={"fault": fault}, clock=Clock("1999-01-01"))[:4]
                == "1999"
            )
        except UserError as error:
            assert not fault and "ZeroDivisionError" in str(error)  # noqa: PT017, PT018
        assert tokenizer.apply_chat_template(ASKED, tokenize=False, fault=1) == f"{year}1"
        assert chat_template.render(tokenizer, ASKED, options={"fault": 1}) == f"{year}1"
