"""Long runs, some minutes: `make soak`. Memory, files and threads stay as they are; being killed changes nothing."""

import os
import random
import signal
import statistics
from pathlib import Path

import pytest

from tests.support.runs import child, flags, kill_at, main, outcome

pytestmark = pytest.mark.traced
STEPS, KILLS, HOURS = 2000, 20, 3600.0 * 4
LONG = [f"--max_steps={STEPS}", "--save_steps=50", "--eval_steps=500", "--num_iterations=1", "--learning_rate=1e-5"]


def watched(argv: list[str]) -> tuple[int, list[tuple[int, int, int]]]:
    """Run; gives bytes of memory, open files and threads of the process in each step."""
    seen = []

    def watch(_: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append(
            (pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        )

    return main(argv, watch)[0], seen


@pytest.fixture(scope="module")
def undisturbed(there):
    """The run that nothing befell: what it left behind, and what each step used."""
    _, (code, seen) = child(watched, flags(there / "model", there / "undisturbed", *LONG), deadline=HOURS)
    assert code == 0
    assert len(seen) == STEPS
    return outcome(there / "undisturbed"), seen


def test_memory_files_and_threads_do_not_grow(undisturbed) -> None:
    _, seen = undisturbed
    early, late = (
        [statistics.median(column) for column in zip(*part, strict=True)] for part in (seen[200:400], seen[-200:])
    )
    print(f"\n{STEPS} steps: memory {early[0] / 2**20:.1f} MiB at step 300, {late[0] / 2**20:.1f} MiB at the end")
    print(f"files {early[1]:.0f} and {late[1]:.0f}, threads {early[2]:.0f} and {late[2]:.0f}")
    assert late[0] <= 1.05 * early[0]
    assert late[1:] == early[1:]


def test_a_run_that_was_killed_again_and_again_ends_as_the_undisturbed_one(there, undisturbed) -> None:
    argv, draw = flags(there / "model", there / "killed", *LONG), random.Random(0)
    for _ in range(KILLS):
        assert child(kill_at, draw.randrange(50, 350), argv, deadline=HOURS)[0] == -signal.SIGKILL
    code, (ended, said, _) = child(main, argv, deadline=HOURS)
    assert (code, ended) == (0, 0)
    print("\nafter", KILLS, "kills", said[said.index("resuming from") :].split(";")[0])
    assert outcome(there / "killed") == undisturbed[0]
