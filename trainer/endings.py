"""End a run between two steps when it is asked to by a signal."""

import os
import signal
import sys
from types import FrameType

_SHOW_CURSOR = "\x1b[?25h"


class Ended(BaseException):
    """A signal ended the program where nothing had to be kept."""


class Ending:
    """Request to end, by Ctrl-C, SIGTERM or SIGHUP; a context manager while which signals become one.

    Attributes:
        signal: the signal that asked for the end; None as long as none did.
        waits: whether the run looks at `signal` itself; if not, the first one raises `Ended`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.waits = False

    def __enter__(self) -> "Ending":
        """Take over the signals; a second Ctrl-C then ends the process at once."""
        self._before = {one: signal.signal(one, self._asked) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for one, handler in self._before.items():
            signal.signal(one, handler)

    @property
    def exit_code(self) -> int:
        """Return what the shell is told: 130 after Ctrl-C, as it expects, else 0."""
        return 130 if self.signal == signal.SIGINT else 0

    def _asked(self, number: int, _: FrameType | None) -> None:
        again, self.signal = self.signal, self.signal or signal.Signals(number)
        if again and number == signal.SIGINT:
            _say(f"{_SHOW_CURSOR if sys.stderr.isatty() else ''}ended at once")
            os._exit(130)
        if again:
            return
        if not self.waits:
            raise Ended("ended before the first step; nothing was written")
        _say(f"{self.signal.name}: ending after this step; Ctrl-C then ends at once")


def _say(text: str) -> None:
    """Write to stderr past Python's buffer, in which the signal may have come.

    Where the terminal is gone, as it is after most SIGHUPs, nobody is told anything any more.
    """
    try:
        os.write(2, f"\n{text}\n".encode())
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for one in [fd for fd in (1, 2) if os.path.sameopenfile(fd, 2)]:
            os.dup2(nowhere, one)
