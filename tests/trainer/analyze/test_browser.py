"""Pages as Chromium shows them: tokens, hover, keys, search, curves, ten megabytes, texts that want to be obeyed."""

import json

import pytest

from tests.support.browser import chromium, hover, open_page, press, unfold
from tests.support.pages import HOSTILE, completion, hostile, write_lines, write_run
from trainer.analyze.page import page_of
from trainer.analyze.run_page import write_run_page
from trainer.analyze.samples import read_samples

pytestmark = pytest.mark.slow

TOKENS = ".tokens > span"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def show(browser, tmp_path):
    """Open a page of completions."""

    def opened(*entries: object) -> None:
        file = tmp_path / "page.html"
        file.write_text(page_of(read_samples(write_lines(tmp_path / "shown.jsonl", entries)), "Example"), "utf-8")
        open_page(browser, file)

    return opened


def texts(browser, selector: str, read: str = "textContent") -> list[str]:
    return browser.execute_script(
        f"return [...document.querySelectorAll(arguments[0])].map(found => found.{read})", selector
    )


def test_tokens_are_shaded_by_weight_and_the_drop_of_their_span_shows_on_hover_and_with_the_keys(browser, show) -> None:
    from selenium.webdriver import Keys

    show(completion(1, 1.0), completion(2, 0.0))
    assert texts(browser, "#c0 ~ .row figure:first-child .tokens > span") == list("Step1=2+3.")
    assert texts(browser, TOKENS, "title")[:5] == ["1", "1", "1", "1", "4"]
    shades = [""] * 4 + ["w8"] * 3 + ["w3", "c8", "w1 answer"]
    assert texts(browser, TOKENS, "className")[:10] == shades
    assert texts(browser, "#c0 ~ .row figure:last-child .tokens > span", "title") == (
        ["-0.5"] * 2 + ["none"] * 2 + ["4.25"] * 3 + ["none"] * 3
    )
    resting = browser.find_element("id", "reading").text
    said = hover(browser, TOKENS, 5).replace("\u2068", "").replace("\u2069", "")
    assert said == "Token 5 “=”: masking 4 · importance of the span 4.25 · drop of the span “1=2” -4.25 (nats)"
    assert texts(browser, ".here") == ["=", "="]

    block = ".tokens"
    assert press(browser, block, Keys.HOME).startswith("Token 0 ")
    assert "drop of the span “\u2068St\u2069” 0.5 (nats)" in press(browser, block, Keys.ARROW_RIGHT)
    assert "drop" not in press(browser, block, Keys.END)
    assert press(browser, block, Keys.ESCAPE) == resting
    assert not texts(browser, ".here")

    unfold(browser, "summary", "details td")
    assert texts(browser, "details[open] td") == ["0–1", "+0.500", "St", "4–6", "-4.250", "1=2"]
    assert not browser.get_log("browser")


def test_completions_are_found_by_step_and_reward_and_turned_ten_at_a_time(browser, show) -> None:
    show(*(completion(step, step / 8) for step in range(24)), {"tokens": ["neither"]})

    def listed(**fields: str) -> list[int]:
        for name, text in fields.items():
            field = browser.find_element("name", name.replace("_", "-"))
            field.clear()
            field.send_keys(text)
        return [int(name.split()[1]) - 1 for name in texts(browser, "#list h3")]

    place = lambda: browser.find_element("id", "place").text  # noqa: E731
    assert (listed(), place()) == ([*range(10)], "1 to 10 of 25")
    browser.find_element("id", "next").click()
    browser.find_element("id", "next").click()
    assert (listed(), place()) == ([*range(20, 25)], "21 to 25 of 25")
    assert not browser.find_element("id", "next").is_enabled()
    browser.find_element("id", "back").click()
    assert listed() == [*range(10, 20)]
    assert (listed(step_from="3", step_to="6"), place()) == ([3, 4, 5, 6], "1 to 4 of 4")
    assert listed(reward_from="0.5") == [4, 5, 6]
    assert listed(reward_to="0.625") == [4, 5]
    assert (listed(step_to="3"), place()) == ([], "none matches")
    assert not browser.get_log("browser")


def test_runs_are_drawn_over_each_other_and_the_numbers_read_off_are_those_of_their_metrics(browser, tmp_path) -> None:
    from selenium.webdriver import Keys

    folders = [write_run(tmp_path / f"seed{seed}", seed, completions=[completion(1, seed)]) for seed in (0, 1)]
    write_run_page(tmp_path / "page.html", folders, "Two seeds")
    open_page(browser, tmp_path / "page.html")
    entries = [[json.loads(line) for line in (folder / "metrics.jsonl").open()] for folder in folders]
    accuracy, reward, entropy, *stages = range(5)
    titles = texts(browser, "#curves strong")
    assert titles == ["Held-out accuracy, greedy", "Mean reward of sampled completions", "Entropy (nats per token)",
                      "Seconds per step, seed0", "Seconds per step, seed1"]  # fmt: skip
    curve = "#curves svg"
    for step, key in ((4, Keys.END), (3, Keys.ARROW_LEFT), (1, Keys.HOME)):
        wanted = " · ".join(f"seed{k} {entries[k][step]['reward']!r}" for k in (0, 1))
        assert press(browser, curve, key, index=reward) == f"{titles[reward]}, step {step}: {wanted}"
        for k, index in enumerate(stages):
            parts = {name[5:]: value for name, value in entries[k][step].items() if name.startswith("time/")}
            said = press(browser, curve, key, index=index).removeprefix(f"{titles[index]}, step {step}: ")
            assert {name: float(value) for name, value in map(str.split, said.split(" · "))} == parts
    said = press(browser, curve, Keys.END, index=accuracy)
    assert said == "Held-out accuracy, greedy, step 4: seed0 0.5 ± 0.05 · seed1 0.6 ± 0.05"
    assert hover(browser, curve, reward).startswith(f"{titles[reward]}, step ")
    assert len(texts(browser, f"figure:nth-child({entropy + 1}) .line.faint", "outerHTML")) == 2
    assert len(texts(browser, f"figure:nth-child({entropy + 1}) .line:not(.faint)", "outerHTML")) == 1  # of one group

    assert not texts(browser, "#more svg", "outerHTML")
    unfold(browser, "#more summary", "#more svg")
    assert texts(browser, "#more strong") == ["num_tokens", "step_time", *sorted(f"time/{name}" for name in parts)]

    press(browser, "select", "seed1")
    assert texts(browser, "#list article > p") == ["seed1 · step 1 · problem 7 · reward 1 · advantage +0.5 · correct"]
    assert not browser.get_log("browser")


def test_nothing_that_a_model_or_a_file_says_is_obeyed(browser, tmp_path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(hostile(tmp_path), "</title><script>document.body.remove()</script>"), "utf-8")
    open_page(browser, file)
    shown = texts(browser, "figure:first-child .tokens > span")
    assert shown[:4] == HOSTILE[:4]
    assert shown[10:] == ["↵\n→\t", "\ufffd", "∅", *HOSTILE[13:]]
    assert len(texts(browser, "script", "type")) == 2
    assert not texts(browser, "img, i i, [onclick], [onerror]")
    hover(browser, TOKENS)
    unfold(browser, "summary", "details td")
    assert texts(browser, "details td:last-child") == ["</details><script>"]
    assert not browser.get_log("browser")
