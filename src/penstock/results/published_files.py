"""Write files atomically, those of a run's folder and others, and read documents of runs.

A reader never sees half a file.

The commit protocol (temporary file, fsync, rename) is the file storage's.
"""

import glob
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.errors import AccessRefused, ObjectNotFound, StorageError, UsageError
from penstock.storage.files.file_storage import open_local
from penstock.storage.files.local_files import OF_SHELL, parse_json, read_document, replace_durably
from penstock.storage.process_id import pid_exists
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


def read_json(path: Path, *, formats: Collection[int] = (), has_nan: bool = False) -> dict[str, Any]:
    """Read a document of a run, which must have one of these formats, if any are given.

    Raises `ObjectNotFound` if it is missing, and `StorageError` if it cannot be read.
    """
    try:
        document = parse_json(read_document(path), has_nan=has_nan)
    except FileNotFoundError as error:
        raise ObjectNotFound(f"This folder has no {path.name}", uri=str(path)) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"Cannot read this run: {error}", uri=str(path)) from error
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(document, dict) or (formats and version not in formats):
        raise StorageError(
            f"This run has format {version}, not {max(formats, default=1)}",
            uri=str(path),
            fix="Read it with the version of Penstock that wrote it.",
        )
    return document


@contextmanager
def publishing(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a file that becomes `target` when the block ends, and the folder of that file to work in.

    If the block fails, nothing remains; what a killed process has left goes when `target` is written again.
    """
    # Of a device or a pipe, only its name would be replaced.
    if str(target).startswith(OF_SHELL) or (target.exists() and not target.is_file()):
        raise UsageError("The output must be a file", where=str(target), fix="Name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*"):
        owner = leftover.name.removeprefix(f".{target.name}.").partition(".")[0]
        if owner.isdecimal() and leftover.is_dir() and not pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)
    prefix = f".{target.name}.{os.getpid()}."
    with (
        TemporaryDirectory(prefix=prefix, dir=target.parent.absolute()) as name,
        _held_folder(name) as folder,
    ):
        draft = folder / "draft"
        yield draft, folder
        replace_durably(draft, target)


@contextmanager
def _held_folder(name: str) -> Iterator[Path]:
    """Yield a path to this user's folder that leads to it even if another user puts something in its place.

    Whoever may write to the folder around it may do that.
    """
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(held).st_uid != os.geteuid():
            raise AccessRefused("Another user has put a folder in the place of ours", uri=name)
        yield Path(f"/proc/{os.getpid()}/fd/{held}")
    finally:
        os.close(held)
