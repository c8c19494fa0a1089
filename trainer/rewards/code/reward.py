"""Reward programs that pass their tests, run by `judge.py` where bubblewrap keeps them from doing harm."""

import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MEMORY_BYTES = 1 << 30
START_SECONDS = 60.0
_JUDGE = Path(__file__).with_name("judge.py")
_FENCED = re.compile(r"^```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)
_ROOT = "/root-of-program"  # a process that chroot started opens no user namespace


def fenced_code(completion: str) -> str | None:
    """Return the last closed block of Python between lines of three backticks; None without one."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else None


class CodeReward:
    """Give 1 where a completion's last fenced block of Python passes all tests of its row, else 0.

    Rows are those of `mbpp_row`. docs/rewards.md says how solutions are isolated, and what that does not stop.
    """

    def __init__(self, timeout: float = 10.0, isolation: str = "bubblewrap") -> None:
        """Raise `ValueError` if programs cannot be isolated here; `timeout`, in seconds, is of a completion's tests."""
        self._seconds, self._isolated = START_SECONDS, isolation != "none"
        try:
            if not self.passes("def right(): return 1", ["assert right() == 1"]):
                raise OSError("a program did not run to its end")
        except OSError as problem:
            advice = "Install bubblewrap, allow user namespaces, or set code_isolation to none, which lets programs do"
            said = f"reward code: programs cannot be isolated here ({problem}). {advice} all that you may do"
            raise ValueError(said) from problem
        self._seconds = timeout

    def __call__(
        self, *, completions: Sequence[str], tests: Sequence[Sequence[str]], test_setup: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:  # fmt: skip
        """Judge B completions by their rows' tests, as many at a time as there are processors."""

        def verdict(completion: str, tests: Sequence[str], setup: str) -> float:
            code = fenced_code(completion)
            return float(code is not None and self.passes(code, tests, setup))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(verdict, completions, tests, test_setup or [""] * len(completions)))

    def passes(self, solution: str, tests: Sequence[str], setup: str = "") -> bool:
        """Run tests against a solution; `OSError` says why a program could not be started."""
        nonce = secrets.token_hex(16)
        order = json.dumps({"nonce": nonce, "solution": solution, "setup": setup, "tests": [*tests]})
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _JUDGE.read_text("utf-8")]
        command += [str(math.ceil(self._seconds)), str(MEMORY_BYTES)]
        try:
            judge = subprocess.run(
                isolated(command) if self._isolated else command, input=order.encode(), capture_output=True, env={},
                timeout=START_SECONDS + self._seconds, start_new_session=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:  # the judge ends itself in time once it runs
            raise OSError(f"no program had ended after {late.timeout:g} s") from late
        if not judge.stdout.startswith(b"ready\n"):
            raise OSError(" ".join(judge.stderr.decode(errors="replace").split())[-300:])
        return judge.stdout == b"ready\n" + nonce.encode()


def isolated(command: Sequence[str]) -> list[str]:
    """Wrap a command in bubblewrap: it sees Python and the system's libraries, can write nothing, and is alone."""
    program = [_path("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    program += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_CHROOT"]
    for folder in sorted({"/usr", "/lib", "/lib64", sys.base_prefix, sys.base_exec_prefix}):
        for parent in reversed(Path(_ROOT + folder).parents):  # which any user may pass through
            program += ["--perms", "0755", "--dir", str(parent)]
        program += ["--ro-bind-try", folder, folder, "--ro-bind-try", folder, _ROOT + folder]
    program += ["--perms", "0755", "--dir", f"{_ROOT}/dev", "--dev-bind", "/dev/null", f"{_ROOT}/dev/null"]
    user = []
    if os.geteuid() == 0:  # whose processes the kernel does not count
        program += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        user = ["--userspec=65534:65534", "--groups="]
    return [*program, "--remount-ro", "/", "--", _path("chroot"), *user, _ROOT, *command]


def _path(program: str) -> str:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") or program
