"""The page and the terminal of a load: complete, self-contained, and harmless whatever names strangers gave."""

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from made_gates import HOSTILE
from made_loads import CLIENT, line, point, refused, request

from mtbench.document.console import Terminal
from mtbench.experiments.load import page
from mtbench.experiments.load.format import Load, ServerFacts, Slo
from mtbench.experiments.load.runner import Scores
from mtbench.experiments.load.summary import Sent, cell, compare
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Environment

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LEVELS = (1.0, 2.0, 8.0)


def made(names: tuple[str, ...] = ("ar", "mars:tau=0.95..0.7"), *, rounds: int = 5, scored: bool = True) -> Load:
    """A load of some arms at three rates; the second arm is faster and refuses more."""
    slo, cells, comparisons = Slo(ttft_s=0.2), [], []
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
        schema_version=1,
        started="2026-11-22T12:00:00Z",
        complete=True,
        environment=Environment(started="2026-11-22T12:00:00Z", processor="a processor", platform="Linux", cores=2),
        request=request(slo=slo, request_rate=LEVELS, rounds=rounds),
        metric="exact_match" if scored else None,
        max_new_tokens=160,
        client=CLIENT.facts,
        arms=[ServerFacts(name=arm, model="tiny", command=["serve", "--method", arm], url=None) for arm in names],
        cells=cells,
        comparisons=comparisons,
    )


def printed(load: Load, width: int = 80) -> str:
    file = io.StringIO()
    console = Terminal(file=file, width=width)
    for renderable in page.terminal(load):
        console.print(renderable)
    return file.getvalue()


def written(folder: Path, load: Load) -> str:
    page.write(RunDirectory(folder), load)
    return (folder / page.PAGE).read_text()


def test_the_page_is_one_file_and_runs_nothing(tmp_path: Path) -> None:
    shown = written(tmp_path, made())
    assert "default-src 'none'" in shown
    assert "<script" not in shown
    assert not re.search(r"https?://", shown)
    ids = re.findall(r' id="([^"]+)"', shown)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'aria-labelledby="([^"]+)"', shown)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', shown)) <= set(ids)
    assert shown == written(tmp_path, made())


def test_a_loss_within_the_margin_is_not_marked_as_bad(tmp_path: Path) -> None:
    """As on the page of a run; a loss beyond it is."""
    load, words = made(), ("worse by less than the margin", "worse than margin")
    compared = [c.changed(accuracy_verdict=word) for c, word in zip(load.comparisons, words, strict=False)]
    shown = written(tmp_path, load.changed(comparisons=compared))
    for word, tone in zip(words, ("plain", "bad"), strict=True):
        assert f'<span class="verdict {tone}">{word}</span>' in shown


def test_the_page_has_figures_words_and_definitions(tmp_path: Path) -> None:
    load = made()
    shown = written(tmp_path, load)
    assert shown.count("<svg") == 2
    for text in ("Goodput under load", "Accuracy under load", "8 requests per second", "45 of 50", "5 rejected"):
        assert text in shown
    assert {c.speed_verdict for c in load.comparisons} == {"faster"}
    assert "faster" in shown
    assert "inter_token_latency" in shown
    assert "J per token" not in shown  # nothing measured it


def test_a_suite_without_scores(tmp_path: Path) -> None:
    shown = written(tmp_path, made(scored=False))
    assert shown.count("<svg") == 1
    assert "correct goodput" not in shown


def test_too_few_rounds_are_said(tmp_path: Path) -> None:
    assert "no intervals of times: 2 rounds, 5 needed" in written(tmp_path, made(rounds=2))


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_has_every_arm(width: int) -> None:
    shown = printed(made(), width)
    assert all(len(text) <= width for text in shown.splitlines())
    assert shown.count(" 90% ") == 3
    assert "goodput/s" in shown
    assert "(correct)" in shown
    assert "(correct)" not in printed(made(scored=False), width)
    assert "mars:tau=0.95..0.7 against ar: faster" in " ".join(shown.split())


def test_hostile_names_are_text(tmp_path: Path) -> None:
    load = made((HOSTILE, "ar"))
    shown = written(tmp_path, load)
    assert "<script" not in shown
    assert "<b>&" not in shown
    for text in (shown, printed(load)):
        assert not set("\x1b\x00\u202e") & set(text)
    assert json.loads((tmp_path / page.RESULTS).read_text())["arms"][0]["name"] == HOSTILE


@pytest.mark.whole
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """There is no error and no request, and nothing is wider than the window, on a desk or a phone."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    written(tmp_path, made(("ar", "mars:tau=0.95..0.7", "x" * 120)))
    url, wrong = (tmp_path / page.PAGE).resolve().as_uri(), list[str]()
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("request", lambda asked: wrong.append(asked.url) if asked.url != url else None)
        tab.goto(url)
        for details in tab.locator("details").all():
            details.evaluate("element => element.open = true")
        for width in (1280, 400):  # tables scroll, the page does not
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        browser.close()
    assert [entry for entry in wrong if entry != "data:,"] == []
