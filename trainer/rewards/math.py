"""Reward answers that are mathematically equal to the data's, by math-verify.

This file is also the program of the process in which math-verify runs (`main`), since it sets alarms and may hang.
"""

import contextlib
import faulthandler
import importlib.util
import json
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

MEMORY_BYTES = 4 << 30


class MathReward:
    """Give 1 where math-verify finds a completion equal to the answer of its row, else 0.

    A completion that takes longer than `timeout` seconds, or kills the child process, earns 0. docs/rewards.md says
    how answers are read.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        """Raise `ImportError` unless math-verify is installed."""
        if importlib.util.find_spec("math_verify") is None:
            from ..extras import installing  # not at the top: the child runs this file by its path

            raise ImportError(f"reward math_verify: math-verify is not installed: {installing('math')}")
        self._timeout = timeout
        self._child: Any = None  # a `subprocess.Popen`

    def __call__(
        self, *, completions: Sequence[str], answer: Sequence[str], completion_contents: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:  # fmt: skip
        """Compare B completions with their rows' answers, one after the other; `OSError` if the child cannot start."""
        return [
            self._compare(gold, text) for gold, text in zip(answer, completion_contents or completions, strict=True)
        ]

    def _compare(self, answer: str, completion: str) -> float:
        from cfa_kernels import answer_text_span  # not in the child

        span = answer_text_span(answer)
        gold, child = answer.strip() if span is None else answer[slice(*span)], self._running()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps([gold, completion]).encode() + b"\n")
        if not (reply := child.stdout.readline()):  # it has ended
            child.wait()
        verdict = json.loads(reply or b"false")
        if verdict is None:
            warnings.warn(f"math_verify cannot read the answer {gold!r}: its problem is never solved", stacklevel=3)
        return float(verdict is True)

    def _running(self) -> Any:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self._timeout)], bufsize=0, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C lets the trainer finish its step
            )  # fmt: skip
            if not self._child.stdout.readline():
                said = self._child.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
                raise OSError(f"reward math_verify: its process did not start: {said}")
        return self._child


def main() -> None:
    """Read pairs of an answer and a completion, a line of JSON each; write whether equal, null for no answer."""
    most = float(sys.argv[1])
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    seconds, replies, nothing = max(1, int(most / 2)), os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.write(replies, b"loaded\n")
    for other in (1, 2):  # nobody reads what libraries say
        os.dup2(nothing, other)
    for line in sys.stdin:  # which ends with the trainer
        answer, completion = json.loads(line)
        verdict = None
        faulthandler.dump_traceback_later(most, exit=True)  # a thread that does not need the interpreter
        if gold := parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds):
            verdict = bool(verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds))
        faulthandler.cancel_dump_traceback_later()
        os.write(replies, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()
