"""Run `python -m trainer.analyze`, `cfa-analyze` or `cfa-compare`; wrong flags wait for no import."""

import argparse
import shutil
import sys
from pathlib import Path

from ..extras import needed_by, program

DESCRIPTION = """Print tables of the credit of logged completions: how much masked spans matter, which contents do, how
concentrated weights are. RUN_OR_FILE is a folder that the training program wrote (log more with --log_completions) or a
file with one JSON object per completion. `compare RUN ...`, or `cfa-compare RUN ...`, compares."""
COMPARISON = """Print runs of the training program side by side: settings that differ, final held-out accuracy with its
interval, reward, tokens, time per step and by stage, with means of runs that differ in their seeds only."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; an error gives one line on stderr and exit code 1, or 2 for flags."""
    if argv is None:
        argv = ["compare"] * (Path(sys.argv[0]).name == "cfa-compare") + sys.argv[1:]
    compares = argv[:1] == ["compare"]
    prog = program("trainer.analyze" + " compare" * compares)
    parser = argparse.ArgumentParser(prog=prog, description=COMPARISON if compares else DESCRIPTION)
    if compares:
        parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that the training program wrote")
    else:
        parser.add_argument("source", type=Path, metavar="RUN_OR_FILE")
    options, width = parser.parse_args(argv[compares:]), shutil.get_terminal_size().columns
    try:
        with needed_by(prog, "trainer"):
            from ..report.runs import read_samples
            from .compare import comparison, shown
            from .tables import analyse
        if compares:
            print(shown(comparison(options.runs), width))
        else:
            for title, table in analyse([*read_samples(options.source)]).items():
                print(f"{title}\n{shown(table, width)}\n")
    except (ValueError, OSError) as problem:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
