"""Write results: a document as JSON, beside it tables as Markdown; pieces of work that an interrupted run takes up."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.environment import REPOSITORY, describe_environment

RESULTS = REPOSITORY / "benchmarks" / "results"
Document = dict[str, Any]


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole: a reader meanwhile, or after a kill, finds the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def document_head(command: Sequence[str], commit: str | None = None) -> Document:
    """The beginning of a document: its command and where it was made; `commit` is recorded, not what git says."""
    environment = describe_environment(torch.device("cpu"), commit)
    return {"schema": 1, "command": shlex.join(command), "environment": environment}


def made_by(document: Mapping[str, Any]) -> str:
    """The sentence part that opens a table: command and commit."""
    environment = document["environment"]
    dirty = " with uncommitted changes" if environment.get("dirty") else ""
    return f"Made by `{document['command']}` at commit {environment['commit']}{dirty}"


class Pieces:
    """Pieces of work in a folder, a file each, so that an interrupted run goes on where it stopped.

    Args:
        folder: of the files; it need not exist.
        settings: what the work depends on; together with the commit it must be that of the files that are there.

    Raises:
        ValueError: the files are of another commit or of other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = json.loads(json.dumps({"commit": head["environment"]["commit"], "settings": settings}))
        note = folder / "made.json"
        if note.exists() and (known := json.loads(note.read_text(encoding="utf-8"))) != own:
            raise ValueError(f"{folder}: holds pieces of {known}, not of {own}; name another --folder, or remove it")
        write_json(note, own)
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return self._path(name).exists()

    def _path(self, name: str) -> Path:
        return self._folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"

    def get(self, name: str, work: Callable[[], Any]) -> Any:
        """Read the piece of this name, or do the work and write it."""
        path = self._path(name)
        if not path.exists():
            write_json(path, work())
        return json.loads(path.read_text(encoding="utf-8"))


def write(document: Document, markdown: str, folder: Path, name: str) -> list[Path]:
    """`name`.json and `name`.md in `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    write_json(paths[0], document)
    paths[1].write_text(markdown, encoding="utf-8")
    return paths


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others figures."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"
