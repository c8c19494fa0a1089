"""Headless Chromium, where it and selenium are installed: pages as a person sees them."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1600")


@contextlib.contextmanager
def chromium() -> Iterator["Any"]:
    """Start a browser; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium or chromedriver is not on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


def open_page(browser: Any, path: Path) -> None:
    """Load a file; earlier messages of the browser are dropped."""
    browser.get_log("browser")
    browser.get(path.resolve().as_uri())


def hover(browser: Any, selector: str, index: int = 0) -> str:
    """Move the mouse onto an element; returns the line that then shows at the page's foot."""
    from selenium.webdriver import ActionChains

    element = browser.find_elements("css selector", selector)[index]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    before = browser.find_element("id", "reading").text
    ActionChains(browser).move_to_element(element).perform()
    return _soon(browser, lambda: (text := browser.find_element("id", "reading").text) != before and text)


def unfold(browser: Any, selector: str, inside: str) -> None:
    """Click on a summary, and wait for its content."""
    browser.find_element("css selector", selector).click()
    _soon(browser, lambda: browser.find_elements("css selector", inside))


def _soon(browser: Any, look: Callable[[], Any]) -> Any:
    # A browser tells a page of some events only when it has time.
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 60).until(lambda _: look())


def press(browser: Any, selector: str, *keys: str, index: int = 0) -> str:
    """Press keys in an element; returns the line that then shows at the page's foot."""
    browser.find_elements("css selector", selector)[index].send_keys(*keys)
    return browser.find_element("id", "reading").text
