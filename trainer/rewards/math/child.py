"""Compare answers by math-verify: a program of its own, since math-verify sets alarms and may hang or eat memory.

`argv`: seconds to start in, and seconds that a comparison may take, after which the program ends. Its first line says
that math-verify is loaded. Each line of stdin is a JSON pair, an answer of the data and a completion; it is answered by
true, false, or null where the answer cannot be read.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30
_DIE_WITH_PARENT = 1  # of prctl


def main() -> None:
    """Answer until nobody asks any more."""
    start, most = map(float, sys.argv[1:])
    faulthandler.dump_traceback_later(start, exit=True)  # a thread that does not need the interpreter
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    seconds, replies, nothing = max(1, int(most / 2)), os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.write(replies, b"loaded\n")
    for other in (1, 2):  # nobody reads what libraries say
        os.dup2(nothing, other)
    faulthandler.cancel_dump_traceback_later()
    for line in sys.stdin:
        answer, completion = json.loads(line)
        verdict = None
        faulthandler.dump_traceback_later(most, exit=True)
        if gold := parse(f"\\boxed{{{answer}}}", parsing_timeout=seconds):
            verdict = bool(verify(gold, parse(completion, parsing_timeout=seconds), timeout_seconds=seconds))
        faulthandler.cancel_dump_traceback_later()
        os.write(replies, json.dumps(verdict).encode() + b"\n")


if __name__ == "__main__":
    main()
