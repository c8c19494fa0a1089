"""Say what made a result: version, commit, date, command."""

import datetime
import shlex
import subprocess
import sys
from pathlib import Path

from cfa_kernels import __version__

CHECKOUT = Path(__file__).parents[1]


def find_commit(repository: Path = CHECKOUT) -> tuple[str | None, bool | None]:
    """Find the commit of a checkout and whether its files differ from it, but for results; None where git cannot tell.

    A checkout that is only somewhere inside another repository has no commit of its own.
    """

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    top, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "--short=12", "HEAD")
    if top is None or commit is None or Path(top).resolve() != repository.resolve():
        return None, None
    return commit, bool(git("status", "--porcelain", "--", ".", ":!benchmarks/results"))


def made_by() -> str:
    """Give version, commit, date and command in a line."""
    commit, dirty = find_commit()
    source = f", commit {commit}{' with changes' if dirty else ''}" if commit else ""
    command = shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])
    return f"cfa_kernels {__version__}{source}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: {command}"
