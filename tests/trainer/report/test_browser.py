"""Pages as Chromium shows them: tokens, hover, keys, order, curves, texts that want to be obeyed."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import HOSTILE, completion, hostile, write_lines, write_run
from trainer.report.page import page_of, write_run_page
from trainer.report.runs import read_samples

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
wait = pytest.importorskip("selenium.webdriver.support.wait")
pytestmark = pytest.mark.slow

TOKENS = ".tokens > span"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium or chromedriver is not on PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,1600"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


def open_page(browser: Any, path: Path) -> None:
    browser.get_log("browser")  # drops earlier messages
    browser.get(path.resolve().as_uri())


def hover(browser: Any, selector: str, index: int = 0) -> str:
    """Move the mouse onto an element; returns the line that then shows at the page's foot."""
    element = browser.find_elements("css selector", selector)[index]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    before = browser.find_element("id", "reading").text
    webdriver.ActionChains(browser).move_to_element(element).perform()
    return soon(browser, lambda: (text := browser.find_element("id", "reading").text) != before and text)


def soon(browser: Any, look: Callable[[], Any]) -> Any:
    # A browser tells a page of some events only when it has time.
    return wait.WebDriverWait(browser, 60).until(lambda _: look())


def press(browser: Any, selector: str, *keys: str, index: int = 0) -> str:
    """Press keys in an element; returns the line that then shows at the page's foot."""
    browser.find_elements("css selector", selector)[index].send_keys(*keys)
    return browser.find_element("id", "reading").text


@pytest.fixture
def show(browser, tmp_path):
    def opened(*entries: object) -> None:
        file = tmp_path / "page.html"
        file.write_text(page_of(read_samples(write_lines(tmp_path / "shown.jsonl", entries)), "Example"), "utf-8")
        open_page(browser, file)

    return opened


def texts(browser, selector: str, read: str = "textContent") -> list[str]:
    return browser.execute_script(
        f"return [...document.querySelectorAll(arguments[0])].map(element => element.{read})", selector
    )


def test_tokens_are_shaded_by_weight_and_their_numbers_show_on_hover_and_with_the_keys(browser, show) -> None:
    show(completion(1, 1.0, question="2+3?", reference="5"), completion(2, 0.0))
    assert texts(browser, "#list summary") == [
        "step 2 · problem 7 · reward 0 · wrong · advantage -0.5",
        "step 1 · problem 7 · reward 1 · correct · advantage 0.5",
    ]
    assert texts(browser, "aside") == ["2+3?Right answer: 5"]
    assert texts(browser, TOKENS) == list("Step1=2+3.") * 2  # one panel each
    shades = [style.removeprefix("background: ") for style in texts(browser, TOKENS, "getAttribute('style')")[:10]]
    most, more, less, neutral = "warm) / 0.620", "warm) / 0.207", "cool) / 0.620", "transparent"
    expected = [*[neutral] * 4, *[most] * 3, more, less, "warm) / 0.103"]
    assert [shade.removeprefix("rgb(var(--").removesuffix(")") for shade in shades] == expected
    assert texts(browser, TOKENS, "className")[:10] == [""] * 9 + ["answer"]
    assert not browser.find_element("id", "reading").is_displayed()
    assert hover(browser, TOKENS, 5) == "Token 5 “=”: masking 4 · importance of “1=2” 4.25 (nats)"
    assert texts(browser, ".here") == ["="]

    block = ".tokens"
    assert press(browser, block, webdriver.Keys.HOME).startswith("Token 0 ")
    assert "importance of “St” -0.5 (nats)" in press(browser, block, webdriver.Keys.ARROW_RIGHT)
    assert "importance" not in press(browser, block, webdriver.Keys.END)
    assert press(browser, block, webdriver.Keys.ESCAPE) == ""
    assert not texts(browser, ".here")
    assert not browser.get_log("browser")


def test_a_run_is_drawn_and_the_numbers_read_off_are_those_of_its_metrics(browser, tmp_path) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(1, 1.0)], model="org/small", dataset="sums.jsonl")
    write_run_page(tmp_path / "page.html", folder, "A run")
    open_page(browser, tmp_path / "page.html")
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert browser.find_element("tag name", "h1").text == "A run: small on sums.jsonl"
    top = [browser.find_element("id", part).location["y"] for part in ("figures", "curves", "search")]
    assert top == sorted(top)  # the figures come first
    assert texts(browser, "#figures tr:nth-child(3) > *") == ["held-out accuracy, %", "50 (45-55)"]
    assert texts(browser, "#curves strong") == ["Held-out accuracy", "Reward", "Time", "Time of credit"]
    assert "Entropy (nats per token): 0.333 at each step." in browser.find_element("id", "notes").text
    curve = "#curves svg"
    titles = {1: ("Reward (mean over completions)", "reward"), 2: ("Time (seconds per step)", "step_time")}
    for step, key in ((4, webdriver.Keys.END), (3, webdriver.Keys.ARROW_LEFT), (1, webdriver.Keys.HOME)):
        for index, (title, metric) in titles.items():
            wanted = f"{title}, step {step}: {entries[step][metric]:.3g}"
            assert press(browser, curve, key, index=index) == wanted
    assert press(browser, curve, webdriver.Keys.END) == "Held-out accuracy (%, greedy), step 4: 50.0 (45.0-55.0)"
    assert hover(browser, curve, 1).startswith("Reward (mean over completions), step ")
    lines = [f"figure:nth-child(2) path{kind}" for kind in (".faint", ":not([class])")]
    assert [len(texts(browser, selector)) for selector in lines] == [1, 1]

    assert not texts(browser, "#more svg")
    browser.find_element("css selector", "#more summary").click()
    soon(browser, lambda: texts(browser, "#more svg"))
    assert texts(browser, "#more strong") == ["num_tokens"]
    assert "seed: 0" in texts(browser, "pre")[0]
    assert texts(browser, "#list summary") == ["step 1 · problem 7 · reward 1 · correct · advantage 0.5"]
    assert not browser.get_log("browser")


def test_nothing_that_a_model_or_a_file_says_is_obeyed(browser, tmp_path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(hostile(tmp_path), "</title><script>document.body.remove()</script>"), "utf-8")
    open_page(browser, file)
    shown = texts(browser, "figure:first-child .tokens > span")
    assert shown[:4] == HOSTILE[:4]
    assert shown[4:7] == ["👩[U+200D]👩 é", "[U+202E]evil[U+2066]", "a[U+061C][U+200B][U+FEFF][U+E0041]b"]
    assert shown[7:11] == [HOSTILE[7], "[U+0000]", "[U+001B][31m[U+0085][U+000D]", "↵\n→\t"]
    assert shown[11:] == ["[U+D800]", "∅", *HOSTILE[13:]]
    assert len(texts(browser, "script", "type")) == 2
    assert not texts(browser, "img, b, [onclick], [onerror]")
    assert "importance of “</details><script>”" in hover(browser, TOKENS)
    assert not browser.get_log("browser")
