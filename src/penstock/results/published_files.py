"""Write the files of a run's folder atomically: a reader never sees half a file, even after a crash.

The commit protocol (temporary file, fsync, rename) is the file storage's.
"""

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import Sink, write_object

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def write_file(folder: Path, name: str, content: bytes) -> None:
    """Replace `folder/name` atomically; it is durable when this returns. Creates missing folders."""
    write_object(open_local(folder), name, [content])


def write_text(folder: Path, name: str, text: str) -> None:
    """Write a string with `write_file`. Undecodable bytes, as in a file's name, are escaped."""
    write_file(folder, name, text.encode(errors="backslashreplace"))


def write_json(folder: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write an indented JSON document with `write_file`.

    NaN and infinity, which JSON lacks, raise `ValueError`.
    """
    write_text(folder, name, json.dumps(document, indent=2, allow_nan=False) + "\n")


@contextmanager
def publishing(folder: Path, name: str) -> Iterator[io.RawIOBase]:
    """Open a file that becomes `folder/name` when the block ends; if the block fails, nothing remains."""
    sink = open_local(folder).create(name)
    with ExitStack() as undo:
        undo.callback(sink.abort)
        yield _SinkFile(sink)
        sink.finish()
        undo.pop_all()


class _SinkFile(io.RawIOBase):
    """A sink as a file object, for libraries that write to one."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, content: "ReadableBuffer", /) -> int:
        view = memoryview(content).cast("B")
        if view.nbytes:
            self._sink.submit(view)
        return view.nbytes
