"""Runs side by side: the table's numbers, the page's data, and one line for what is not a run."""

import json
import math
import re

import pytest

from tests.support.pages import Page, completion, write_lines, write_run
from trainer.analyze import run_page
from trainer.analyze.runs import Figures, comparison, differences, groups_of, read_runs
from trainer.compare import main

pytestmark = pytest.mark.slow


def test_the_table_holds_what_the_metrics_say_and_the_mean_of_runs_that_differ_in_their_seeds_only(tmp_path, capsys):
    folders = [write_run(tmp_path / f"cf-{seed}", seed, steps=20, credit="counterfactual") for seed in (0, 1)]
    folders.append(write_run(tmp_path / "plain", steps=10, credit="uniform"))
    runs = read_runs(folders)
    assert groups_of(runs) == [0, 0, 1]
    assert differences(runs) == [
        "credit counterfactual, seed 0", "credit counterfactual, seed 1", "credit uniform, seed 0",
    ]  # fmt: skip
    figures = Figures.of(runs[1])
    assert (figures.steps, figures.accuracy_before, figures.accuracy, figures.accuracy_error) == (20, 0.25, 0.6, 0.05)
    assert figures.reward == pytest.approx((1.9 + 2.0) / 2 + 0.01)  # of two steps, the last tenth
    assert figures.stages == pytest.approx({"generate": 2, "credit": 1.05, "update": 0.7, "other": 0.01})
    assert sum(figures.stages.values()) == pytest.approx(figures.step_time)
    assert figures.tokens == 2000
    mean = Figures.mean([Figures.of(run) for run in runs[:2]])
    assert mean.accuracy_error == pytest.approx(math.sqrt(0.005) / math.sqrt(2))  # over the two seeds
    assert (mean.accuracy, mean.stages["generate"]) == pytest.approx((0.55, 1.5))

    page = tmp_path / "all.html"
    assert main([*map(str, folders), "--out", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns, rows = comparison(runs)
    assert lines[-1] == str(page)
    assert [re.split(r" {2,}", line.strip()) for line in lines[:-1]] == [columns, *rows]
    assert rows[1] == [
        "cf-1", "credit counterfactual, seed 1", "20", "25.0%", "60.0% ± 5.0%", "1.960", "3.76", "2", "1.05", "0.7",
        "0.01", "2,000",
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["cf-0", "cf-1", "plain", "mean of 2 seeds"]
    drawn = Page(page.read_text("utf-8")).data["runs"]
    assert [run["group"] for run in drawn] == [0, 0, 1]
    for folder, run in zip(folders, drawn, strict=True):
        for entry in map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines()):
            at = run["steps"].index(entry.pop("step"))
            assert {name: run["metrics"][name][at] for name in entry} == entry


def test_of_a_step_that_was_done_again_the_last_line_counts_and_what_is_not_finite_is_a_gap(tmp_path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [{"step": step, "reward": reward} for step, reward in ((1, 1.0), (2, 2.0), (2, 3.0), (3, 0))]
    write_lines(folder / "metrics.jsonl", [*lines, '{"step": 4, "reward": NaN}'])
    (run,) = read_runs([folder])
    assert (run.steps, run.metrics) == ([1, 2, 3, 4], {"reward": [1.0, 3.0, 0, None]})
    Page("".join(run_page.run_page([run], "")))


def test_settings_may_have_names_and_values_of_any_kind_that_yaml_has(tmp_path, capsys) -> None:
    """Numbers, nothing, dates, lists within mappings; in whatever order, what is equal is a repetition."""
    odd = ["2: two", "null: none", "1.5: [half]", "true: yes", "2026-01-02: day", "nested: {3: [{x: null}], no: 4}"]
    others = [*odd[:-1], "nested: {3: [{x: 0}], no: 4}"]
    folders = [tmp_path / name for name in ("one", "again", "other")]
    for seed, (folder, lines) in enumerate(zip(folders, (odd, odd[::-1], others), strict=True)):
        (write_run(folder) / "config.yaml").write_text("\n".join([*lines, f"seed: {seed}"]))
    runs = read_runs(folders)
    assert groups_of(runs) == [0, 0, 1]
    assert sorted(map(str, runs[0].settings)) == ["1.5", "2", "2026-01-02", "None", "True", "nested", "seed"]
    assert differences(runs)[0] == "nested {3: [{'x': None}], False: 4}, seed 0"
    assert differences(runs)[2] == "nested {3: [{'x': 0}], False: 4}, seed 2"
    assert main([*map(str, folders), "--out", str(tmp_path / "page.html")]) == 0
    assert "mean of 2 seeds" in capsys.readouterr().out


@pytest.mark.parametrize("half", ['{"step": 5, "rew', '{"step": 5, "é', '{"step": 5, "é"'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_a_last_line_that_is_half_written_is_left_out_and_named(tmp_path, capsys, name, half) -> None:
    """As a run leaves it that was killed; a character may be half-written, too."""
    folder, page = write_run(tmp_path / "run", completions=[completion(1, 1.0)]), tmp_path / "page.html"
    assert main([str(folder), "--out", str(page)]) == 0
    whole, table = page.read_text("utf-8"), capsys.readouterr().out
    lines = (folder / name).read_bytes()
    (folder / name).write_bytes(lines + half.encode()[: -1 if half[-1] == "é" else None])
    assert main([str(folder), "--out", str(page)]) == 0
    said = capsys.readouterr()
    number = lines.count(b"\n") + 1
    assert (
        said.err
        == f"note: {folder / name}, line {number}: is half-written, as by a run that was killed, and is left out\n"
    )
    assert (said.out, page.read_text("utf-8")) == (table, whole)


def test_completions_of_which_only_half_a_line_was_written_are_none(tmp_path, capsys) -> None:
    folder, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    (folder / "completions.jsonl").write_text('{"step": 1, "tok')
    assert main([str(folder), "--out", str(page)]) == 0
    assert "completions.jsonl, line 1: is half-written" in capsys.readouterr().err
    assert Page(page.read_text("utf-8")).data["completions"] == []


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path) -> None:
    folders = [write_run(tmp_path / part / "run") for part in "ab"]
    assert [run.name for run in read_runs(folders)] == list(map(str, folders))


def test_of_more_completions_than_a_page_holds_some_of_each_part_are_on_it_and_it_says_so(
    tmp_path, monkeypatch
) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(step, 1.0) for step in range(10)])
    size = (folder / "completions.jsonl").stat().st_size
    for room, steps, notes in ((size, range(10), 0), (size - 1, range(0, 10, 2), 1), (size / 4.5, (0, 5), 1)):
        monkeypatch.setattr(run_page, "_MOST_BYTES", room)
        page = "".join(run_page.run_page(read_runs([folder]), ""))
        assert [shown["step"] for shown in Page(page).data["completions"]] == list(steps)[::-1]
        assert page.count("Of the completions in") == notes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run / "nowhere", "nowhere: there is no such folder"),
        (lambda run: (run / "metrics.jsonl").unlink(), "holds no metrics.jsonl, so it is not the folder of a run"),
        (lambda run: (run / "metrics.jsonl").write_text(""), r"metrics\.jsonl: holds no step"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 2}\n'),
            r"metrics\.jsonl, line 2: is not JSON",
        ),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n'), r"line 2: is not JSON"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"), r"metrics\.jsonl: is not text in UTF-8"),
        (lambda run: write_lines(run / "metrics.jsonl", [{"reward": 1}]), "line 1: must be an object with an integer"),
        (lambda run: write_lines(run / "metrics.jsonl", [[1]]), "line 1: must be an object with an integer step"),
        (
            lambda run: write_lines(run / "metrics.jsonl", [{"step": 1, "reward": "high"}]),
            "line 1: reward must be a number, got 'high'",
        ),
        (lambda run: (run / "config.yaml").write_text("a: [1"), r"config\.yaml: is not YAML"),
        (
            lambda run: write_lines(run / "completions.jsonl", [{"tokens": 1}]),
            r"completions\.jsonl, line 1: tokens must",
        ),
        (lambda run: [run, run], "run: is given twice"),
    ],
)
def test_what_is_not_a_run_is_one_line_and_no_page(tmp_path, capsys, change, message) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(1, 1.0)])
    given = change(folder)
    folders = given if isinstance(given, list) else [given] if given == folder / "nowhere" else [folder]
    assert main([*map(str, folders), "--out", str(tmp_path / "page.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, capsys) -> None:
    assert main([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "nowhere" / "page.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search("error: .*No such file or directory: .*page.html", line)
