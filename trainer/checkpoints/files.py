"""Write files and folders whole: aside, on the disk, then under their name; see by a manifest what is damaged."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

MANIFEST = "manifest.json"
_FORMAT = 1


class DiskError(OSError):
    """A file could not be written; the message names it and the cause."""


class Damaged(ValueError):
    """A folder is not as it was written; the message names the file and what is wrong with it."""


@contextlib.contextmanager
def naming(path: Path, setting: str = "") -> Iterator[None]:
    """Within it what the disk refuses is a `DiskError` that names `path`, after the `setting` that gave it."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, SafetensorError) as problem:
        cause = problem.strerror if isinstance(problem, OSError) and problem.strerror else problem
        raise DiskError(f"{setting}{path} cannot be written: {cause}") from problem


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, whenever the machine stops."""
    aside = _aside(path)
    with naming(path):
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            sync(file.fileno())
        os.replace(aside, path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path, *, manifest: bool = False) -> Iterator[Path]:
    """Give a folder to write files into; it gets its name, in place of one that has it, once all is on the disk.

    With a `manifest` it also gets the size and SHA-256 of each file, for `require_whole`.
    """
    aside = _aside(folder)
    try:
        with naming(folder):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            if manifest:
                listed = {path.relative_to(aside).as_posix(): seal(path) for path in files}
                files.append(aside / MANIFEST)
                files[-1].write_text(json.dumps({"format": _FORMAT, "files": listed}, indent=1) + "\n", "utf-8")
            for path in files:
                with path.open("rb") as file:
                    sync(file.fileno())
            _sync_folder(aside)
            if folder.exists():
                old = _aside(folder.with_name(f"{folder.name}.old"))
                shutil.rmtree(old, ignore_errors=True)
                folder.rename(old)
            aside.rename(folder)
            _sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(_aside(folder.with_name(f"{folder.name}.old")), ignore_errors=True)


def require_whole(folder: Path) -> None:
    """Raise `Damaged` naming a file of `folder` that is not what its manifest says, or the manifest."""
    for name, said in _listed(folder / MANIFEST).items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != said["bytes"]:
                raise Damaged(f"{path}: has {found} bytes of {said['bytes']}")
            if seal(path) != said:
                raise Damaged(f"{path}: its SHA-256 is not that of the manifest")
        except OSError as problem:
            raise Damaged(f"{path}: cannot be read ({problem.strerror})") from problem


def _listed(manifest: Path) -> dict[str, dict[str, Any]]:
    """Read what a manifest says of each file."""
    try:
        said = json.loads(manifest.read_bytes())
        if said["format"] != _FORMAT or not all({"bytes", "sha256"} == set(file) for file in said["files"].values()):
            raise ValueError(f"its format is not {_FORMAT}")
        return said["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise Damaged(f"{manifest}: cannot be read ({problem})") from problem


def remove_leftovers(folder: Path) -> None:
    """Delete what a process that was killed while it wrote left in `folder`."""
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def sync(file: int) -> None:
    """Wait until what was written to an open file is on the disk."""
    os.fsync(file)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def seal(path: Path, size: int | None = None) -> dict[str, Any]:
    """Measure a file, or its first `size` bytes: how many there are, and their SHA-256."""
    digest, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while part := file.read(min(left, 1 << 20)):
            digest.update(part)
            left -= len(part)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
