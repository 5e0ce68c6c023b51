"""The history of a results folder: a line for each run that began, ended, or whose folder moved.

    PARENT/.penstock/history.jsonl      the lines, each durable once the call that appends it returns
    PARENT/.penstock/trash/BATCH/       folders that `penstock results rm` moved away

Lines are appended and never changed, so a crash or power cut costs at most the line being written. Lines that
cannot be read are reported and skipped. A run is entered before its folder is made, and closed after its
record is: `run.json` is the truth about how it ended, and an end that cannot be entered is only logged.
"""

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
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from penstock.errors import StorageError
from penstock.results import provenance, run_folder
from penstock.results.run_record import RunRequest
from penstock.storage.files import durable, system_calls

FORMAT_VERSION: Final = 1
"""Raised whenever a key is added, renamed or means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """A run is about to create its folder. `run` is its permanent id, six or more hexadecimal digits.

    `command` and `settings` are without secrets; `is_named` if the user chose the folder.
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
    process: provenance.ProcessMark


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """A run closed its record with this outcome."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    event: Literal["ended"] = "ended"
    run: str
    at: str
    outcome: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderMoved:
    """A folder got its final name, was moved to the trash, was restored, or was deleted for good.

    `folder` is its name below the results folder; `run` is the same for a run without an id.
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
    """Parse the entry of a line; `ValueError` says what is wrong with it."""
    document: Any = json.loads(line.decode())
    version = document.pop("format", None) if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, not {FORMAT_VERSION}")
    try:
        return _adapter().validate_python(document)
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
"""For the lock: a longer holder is stopped, or died on another host. Lines are atomic without it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLines:
    """The entries in the order of writing, and a sentence for each line that cannot be read."""

    entries: tuple[HistoryEntry, ...]
    complaints: tuple[str, ...]


class HistoryFile:
    """The history of the runs directly below `parent`."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.path = parent / FOLDER / FILE
        self.trash = parent / FOLDER / TRASH

    def exists(self) -> bool:
        """Whether anything was ever entered."""
        return self.path.is_file()

    def begin(self, make_entry: Callable[[str], RunBegan]) -> RunBegan:
        """Enter a new run under an unused id, for which `make_entry` makes the entry."""
        with self._appending() as append:
            used_ids = {entry.run for entry in self.read().entries}
            entry = make_entry(_fresh_id(used_ids))
            append(entry)
        return entry

    def append(self, *entries: HistoryEntry) -> None:
        """Append entries."""
        with self._appending() as append:
            for entry in entries:
                append(entry)

    def publish(self, old: Path, new: Path) -> None:
        """Enter that a run's folder `old`, if it was entered, has its final name `new`."""
        if not self.exists():
            return
        old_name, new_name = (path.relative_to(self.parent).as_posix() for path in (old, new))
        runs = [
            entry.run
            for entry in self.read().entries
            if isinstance(entry, RunBegan) and entry.folder == old_name
        ]
        if runs:
            at = datetime.now(UTC).isoformat(timespec="microseconds")
            self.append(FolderMoved(event="published", run=runs[-1], at=at, folder=new_name, batch=""))

    def read(self) -> HistoryLines:
        """Read all entries; a missing file is an empty history."""
        with system_calls.translate_os_errors("Reading the history of runs", str(self.path)):
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                content = b""
        return parse_lines(content, str(self.path))

    @contextmanager
    def _appending(self) -> Iterator[Callable[[HistoryEntry], None]]:
        with system_calls.translate_os_errors("Writing the history of runs", str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(descriptor, self.path)
                yield lambda entry: _write_line(descriptor, format_entry(entry))
                durable.sync_open_file(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                for folder in (self.path.parent, self.parent):
                    durable.sync_folder(folder)


def parse_lines(content: bytes, name: str) -> HistoryLines:
    """Parse a file's content; `name` is the file's in complaints."""
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
            what = f"is cut off after {len(line)} bytes" if is_torn else f"cannot be read: {error}"
            complaints.append(f"{name}: line {number} {what}; it is skipped")
    return HistoryLines(entries=tuple(entries), complaints=tuple(complaints))


def _fresh_id(used_ids: set[str]) -> str:
    """Six digits are readable; after a few collisions more are used."""
    for num_bytes in (3, 3, 3, 4, 8):
        candidate = secrets.token_hex(num_bytes)
        if candidate not in used_ids:
            return candidate
    return secrets.token_hex(16)


def _write_line(descriptor: int, line: bytes) -> None:
    """Append with one write, so that the lines of other processes come before or after, never inside."""
    size_bytes = os.fstat(descriptor).st_size
    ends_whole = size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
    left = memoryview(line if ends_whole else b"\n" + line)
    while left:
        left = left[os.write(descriptor, left) :]


def _lock(descriptor: int, path: Path) -> None:
    """Wait for other writers; continue without a lock where none can be had (see `_write_line`)."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            logger.warning("%s has been locked for %.0f s; writing without the lock", path, LONGEST_WAIT_S)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, error)
        return


class RunEntry:
    """One run's entries in the history."""

    def __init__(self, history: HistoryFile, began: RunBegan) -> None:
        self._history = history
        self._began = began

    @classmethod
    def begin(cls, history: HistoryFile, request: RunRequest, now: datetime, *, named: str = "") -> Self:
        """Enter a run that starts `now`, in the folder `named` by the user or one with a generated name."""
        workload = request.workload.full_name

        def entry(run_id: str) -> RunBegan:
            return RunBegan(
                run=run_id,
                at=_text(now),
                folder=named or run_folder.run_folder_name(workload, now, run_id),
                is_named=bool(named),
                workload=workload,
                ranks=request.ranks,
                command=provenance.redact(request.command),
                working_folder=provenance.replace_surrogates(str(Path.cwd())),
                settings=provenance.redact_settings(request.environment),
                process=provenance.identify_this_process(),
            )

        return cls(history, history.begin(entry))

    @classmethod
    def begin_in(cls, folder: Path, request: RunRequest, now: datetime, *, results: Path) -> Self | None:
        """The same for a folder below `results`; None if that is its parent and has no history."""
        history, place = HistoryFile(results.absolute()), folder.absolute()
        if not place.is_relative_to(history.parent) or (
            place.parent == history.parent and not history.exists()
        ):
            return None
        return cls.begin(history, request, now, named=place.relative_to(history.parent).as_posix())

    @property
    def folder_name(self) -> str:
        """The name of the run's folder."""
        return self._began.folder

    def end(self, outcome: str, why: str) -> None:
        """Enter how the run ended."""
        try:
            self._history.append(
                RunEnded(run=self._began.run, at=_text(datetime.now(UTC)), outcome=outcome, why=why)
            )
        except StorageError as error:
            logger.warning("The end of run %s could not be entered: %s", self._began.run, error)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Enter that the run failed if the block, which creates its folder, fails."""
        try:
            yield
        except StorageError as error:
            self.end("failed", f"{type(error).__name__}: {error}")
            raise


def _text(now: datetime) -> str:
    return now.isoformat(timespec="microseconds")
