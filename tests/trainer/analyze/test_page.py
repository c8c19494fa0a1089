"""The page of completions, before any script runs: what it holds, what it loads, and texts that want to be obeyed."""

import re

import pytest

from tests.support.pages import HOSTILE, Page, completion, hostile, write_lines
from trainer.analyze.analysis import write_analysis
from trainer.analyze.page import page_of
from trainer.analyze.samples import Sample, read_samples

pytestmark = pytest.mark.slow


def test_the_page_holds_every_estimator_with_its_numbers_spans_and_facts(tmp_path) -> None:
    more = {"estimators": {"entropy": {"importances": [0, 1, 2, 3, 4, 5, 6, 7, 8.5, None]}}}
    spans = [{"start": 0, "end": 2, "drop": 0.5, "text": "St"}, {"start": 4, "end": 7, "drop": -4.25, "text": "other"}]
    file = write_lines(tmp_path / "one.jsonl", [completion(3, 1.0, spans=spans, drops=None, **more)])
    page = page_of(read_samples(file), "Example")
    (shown,) = Page(page).data["completions"]
    assert shown == {
        "run": None, "step": 3, "reward": 1.0, "facts": "step 3 · problem 7 · reward 1 · advantage +0.5 · correct",
        "tokens": list("Step1=2+3."), "answer": [9, 10], "unit": "nats", "spans": [[0, 2, 0.5], [4, 7, -4.25, "other"]],
        "credit": [
            ["masking", "weights", "weights, ESS ratio 0.684, top 10 % mass 0.200", [1, 1, 1, 1, 4, 4, 4, 2, 0.5, 1.5]],
            ["entropy", "importances", "importances, top 10 % mass 0.233", [0, 1, 2, 3, 4, 5, 6, 7, 8.5, None]],
        ],
    }  # fmt: skip
    assert Page(page).data["bounds"] == [0.5, 4.0]
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_the_page_loads_nothing() -> None:
    page = page_of([Sample(1, ["a"])], "Example")
    read = Page(page)
    assert not any({"src", "href", "action", "srcset"} & set(attributes) for _, attributes in read.elements)
    assert not re.search(r"https?:|@import|url\(", page)
    (policy,) = [attributes["content"] for _, attributes in read.elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'")


def test_hostile_text_is_held_as_text(tmp_path) -> None:
    samples = hostile(tmp_path)
    page = page_of(samples, "</title><script>")
    read, plain = Page(page), Page(page_of([Sample(1, ["a"])], ""))
    assert [(tag, sorted(attributes)) for tag, attributes in read.elements] == [
        (tag, sorted(attributes)) for tag, attributes in plain.elements
    ]
    (shown,) = read.data["completions"]
    assert shown["tokens"][:4] == HOSTILE[:4]
    assert shown["tokens"][4:7] == [
        "👩[U+200D]👩 é", "[U+202E]evil[U+2066]", "a[U+061C][U+200B][U+FEFF][U+E0041]b",
    ]  # fmt: skip
    assert shown["tokens"][7] == HOSTILE[7]
    assert shown["tokens"][8:10] == ["\u2400", "\u241b[31m\u2424\u240d"]
    assert not set(page) & set("\x00\x1b\x85\r\u202e\u2066\ud800")
    page.encode()

    places = range(len(HOSTILE))
    entry = {"tokens": HOSTILE, "spans": [[i, i + 1] for i in places], "drops": [float(i) for i in places]}
    file = write_lines(tmp_path / "tables.jsonl", [entry])
    report = (write_analysis(file, tmp_path / "out") / "analysis.md").read_text("utf-8")
    assert "<" not in report
    tables = [line for line in report.split("\n") if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5, 6, 7) for line in tables)
