"""Runs side by side: their figures and page, and messages about folders that are not runs."""

import json
import re

import pytest

from tests.support.pages import Page, completion, write_lines, write_run
from trainer.analyze.__main__ import main
from trainer.report import page as pages
from trainer.report.runs import comparison, groups_of, read_runs


def compared(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def page_of_run(folder) -> str:
    pages.write_run_page(folder / "page.html", [folder], "")
    return (folder / "page.html").read_text("utf-8")


@pytest.fixture
def folders(tmp_path):
    """Two seeds of one setting and a run of another."""
    runs = [write_run(tmp_path / f"cf-{seed}", seed, 20, credit="counterfactual") for seed in (0, 1)]
    return [*runs, write_run(tmp_path / "plain", 0, 10, credit="uniform")]


def test_figures_are_those_of_the_runs_files_and_means_are_over_seeds(folders, tmp_path, capsys) -> None:
    runs, page = read_runs(folders), tmp_path / "all.html"
    assert groups_of(runs) == [0, 0, 1]
    figures = runs[1].figures()
    names = ("steps", "accuracy at step 0", "held-out accuracy", "low", "high", "tokens")
    assert [figures[name] for name in names] == pytest.approx([20, 0.25, 0.6, 55, 65, 2000])
    assert figures["reward"] == pytest.approx((1.9 + 2.0) / 2 + 0.01)  # of two steps, the last tenth
    stages = {name: figures[f"seconds, {name}"] for name in ("generate", "credit", "update", "other")}
    assert stages == pytest.approx({"generate": 2, "credit": 1.05, "update": 0.7, "other": 0.01})
    assert sum(stages.values()) == pytest.approx(figures["seconds per step"])

    assert compared(*folders, "--out", page) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    names, rows = comparison(runs)
    assert last == str(page)
    assert rows[1] == [
        "cf-1", "counterfactual", "1", "20", "25.0%", "60.0% (55-65)", "1.960", "2,000", "3.76", "2", "1.05", "0.7",
        "0.01",
    ]  # fmt: skip
    assert rows[3][:3] == ["mean of 2 seeds", "counterfactual", "0, 1"]
    assert rows[3][5] == "55.0% (50-60)"  # of the lowest and the highest seed
    # A line for each setting that differs and each figure, in 80 columns: three runs, then the mean.
    assert max(map(len, lines)) <= 80
    shown = [re.split(r" {2,}", line.strip()) for line in lines if line.strip()]
    blocks = [[name, *cells] for part in (rows[:3], rows[3:]) for name, *cells in zip(names, *part, strict=True)]
    assert shown == blocks
    drawn = Page(page.read_text("utf-8")).data["runs"]
    assert [run["group"] for run in drawn] == [0, 0, 1]
    for folder, run in zip(folders, drawn, strict=True):
        assert run["settings"] == (folder / "config.yaml").read_text("utf-8")  # with version, commit and command on top
        for entry in map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines()):
            at = run["steps"].index(entry.pop("step"))
            assert {name: run["metrics"][name][at] for name in entry} == entry


def test_a_mean_is_also_over_seeds_of_runs_that_log_otherwise_and_shows_both_settings(tmp_path) -> None:
    settings = [{"log_completions": 4}, {"log_completions": 64, "resume": False}]
    folders = [write_run(tmp_path / f"cf-{seed}", seed, 20, **own) for seed, own in enumerate(settings)]
    names, rows = comparison(read_runs(folders))
    mean = dict(zip(names, rows[2], strict=True))
    assert [mean[name] for name in ("run", "log_completions", "seed")] == ["mean of 2 seeds", "4, 64", "0, 1"]


def test_the_last_line_of_a_repeated_step_counts_and_a_number_that_is_not_finite_is_a_gap(tmp_path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [{"step": step, "reward": reward} for step, reward in ((1, 1.0), (2, 2.0), (2, 3.0), (3, 0))]
    write_lines(folder / "metrics.jsonl", [*lines, '{"step": 4, "reward": NaN}'])
    (run,) = Page(page_of_run(folder)).data["runs"]
    assert (run["steps"], run["metrics"]) == ([1, 2, 3, 4], {"reward": [1.0, 3.0, 0, None]})


@pytest.mark.parametrize(
    ("name", "half"), [("metrics.jsonl", '{"step": 5, "rew'), ("completions.jsonl", '{"step": 5, "é')]
)
def test_a_last_line_that_a_killed_run_left_half_written_is_left_out(tmp_path, capsys, name, half) -> None:
    folder, page = write_run(tmp_path / "run", completions=[completion(1, 1.0)]), tmp_path / "page.html"
    assert compared(folder, "--out", page) == 0
    whole, table = page.read_text("utf-8"), capsys.readouterr().out
    (folder / name).write_bytes((folder / name).read_bytes() + half.encode()[: -1 if half[-1] == "é" else None])
    assert compared(folder, "--out", page) == 0
    assert (capsys.readouterr().out, page.read_text("utf-8")) == (table, whole)


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path) -> None:
    folders = [write_run(tmp_path / part / "run") for part in "ab"]
    runs = read_runs(folders)
    assert [run.name for run in runs] == list(map(str, folders))
    mean = comparison(runs)[1][-1]  # of one seed: no spread over seeds
    assert (mean[0], mean[3]) == ("same seed twice", "50.0%")


def test_a_mean_of_equal_accuracies_shows_no_interval_and_long_names_leave_room_for_three_runs(tmp_path, capsys):
    folders = [write_run(tmp_path / f"20261127-08484{i}-embedded-counterfactual-seed{i}", i) for i in range(3)]
    for folder in folders:
        lines = [{"step": 4, "eval_accuracy": 1.0, "eval_accuracy_low": 0.985, "eval_accuracy_high": 1.0}]
        write_lines(folder / "metrics.jsonl", lines)
    assert comparison(read_runs(folders))[1][3][:2] == ["mean of 3 seeds", "0, 1, 2"]
    assert compared(*folders, "--out", tmp_path / "page.html") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    accuracies = [line.split()[2:] for line in lines if line.startswith("held-out accuracy")]
    assert accuracies == [["100.0%", "(98.5-100)"] * 3, ["100.0%"]]


def test_a_page_that_cannot_hold_all_completions_holds_some_of_each_part_and_says_so(tmp_path, monkeypatch) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(step, 1.0) for step in range(10)])
    size = (folder / "completions.jsonl").stat().st_size
    for room, steps, notes in ((size, range(10), 0), (size - 1, range(0, 10, 2), 1), (size / 4.5, (0, 5), 1)):
        monkeypatch.setattr(pages, "_MOST_BYTES", room)
        page = page_of_run(folder)
        assert [shown["step"] for shown in Page(page).data["completions"]] == list(steps)
        assert page.count("One in ") == notes


@pytest.mark.parametrize(
    ("file", "lines", "message"),
    [
        ("metrics.jsonl", [], r"metrics\.jsonl: holds no step"),
        ("metrics.jsonl", ['{"step": 1}', '{"step"', '{"step": 2}'], r"metrics\.jsonl, line 2: is not JSON"),
        ("metrics.jsonl", [{"step": 1, "reward": "high"}], "line 1: must hold a step and numbers .*'high'"),
        ("config.yaml", ["- 1"], r"config\.yaml: must hold settings as"),
        ("completions.jsonl", [{"tokens": 1}], r"completions\.jsonl, line 1: is not a completion"),
    ],
)
def test_a_folder_that_is_not_a_run_is_one_line_and_no_page(tmp_path, capsys, file, lines, message) -> None:
    folder = write_run(tmp_path / "run", completions=[completion(1, 1.0)])
    write_lines(folder / file, lines)
    assert compared(folder, "--out", tmp_path / "page.html") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^error: .*{message}", line)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: holds no metrics.jsonl"),
        (("run", "run"), "run: is given twice"),
        (("run", "--out", "nowhere/page.html"), "nowhere/page.html cannot be written: No such file"),
    ],
)
def test_folders_and_pages_that_cannot_be_are_one_line(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert compared(*arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"error: .*{message}", line)
