"""The first hour's script: each of its commands is one that parses and ends within nine minutes."""

import os
import re
import shlex
import subprocess

import pytest

from benchmarks.speed import command
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

SCRIPT = REPOSITORY / "benchmarks" / "first_hour.sh"


def hour(*steps, **variables):
    environment = {**os.environ, "PY": "python3", **variables}
    return subprocess.run(["bash", str(SCRIPT), *steps], env=environment, capture_output=True, text=True, check=False)


def test_every_command_parses_and_ends_within_nine_minutes():
    lines = hour(DRY="1", R="results", COMMIT="abc").stdout.splitlines()
    assert len(lines) == 9
    for line in lines:
        kill, limit = map(int, re.match(r"timeout --kill-after=(\d+) (\d+) ", line).groups())
        assert limit + kill < 540
        if "benchmarks speed" in line:
            options = command.parse_options(shlex.split(line.partition("benchmarks speed ")[2]))
            assert (options.device, options.commit) == ("cuda", "abc")


def test_a_command_that_fails_is_named_at_the_end_and_stops_no_other(tmp_path):
    ended = hour("3", "8", PY="/bin/false", R=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, "failed: 3 8\n")
    assert {file.name for file in tmp_path.iterdir()} == {"3.log", "8.log"}
    assert hour("12").returncode == 2
