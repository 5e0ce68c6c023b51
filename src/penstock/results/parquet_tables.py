"""Parquet tables in a run's folder: published whole, with a header of JSON in their metadata.

While the run lasts, spools hold the rows; the first line of a spool is such a header, too.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StorageError
from penstock.results.published_files import publishing
from penstock.storage.files.local_files import (
    open_to_read,
    open_without_links,
    parse_json,
    sync_open_file,
)
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import MOST_BYTES

Header = TypeVar("Header")

WORDS: Final = pa.dictionary(pa.int32(), pa.string())
"""The type of a column with few distinct words."""
_METADATA: Final = b"penstock"
_MOST_UNPACKED: Final = 100
"""The largest ratio of size in memory to size on disk for tables of over 64 MiB; ours stay below 20."""


@contextmanager
def publishing_table(
    folder: Path, name: str, columns: Mapping[str, pa.DataType], header: Mapping[str, Any]
) -> Iterator[pq.ParquetWriter]:
    """Open a table that becomes `folder/name` when the block ends; if the block fails, nothing remains."""
    schema = pa.schema(list(columns.items()), metadata={_METADATA: json.dumps(header).encode()})
    with (
        translate_os_errors("Writing", str(folder / name)),
        publishing(folder / name) as (draft, _),
        draft.open("xb") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as table,
    ):
        yield table


def open_table(path: Path, what: str, version: int) -> tuple[pq.ParquetFile, dict[str, Any]]:
    """Open a table and read its header, whose `format` must be `version`.

    `what` names the table in errors.
    """
    try:
        # Arrow would wait for a pipe's writer.
        with open_to_read(path):
            file = pq.ParquetFile(path)
        header = dict(parse_json((file.schema_arrow.metadata or {}).get(_METADATA, b"{}")))
        groups = map(file.metadata.row_group, range(file.num_row_groups))
        # Columns without a fixed width raise ValueError; no table of ours has any.
        row_bits = sum(kind.bit_width for kind in file.schema_arrow.types)
        num_rows = sum(max(group.column(i).num_values for i in range(group.num_columns)) for group in groups)
        most_bytes = max(MOST_BYTES, _MOST_UNPACKED * path.stat().st_size)
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise StorageError(f"Cannot read the {what}: {error}", uri=str(path)) from error
    if num_rows * row_bits // 8 > most_bytes:
        raise StorageError(f"The {what} have too many rows for the file's size: {num_rows:,}", uri=str(path))
    if header.get("format") != version:
        raise StorageError(
            f"The {what} have format {header.get('format')}, not {version}",
            uri=str(path),
            fix="Read them with the version that wrote them.",
        )
    return file, header


class Spool(AbstractContextManager[Any]):
    """A file of rows while a run lasts. Rows survive the death of their writer, but not a power cut."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        with translate_os_errors("Writing", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "xb", buffering=0, opener=open_without_links)  # noqa: SIM115
        self.write(json.dumps(header).encode() + b"\n")

    def write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Make everything durable. May be called twice."""
        if not self._file.closed:
            sync_open_file(self._file)
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_spool_header(path: Path, make: Callable[..., Header], *, what: str, version: int) -> Header:
    """Return what `make` builds from a spool's header, whose `format` must be `version`.

    `what` names the spool in errors.
    """
    with translate_os_errors("Opening", str(path)), open_to_read(path) as file:
        line = file.readline(MOST_BYTES)
    try:
        header = parse_json(line)
        if header.pop("format") == version:
            return make(**header)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"Not a spool of {what}", uri=str(path), fix="Remove it.") from error
    raise StorageError(
        "This spool has a different format", uri=str(path), fix="Read it with the version that wrote it."
    )
