"""Write logged completions as parquet, for tools that read tables."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
from pyarrow import parquet

_ROWS = 1024


def write_parquet(source: Path, path: Path) -> None:
    """Write the rows of a file with a JSON object a line as parquet, whole or not at all; nothing where it has none.

    A column has the type that holds all its values; what a row does not have is null.

    Raises:
        ValueError: a line is not JSON, or two rows hold values of a column that no type has both of.
        OSError: a file cannot be read or written.
    """
    try:
        _write(source, path)
    except (pyarrow.ArrowException, OverflowError) as problem:
        raise ValueError(f"{source}: {problem}") from problem


def _write(source: Path, path: Path) -> None:
    kinds = [pyarrow.schema(list(pyarrow.array(rows).type)) for rows in _chunks(source)]
    if not kinds:
        return
    schema = pyarrow.unify_schemas(kinds, promote_options="permissive")
    aside = path.with_name(f".{path.name}.partial")
    with parquet.ParquetWriter(aside, schema) as writer:
        for rows in _chunks(source):
            found = pyarrow.array(rows, pyarrow.struct(list(schema)))
            writer.write_table(pyarrow.Table.from_struct_array(found))
    aside.replace(path)


def _chunks(source: Path) -> Iterator[list[dict]]:
    with source.open(encoding="utf-8") as lines:
        while rows := [json.loads(line) for line in itertools.islice(lines, _ROWS)]:
            yield rows
