"""Record the source of a result, code, machine and command, and state it in tables.

Every line of a ledger carries its source; a document names those of the lines it was made of.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.environment import describe_environment
from benchmarks.harness.workloads import REPOSITORY

Source = dict[str, Any]
"""What made a line: `commit` and whether the tree was `dirty` (None where git cannot tell), `code`, a digest of all
that a result may depend on, `versions` of Python, torch, transformers and triton, `processor`, `threads`, `command`."""

UNKNOWN: Source = {"commit": "unknown"}
"""The source of a line that names none."""

_CODE = ("cfa_kernels", "trainer", "benchmarks")
_PACKAGES = ("python", "torch", "transformers", "triton")


def describe_source(command: str, commit: str | None = None) -> Source:
    """The source of what this process makes; `commit` is recorded where git cannot tell."""
    found = describe_environment(torch.device("cpu"), commit)
    return {
        "commit": found["commit"],
        "dirty": found["dirty"],
        "code": code_digest(),
        "versions": {name: found["versions"][name] for name in _PACKAGES},
        "processor": found["device"]["name"],
        "threads": found["device"]["threads"],
        "command": command,
    }


def code_digest() -> str:
    """A digest of every file of the library, the training program and the benchmarks, results left out.

    Commits that differ elsewhere share it, and two dirty trees of one commit do not.
    """
    digest, results = hashlib.sha256(), REPOSITORY / "benchmarks" / "results"
    for folder in _CODE:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and results not in path.parents:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(REPOSITORY)}\n{len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def same_conditions(one: Source, other: Source) -> bool:
    """Whether lines of both may be in one table without a remark: same code, versions, processor and threads."""
    return all(one.get(key) == other.get(key) for key in ("code", "versions", "processor", "threads"))


def counted(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Each different source once, with the number of its `lines`, most lines first."""
    distinct: list[dict[str, Any]] = []
    for one in sources:
        known = next((known for known in distinct if {**known, "lines": 0} == {**one, "lines": 0}), None)
        if known is None:
            distinct.append({**one, "lines": 1})
        else:
            known["lines"] += 1
    return sorted(distinct, key=lambda one: -int(one["lines"]))


def document_head(made: Source, used: Sequence[Source] = ()) -> dict[str, Any]:
    """The beginning of a document: its command and environment, and under `lines` the sources of a ledger's lines."""
    environment = describe_environment(torch.device("cpu"), made["commit"])
    return {"schema": 1, "command": made["command"], "environment": environment, "lines": counted(used)}


def made_by(document: Mapping[str, Any]) -> str:
    """The sentence part that opens a table: the command, and the tree of its lines, or how many came from each.

    Trees with uncommitted changes are marked; processors and versions of torch are named where they differ.
    """
    lines: list[dict[str, Any]] = document.get("lines") or [{**document["environment"], "lines": 1}]
    machines = [f"{one.get('processor')}, torch {one.get('versions', {}).get('torch')}" for one in lines]
    trees: dict[str, int] = {}
    for one, machine in zip(lines, machines, strict=True):
        tree = f"at commit {one['commit']}" + (" with uncommitted changes" if one.get("dirty") else "")
        tree += f" on {machine}" if len(set(machines)) > 1 else ""
        trees[tree] = trees.get(tree, 0) + one["lines"]
    command = f"Made by `{document['command']}`"
    if len(trees) == 1:
        return f"{command} {next(iter(trees))}"
    counts = ", ".join(f"{count} {tree}" for tree, count in trees.items())
    return f"{command} from {sum(trees.values())} pieces of work that **several trees** did: {counts}"
