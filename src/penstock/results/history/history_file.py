"""The history of a results folder: a line for each run that began, ended, or whose folder moved.

    PARENT/.penstock/history.jsonl      the lines, each durable once the call that appends it returns
    PARENT/.penstock/trash/BATCH/       folders that `penstock results rm` moved away

Lines are appended and never changed, so a crash or power cut costs at most the line being written. Lines that
cannot be read are reported and skipped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from penstock.results.provenance import ProcessMark
from penstock.storage.files.durable import sync_folder, sync_open_file
from penstock.storage.files.system_calls import translate_os_errors

FORMAT_VERSION: Final = 1
"""Raised whenever a key is added, renamed or means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """A run is about to make its folder. `run` is its id: six or more hexadecimal digits, for good.

    `command` and `settings` are without secrets; `is_named` where its user chose the folder.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["began"] = "began"
    run: str
    at: str
    folder: str
    is_named: bool
    workload: str
    ranks: int
    command: tuple[str, ...]
    working_folder: str
    settings: Mapping[str, str]
    process: ProcessMark


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """A run closed its record: its outcome there, and why."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["ended"] = "ended"
    run: str
    at: str
    outcome: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderMoved:
    """A folder was published under its last name, went into the trash, came back, or was deleted for good.

    `folder` is its name below the results folder, `run` the same if it has no id.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["published", "removed", "restored", "deleted"]
    run: str
    at: str
    folder: str
    batch: str


HistoryEntry = RunBegan | RunEnded | FolderMoved


def format_entry(entry: HistoryEntry) -> bytes:
    """The entry as one line."""
    return json.dumps({"format": FORMAT_VERSION, **asdict(entry)}, separators=(",", ":")).encode() + b"\n"


def parse_entry(line: bytes) -> HistoryEntry:
    """The entry of a line; `ValueError` says what is wrong with it."""
    found: Any = json.loads(line.decode())
    version = found.pop("format", None) if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, not {FORMAT_VERSION}")
    try:
        return _adapter().validate_python(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _adapter() -> TypeAdapter[HistoryEntry]:
    return TypeAdapter(Annotated[HistoryEntry, Field(discriminator="event")])


FOLDER: Final = ".penstock"
FILE: Final = "history.jsonl"
TRASH: Final = "trash"
LONGEST_WAIT_S: Final = 10.0
"""For the lock; whoever keeps it longer is stopped or dead on another host, and lines are whole anyway."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLines:
    """What could be read: entries in the order of writing, and a sentence for each line that could not."""

    entries: tuple[HistoryEntry, ...]
    complaints: tuple[str, ...]


class HistoryFile:
    """The history of the runs right below `parent`."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.path = parent / FOLDER / FILE
        self.trash = parent / FOLDER / TRASH

    def exists(self) -> bool:
        """Whether anything was ever entered here."""
        return self.path.is_file()

    def begin(self, entry_of: Callable[[str], RunBegan]) -> RunBegan:
        """Enter a run that begins, under an id that no run here has had; `entry_of` makes an id's entry."""
        with self._appending() as append:
            taken = {entry.run for entry in self.read().entries}
            entry = entry_of(_fresh_id(taken))
            append(entry)
        return entry

    def append(self, *entries: HistoryEntry) -> None:
        """Enter what happened."""
        with self._appending() as append:
            for entry in entries:
                append(entry)

    def publish(self, old: Path, new: Path) -> None:
        """Enter that the run in `old` has its last name, `new`, both below the parent, if it was entered."""
        if not self.exists():
            return
        was, now = (path.relative_to(self.parent).as_posix() for path in (old, new))
        runs = [
            entry.run for entry in self.read().entries if isinstance(entry, RunBegan) and entry.folder == was
        ]
        if runs:
            at = datetime.now(UTC).isoformat(timespec="microseconds")
            self.append(FolderMoved(event="published", run=runs[-1], at=at, folder=now, batch=""))

    def read(self) -> HistoryLines:
        """All entries; an absent file is an empty history."""
        with translate_os_errors("Reading the history of runs", str(self.path)):
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                content = b""
        return parse_lines(content, str(self.path))

    @contextmanager
    def _appending(self) -> Iterator[Callable[[HistoryEntry], None]]:
        with translate_os_errors("Writing the history of runs", str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(descriptor, self.path)
                yield lambda entry: _append(descriptor, format_entry(entry))
                sync_open_file(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                for folder in (self.path.parent, self.parent):
                    sync_folder(folder)


def parse_lines(content: bytes, name: str) -> HistoryLines:
    """The entries in a file's content; `name` is for complaints."""
    entries: list[HistoryEntry] = []
    complaints: list[str] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append(parse_entry(line))
        except (ValueError, RecursionError) as error:
            is_torn = number == len(lines)
            what = f"is torn after {len(line)} bytes" if is_torn else f"cannot be understood: {error}"
            complaints.append(f"{name}: line {number} {what}; it is passed over")
    return HistoryLines(entries=tuple(entries), complaints=tuple(complaints))


def _fresh_id(taken: set[str]) -> str:
    """Six digits read well; where chance is no longer on our side, more."""
    for num_bytes in (3, 3, 3, 4, 8):
        candidate = secrets.token_hex(num_bytes)
        if candidate not in taken:
            return candidate
    return secrets.token_hex(16)


def _append(descriptor: int, line: bytes) -> None:
    """One write a line, so that lines of others stand before or after it, never inside."""
    size_bytes = os.fstat(descriptor).st_size
    ends_whole = size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
    left = memoryview(line if ends_whole else b"\n" + line)
    while left:
        left = left[os.write(descriptor, left) :]


def _lock(descriptor: int, path: Path) -> None:
    """Wait for others that write. Where there are no locks, or somebody keeps one, go on: see `_append`."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            _log.warning("%s has been locked for %.0f s; writing all the same", path, LONGEST_WAIT_S)
        except OSError as error:
            _log.debug("%s cannot be locked: %s", path, error)
        return
