"""Put runs side by side, a table and a page of their curves: `python -m trainer.compare RUN RUN ...`."""

import argparse
import sys
from pathlib import Path

from trainer.extras import needed_by

with needed_by("python -m trainer.compare", "trainer"):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from trainer.analyze.run_page import write_run_page
    from trainer.analyze.runs import comparison

DESCRIPTION = """Compare runs of the training program: final held-out accuracy with its standard error, reward, time per
step and by stage, tokens. Runs that differ in their seeds only are averaged as well. Writes a page with their curves
over each other and their completions."""


def main(argv: list[str] | None = None) -> int:
    """Run the program; an error gives one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m trainer.compare", description=DESCRIPTION)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that the training program wrote")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page to write; default: compare.html")
    options = parser.parse_args(argv)
    try:
        runs = write_run_page(options.out, options.runs, "Runs compared", _note)
    except (ValueError, OSError) as problem:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 1
    columns, rows = comparison(runs)
    table = Table(box=None, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    console.print(table)
    console.print(escape(str(options.out)), soft_wrap=True)
    return 0


def _note(said: str) -> None:
    print(f"note: {said}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
