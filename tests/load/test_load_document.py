"""The page and the terminal of a load are harmless whatever names strangers gave."""

import io

from made_gates import HOSTILE
from made_loads import line, point, request

from mtbench.document.console import Terminal
from mtbench.document.html_page import html
from mtbench.document.terminal import show
from mtbench.experiments.load.aiperf import FACTS
from mtbench.experiments.load.document import document
from mtbench.experiments.load.format import Load, ServerFacts
from mtbench.experiments.load.request import Limits
from mtbench.experiments.load.runner import Scores
from mtbench.experiments.load.summary import Sent, cell, compare
from mtbench.plan.formats import Environment


def made(*names: str) -> Load:
    """A load of some arms at one rate, without scores."""
    slo: Limits = {"ttft": 0.2}
    sent = []
    for arm in names:
        points = [
            point(number, [line(n) for n in range(10)], arm=arm, level=1.0, point=f"{number}.{arm}")
            for number in range(1, 6)
        ]
        sent.append(Sent(arm, 1.0, points, Scores(), slo))
    return Load(
        schema_version=3,
        started="2026-11-22T12:00:00Z",
        complete=True,
        environment=Environment(started="2026-11-22T12:00:00Z", processor="a processor", platform="Linux", cores=2),
        request=request(slo=slo, request_rate=(1.0,), rounds=5),
        metric=None,
        max_new_tokens=160,
        client=FACTS,
        arms=[
            ServerFacts(name=arm, model="tiny", command=["mtbench", "serve"], engine="mtbench", url=None)
            for arm in names
        ],
        cells=[cell(one) for one in sent],
        comparisons=compare(sent[0], sent[1:], 0.02),
    )


def printed(load: Load, width: int = 80) -> str:
    file = io.StringIO()
    show(document(load, drawn=False), Terminal(file=file, width=width))
    return file.getvalue()


def test_hostile_names_are_text() -> None:
    shown = html(document(made(HOSTILE, "ar")))
    assert "<b>&" not in shown
    for text in (shown, printed(made(HOSTILE, "ar"))):
        assert not set("\x1b\x00\u202e") & set(text)
