"""Run `python -m trainer.analyze`, `cfa-analyze` or `cfa-compare`; wrong flags wait for no import."""

import argparse
import shutil
import sys
from pathlib import Path

from ..extras import needed_by, program


def main(argv: list[str] | None = None) -> int:
    """Run the program; an error gives one line on stderr and exit code 1, or 2 for flags."""
    if argv is None:
        argv = ["compare"] * (Path(sys.argv[0]).name == "cfa-compare") + sys.argv[1:]
    compares = argv[:1] == ["compare"]
    prog = program("trainer.analyze" + " compare" * compares)
    tables = "runs side by side" if compares else "tables of the credit of a run's logged completions"
    parser = argparse.ArgumentParser(prog=prog, description=f"Print {tables}, as docs/analysis.md describes.")
    parser.add_argument(
        "sources", type=Path, nargs="+" if compares else 1, metavar="RUN" if compares else "RUN_OR_FILE"
    )
    sources, width = parser.parse_args(argv[compares:]).sources, shutil.get_terminal_size().columns
    try:
        with needed_by(prog, "trainer"):
            from ..report.runs import read_samples
            from .tables import analyse, comparison
        if compares:
            print(comparison(sources).to_string(line_width=width))
        else:
            for title, table in analyse([*read_samples(sources[0])]).items():
                print(f"{title}\n{table.to_string(line_width=width, float_format='{:.4g}'.format)}\n")
    except (ValueError, OSError) as problem:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
