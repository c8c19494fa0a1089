"""`python -m trainer`, or `cfa-train`: help, wrong flags and missing files before slow imports."""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
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
    ours = Path(__file__).with_name("examples")
    if not ours.is_dir():  # in a checkout they are next to the trainer
        return

    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if name != "examples":
            return None
        others = (other.find_spec(name, None) for other in sys.meta_path if other is not finder)
        spec = next(filter(None, others), ModuleSpec(name, None))
        spec.submodule_search_locations = [*(spec.submodule_search_locations or ()), str(ours)]
        return spec

    # A user's package, installed editable perhaps, is imported when something of it is asked for, not before.
    sys.meta_path.insert(0, finder := SimpleNamespace(find_spec=find_spec))


if __name__ == "__main__":
    sys.exit(main())
