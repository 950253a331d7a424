"""One document, every renderer: nothing is lost, every text is text, and the page fits a desk and a phone."""

import html as entities
import io
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browsers import BROWSER, opened
from made_gates import HOSTILE

from mtbench.document import html_page, latex_table, markdown_text, plots, terminal
from mtbench.document.console import Terminal
from mtbench.document.model import (
    Bar,
    Beside,
    Document,
    Entry,
    Figure,
    Notes,
    Pairs,
    Part,
    Points,
    Row,
    Section,
    Table,
    Text,
    Verdict,
    Widget,
)
from mtbench.errors import printable

COLUMNS = [("speedup", "wall time of the baseline over the arm's"), ("accuracy, %", "share of correct items")]


def drawn(name: str = "line", text: str = "A line") -> Figure:
    text = plots.cut(printable(text), 40)
    with plots.style():
        figure, axes = plots.canvas(text, "up is better", 100, [text])
        axes.plot([1, 2], [1, 2], color=plots.ACCENT)
        plots.label_ends(axes, [(2, 2, "1", plots.ACCENT), (2, 2, "2", plots.INK)])
        return plots.finish(figure, text, name=name, title=text, caption=f"{text}.", alt=f"{text}: 1, 2.")


@pytest.mark.parametrize("y", [0.0, 0.5, 1.0])
def test_labels_of_many_lines_that_end_alike_stay_beside_the_plot(y: float) -> None:
    arms = 35
    figure, axes = plots.canvas("", "", arms * plots.APART)
    axes.set_ylim(0, 1)

    plots.label_ends(axes, [(1.0, y, str(number), plots.INK) for number in range(arms)])

    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: float(box.y0))
    plot, letter = axes.get_window_extent(), boxes[0].height
    assert plot.y0 - letter < boxes[0].y0
    assert boxes[-1].y1 < plot.y1 + letter
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))


def rows(name: str = "ar") -> list[Row]:
    faster, slower = map(Verdict.of, ("faster", "slower"))
    fast = Entry("×2.00", "[1.90, 2.10]", faster, bar=Bar(0.4, 0.5, 0.6, 0.1))
    return [
        Row(name, [fast, Entry("50.1", "[40.0, 60.2]")], 1, about=f"{name}:tau=0.9@mars/graph"),
        Row("void", [Entry("×0.50", verdict=slower), Entry()], 2, tags=["void"], notes=[("void", "It is void.")]),
        Row("failed", [], 3, notes=[("failed", "Out of memory.")]),
    ]


def made(name: str = "ar") -> Document:
    """A document with every kind of block, in which `name` stands in every place that may hold a stranger's text."""
    task = Table([(name, name)], [Row(name, [Entry(name, detail=name, against=name)], group=name)])
    facts = Pairs([("Command", name), (name, name)], {"Command"}, {name: "run/report.html"})
    return Document(
        title=f"Which arm is fastest on {name}?",
        lead=f"{name} is the fastest.",
        steps=[(f"Deploy {name}:", f"mtbench serve {name}")],
        subject=f"On {name}",
        verdict=Verdict("FAIL", tone="bad", sign="✗"),
        marks=[f"Demonstration of {name}"],
        warnings=[f"{name} was disturbed."],
        picture=drawn("picture", name),
        source="`results.json`",
        sections=[
            Section(
                "Times",
                [
                    Text(f"facts of {name}", "facts"),
                    Table(COLUMNS, rows(name), caption=f"By {name}", leading=True),
                    Points([name, Verdict("PASS", name, "good", "✓")]),
                    Part("More", [task]),
                    Part("Apart", [Text(name), Text(name, "code")], folded=False),
                    Beside([drawn(text=name), Table([("a", "")], [Row("b", [Entry("3")])])]),
                ],
            ),
            Section(
                "Machine",
                [facts],
                folded=True,
            ),
            Section("How to read it", [Notes([(name, name)])], folded=True),
            Section("Viewer", [Widget("<p id='w'>-</p>", "document.getElementById('w').textContent = 'it ran';")]),
        ],
    )


def text_of(page: str) -> str:
    """The visible text of a page."""
    page = re.sub(r"<(style|script)>.*?</\1>|<wbr>", "", page, flags=re.DOTALL)
    return " ".join(entities.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def printed(shown: Document, width: int = 80) -> str:
    file = io.StringIO()
    terminal.show(shown, Terminal(file=file, width=width))
    return file.getvalue()


def test_every_renderer_shows_what_was_found(tmp_path: Path) -> None:
    page = html_page.write(tmp_path, "report", made())
    assert page == tmp_path / "report.html"
    shown = text_of(page.read_text()), (tmp_path / "report.md").read_text(), printed(made())
    for text in (text.replace("\\", "") for text in shown):
        for words in (
            "Demonstration of ar",
            "ar is the fastest.",
            "mtbench serve ar",
            "×2.00",
            "[1.90, 2.10]",
            "50.1",
            "failed",
            "FAIL",
        ):
            assert words in text
        assert "ar was disturbed." in text
        assert "It is void." in text
    for text in shown[:2]:
        for words in ("faster", "How to read it", "wall time of the baseline", "ar: 1, 2.")[
            : 4 if text == shown[0] else 2
        ]:
            assert words in text
    assert {file.name for file in (tmp_path / "figures").iterdir()} >= {"picture.svg", "line.png"}
    assert "](figures/line.svg)" in shown[1]
    assert "How to read it" not in shown[2]
    assert printed(made()).rstrip().endswith("✗ FAIL: Which arm is fastest on ar?")


def test_a_page_without_a_decision_looks_different() -> None:
    """Its first sentence has a frame of its own."""
    assert '<p class="lead bad">' in html_page.html(made())
    assert '<p class="lead bad open">' in html_page.html(replace(made(), open=True))


def test_the_page_is_one_file_that_loads_nothing() -> None:
    page = html_page.html(made())
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-" in page
    assert not re.search(r"https?://|@import|\bsrc=", page)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'aria-labelledby="([^"]+)"', page)) <= set(ids)
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert page == html_page.html(made())


def test_the_page_is_accessible() -> None:
    """It has a language, headings in order, scopes on table heads, and words for every figure."""
    page = html_page.html(made())
    assert '<html lang="en">' in page
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all("scope=" in head for head in re.findall(r"<th\b[^>]*>", page))
    assert all("aria-" in drawing for drawing in re.findall(r"<svg[^>]*>", page))


def test_no_text_is_markup(tmp_path: Path) -> None:
    """Whatever a name holds, it is shown as text everywhere, and controls no terminal."""
    nasty = "<script>x()</script><b>&$y$ *a* [b](c) |"
    page = html_page.html(made(nasty))
    assert page.count("<script") == 2  # the page's own, and the widget's
    assert text_of(page).count(nasty) > 12
    lines = [line for line in markdown_text.markdown(made(nasty)).splitlines() if not line.startswith("    ")]
    assert "<script" not in "".join(lines)  # in a block of code it is text
    assert "[b](c)" not in "".join(lines)
    assert "<b>" not in latex_table.latex(Table(COLUMNS, rows(nasty)), "x", [])
    assert not set("\x1b\x00\u202e") & set(printed(made(HOSTILE)))


def test_a_narrow_terminal_keeps_the_first_interval_then_drops_columns() -> None:
    """The table fits, the first of `brief` stays, and every name is whole."""
    entries = [Entry("10.0 s", "[9.0, 11.0]"), Entry("1,000", "[900, 1,100]", Verdict.of("faster")), Entry("3 J")]
    columns = [(heading, "") for heading in ("time", "rate", "energy")]
    wide = Table(columns, [Row(f"mars:tau={n}", entries) for n in (1, 2)], brief=("rate", "time", "energy"))
    shown = Document("t", "l", sections=[Section("s", [wide])])
    assert all(text in printed(shown, 100) for text in ("10.0 s [9.0, 11.0]", "1,000 [900, 1,100] ▲", "▲ faster"))
    narrow, least = printed(shown, 56), printed(shown, 44)
    assert "[9.0" not in narrow
    assert ("3 J" in narrow, "3 J" in least) == (True, False)
    for text, width in ((narrow, 56), (least, 44)):
        assert "1,000 [900, 1,100] ▲" in text
        assert "mars:tau=2" in text
        assert max(map(len, text.splitlines())) <= width


@BROWSER
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """No error and no request; no page is wider than the window; links and the printer unfold what they ask for."""
    url = html_page.write(tmp_path, "report", made("x" * 120)).resolve().as_uri()
    with opened(url) as (tab, wrong):
        assert tab.locator("#w").inner_text() == "it ran"
        assert not tab.locator("#how-to-read-it dl").is_visible()
        tab.locator("nav a[href='#how-to-read-it']").click()
        tab.locator("#how-to-read-it dl").wait_for(state="visible", timeout=5000)
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert tab.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        for width in (1280, 400):  # tables scroll, the page does not
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert wrong == []
