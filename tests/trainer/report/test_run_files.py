"""Files of a run that are there to be looked at: the page and completions as parquet."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet as pq

from tests.support.embedded import EVERY_OTHER, metrics_of, run, samples_of, settings
from tests.support.pages import Page
from trainer.evaluate import Evaluation
from trainer.report import Report, parquet, run_report

pytestmark = pytest.mark.slow


def test_a_run_leaves_a_page_of_its_metrics_and_its_completions_as_parquet(tmp_path, monkeypatch) -> None:
    there, write = [], run_report.write_whole

    def written(path: Path, text: str) -> None:
        shown = ("completions.parquet", "curves.png", "report.html")
        there.append((path.name, [name for name in shown if (path.parent / name).exists()]))
        write(path, text)

    monkeypatch.setattr(run_report, "write_whole", written)
    folder = run(tmp_path / "run", "--max_steps=1", "--eval_problems=1", "--log_completions=5", EVERY_OTHER)
    # Killed after its summary a run counts as finished, so all else must be there by then.
    assert there == [("summary.json", ["completions.parquet", "curves.png", "report.html"])]
    data = Page((folder / "report.html").read_text("utf-8")).data
    (shown,) = data["runs"]
    for entry in metrics_of(folder):
        at = shown["steps"].index(entry.pop("step"))
        assert {name: shown["metrics"][name][at] for name in entry} == entry
    samples = samples_of(folder)
    by_step = sorted(samples, key=lambda sample: -sample["step"])
    assert [shown["tokens"] for shown in data["completions"]] == [sample["tokens"] for sample in by_step]
    assert [shown["credit"][0][3] for shown in data["completions"]] == [sample["weights"] for sample in by_step]
    rows = pq.read_table(folder / "completions.parquet").to_pylist()
    assert rows == samples
    assert not list(folder.glob(".*.partial"))


def test_the_page_is_there_after_each_evaluation_and_one_that_cannot_be_written_ends_no_run(tmp_path, capsys) -> None:
    page = tmp_path / "report.html"
    result = Evaluation([True, True, True, False], [""] * 4, 3.0)
    with Report(tmp_path, settings(), None, {}) as report:
        report.evaluated(0, result)
        (first,) = Page(page.read_text("utf-8")).data["runs"]
        assert first["metrics"]["eval_accuracy"] == [0.75]
        assert first["metrics"]["eval_accuracy_stderr"] == [0.25]  # sqrt(3/4 * 1/4 / 3)
        page.unlink()
        page.mkdir()
        report.evaluated(2, result)
    printed = capsys.readouterr().out
    assert printed.count(f"warning: {page} was not written: ") == 2
    assert len(metrics_of(tmp_path)) == 2


def test_rows_of_parquet_are_those_of_the_file_whatever_some_of_them_lack(tmp_path, monkeypatch) -> None:
    rows = [
        {"step": 1, "answer": None, "spans": [], "weights": [1, 2.5], "reward": 1, "text": "2020-01-01"},
        {"step": 1, "answer": None, "spans": [], "weights": [], "reward": 0, "text": "é\u2028 \x00"},
        {"step": 2, "answer": {"start": 1, "end": 2}, "spans": [{"start": 0, "drop": -1.5}], "weights": [1.0],
         "reward": 0.5, "text": "", "estimators": {"tree": {"advantages": [0.5]}}},
        {"step": 3, "answer": None, "spans": [], "weights": [0.1], "reward": 1.0, "correction": {"right": True}},
    ]  # fmt: skip
    source, path = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = dict.fromkeys(name for row in rows for name in row)
    for chunk in (1, 2, 100):  # columns and their types are those of all rows, in whatever pieces they are read
        monkeypatch.setattr(parquet, "_ROWS", chunk)
        parquet.write_parquet(source, path)
        assert pq.read_table(path).to_pylist() == [{name: row.get(name) for name in columns} for row in rows]


@pytest.mark.parametrize("rows", [[{"a": 1}, {"a": "x"}], [{"a": 1}, {"a": [1]}], [{"a": 2**70}], [{"a": {}}]])
def test_values_that_parquet_does_not_hold_are_an_error_that_names_the_file(tmp_path, monkeypatch, rows) -> None:
    monkeypatch.setattr(parquet, "_ROWS", 1)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=f"^{source}: "):
        parquet.write_parquet(source, tmp_path / "rows.parquet")
    assert not (tmp_path / "rows.parquet").exists()


def test_a_run_without_completions_has_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    parquet.write_parquet(tmp_path / "rows.jsonl", tmp_path / "rows.parquet")
    assert not (tmp_path / "rows.parquet").exists()
