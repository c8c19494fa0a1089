"""Say what made a result: version, commit, date, command."""

import datetime
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cfa_kernels import __version__

CHECKOUT = Path(__file__).parents[1]


def find_commit() -> tuple[str | None, bool | None]:
    """Find the commit of this checkout, if it is one, and whether its files other than results differ from it."""
    if not (CHECKOUT / ".git").exists() or not shutil.which("git"):
        return None, None
    questions = ("rev-parse --short=12 HEAD", "status --porcelain -- . :!benchmarks/results")
    answers = [subprocess.run(["git", *q.split()], cwd=CHECKOUT, capture_output=True, text=True) for q in questions]
    return answers[0].stdout.strip() or None, bool(answers[1].stdout)


def made_by() -> str:
    """Give version, commit, date and command in a line."""
    commit, dirty = find_commit()
    source = f", commit {commit}{' with changes' if dirty else ''}" if commit else ""
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    return f"cfa_kernels {__version__}{source}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {command}"
