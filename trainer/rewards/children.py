"""Read what child processes say, line by line and not for ever."""

import os
import select
import subprocess
import time


def next_line(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Read the next line of a child's unbuffered stdout; nothing if it ends or has not said it after so long.

    The child says no more than a line before it is asked again.
    """
    assert child.stdout is not None
    pipe, line, end = child.stdout.fileno(), b"", time.monotonic() + seconds
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while not line.endswith(b"\n") and ready.poll(max(0.0, 1000 * (end - time.monotonic()))):
        read = os.read(pipe, 64)
        if not read:
            break
        line += read
    return line if line.endswith(b"\n") else b""
