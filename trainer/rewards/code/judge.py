"""Run tests against a solution that is not trusted: a program of its own, with the standard library only.

The process forks: the child runs the solution, the parent the tests. A name that the tests lack is requested from the
child, which answers in literals, so nothing that the solution changes takes part in a comparison or in the verdict.

`argv`: seconds, bytes of memory. The order is JSON on stdin, read after the fork; stdout gets the line "ready", and the
order's nonce if all tests pass.
"""

import ast
import builtins
import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import struct
import sys
from typing import Any

REPLY_CHARACTERS = 1 << 24
_NO_NEW_PRIVILEGES, _DUMPABLE, _DIE_WITH_PARENT = 38, 4, 1  # of prctl
_CAPABILITIES_3 = 0x20080522


def plain(value: Any) -> Any:
    """Copy a value of the types that a literal can hold; raises `TypeError` for any other."""
    if value is None:
        return None
    kinds: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    for several in (list, tuple, set, frozenset):
        if isinstance(value, several):
            return several(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    raise TypeError(f"a {type(value).__name__} passes neither to a solution nor from it")


def serve(requests: int, replies: int) -> None:
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
        return ("iterator", plain([*value])) if hasattr(value, "__next__") else ("value", plain(value))

    with os.fdopen(requests) as lines, os.fdopen(replies, "w") as file:
        for line in lines:
            try:
                reply = answer(*ast.literal_eval(line))
            except BaseException as problem:  # SystemExit as well
                reply = "raised", f"{type(problem).__name__}: {problem}"[:200]
            print(ascii(reply), file=file, flush=True)


class Names(dict[str, Any]):
    """Names of the tests: their own, Python's and its modules', then the solution's, which `of_solution` gives too."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = os.fdopen(requests, "w"), os.fdopen(replies)
        self["of_solution"] = self.request

    def request(self, *words: Any) -> Any:
        """Send words to `serve` and return its answer, or raise `RuntimeError` if it raised."""
        print(ascii(plain(words)), file=self._requests, flush=True)
        kind, value = ast.literal_eval(self._replies.readline(REPLY_CHARACTERS))
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
    """Give up privileges for good, fork, read the order, run the tests."""
    seconds, memory = map(int, sys.argv[1:])
    system, nothing = ctypes.CDLL(None), os.open(os.devnull, os.O_RDWR)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.capset(struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24))
    system.prctl(_DUMPABLE, 0, 0, 0, 0)  # no process of this user reads its memory or its pipes
    for kind, most in ((resource.RLIMIT_CPU, seconds + 1), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0)):
        allowed = resource.getrlimit(kind)[1]
        limit = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (limit, limit))
    os.chdir("/")
    sys.set_int_max_str_digits(0)
    verdict, requests, replies = os.dup(1), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        system.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        for other in (verdict, nothing, requests[1], replies[0]):
            os.close(other)
        serve(requests[0], replies[1])
        os._exit(0)
    faulthandler.dump_traceback_later(seconds, exit=True)  # whoever waits for the verdict may be gone
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    os.close(requests[0])
    os.close(replies[1])
    os.write(verdict, b"ready\n")
    order = json.load(sys.stdin)
    for standard in (1, 2):
        os.dup2(nothing, standard)
    try:
        names = Names(requests[1], replies[0])
        names.request(None, order["solution"])
        for test in (order["setup"], *order["tests"]):
            exec(compile(test, "test", "exec"), names)
        os.write(verdict, order["nonce"].encode())
    finally:
        os.kill(child, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
