"""Run tests against a solution that must not be trusted: a program of its own, with the standard library only.

The process forks: the child runs the solution, this one the tests. A name that a test takes from the solution stands
for the child's object: a call is a message, and what comes back is built anew from plain values. So the solution can
change nothing that decides: not the comparison, not the test, not the verdict, whose pipe it does not have.

`argv`: user to become (0: none), working folder, seconds, bytes of memory. The order is JSON on stdin, read after the
fork; stdout gets the line "ready", and the order's nonce if all tests pass.
"""

import builtins
import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

FILE_BYTES, OPEN_FILES, REPLY_CHARACTERS = 1 << 20, 32, 1 << 24
_NO_NEW_PRIVILEGES, _DUMPABLE, _DIE_WITH_PARENT = 38, 4, 1  # of prctl
_CAPABILITIES_3 = 0x20080522
_SEVERAL = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def packed(value: Any, hold: Callable[[Any], dict[str, Any]]) -> Any:
    """Write a value as JSON: plain ones, and of all others what `hold` says."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    for tag, several in _SEVERAL.items():
        if isinstance(value, several):
            return {tag: [packed(part, hold) for part in value]}  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {"dict": [[packed(key, hold), packed(part, hold)] for key, part in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    return None if value is None else hold(value)


def unpacked(value: Any, held: Callable[[str, Any], Any]) -> Any:
    """Read what `packed` wrote; `held` finds what is not plain."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _SEVERAL:
        return _SEVERAL[tag](unpacked(part, held) for part in content)
    if tag == "dict":
        return {unpacked(key, held): unpacked(part, held) for key, part in content}
    if tag == "bytes":
        return bytes.fromhex(content)
    return complex(*content) if tag == "complex" else held(tag, content)


def serve(requests: int, replies: int) -> None:
    """Run a solution and answer what is asked of it until nobody asks any more."""
    names: dict[str, Any] = {"__name__": "solution"}
    objects: list[Any] = []

    def hold(value: Any) -> dict[str, Any]:
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        objects.append(value)
        return {"held": len(objects) - 1}

    def answer(what: str, target: Any, *rest: Any) -> Any:
        if what == "run":
            return exec(compile(target, "solution", "exec"), names)
        if what == "name":
            return names[target]
        if what == "call":
            positional, named = (unpacked(part, lambda _, number: objects[number]) for part in rest)
            return objects[target](*positional, **named)
        return list(objects[target]) if what == "list" else getattr(objects[target], *rest)

    with os.fdopen(requests) as asked, os.fdopen(replies, "w") as said:
        for line in asked:
            try:
                reply = {"value": packed(answer(*json.loads(line)), hold)}
            except BaseException as problem:  # SystemExit as well
                reply = {"raised": [type(problem).__name__, str(problem)[:200]]}
            print(json.dumps(reply), file=said, flush=True)


class Solution:
    """The solution as the tests see it."""

    def __init__(self, requests: int, replies: int) -> None:
        self._asked, self._said = os.fdopen(requests, "w"), os.fdopen(replies)

    def ask(self, *request: Any) -> Any:
        """Send a request of `serve` and give its value, or raise what it raised."""
        print(json.dumps(request), file=self._asked, flush=True)
        reply = json.loads(self._said.readline(REPLY_CHARACTERS))
        if "raised" in reply:
            name, text = map(str, reply["raised"])
            kind = getattr(builtins, name, None)
            raise kind(text) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(name, text)
        return unpacked(reply["value"], self._found)

    def _found(self, tag: str, content: Any) -> Any:
        if tag == "module" and content in sys.stdlib_module_names:
            return importlib.import_module(content)  # the solution's own may be patched
        return Held(self, int(content))


class Held:
    """An object of the solution: what it does happens there, and it equals nothing but itself."""

    def __init__(self, solution: Solution, number: int) -> None:
        self._solution, self._number = solution, number

    def __call__(self, *positional: Any, **named: Any) -> Any:
        """Call the object; only plain values and other objects of the solution can be passed."""
        return self._solution.ask("call", self._number, packed(positional, _known), packed(named, _known))

    def __iter__(self) -> Any:
        return iter(self._solution.ask("list", self._number))

    def __getattr__(self, name: str) -> Any:
        return self._solution.ask("of", self._number, name)


def _known(value: Any) -> dict[str, Any]:
    if not isinstance(value, Held):
        raise TypeError(f"a {type(value).__name__} cannot be passed to the solution")
    return {"held": value._number}


class Names(dict[str, Any]):
    """Names of the tests: their own, then Python's but for a few that the solution is to define, then its own."""

    def __init__(self, solution: Solution, own: list[str]) -> None:
        self._solution, self._own = solution, own

    def __missing__(self, name: str) -> Any:
        """Ask the solution for a name that nobody else has."""
        if hasattr(builtins, name) and name not in self._own:
            raise KeyError(name)
        return self._solution.ask("name", name)


def confine(user: int, seconds: int, memory: int) -> None:
    """Give up privileges for good, and limit what this process and its children may use."""
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    system = ctypes.CDLL(None)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    system.capset(struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24))
    system.prctl(_DUMPABLE, 0, 0, 0, 0)  # no process of this user reads its memory or its pipes
    limits = {"CPU": seconds + 1, "AS": memory, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0}
    for name, most in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        allowed = resource.getrlimit(number)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(number, (most, most))
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # with a handler, as the first process of a namespace needs


def main() -> None:
    """Fork, take the order, run the tests."""
    user, seconds, memory = (int(sys.argv[i]) for i in (1, 3, 4))
    confine(user, seconds, memory)
    os.chdir(sys.argv[2])
    sys.set_int_max_str_digits(0)
    verdict, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    asked, said = os.pipe(), os.pipe()
    child = os.fork()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if child == 0:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        for mine in (0, 1, 2):
            os.dup2(nothing, mine)
        for other in (verdict, nothing, asked[1], said[0]):
            os.close(other)
        serve(asked[0], said[1])
        os._exit(0)
    os.close(asked[0])
    os.close(said[1])
    os.write(verdict, b"ready\n")
    order = json.load(sys.stdin)
    for mine in (1, 2):
        os.dup2(nothing, mine)
    signal.alarm(seconds + 1)  # whoever waits for the verdict may be gone
    try:
        solution = Solution(asked[1], said[0])
        solution.ask("run", order["solution"])
        names = Names(solution, order["own"])
        for test in (order["setup"], *order["tests"]):
            exec(compile(test, "test", "exec"), names)
        os.write(verdict, order["nonce"].encode())
    finally:
        os.kill(child, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
