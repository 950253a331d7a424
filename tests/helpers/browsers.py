"""A page in a headless browser, and what went wrong in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def BROWSER(test: Any) -> Any:
    """Mark a test that needs a browser."""
    return pytest.mark.whole(pytest.mark.skipif(PATH is None, reason="no browser is on the path")(test))


@cache
def _browser() -> tuple[Any, Any]:
    """The driver and the browser of all pages of a file's tests: starting them takes seconds."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    driver = playwright.sync_playwright().start()
    return driver, driver.chromium.launch(executable_path=PATH, args=["--no-sandbox", "--disable-gpu"])


def end_browser() -> None:
    """End the browser, if one runs. No other event loop can run beside its driver's."""
    if _browser.cache_info().currsize:
        driver, browser = _browser()
        browser.close()
        driver.stop()
        _browser.cache_clear()


@contextmanager
def opened(url: str, width: int = 1280, **context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield the tab that shows a page, and the list of its errors, messages and requests, which is filled meanwhile."""
    _, browser = _browser()
    wrong: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 900}, **context)
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "request",
        lambda asked: wrong.append(asked.url) if asked.url.partition("#")[0] not in (url, "data:,") else None,
    )
    try:
        tab.goto(url)
        yield tab, wrong
    finally:
        tab.close()
