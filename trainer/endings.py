"""End a run between two steps when it is asked to by a signal, and not where nobody reads what it prints."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

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
        _lead_nowhere(2)


@contextlib.contextmanager
def even_unheard() -> Iterator[None]:
    """Print to nowhere, inside, once nobody reads it: where a pipe is closed (`| head`), or the terminal is gone."""
    before: Any = sys.stdout, sys.stderr
    patient = [stream and _Patient(stream) for stream in before]  # there are none where a shell closed them
    sys.stdout, sys.stderr = patient
    try:
        yield
    finally:
        for stream in filter(None, patient):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Patient:
    """Stream that leads nowhere once its reader is gone; in all else as the one that it is made of."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        return self._told(self._stream.write, text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._told(self._stream.flush)

    def _told(self, do: Callable[..., Any], *given: str) -> Any:
        try:
            return do(*given)
        except OSError as problem:
            if problem.errno not in (errno.EPIPE, errno.EIO):  # of a pipe and of a terminal
                raise
            _lead_nowhere(self._stream.fileno())
            return do(*given)


def _lead_nowhere(gone: int) -> None:
    """Have a file and those of stdout and stderr that are the same one take everything and keep nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for one in [gone, *(own for own in (1, 2) if os.path.sameopenfile(own, gone))]:
        os.dup2(nowhere, one)
    os.close(nowhere)
