"""The first hour's script: each of its commands is one that parses and ends within nine minutes."""

import os
import re
import shlex
import subprocess
import sys
import zipfile

import pytest

from benchmarks.harness import figures
from benchmarks.speed import command
from benchmarks.speed.bench_step import WORKLOADS
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

SCRIPT = REPOSITORY / "benchmarks" / "first_hour.sh"


def hour(*steps, **variables):
    environment = {**os.environ, "PY": "python3", **variables}
    return subprocess.run(["bash", str(SCRIPT), *steps], env=environment, capture_output=True, text=True, check=False)


def test_every_command_parses_and_they_end_within_nine_minutes_each_and_half_an_hour_in_all():
    lines = hour(DRY="1", R="results", COMMIT="abc").stdout.splitlines()
    assert len(lines) == 7
    limits = [sum(map(int, re.match(r"timeout --kill-after=(\d+) (\d+) ", line).groups())) for line in lines]
    assert max(limits) < 540
    assert sum(limits) <= 33 * 60  # none takes as long as it may
    for line in lines:
        if "benchmarks speed" in line:
            options = command.parse_options(shlex.split(line.partition("benchmarks speed ")[2]))
            assert (options.device, options.commit) == ("cuda", "abc")
            if options.only in (["step"], ["profile"]):
                words = options.select.split(" and ")
                assert all(re.fullmatch(r"[\w.]+", word) for word in words)  # what every pytest takes for a name
                assert any(all(word in name for word in words) for name in WORKLOADS["cuda"])


def test_a_command_that_fails_is_named_at_the_end_and_stops_no_other(tmp_path):
    ended = hour("3", "7", PY="/bin/false", R=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, "failed: 3 7\n")
    assert {file.name for file in tmp_path.iterdir()} == {"3.log", "7.log"}
    assert hour("12").returncode == 2


def test_steps_run_on_a_cpu_with_what_is_carried_and_their_figures_are_read_together(tmp_path, capsys):
    """Those whose parts no other test runs by their command."""
    wheel, carried = tmp_path / "carry" / "carried-1-py3-none-any.whl", tmp_path / "carry"
    carried.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        info = "carried-1.dist-info/"
        file.writestr("sitecustomize.py", "import sys; sys.stderr.write('carried\\n')")
        file.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1\n")
        file.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(info + "RECORD", "")
    ended = hour("2", "3", "6", SMOKE="1", PY=sys.executable, R=str(tmp_path), CARRY=str(carried))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "carried" in ended.stdout
    files = sorted(tmp_path.glob("*.json"))
    assert [file.stem for file in files] == ["2", "3", "6"]
    assert figures.main([*map(str, files)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "rollouts, narrow",
        "decoding, ",
        "trainer step, ",
        "credit_ms_per_1000_rows",
        "SDPA",
    ):
        assert text in printed
