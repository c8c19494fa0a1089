"""Parts of a benchmark run: what is killed or cut keeps what it had finished, and result files say which is which."""

import argparse
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.harness import parts
from benchmarks.harness.environment import find_commit
from benchmarks.harness.parts import PARTS, Part, merge_part
from benchmarks.harness.progress import write_json
from benchmarks.harness.race import OUT_OF_TIME, Absent, Budget, Contender, Figures, FiguresFile, Lap, race, times_ours
from benchmarks.speed import command

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ENVIRONMENT = {"commit": "abc", "dirty": False}

FILE = """
import os, pathlib, signal, time

import pytest
import torch

from benchmarks.harness.race import Contender, Lap, race, replay_clock


def test_a_failure():
    assert False


@pytest.mark.benchmark(timer=replay_clock)
def test_a_finished_race(report):
    report(Lap("ours", [1.0, 3.0, 2.0]), group="finished")


def test_a_race_under_way(budget):
    def end():
        {ending}

    quick = Contender("quick", int, lambda _: None)
    race([quick, Contender("slow", end, lambda _: None)], device=torch.device("cpu"), budget=budget)


def test_what_is_never_reached(report):
    report(Lap("ours", [1.0]), group="never")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the file as a part, with `ending` in the middle of its race; returns status and document."""

    def run_file(ending: str, *options: str):
        path, results = tmp_path / "test_file.py", tmp_path / "results.json"
        path.write_text(FILE.replace("{ending}", ending))
        monkeypatch.setitem(PARTS, "host", Part(("-p", "benchmarks.speed.conftest", str(path)), ceilings=False))
        arguments = ["--device", "cpu", "--only", "host", "--into", str(results), "--rounds", "1", "--seconds", "0"]
        return command.main([*arguments, *options]), json.loads(results.read_text())

    return run_file


def assert_finished_race_is_kept(document):
    part = document["parts"]["host"]
    assert [(f["group"], f["seconds"]["median"]) for f in part["figures"]] == [("finished", 2.0)]
    assert [lap["name"] for lap in part["unfinished"]] == ["quick"]
    assert (part["tests"]["tests"], part["tests"]["failures"]) == (2, 1)
    assert part["tests"]["failed"][0].endswith("test_a_failure")
    assert document["state"] == {"host": part["outcome"]}


def test_a_part_that_is_killed_leaves_the_races_it_had_finished(run, tmp_path, monkeypatch):
    """And so would a killed command: the part waits for its race in the result file and keeps a copy of that."""
    monkeypatch.setattr(parts, "POLL_SECONDS", 0.1)
    results, copy = tmp_path / "results.json", tmp_path / "copy.json"
    wait = f"while 'quick' not in pathlib.Path({str(results)!r}).read_text(): time.sleep(0.05)"
    keep = f"pathlib.Path({str(copy)!r}).write_text(pathlib.Path({str(results)!r}).read_text())"
    status, document = run("\n        ".join([wait, keep, "os.kill(os.getpid(), signal.SIGKILL)"]))
    assert status == command.CUT
    assert (document["parts"]["host"]["outcome"], document["parts"]["host"]["reason"]) == ("cut", "killed by SIGKILL")
    for found in (document, json.loads(copy.read_text())):
        assert_finished_race_is_kept(found)
    assert found["state"] == {"host": "running"}


def test_a_part_is_stopped_at_its_limit_and_what_it_has_is_merged(run, tmp_path, monkeypatch):
    """The limit's clock leaps once the race is in the result file: how fast this machine is does not count."""
    results = tmp_path / "results.json"
    monkeypatch.setattr(parts, "clock", lambda: 1e6 * (results.exists() and "quick" in results.read_text()))
    monkeypatch.setattr(parts, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(parts, "GRACE_SECONDS", 600.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts in its background
    try:
        status, document = run("time.sleep(600)", "--limit", "5000")
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == command.CUT
    assert_finished_race_is_kept(document)
    part = document["parts"]["host"]
    assert (part["reason"], part["exit_status"]) == ("stopped at its limit", pytest.ExitCode.INTERRUPTED)


def test_sigterm_is_taken_for_an_interruption():
    with pytest.raises(KeyboardInterrupt), command._ended_like_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# Races that run out of time


def test_a_race_ends_with_the_rounds_that_fit_and_says_so(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("benchmarks.harness.race.time.monotonic", lambda: now[0])
    monkeypatch.setattr("benchmarks.harness.race.time.perf_counter", lambda: now[0])

    def run(seconds):
        now[0] += seconds

    contenders = [Contender(name, lambda s=s: run(s), lambda _: None) for name, s in (("ours", 1.0), ("slow", 3.0))]
    whole = race(contenders, device=CPU, budget=Budget(0.0, 3, 3, until=now[0] + 16.0))
    assert [(lap.seconds, lap.cut) for lap in whole.values()] == [([1.0] * 3, False), ([3.0] * 3, False)]
    cut = race(contenders, device=CPU, budget=Budget(0.0, 3, 3, until=now[0] + 15.0))
    assert [(lap.seconds, lap.cut) for lap in cut.values()] == [([1.0] * 2, True), ([3.0] * 2, True)]
    none = race([*contenders, Contender("late", int, lambda _: None)], device=CPU, budget=Budget(until=now[0] + 3.5))
    assert [(lap.absent, lap.cut) for lap in none.values()] == [(OUT_OF_TIME, True)] * 3
    with pytest.raises(Absent, match="ours: the time"):
        times_ours(none)


def test_each_check_and_each_round_is_noted():
    noted = []
    budget = Budget(0.0, 2, 2, note=lambda laps: noted.append([len(lap.seconds) for lap in laps.values()]))
    race([Contender(name, int, lambda _: None) for name in "ab"], device=CPU, budget=budget)
    assert noted == [[0], [0, 0], [1, 1], [2, 2]]


def test_what_is_noted_is_dropped_when_its_test_ends(tmp_path):
    file = FiguresFile(Figures(), tmp_path / "figures.json")
    file.note({"a": Lap("a", [1.0])})
    assert json.loads((tmp_path / "figures.json").read_text())["unfinished"][0]["rounds"] == [1.0]
    file.finish()
    assert json.loads((tmp_path / "figures.json").read_text())["unfinished"] == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "results.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# Merging


def _piece(select: str | None, status: int = 0, outcome: str | None = None, **lists) -> dict:
    return {
        "outcome": outcome or ("failed" if status else "passed"),
        "reason": None,
        "exit_status": status,
        "took_seconds": 1.0,
        "tests": {"tests": 7, "failed": [select] * bool(status)},
        "select": select,
        **lists,
    }


def _measured(group: str, status: int = 0, **changed) -> dict:
    figures = [{"group": group, "name": "ours"}]
    lists = {"figures": figures, "ratios": [], "absent": [], "refused": [], "workloads": {group: {}}}
    return {**_piece(group, status, **lists), **changed}


def _merged(path: Path, part: str, *pieces: dict) -> dict:
    for i, piece in enumerate(pieces):
        merge_part(path, {**ENVIRONMENT, "commit": f"commit {i}"}, part, piece)
    return json.loads(path.read_text())


def test_pieces_of_a_part_add_up_and_a_failed_piece_stays_visible(tmp_path):
    path = tmp_path / "result.json"
    scoring = _merged(path, "scoring", _measured("a", status=1), _measured("b"), _measured("b"))["parts"]["scoring"]
    assert [figure["group"] for figure in scoring["figures"]] == ["a", "b"]
    assert scoring["workloads"].keys() == {"a", "b"}
    assert (scoring["outcome"], scoring["select"], scoring["took_seconds"]) == ("failed", "a | b", 2.0)
    assert [(p["select"], p["commit"], p["groups"]) for p in scoring["pieces"]] == [
        ("a", "commit 0", ["a"]),
        ("b", "commit 2", ["b"]),
    ]
    document = _merged(path, "tests", _piece("one", status=1), _piece("two"))
    assert document["test_suite"] == {"outcome": "failed", "tests": 14, "failed": ["one"]}
    assert document["state"] == {"scoring": "failed", "tests": "failed"}


def test_a_piece_that_passes_when_run_again_replaces_its_failure(tmp_path):
    document = _merged(tmp_path / "r.json", "scoring", _measured("a", status=1), _measured("b"), _measured("a"))
    part = document["parts"]["scoring"]
    assert (part["outcome"], part["exit_status"], part["tests"]["failed"]) == ("passed", 0, [])
    assert document["state"] == {"scoring": "pieces"}


def test_a_run_that_was_cut_takes_nothing_from_a_whole_one(tmp_path):
    path, everything = tmp_path / "r.json", _measured("a", select=None)
    assert _merged(path, "scoring", everything)["state"] == {"scoring": "whole"}
    document = _merged(path, "scoring", _measured("b", select="b", outcome="cut"))
    assert [figure["group"] for figure in document["parts"]["scoring"]["figures"]] == ["a", "b"]
    assert document["state"] == {"scoring": "cut"}
    assert _merged(path, "scoring", everything)["state"] == {"scoring": "whole"}


# The command's options


def _options(*arguments: str):
    return command.parse_options(["--device", "cpu", *arguments])


def test_options_reach_pytest():
    options = _options("--only", "tests", "-n", "3", "--timeout", "120", "--tests", "tests/ops", "--select", "not aot")
    line = parts._command(PARTS["tests"], CPU, options, 50.0, Path("f"), Path("p"))
    assert line[3] == "tests/ops"
    assert {"-n", "3", "--timeout=120", "-k", "not aot"} <= set(line)
    assert parts._environment(PARTS["tests"], CPU, options)["OMP_NUM_THREADS"] == "1"
    assert parts.selection(PARTS["tests"], options) == "tests/ops, not aot"
    options = _options("--only", "loss", "--only", "step", "--peers", "ours")
    assert [parts.selection(PARTS[name], options) for name in ("loss", "step")] == [None, "peers ours"]
    line = parts._command(PARTS["step"], CPU, _options("--only", "step", "--no-sampling"), 50.0, Path("f"), Path("p"))
    assert {"--bench-sampling-seconds=0.0", "--bench-limit=50.0"} <= set(line)
    assert parts._environment(PARTS["first-light"], CPU, _options())["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "loss", "--peers", "ours"], "--peers is for scoring, step, profile"),
        (["--only", "loss", "--tests", "tests/ops"], "--tests is for --only tests"),
    ],
)
def test_options_that_a_part_does_not_take_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        _options(*arguments)
    assert message in capsys.readouterr().err


def test_plugins_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.parts.importlib.util.find_spec", lambda name: None)
    options = argparse.Namespace(processes=2, timeout=None)
    assert parts.missing_plugins(options) == ["pytest-benchmark", "pytest-xdist"]


def test_without_git_the_commit_is_what_was_given(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "outer"],
        cwd=tmp_path,
        check=True,
    )
    inside = tmp_path / "copy"
    inside.mkdir()
    assert find_commit("given", inside) == ("given", None)
    assert find_commit(None, inside) == ("unknown", None)
    commit, dirty = find_commit("given", tmp_path)
    assert len(commit) == 12
    assert dirty is False


def test_a_part_without_its_pictures_still_ends_well(tmp_path, monkeypatch, capsys):
    def missing(path):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr(command, "plot_results", missing)
    monkeypatch.setattr(command, "run_part", lambda *_: _piece(None))
    assert command.main(["--device", "cpu", "--only", "host", "--into", str(tmp_path / "r.json")]) == 0
    assert "no pictures" in capsys.readouterr().out
