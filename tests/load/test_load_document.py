"""The page and the terminal of a load: complete, and harmless whatever names strangers gave."""

import io

import pytest
from made_gates import HOSTILE
from made_loads import line, point, refused, request

from mtbench.document.console import Terminal
from mtbench.document.html_page import html
from mtbench.document.markdown_text import markdown
from mtbench.document.terminal import show
from mtbench.experiments.load.aiperf import FACTS
from mtbench.experiments.load.document import document
from mtbench.experiments.load.format import Load, ServerFacts
from mtbench.experiments.load.request import Limits
from mtbench.experiments.load.runner import Scores
from mtbench.experiments.load.summary import Sent, cell, compare
from mtbench.runs.formats import Environment

LEVELS = (1.0, 2.0, 8.0)


def made(names: tuple[str, ...] = ("ar", "mars:tau=0.95,cache=block"), *, rounds: int = 5, scored: bool = True) -> Load:
    """A load of some arms at three rates; the second arm is faster and refuses more."""
    slo: Limits = {"ttft": 0.2}
    cells, comparisons = [], []
    for level in LEVELS:
        sent = []
        for place, arm in enumerate(names):
            points, scores = [], Scores()
            for number in range(1, rounds + 1):
                slow = 1 + 0.01 * number + level / (8 + 8 * place)
                answered = [line(n, ttft_s=0.1 * slow, e2e_s=0.3 * slow) for n in range(10)]
                requests = [*answered[:9], refused(9)] if place else answered
                points.append(point(number, requests, arm=arm, level=level, point=f"{number}.{arm}.{level}"))
                if scored:
                    right: list[float | None] = [float(n % (3 + place) > 0) for n in range(10)]
                    scores[points[-1].point] = [*right[:9], None] if place else right
            sent.append(Sent(arm, level, points, scores, slo))
        cells += [cell(one) for one in sent]
        comparisons += [c for n, base in enumerate(sent) for c in compare(base, sent[n + 1 :], 0.02)]
    return Load(
        schema_version=2,
        started="2026-11-22T12:00:00Z",
        complete=True,
        environment=Environment(started="2026-11-22T12:00:00Z", processor="a processor", platform="Linux", cores=2),
        request=request(slo=slo, request_rate=LEVELS, rounds=rounds),
        metric="exact_match" if scored else None,
        max_new_tokens=160,
        client=FACTS,
        arms=[
            ServerFacts(name=arm, model="tiny", command=["mtbench", "serve"], engine="mtbench", url=None)
            for arm in names
        ],
        cells=cells,
        comparisons=comparisons,
    )


def printed(load: Load, width: int = 80) -> str:
    file = io.StringIO()
    show(document(load, drawn=False), Terminal(file=file, width=width))
    return file.getvalue()


def test_the_page_has_figures_words_and_definitions() -> None:
    load = made()
    shown = html(document(load))
    assert shown.count("<svg") == 2
    for text in ("Goodput under load", "Accuracy under load", "8 requests per second", "45 of 50", "5 rejected"):
        assert text in shown
    assert {c.speed_verdict for c in load.comparisons} == {"faster"}
    assert "faster" in shown
    assert "inter_token_latency" in shown
    assert "J per token" not in shown  # nothing measured it


def test_a_suite_without_scores() -> None:
    shown = html(document(made(scored=False)))
    assert shown.count("<svg") == 1
    assert "correct goodput" not in shown


def test_too_few_rounds_are_said() -> None:
    assert "no intervals of times: 2 rounds, 5 needed" in markdown(document(made(rounds=2), drawn=False))


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_has_every_arm(width: int) -> None:
    shown = printed(made(), width)
    assert all(len(text) <= width for text in shown.splitlines())
    assert shown.count("45 of 50") == 3
    assert "goodput" in shown
    assert "mars:tau=0.95,cache=block" in shown
    assert "▲" in shown


def test_hostile_names_are_text() -> None:
    shown = html(document(made((HOSTILE, "ar"))))
    assert "<b>&" not in shown
    for text in (shown, printed(made((HOSTILE, "ar")))):
        assert not set("\x1b\x00\u202e") & set(text)
