"""Reward programs that pass their tests, run where they can do no harm."""

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.rewards.children import next_line
from trainer.rewards.code.isolation import LAUNCHES, NOBODY, PATH, Isolation

MEMORY_BYTES = 1 << 30
START_SECONDS = 60.0
READY = b"ready\n"
_JUDGE = Path(__file__).with_name("judge.py")
_FENCED = re.compile(r"^```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def fenced_code(completion: str) -> str | None:
    """Find the last closed block of Python between lines of three backticks; None without one."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else None


class CodeReward:
    """Give 1 where a completion's last fenced block of Python passes all tests of its row, else 0.

    Tests come from the column `tests`, a list of statements for each row, after `test_setup` where there is one; names
    of Python in them stand for the solution's where the row's `own_names` have them. They run in one process, the
    solution in another: see `judge`. Both are isolated by bubblewrap or by namespaces: no network, no files but
    Python's and an empty folder in memory, no process but their own, no capability, an empty environment. Limits hold
    besides: CPU time, memory, file size, open files, no further process or thread.

    What this does not stop: faults of the kernel; use of a processor until the deadline; what a solution finds out by
    timing. With `none` a solution can read and send what this user can, delete this user's files and kill its
    processes; only the limits, the separate process and the nonce remain.

    A test sees plain values (numbers, text, bytes, lists, tuples, sets, dicts, None): a list that a solution changes in
    place stays as it was, and a function cannot be passed to a solution.
    """

    def __init__(self, timeout: float = 10.0, isolation: Isolation = "auto") -> None:
        """Choose the isolation, by running a program in it.

        Args:
            timeout: seconds that a completion's tests may take together, once Python runs.
            isolation: "auto" takes bubblewrap, else unshare.

        Raises:
            ValueError: programs cannot be isolated here; the message says why.
        """
        if not sys.platform.startswith("linux"):
            raise ValueError(f"reward code: runs programs on Linux only, and this is {sys.platform}")
        reasons = []
        for self._isolation in ("bubblewrap", "unshare") if isolation == "auto" else (isolation,):
            try:
                self._timeout = START_SECONDS  # of this program, whatever is asked of later ones
                if self.passes("def right(): return 1", ["assert right() == 1"]):
                    self._timeout = timeout
                    return
                reasons.append(f"{self._isolation}: a program in it did not run to its end")
            except OSError as problem:
                reasons.append(f"{self._isolation}: {problem}")
        raise ValueError(
            f"reward code: programs cannot be isolated here ({'; '.join(reasons)}). Install bubblewrap, allow user "
            "namespaces, or set code_isolation to none, which runs what the model writes with all that this user may do"
        )

    def __call__(
        self,
        *,
        completions: Sequence[str],
        tests: Sequence[Sequence[str]],
        test_setup: Sequence[str] | None = None,
        own_names: Sequence[Sequence[str]] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Judge B completions by their rows' tests, as many at a time as there are processors."""
        setups, own = test_setup or [""] * len(completions), own_names or [()] * len(completions)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(self._judged, completions, tests, setups, own))

    def _judged(self, completion: str, tests: Sequence[str], setup: str, own: Sequence[str]) -> float:
        code = fenced_code(completion)
        return float(code is not None and self.passes(code, tests, setup, own))

    def passes(self, solution: str, tests: Sequence[str], setup: str = "", own: Sequence[str] = ()) -> bool:
        """Run tests against a solution.

        Raises:
            OSError: what runs tests could not start; the message says why.
        """
        nonce = secrets.token_hex(16)
        order = json.dumps(
            {"nonce": nonce, "solution": solution, "setup": setup, "tests": list(tests), "own": list(own)}
        )
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, self._started(folder) as judge:
            try:
                if next_line(judge, START_SECONDS) != READY:
                    os.killpg(judge.pid, signal.SIGKILL)
                    told = " ".join(judge.communicate()[1].decode(errors="replace").split())
                    raise OSError(told[-300:] or f"no program was under way after {START_SECONDS:g} s")
                return judge.communicate(order.encode(), self._timeout)[0] == nonce.encode()
            except subprocess.TimeoutExpired:
                return False
            finally:
                if judge.returncode is None:
                    os.killpg(judge.pid, signal.SIGKILL)

    def _started(self, folder: str) -> subprocess.Popen[bytes]:
        isolated = self._isolation != "none"
        user = NOBODY if isolated and os.geteuid() == 0 else 0
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", _JUDGE.read_text("utf-8"), str(user)]
        command += ["/tmp" if isolated else folder, str(math.ceil(self._timeout)), str(MEMORY_BYTES)]
        return subprocess.Popen(
            LAUNCHES[self._isolation](folder, command) if isolated else command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env={"PATH": PATH} if isolated else {}, start_new_session=True,
        )  # fmt: skip
