"""Hold the project to its size: count lines of Python against budgets, and commit subjects against 72 characters.

A change that needs more lines raises the budget in the same commit, so that growth is a decision.
"""

import subprocess
import sys
from pathlib import Path

BUDGETS = {
    "cfa_kernels": 17_300,
    "trainer": 4_950,
    "trainer, its core": 3_880,
    "benchmarks": 7_190,
    "tests": 26_190,
}
"""Most lines of Python in each package; the core is what a training run without vLLM reads."""
SUBJECT = 72
SINCE = "65d6561905db"
"""Commit after which subjects are checked; earlier ones may be longer."""
ROOT = Path(__file__).parents[1]


def git(*words: str) -> list[str]:
    """Return the lines that git prints, none where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def lines(package: str) -> int:
    """Count the lines of the Python files of a package that git tracks."""
    folder, _, is_core = package.partition(", ")
    outside = (
        "trainer/report/",
        "trainer/analyze/",
        "trainer/embedded/",
        "trainer/rollouts/vllm.py",
        "trainer/one_page.py",
    )
    names = [name for name in git("ls-files", f"{folder}/*.py") if not (is_core and name.startswith(outside))]
    return sum(len((ROOT / name).read_text("utf-8").splitlines()) for name in names if (ROOT / name).exists())


def main() -> int:
    """Print every count; return 1 where one is above its budget or a subject is too long."""
    counts = {package: lines(package) for package in BUDGETS}
    for package, count in counts.items():
        over = f", {count - BUDGETS[package]} too many" if count > BUDGETS[package] else ""
        print(f"{package}: {count:,} lines of at most {BUDGETS[package]:,}{over}")
    subjects = git("log", "--no-merges", "--format=%h %s", f"{SINCE}..HEAD")
    long = [subject for subject in subjects if len(subject.partition(" ")[2]) > SUBJECT]
    for subject in long:
        print(f"subject over {SUBJECT} characters, its reasons belong into the body: {subject}")
    return int(bool(long) or any(counts[package] > budget for package, budget in BUDGETS.items()))


if __name__ == "__main__":
    sys.exit(main())
