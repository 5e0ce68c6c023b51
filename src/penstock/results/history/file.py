"""The file of a history: lines are appended, durable once that returns; damage is named and read past.

    PARENT/.penstock/history.jsonl      one line for whatever happened to a run
    PARENT/.penstock/trash/BATCH/       folders that `penstock results rm` took away

Place in the flow: a run's record opens and closes here too, commands read it. Invariant: nothing that is in
the file is ever changed, so a kill or a power cut costs at most the line that was being written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from penstock.results.history.entries import Began, Entry, Moved, format_entry, parse_entry
from penstock.storage.files.durable import sync_folder, sync_open_file
from penstock.storage.files.system_calls import translate_os_errors

FOLDER: Final = ".penstock"
FILE: Final = "history.jsonl"
TRASH: Final = "trash"
LONGEST_WAIT_S: Final = 10.0
"""For the lock; whoever keeps it longer is stopped or dead on another host, and lines are whole anyway."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What could be read: entries in the order of writing, and a sentence for each line that could not."""

    entries: tuple[Entry, ...]
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

    def begin(self, entry_of: Callable[[str], Began]) -> Began:
        """Enter a run that begins, under an id that no run here has had; `entry_of` makes an id's entry."""
        with self._appending() as append:
            taken = {entry.run for entry in self.read().entries}
            entry = entry_of(_fresh_id(taken))
            append(entry)
        return entry

    def append(self, *entries: Entry) -> None:
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
            entry.run for entry in self.read().entries if isinstance(entry, Began) and entry.folder == was
        ]
        if runs:
            at = datetime.now(UTC).isoformat(timespec="microseconds")
            self.append(Moved(event="published", run=runs[-1], at=at, folder=now, batch=""))

    def read(self) -> Lines:
        """All entries; an absent file is an empty history."""
        with translate_os_errors("Reading the history of runs", str(self.path)):
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                content = b""
        return parse_lines(content, str(self.path))

    @contextmanager
    def _appending(self) -> Iterator[Callable[[Entry], None]]:
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


def parse_lines(content: bytes, name: str) -> Lines:
    """The entries in a file's content; `name` is for complaints."""
    entries: list[Entry] = []
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
    return Lines(entries=tuple(entries), complaints=tuple(complaints))


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
