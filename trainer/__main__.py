"""`python -m trainer`, or `cfa-train`: help, wrong flags and missing files before slow imports."""

import os
import sys

from .extras import needed_by, program


def main(argv: list[str] | None = None) -> int:
    """Run the program; gives its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if os.getcwd() not in sys.path:  # an entry point omits it; a user's rewards and estimators may be there
        sys.path.append(os.getcwd())
    with needed_by(program("trainer"), "trainer"):
        from .cli import of_rank, print_help

        if print_help(argv):
            return 0
        flags = ["--help" if flag == "--help-all" else flag for flag in argv]  # tyro's, of every setting
        settings = of_rank(flags, prog=program("trainer"))
        from .run import main as run
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
