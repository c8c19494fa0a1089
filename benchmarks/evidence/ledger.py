"""A file of results that grows by one line per piece of work, so that a run broken off goes on where it stopped."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Key = tuple[str | int, ...]


class Ledger:
    """Records by key in a JSONL file. A last line that was cut off while it was written is dropped.

    Raises:
        ValueError: a line elsewhere is not a record; names file and line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[Key, dict[str, Any]] = {}
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for i, line in enumerate(whole.splitlines()):
            try:
                record = json.loads(line)
                self._records[tuple(record["key"])] = record["value"]
            except (json.JSONDecodeError, TypeError, KeyError) as problem:
                raise ValueError(f"{path}, line {i + 1}: is not a record: {problem!r}") from problem
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return self._records[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._records)

    def get(self, key: Key, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of `key`, from the file or from `work`, whose result is written before it is returned."""
        if key not in self._records:
            value = json.loads(json.dumps(work()))  # as it will be read back
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": list(key), "value": value}) + "\n")
            self._records[key] = value
        return self._records[key]
