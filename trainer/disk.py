"""Write files and folders whole: aside, on the disk, then under their name."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


class DiskError(OSError):
    """A file could not be written; the message names it and the cause."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a `DiskError` that names `path`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as problem:
        cause = problem.__context__ if isinstance(problem, RuntimeError) else problem  # torch.save raises another
        if not isinstance(cause, OSError | SafetensorError):
            raise
        raise DiskError(f"{path} cannot be written: {getattr(cause, 'strerror', None) or cause}") from problem


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, whenever the machine stops."""
    aside = path.with_name(f".{path.name}.partial")
    with naming(path):
        aside.write_text(text, encoding="utf-8")
        _sync(aside)
        os.replace(aside, path)
        _sync(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write files into; it gets its name, in place of one that has it, once all is on the disk."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    with naming(folder):
        aside.mkdir(parents=True)
        yield aside
        for path in [*aside.rglob("*"), aside]:
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
