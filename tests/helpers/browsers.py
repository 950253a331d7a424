"""A page in a headless browser, and what went wrong in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def BROWSER(test: Any) -> Any:
    """Mark a test that needs a browser."""
    return pytest.mark.whole(pytest.mark.skipif(PATH is None, reason="no browser is on the path")(test))


@contextmanager
def opened(url: str, width: int = 1280, **context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the tab that shows a page, and the list of its errors, messages and requests, which is filled meanwhile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    wrong: list[str] = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=PATH, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, **context)
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request",
            lambda asked: wrong.append(asked.url) if asked.url.partition("#")[0] not in (url, "data:,") else None,
        )
        tab.goto(url)
        yield tab, wrong
        browser.close()
