"""Files of a run's folder, each whole or absent: a reader never meets half of one, and a crash leaves none.

Place in the flow: below everything in this room that writes. The commit protocol itself is storage's own.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import write_object

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from penstock.storage.files.file_storage import FileStorage
    from penstock.storage.protocol import Sink


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Replace `folder/name` in one step; durable once this returns. Missing folders are made."""
    write_object(_storage(folder), name, [content])


def write_text(folder: Path, name: str, text: str) -> None:
    """The same for text."""
    write_file(folder, name, text.encode())


def write_json(folder: Path, name: str, document: Mapping[str, Any]) -> None:
    """The same for one JSON document, for people to read; what is no number in JSON is a defect."""
    write_text(folder, name, json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def publishing(folder: Path, name: str) -> Iterator[io.RawIOBase]:
    """A file to write to, which becomes `folder/name` when the block ends, or nothing if it fails."""
    sink = _storage(folder).create(name)
    with ExitStack() as undo:
        undo.callback(sink.abort)
        yield _SinkFile(sink)
        sink.finish()
        undo.pop_all()


def _storage(folder: Path) -> FileStorage:
    return open_local(folder)


class _SinkFile(io.RawIOBase):
    """A sink as the kind of file that other libraries write to."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, content: ReadableBuffer, /) -> int:
        view = memoryview(content).cast("B")
        if view.nbytes:
            self._sink.submit(view)
        return view.nbytes
