"""Runs side by side: their figures, means over seeds, and messages about folders that are not runs."""

import re
from pathlib import Path

import pytest

from tests.support.pages import write_lines, write_run
from trainer.analyze.__main__ import main
from trainer.analyze.tables import comparison


def test_figures_are_those_of_the_runs_files_and_means_are_over_seeds(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [write_run(Path(f"cf-{seed}"), seed, 20, log_completions=seed) for seed in (2, 3)]
    folders.append(write_run(Path("plain"), 2, 10, credit="none"))
    table = comparison(folders)
    assert list(table) == ["cf-2", "cf-3", "plain", "mean of 2 like cf-2"]
    accuracy = ["seed", "accuracy at step 0, %", "held-out accuracy, %", "low", "high"]
    assert list(table["cf-3"][accuracy]) == ["3", "25", "80", "75", "85"]
    assert list(table["mean of 2 like cf-2"][accuracy]) == ["", "25", "75", "70", "80"]
    assert list(table["cf-2"][["steps", "reward", "tokens", "seconds, credit"]]) == ["20", "1.97", "2,000", "1.05"]
    assert main(["compare", *map(str, folders)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere/metrics.jsonl: there is no such file"),
        (["bad"], "metrics.jsonl: .* a step and numbers"),
        (["good", "bare"], "bare: has no config.yaml"),
        (["good", "bare/../good"], "good and bare/../good are one run"),
    ],
)
def test_folders_that_are_no_runs_are_one_line(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    write_lines(write_run(tmp_path / "bad") / "metrics.jsonl", [{"step": 1, "reward": "high"}])
    write_run(tmp_path / "good")
    (write_run(tmp_path / "bare") / "config.yaml").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"error: .*{message}", line)
