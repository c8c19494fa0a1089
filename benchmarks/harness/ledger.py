"""Keep results in a file that grows by a line per piece of work, so that an interrupted run resumes."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import UNKNOWN, Source, same_conditions

Key = tuple[str | int, ...]


class Ledger:
    """Records by key in a JSONL file, each with its source.

    Only lines made by the same code under the same conditions are taken for done; the others are counted in `others`
    and left where they are. With `mixed` they count too, where there is no line of the same code, and `used` tells. A
    last line that was cut off while it was written is dropped.

    Args:
        path: the file; it need not exist.
        source: of what is added.
        mixed: take lines of other sources as well.
        also: files whose lines are read as if they stood in this one.

    Raises:
        ValueError: a line elsewhere is not a record; names file and line.
    """

    def __init__(self, path: Path, source: Source, *, mixed: bool = False, also: Sequence[Path] = ()) -> None:
        self.path, self.source = path, source
        self.others = 0
        self._records: dict[Key, tuple[Source, dict[str, Any]]] = {}
        self._used: dict[Key, Source] = {}
        for file in (*also, path):
            for key, made, value in _lines(file):
                same = same_conditions(made, source)
                self.others += not same
                known = self._records.get(key)
                if same or (mixed and not (known and same_conditions(known[0], source))):
                    self._records[key] = made, value

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def __getitem__(self, key: Key) -> dict[str, Any]:
        made, value = self._records[key]
        self._used[key] = made
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(self._records)

    @property
    def used(self) -> list[Source]:
        """The sources of the lines that were read or added since it was opened, one for each."""
        return list(self._used.values())

    def get(self, key: Key, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of `key`, from the file or from `work`, whose result is written before it is returned."""
        if key not in self._records:
            value = json.loads(json.dumps(work()))  # as it will be read back
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(_line(key, self.source, value))
                lines.flush()
                os.fsync(lines.fileno())
            self._records[key] = self.source, value
        return self[key]

    def write_used(self, path: Path) -> None:
        """Write the lines that were used, and no others, to a file of their own."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(_line(key, *self._records[key]) for key in self._used)
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _line(key: Key, made: Source, value: dict[str, Any]) -> str:
    return json.dumps({"key": list(key), "source": made, "value": value}) + "\n"


def _lines(path: Path) -> Iterator[tuple[Key, Source, dict[str, Any]]]:
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    for i, line in enumerate(whole.splitlines()):
        try:
            record = json.loads(line)
            yield tuple(record["key"]), record.get("source", UNKNOWN), record["value"]
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"{path}, line {i + 1}: is not a record: {problem!r}") from problem
    if whole != text:
        path.write_text(whole, encoding="utf-8")
