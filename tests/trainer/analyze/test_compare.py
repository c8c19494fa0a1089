"""Runs side by side: their figures, means over seeds, and messages about folders that are not runs."""

import re

import pytest

from tests.support.pages import write_lines, write_run
from trainer.analyze.__main__ import main
from trainer.analyze.compare import comparison


def test_figures_are_those_of_the_runs_files_and_means_are_over_seeds(tmp_path, capsys) -> None:
    folders = [write_run(tmp_path / f"cf-{seed}", seed, 20, credit="counterfactual") for seed in (2, 3)]
    folders.append(write_run(tmp_path / "plain", 2, 10, credit="uniform"))
    table = comparison(folders)
    assert list(table) == ["cf-2", "cf-3", "plain", "mean of 2 seeds"]
    accuracy = ["credit", "seed", "accuracy at step 0, %", "held-out accuracy, %", "low", "high"]
    assert list(table["cf-3"][accuracy]) == ["counterfactual", "3", "25", "80", "75", "85"]
    assert list(table["mean of 2 seeds"][accuracy]) == ["counterfactual", "2, 3", "25", "75", "70", "80"]
    assert list(table["cf-2"][["steps", "reward", "tokens", "seconds, credit"]]) == ["20", "1.97", "2,000", "1.05"]
    assert main(["compare", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line.split() for line in lines if line.startswith("credit"))[1:3] == ["counterfactual"] * 2


def test_a_mean_is_also_over_seeds_of_runs_that_log_otherwise_and_shows_both_settings(tmp_path) -> None:
    settings = [{"log_completions": 4}, {"log_completions": 64, "resume": False}]
    folders = [write_run(tmp_path / f"cf-{seed}", seed, 20, **own) for seed, own in enumerate(settings)]
    mean = comparison(folders)["mean of 2 seeds"]
    assert list(mean[["log_completions", "seed"]]) == ["4, 64", "0, 1"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path) -> None:
    folders = [write_run(tmp_path / part / "run") for part in "ab"]
    assert list(comparison(folders)) == [*map(str, folders), "same seed twice"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: holds no metrics.jsonl"),
        (("run", "run"), "run: is given twice"),
        (("bad",), "metrics.jsonl, line 1: must hold a step and numbers"),
    ],
)
def test_folders_that_are_no_runs_are_one_line(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    write_run(tmp_path / "run")
    write_lines(write_run(tmp_path / "bad") / "metrics.jsonl", [{"step": 1, "reward": "high"}])
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"error: .*{message}", line)
