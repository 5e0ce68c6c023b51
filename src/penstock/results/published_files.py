"""Write the files of a run's folder atomically: a reader never sees half a file, even after a crash.

The commit protocol (temporary file, fsync, rename) is the file storage's.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from penstock.storage.files import local_files, system_calls
from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import write_object


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
def publishing(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """Open a file that becomes `folder/name` when the block ends; if the block fails, nothing remains."""
    target, draft = folder / name, folder / f".{name}.{os.getpid()}"
    with system_calls.translate_os_errors("Writing", str(target)), ExitStack() as undo:
        folder.mkdir(parents=True, exist_ok=True)
        undo.callback(draft.unlink, missing_ok=True)
        with local_files.open_draft(draft) as file:
            yield file
        local_files.replace_durably(draft, target)
