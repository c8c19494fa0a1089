"""Two processes that have trained with credit and saved come to an end."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cfa_kernels.integrations.trl", reason="TRL is not installed", exc_type=ImportError)

from tests.support.trl_training import packs

pytestmark = pytest.mark.slow


@packs
@pytest.mark.parametrize("kind", ["credit", "packed"])
def test_processes_end_after_training_and_saving(kind):
    """Three exits of each kind; `two_process_exits` watches as many as are wanted."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.two_process_exits", "3", kind]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert "3 pairs of processes, 0 did not end well" in ended.stdout, ended.stdout[-500:] + ended.stderr[-2000:]
