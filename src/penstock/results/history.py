"""The history of a results folder: a line for each run that began, ended, was published or deleted.

    PARENT/.penstock/history.jsonl

Lines are appended and never changed, so a crash or power cut costs at most the line being written. Lines that
cannot be read are reported and skipped. A run is entered before its folder is made, and closed after its
record is: `run.json` is the truth about how it ended, and an end that cannot be entered is only logged.

    {"format": 1, "event": "ended", "run": "1a2b3c", "at": "2026-01-02T03:04:05.000000+00:00", ...}
"""

import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.results import provenance, run_folder
from penstock.results.run_record import RunRequest
from penstock.storage.files import durable, system_calls

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
"""Raised whenever a key is added, renamed or means something else."""
FOLDER: Final = ".penstock"
FILE: Final = "history.jsonl"
LONGEST_WAIT_S: Final = 10.0
"""For the lock: a longer holder is stopped, or died on another host. Lines are atomic without it."""

Entry = Mapping[str, Any]
_EVERY: Final = {"event": str, "run": str, "at": str}
_MOVED: Final = {**_EVERY, "folder": str, "batch": str}
_KEYS: Final[Mapping[str, Mapping[str, type]]] = {
    "began": {
        **_EVERY, "folder": str, "is_named": bool, "workload": str, "ranks": int, "command": list,
        "working_folder": str, "settings": dict, "process": dict,
    },
    "ended": {**_EVERY, "outcome": str, "why": str},
    "published": _MOVED,
    "deleted": _MOVED,
    # Version 0.2 moved removed runs to `.penstock/trash/BATCH/`, from where they could be restored.
    "removed": _MOVED,
    "restored": _MOVED,
}  # fmt: skip


def format_entry(entry: Entry) -> bytes:
    """Return the entry as one line."""
    return json.dumps({"format": FORMAT_VERSION, **entry}, separators=(",", ":")).encode() + b"\n"


def parse_entry(line: bytes) -> Entry:
    """Parse the entry of a line; `ValueError` names what is wrong with it."""
    document: Any = json.loads(line.decode())
    version = document.pop("format", None) if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, not {FORMAT_VERSION}")
    keys = _KEYS.get(document.get("event"))
    if keys is None:
        raise ValueError(f"unknown event {document.get('event')!r}")
    for key in sorted({*keys, *document}):
        if key not in keys or not isinstance(document.get(key), keys[key]):
            raise ValueError(f"key {key!r} is {'wrong' if key in keys else 'unknown'}")
    return document  # type: ignore[no-any-return]


def parse_lines(content: bytes, name: str) -> tuple[list[Entry], list[str]]:
    """Parse a file's content: its entries, and a sentence for each line that cannot be read."""
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
            what = f"is cut off after {len(line)} bytes" if is_torn else f"cannot be read: {error}"
            complaints.append(f"{name}: line {number} {what}; it is skipped")
    return entries, complaints


class HistoryFile:
    """The history of the runs below `parent`."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.path = parent / FOLDER / FILE

    def exists(self) -> bool:
        """Check whether anything was ever entered."""
        return self.path.is_file()

    def read(self) -> tuple[list[Entry], list[str]]:
        """Read all entries, and complaints about damaged lines; a missing file is an empty history."""
        with system_calls.translate_os_errors("Reading the history of runs", str(self.path)):
            try:
                content = self.path.read_bytes()
            except FileNotFoundError:
                content = b""
        return parse_lines(content, str(self.path))

    def begin(self, request: RunRequest, now: datetime, *, named: str = "") -> Entry:
        """Enter a run that starts `now`, in the folder `named` by the user or one with a generated name."""
        workload = request.workload.full_name

        def make_entry() -> Entry:
            used = {entry["run"] for entry in self.read()[0]}
            # Six digits are readable; after a few collisions more are used.
            candidates = (secrets.token_hex(num_bytes) for num_bytes in (3, 3, 3, 4, 8, 16))
            run_id = next(candidate for candidate in candidates if candidate not in used)
            return {
                "event": "began",
                "run": run_id,
                "at": now.isoformat(timespec="microseconds"),
                "folder": named or run_folder.run_folder_name(workload, now, run_id),
                "is_named": bool(named),
                "workload": workload,
                "ranks": request.ranks,
                "command": list(provenance.redact(request.command)),
                "working_folder": provenance.replace_surrogates(str(Path.cwd())),
                "settings": provenance.redact_settings(request.environment),
                "process": asdict(provenance.identify_this_process()),
            }

        return self._append(make_entry)

    def append(self, event: str, run: str, **values: str) -> None:
        """Enter what happened to a run now."""
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        self._append(lambda: {"event": event, "run": run, "at": at, **values})

    def end(self, run: str, outcome: str, why: str) -> None:
        """Enter how a run ended; if that fails, only log it."""
        try:
            self.append("ended", run, outcome=outcome, why=why)
        except StorageError as error:
            logger.warning("The end of run %s could not be entered: %s", run, error)

    def publish(self, old: Path, new: Path) -> None:
        """Enter that a run's folder `old`, if it was entered, has its final name `new`."""
        if not self.exists():
            return
        old_name, new_name = (path.relative_to(self.parent).as_posix() for path in (old, new))
        runs = [entry["run"] for entry in self.read()[0] if entry.get("folder") == old_name]
        if runs:
            self.append("published", runs[-1], folder=new_name, batch="")

    def _append(self, make_entry: Callable[[], Entry]) -> Entry:
        with system_calls.translate_os_errors("Writing the history of runs", str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(descriptor, self.path)
                entry = make_entry()
                # One write, so that the lines of other processes come before or after, never inside.
                size_bytes = os.fstat(descriptor).st_size
                ends_whole = size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
                left = memoryview((b"" if ends_whole else b"\n") + format_entry(entry))
                while left:
                    left = left[os.write(descriptor, left) :]
                durable.sync_open_file(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                for folder in (self.path.parent, self.parent):
                    durable.sync_folder(folder)
        return entry


def _lock(descriptor: int, path: Path) -> None:
    """Wait for other writers; continue without a lock where none can be had (see `_append`)."""
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
