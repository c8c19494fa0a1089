"""`python -m trainer`, or `cfa-train`: help at once; `program` and its imports, which take seconds, for all else."""

import os
import sys

from .endings import ignore_broken_pipe
from .extras import needed_by, program
from .settings import print_help


@ignore_broken_pipe()
def main(argv: list[str] | None = None) -> int:
    """Run the program; gives its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if print_help(argv):
        return 0
    if os.getcwd() not in sys.path:  # an entry point leaves it out; rewards and estimators of one's own may be there
        sys.path.append(os.getcwd())
    with needed_by(program("trainer"), "trainer"):
        from .program import main as run
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
