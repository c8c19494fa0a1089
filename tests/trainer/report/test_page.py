"""The page before any script runs: what it holds, what it loads, and texts that want to be obeyed."""

import re

import pytest

from tests.support.pages import HOSTILE, Page, completion, hostile, write_lines, write_run
from trainer.report import page as pages
from trainer.report.page import page_of
from trainer.report.runs import read_samples, sample_of

pytestmark = pytest.mark.slow


def test_the_page_holds_every_estimator_with_its_numbers_spans_and_facts_and_equal_completions_once(tmp_path) -> None:
    entropy = {"importances": [0, 1, 2, 3, 4, 5, 6, 7, 8.5, None]}
    entry = completion(3, 1.0, estimators={"entropy": entropy}, question="2+3?", reference="5")
    file = write_lines(tmp_path / "two.jsonl", [entry, completion(4, 0.0), entry])
    shown, other = Page(page_of(read_samples(file), "Example")).data["completions"]
    assert shown == {
        "step": 3, "problem": 7, "question": "2+3?", "reference": "5", "reward": 1.0, "correct": True,
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


def page_of_run(folder) -> Page:
    pages.write_run_page(folder / "page.html", folder, "")
    return Page((folder / "page.html").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "half"), [("metrics.jsonl", '{"step": 5, "rew'), ("completions.jsonl", '{"step": 5, "é')]
)
def test_a_last_line_that_a_killed_run_left_half_written_is_left_out(tmp_path, name, half) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(1, 1.0)])
    whole = page_of_run(folder).data
    (folder / name).write_bytes((folder / name).read_bytes() + half.encode()[: -1 if half[-1] == "é" else None])
    assert page_of_run(folder).data == whole


def test_a_page_that_cannot_hold_all_completions_holds_some_of_each_part_and_says_so(tmp_path, monkeypatch) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(step, 1.0) for step in range(10)])
    for most, steps, notes in ((10, range(10), 0), (9, range(0, 10, 2), 1), (2, (0, 5), 1)):
        monkeypatch.setattr(pages, "_MOST", most)
        data = page_of_run(folder).data
        assert [shown["step"] for shown in data["completions"]] == list(steps)
        assert data["notes"].count("One in ") == notes


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("metrics.jsonl", [], r"metrics\.jsonl: each line of a run must hold a step"),
        ("metrics.jsonl", ['{"step": 1}', '{"step"', '{"step": 2}'], r"metrics\.jsonl, line 2: is not JSON"),
        ("config.yaml", ["- 1"], r"config\.yaml: must hold settings as"),
        ("completions.jsonl", [{}], "line 1: is not a completion with its credit .*'tokens'"),
        ("completions.jsonl", [{"tokens": ["a"], "weights": [1, 2]}], "weights has 2 numbers for 1 tokens"),
        ("completions.jsonl", [{"tokens": ["a"], "spans": [{"start": 0, "end": 2}]}], "span 0 to 2 of 1 tokens"),
        ("completions.jsonl", [{"tokens": ["a"], "correct": "yes"}], "correct is 'yes' and drops_unit 'nats', not"),
        ("completions.jsonl", [{"tokens": ["a"], "drops_unit": 3}], "correct is None and drops_unit 3, not true"),
        ("completions.jsonl", [{"tokens": ["a"], "reward": float("nan")}], "Out of range float values"),
    ],
)
def test_a_folder_that_is_not_a_run_is_named_with_its_line_and_has_no_page(tmp_path, file, lines, message) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(1, 1.0)])
    write_lines(folder / file, lines)
    with pytest.raises(ValueError, match=message):
        page_of_run(folder)
    assert not (folder / "page.html").exists()
