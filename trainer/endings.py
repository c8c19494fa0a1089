"""Stop after the current step on SIGINT, SIGTERM or SIGHUP; print to nowhere once nobody reads it."""

import contextlib
import errno
import functools
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO


class Ended(BaseException):
    """A signal ended the program before it had anything to keep."""


class Ending:
    """Request to end; as a context manager it takes the signals over, and a second Ctrl-C then ends at once.

    Attributes:
        signal: the signal that came first; None as long as none did.
        waits: whether the run looks at `signal` itself; if not, the first one raises `Ended`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.waits = False

    def __enter__(self) -> "Ending":
        # One that is ignored at the start stays so: nohup does that, and a shell that starts a script's command by `&`.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ours = [one for one in signals if signal.getsignal(one) != signal.SIG_IGN]
        self._before = {one: signal.signal(one, self._handle) for one in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    @property
    def exit_code(self) -> int:
        """Return the exit code: 130 after Ctrl-C, as shells expect, else 0."""
        return 130 if self.signal == signal.SIGINT else 0

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.signal = self.signal, self.signal or signal.Signals(number)
        if not again and not self.waits:
            raise Ended("ended before a step; nothing was written, and what was there is unchanged")
        if again and number != signal.SIGINT:
            return
        text = "ended at once" if again else f"{self.signal.name}: ending after this step; Ctrl-C then ends at once"
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, f"\n{cursor}{text}\n".encode())  # past Python's buffer, in which the signal may have come
        if again:
            os._exit(130)


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Continue in silence, inside, if a pipe is closed (`| head`) or the terminal is gone."""
    before: Any = sys.stdout, sys.stderr
    streams = [stream and _Stream(stream) for stream in before]  # there are none where a shell closed them
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in filter(None, streams):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Stream:
    # Ctrl-C ends `cfa-train | tee log` on both sides at once; the run still has a step to finish and to save.

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write, self.flush = (functools.partial(self._attempt, name) for name in ("write", "flush"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, method: str, *text: str) -> Any:
        try:
            return getattr(self._stream, method)(*text)
        except OSError as problem:
            if problem.errno not in (errno.EPIPE, errno.EIO):  # of a pipe and of a terminal
                raise
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            return getattr(self._stream, method)(*text)
