"""The page of completions, before any script runs: what it holds, what it loads, and texts that want to be obeyed."""

import re

import pytest

from tests.support.pages import HOSTILE, Page, completion, hostile, write_lines
from trainer.analyze.analysis import write_analysis
from trainer.report.page import page_of
from trainer.report.runs import read_samples, sample_of

pytestmark = pytest.mark.slow


def test_the_page_holds_every_estimator_with_its_numbers_spans_and_facts_and_equal_completions_once(tmp_path) -> None:
    entropy = {"importances": [0, 1, 2, 3, 4, 5, 6, 7, 8.5, None]}
    entry = completion(3, 1.0, estimators={"entropy": entropy}, question="2+3?", reference="5")
    file = write_lines(tmp_path / "two.jsonl", [entry, completion(4, 0.0), entry])
    shown, other = Page(page_of(read_samples(file), "Example")).data["completions"]
    assert shown == {
        "run": None, "step": 3, "problem": 7, "question": "2+3?", "reference": "5", "reward": 1.0, "correct": True,
        "advantage": 0.5, "truncated": False, "counted": True, "uncredited": None,
        "tokens": list("Step1=2+3."), "answer": [9, 10], "drops_unit": "nats",
        "spans": [{**span, "text": text} for span, text in zip(entry["spans"], ("St", "1=2"), strict=True)],
        "credit": {
            "masking": {"kind": "weights", "values": entry["weights"]},
            "entropy": {"kind": "importances", "values": entropy["importances"]},
        },
        "times": 2,
    }  # fmt: skip
    assert (other["step"], other["times"]) == (4, 1)


def test_the_page_loads_nothing() -> None:
    page = page_of([sample_of({"tokens": ["a"]})], "Example")
    read = Page(page)
    assert not any({"src", "href", "action", "srcset"} & set(attributes) for _, attributes in read.elements)
    assert not re.search(r"https?:|@import|url\(", page.replace("'http://www.w3.org/'", ""))
    (policy,) = [attributes["content"] for _, attributes in read.elements if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'")


def test_hostile_text_is_held_as_text(tmp_path) -> None:
    page = page_of(hostile(tmp_path), "</title><script>")
    read, plain = Page(page), Page(page_of([sample_of({"tokens": ["a"]})], ""))
    assert read.elements == plain.elements
    (shown,) = read.data["completions"]
    assert shown["tokens"] == HOSTILE
    assert not set(page) & set("\x00\x1b\x85\r\u202e\u2066\ud800")

    spans = [{"start": i, "end": i + 1, "drop": float(i)} for i in range(len(HOSTILE))]
    file = write_lines(tmp_path / "tables.jsonl", [{"tokens": HOSTILE, "spans": spans}])
    report = (write_analysis(file, tmp_path / "out") / "analysis.md").read_text("utf-8")
    assert "<" not in report
    tables = [line for line in report.split("\n") if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 5, 7, 9) for line in tables)
