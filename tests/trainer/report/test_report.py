"""Reports of a run: its page after each evaluation and at its end, and logging back-ends."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.embedded import EVERY_OTHER, metrics_of, run, samples_of
from tests.support.pages import Page
from trainer.data import load_rows
from trainer.report.page import write_run_page
from trainer.report.report import open_tracker, write_whole


@pytest.mark.slow
def test_a_run_leaves_a_page_of_its_metrics_and_its_completions(tmp_path, monkeypatch) -> None:
    there = []

    def written(path: Path, text: str) -> None:
        there.append((path.name, (path.parent / "report.html").exists()))
        write_whole(path, text)

    monkeypatch.setattr("trainer.report.report.write_whole", written)
    pages: list[Path] = []
    monkeypatch.setattr(
        "trainer.report.report.write_run_page", lambda *page: pages.append(page[0]) or write_run_page(*page)
    )
    options = ("--max_steps=1", "--page_steps=1", "--eval_problems=1", "--log_completions=5", EVERY_OTHER)
    folder = run(tmp_path / "run", *options)
    assert pages == [folder / "report.html"] * 4  # after evaluations, the step, at the end
    # Killed after its summary a run counts as finished, so all else must be there by then.
    assert there == [("summary.json", True)]
    data = Page((folder / "report.html").read_text("utf-8")).data
    shown = data["run"]
    for entry in metrics_of(folder):
        at = shown["steps"].index(entry.pop("step"))
        assert {name: shown["metrics"][name][at] for name in entry} == entry
    samples, shown = samples_of(folder), data["completions"]
    assert sum(one["times"] for one in shown) == len(samples)
    assert shown[0]["tokens"] == samples[0]["tokens"]
    assert shown[0]["credit"]["masking"]["values"] == samples[0]["weights"]
    assert samples[0]["question"] in {row["question"] for row in load_rows("generated", split="train", count=16)}
    assert not list(folder.glob(".*.partial"))


# Logging back-ends of a run that goes on: the same run there, from the step of the checkpoint on


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("wandb", None, {"id": "a1", "resume": "never"}),
        ("wandb", 4, {"id": "a1", "resume": "allow"}),
        ("trackio", 4, {"resume": "allow"}),
    ],
)
def test_a_run_that_goes_on_is_the_same_run_for_the_back_end(monkeypatch, tmp_path, name, step, expected) -> None:
    begun = []
    library = SimpleNamespace(init=lambda **options: begun.append(options), log=None, finish=None)
    monkeypatch.setitem(sys.modules, name, library)
    open_tracker(name, tmp_path, {}, "a1", step)
    (options,) = begun
    assert {key: options[key] for key in ("id", "resume") if key in options} == expected


def test_a_back_end_that_fails_ends_no_run(monkeypatch, tmp_path, capsys) -> None:
    steps = []

    def log(metrics, step):
        steps.append(step)
        if step == 1:
            raise ConnectionError("no answer")

    def finish():
        raise TimeoutError("still no answer")

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: None, log=log, finish=finish))
    folder = run(tmp_path / "run", "--report_to", "trackio", "--max_completion_length=12", "--eval_problems=2")
    assert [entry["step"] for entry in metrics_of(folder)] == [0, 1, 2, 2]
    assert steps == [0, 1]
    said = capsys.readouterr().out
    # A file gets a line for what begins and for each step, and nothing that overwrites a line.
    begun = ["checking the model's", "held-out problems ...", "sampling 16 completions ...", "reward 0."]
    places = [said.find(words) for words in begun]
    assert -1 < places[0] < places[1] < places[2] < places[3]
    assert len(re.findall(r"^  step    \d   reward ", said, re.MULTILINE)) == 2
    assert not re.search(r"[\r\x1b]", said)
    assert "report_to: trackio failed and gets no more: ConnectionError: no answer" in said
    assert "report_to: trackio failed and gets no more: TimeoutError: still no answer" in said


@pytest.mark.slow
def test_a_step_without_credit_that_teaches_nothing_says_why_and_names_no_credit(tmp_path, capsys):
    sizes = ("--max_steps=2", "--eval_problems=4", "--num_generations=4", "--generation_batch_size=8", "--credit=none")
    folder = run(tmp_path / "run", *sizes, "--max_completion_length=4")
    printed = capsys.readouterr().out
    assert printed.count("all 8 completions were cut off at the length limit") == 1
    assert printed.count("warning: step 1: 100% of the completions were cut off at --max_completion_length 4") == 1
    assert "4 problems: gains above 49 points)" in printed
    assert "(0 of 4, 95 % interval" in printed
    lines = [line for line in printed.splitlines() if "mixed groups" in line]
    assert len(lines) == 2
    for line in lines:
        assert re.search(
            r"cut off 100%   \d\.\d s: sampling \d\.\d, update \d\.\d   [\d,]+ tokens/s   all truncated", line
        )
    named = {name for entry in [*metrics_of(folder), *samples_of(folder)] for name in entry}
    assert not {name for name in named if "credit" in name} | named & {"spans", "weights", "drops_unit", "answer"}
