"""Reward answers that are mathematically equal to the data's, by math-verify in a child process."""

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cfa_kernels import answer_text_span
from trainer.rewards.children import next_line

START_SECONDS = 120  # SymPy takes seconds to load, on a busy machine many
_CHILD = Path(__file__).with_name("child.py")


class MathReward:
    """Give 1 where math-verify finds a completion equal to the answer of its row, else 0.

    The answer is what a worked solution ends with (`#### 72`) or the column `answer` as it is, in LaTeX or plain. The
    child process is started anew when it dies or takes longer than `timeout` over a completion, which earns 0. An
    answer that math-verify cannot read earns 0 for every completion, so its group has no advantage; a warning names it.

    math-verify reads completions by its own rules, not by the run's `answer_format`, and has faults: it accepts what
    equals the answer without being computed (`\\boxed{36+36}` for 72), and finds nothing in `<answer>72</answer>`.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        """Check that math-verify is there, or raise `ImportError`; `timeout` is in seconds for each completion."""
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(
                "reward math_verify: math-verify is not installed; in the checkout: pip install '.[math]'"
            )
        self._timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._unreadable: set[str] = set()

    def __call__(self, *, completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
        """Compare B completions with their rows' answers, one after the other.

        Raises:
            OSError: the child cannot be started; the message has the last line that it said.
        """
        return [self._compared(gold, text) for gold, text in zip(answer, completions, strict=True)]

    def _compared(self, answer: str, completion: str) -> float:
        span = answer_text_span(answer)
        gold = answer.strip() if span is None else answer[slice(*span)]
        verdict = self._asked(json.dumps([gold, completion]).encode() + b"\n")
        if verdict is None and gold not in self._unreadable:
            self._unreadable.add(gold)
            warnings.warn(f"math_verify cannot read the answer {gold!r}: its problem is never solved", stacklevel=2)
        return float(verdict is True)

    def _asked(self, question: bytes) -> bool | None:
        """Ask the child; false where it dies or takes too long."""
        child = self._running()
        try:
            child.stdin.write(question)  # type: ignore[union-attr]
            reply = next_line(child, self._timeout)
        except BrokenPipeError:
            reply = b""
        if not reply:
            child.kill()
            child.communicate()
            self._child = None
        return json.loads(reply or b"false")

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the child, started if there is none or if it has died meanwhile."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        child = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(max(1, int(self._timeout / 2)))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C lets the trainer finish its step
        )  # fmt: skip
        if not next_line(child, START_SECONDS):
            child.kill()
            lines = child.communicate()[1].decode(errors="replace").strip().splitlines()
            raise OSError(f"reward math_verify: its process did not start: {lines[-1] if lines else 'it said nothing'}")
        self._child = child
        return child
