"""Compare answers by math-verify: a program of its own, since math-verify sets alarms and may hang or eat memory.

`argv` has the seconds after which math-verify itself gives up. Each line of stdin is a JSON pair, an answer of the data
and a completion; the line of stdout that answers it is true, false, or null where the answer cannot be read. The first
line says that math-verify is loaded.
"""

import ctypes
import json
import os
import resource
import signal
import sys

from math_verify import parse, verify

MEMORY_BYTES = 4 << 30
_DIE_WITH_PARENT = 1  # of prctl


def main() -> None:
    """Answer until nobody asks any more."""
    seconds, replies = int(sys.argv[1]), os.dup(1)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.write(replies, b"loaded\n")
    nothing = os.open(os.devnull, os.O_WRONLY)
    for other in (1, 2):  # nobody reads what libraries say
        os.dup2(nothing, other)
    for line in sys.stdin:
        answer, completion = json.loads(line)
        verdict = None
        if gold := parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds):
            verdict = bool(verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds))
        os.write(replies, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()
