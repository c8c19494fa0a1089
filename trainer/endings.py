"""Stop after the current step on SIGINT, SIGTERM or SIGHUP."""

import os
import signal
from types import FrameType


class Ended(BaseException):
    """A signal ended what it interrupted."""


class Ending:
    """Request to end; as a context manager it takes the signals over, and a second Ctrl-C then ends at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first that came
        self.waits = False  # whether the run looks at `signal` itself; if not, the first one raises `Ended`

    def __enter__(self) -> "Ending":
        # One that is ignored at the start stays so: nohup does that, and a shell that starts a script's command by `&`.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ours = [one for one in signals if signal.getsignal(one) != signal.SIG_IGN]
        self._before = {one: signal.signal(one, self._handle) for one in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        again, self.signal = self.signal, self.signal or signal.Signals(number)
        if again and number != signal.SIGINT:
            return
        when = " after this step" if self.waits else ""
        text = "ended at once" if again else f"{self.signal.name}: ending{when}; Ctrl-C then ends at once"
        cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides it
        for descriptor, said in ((1, "\n"), (2, f"\n{cursor}{text}\n")):
            try:
                os.write(descriptor, said.encode())  # past Python's buffer, in which the signal may have come
            except OSError:  # the terminal has closed, or Ctrl-C ended the other side of the pipe, too
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        if again:
            os._exit(130)
        if not self.waits:
            raise Ended("ended before a step; nothing was written, and what was there is unchanged")
