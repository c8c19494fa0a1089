"""Reward programs that pass their rows' tests, in processes that bubblewrap keeps from doing harm.

    cfa-train --reward_funcs examples.code:passes_tests

Rows have `tests` and perhaps a `test_setup`; `mbpp.py` makes such rows of MBPP.

This file is also their program (`main`), by the standard library only: one process runs the solution, another the
tests. A name that the tests lack is requested from the solution's process, which answers in literals, so nothing that
the solution changes takes part in a comparison or in the verdict.
"""

import ast
import builtins
import ctypes
import faulthandler
import importlib
import json
import math
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

MEMORY_BYTES = 1 << 30
START_SECONDS = 60.0
REPLY_CHARACTERS = 1 << 24
_ROOT = "/root-of-program"  # a process that chroot started opens no user namespace
_FENCED = re.compile(r"^```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)^```", re.MULTILINE | re.DOTALL | re.IGNORECASE)


def fenced_code(completion: str) -> str | None:
    """Return the last closed block of Python between lines of three backticks; None without one."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else None


class CodeReward:
    """Give 1 where a completion's last fenced block of Python passes all tests of its row, else 0.

    docs/rewards.md says how solutions are isolated, and what that does not stop.
    """

    def __init__(self, timeout: float = 10.0, isolation: str = "bubblewrap") -> None:
        """Raise `ValueError` if programs cannot be isolated here; `timeout`, in seconds, is of a completion's tests."""
        self._seconds, self._isolated = START_SECONDS, isolation != "none"
        try:
            if not self.passes("def right(): return 1", ["assert right() == 1"]):
                raise OSError("a program did not run to its end")
        except OSError as problem:
            advice = "Install bubblewrap, allow user namespaces, or take passes_tests_unisolated, which lets programs"
            said = f"programs cannot be isolated here ({problem}). {advice} do all that you may do"
            raise ValueError(said) from problem
        self._seconds = timeout

    def __call__(
        self, *, completions: Sequence[str], tests: Sequence[Sequence[str]], test_setup: Sequence[str] = (),
        completion_contents: Sequence[str] | None = None, **_: Any,
    ) -> list[float | None]:  # fmt: skip
        """Run the tests of B completions' rows, as many at a time as there are processors."""

        def verdict(completion: str, tests: Sequence[str], setup: str) -> float:
            code = fenced_code(completion)
            return float(code is not None and self.passes(code, tests, setup))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(
                pool.map(verdict, completion_contents or completions, tests, test_setup or [""] * len(completions))
            )

    def passes(self, solution: str, tests: Sequence[str], setup: str = "") -> bool:
        """Run tests against a solution; `OSError` says why a program could not be started."""
        nonce = secrets.token_hex(16)
        order = json.dumps({"nonce": nonce, "solution": solution, "tests": [setup, *tests]})
        command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", Path(__file__).read_text("utf-8")]
        command += [str(math.ceil(self._seconds)), str(MEMORY_BYTES)]
        try:
            judge = subprocess.run(
                isolated(command) if self._isolated else command, input=order.encode(), capture_output=True, env={},
                timeout=START_SECONDS + self._seconds, start_new_session=True, check=False, cwd="/",
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:  # the judge ends itself in time once it runs
            raise OSError(f"no program had ended after {late.timeout:g} s") from late
        if not judge.stdout.startswith(b"ready\n"):
            raise OSError(" ".join(judge.stderr.decode(errors="replace").split())[-300:])
        return judge.stdout == b"ready\n" + nonce.encode()


def isolated(command: Sequence[str]) -> list[str]:
    """Wrap a command in bubblewrap: it sees Python and the system's libraries, and can write nothing."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/bin"
    bubblewrap, chroot = (shutil.which(name, path=path) or name for name in ("bwrap", "chroot"))
    program = [bubblewrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
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
    return [*program, "--remount-ro", "/", "--", chroot, *user, _ROOT, *command]


_ISOLATION = {"passes_tests": "bubblewrap", "passes_tests_unisolated": "none"}


def __getattr__(name: str) -> CodeReward:
    """Make a reward function where it is named, so that a run without isolation ends before it starts."""
    if name not in _ISOLATION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return CodeReward(isolation=_ISOLATION[name])


_SEVERAL = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}


def written(value: Any) -> str:
    """Write a value of the built-in types of data as a literal; raises `TypeError` for any other."""

    def plain(value: Any) -> Any:
        kinds: tuple[Any, ...] = (bool, int, str, bytes)
        for kind in kinds:
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, float):
            return "float", float.__repr__(value)  # inf and nan are not literals
        if isinstance(value, complex):
            return "complex", plain(value.real), plain(value.imag)
        for name, several in _SEVERAL.items():
            if isinstance(value, several):
                return name, *map(plain, value)
        if isinstance(value, dict):
            return "dict", *((plain(key), plain(part)) for key, part in value.items())
        if value is not None:
            raise TypeError(f"a {type(value).__name__} passes neither to a solution nor from it")
        return None

    return ascii(plain(value))


def read(literal: str) -> Any:
    """Make the value that `written` wrote, of exactly the built-in types."""

    def made(plain: Any) -> Any:
        if not isinstance(plain, tuple):
            return plain
        name, *parts = plain
        if name == "float":
            return float(parts[0])
        if name == "complex":
            return complex(*map(made, parts))
        if name == "dict":
            return {made(key): made(part) for key, part in parts}
        return _SEVERAL[name](map(made, parts))

    return made(ast.literal_eval(literal))


def serve(tests: TextIO) -> None:
    """Run code (no name) and answer for the names that it defines: requests and replies are a literal a line."""
    names: dict[str, Any] = {"__name__": "solution"}

    def answer(name: str | None, *arguments: Any) -> tuple[str, Any]:
        if name is None:
            exec(compile(arguments[0], "solution", "exec"), names)
            return "value", None
        value = names[name]
        if arguments:
            value = value(*arguments[0], **arguments[1])
        elif callable(value):
            return "function", None
        return ("iterator", [*value]) if hasattr(value, "__next__") else ("value", value)

    for line in tests:
        try:
            reply = written(answer(*read(line)))
        except BaseException as problem:  # SystemExit as well
            reply = written(("raised", f"{type(problem).__name__}: {problem}"[:200]))
        print(reply, file=tests, flush=True)


class Names(dict[str, Any]):
    """Names of the tests: their own, Python's and its modules', then the solution's, which `of_solution` gives too."""

    def __init__(self, solution: TextIO) -> None:
        super().__init__(of_solution=self.request)
        self._solution = solution

    def request(self, *words: Any) -> Any:
        """Send a name and perhaps arguments to the solution and give its answer; `RuntimeError` if it raised."""
        print(written(words), file=self._solution, flush=True)
        kind, value = read(self._solution.readline(REPLY_CHARACTERS))
        if kind == "raised":
            raise RuntimeError(value)
        if kind == "function":
            return lambda *positional, **named: self.request(words[0], positional, named)
        return iter(value) if kind == "iterator" else value

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return importlib.import_module(name) if name in sys.stdlib_module_names else self.request(name)


def main() -> None:
    """Give up privileges for good, fork, write "ready", read the order, run the tests, write its nonce if all pass."""
    seconds, memory = map(int, sys.argv[1:])
    system, nothing = ctypes.CDLL(None), os.open(os.devnull, os.O_RDWR)
    system.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    system.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3
    system.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no process of this user reads its memory or its pipes
    for kind, most in ((resource.RLIMIT_CPU, seconds + 1), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(kind, (most, most))
    sys.set_int_max_str_digits(0)
    verdict, (solution, tests) = os.dup(1), socket.socketpair()
    child = os.fork()
    if child == 0:
        system.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        for other in (verdict, nothing, solution.detach()):
            os.close(other)
        serve(tests.makefile("rw"))
        os._exit(0)
    faulthandler.dump_traceback_later(seconds, exit=True)  # whoever waits for the verdict may be gone
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    tests.close()
    os.write(verdict, b"ready\n")
    order = json.load(sys.stdin)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    try:
        names = Names(solution.makefile("rw"))
        names.request(None, order["solution"])
        for test in order["tests"]:
            exec(compile(test, "test", "exec"), names)
        os.write(verdict, order["nonce"].encode())
    finally:
        os.kill(child, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
