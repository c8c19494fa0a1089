"""`python -m trainer`, or `cfa-train`: help, wrong flags and missing files before slow imports."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any

from .extras import needed_by, program


def main(argv: list[str] | None = None) -> int:
    """Run the program; gives its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if os.getcwd() not in sys.path:  # an entry point omits it; a user's rewards and estimators may be there
        sys.path.append(os.getcwd())
    add_examples()
    with needed_by(program("trainer"), "trainer"):
        from .cli import parse_checked, print_help

        if print_help(argv):
            return 0
        flags = ["--help" if flag == "--help-all" else flag for flag in argv]  # tyro's, of every setting
        settings = parse_checked(flags, prog=program("trainer"))
        from .run import main as run
    return run(settings)


def add_examples() -> None:
    """Let `examples.code` and the like be imported where the program is installed, behind a user's own `examples`."""
    ours = importlib.util.find_spec(f"{__package__}.examples")  # none in a checkout, which they are next to
    if ours is None or ours.submodule_search_locations is None:
        return
    places = [*ours.submodule_search_locations]

    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) or ModuleSpec(name, None) if name == "examples" else None
        if spec is not None:
            spec.submodule_search_locations = [*(spec.submodule_search_locations or ()), *places]
        return spec

    # A user's package is imported when something of it is asked for, not before.
    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))


if __name__ == "__main__":
    sys.exit(main())
