"""The flush folder of one cache, where trainers, the daemon and `status` meet. Only here are its file names.

    orders/step-N.json   what is to become durable       trainers/, saving/   presence files of live processes
    due/step-N           likewise, by trainers' threads
    journal              what happened to it             progress.json        the current rate
    lock                 held by the daemon, names it    log                  the log of the daemon

They meet in files rather than over a socket, because each may be killed at any time and the files tell its
successor where to continue. An order appears as a whole or not at all, and stays until its step is durable or
superseded, or until a newer save of that step replaces it. The journal has a JSON line, fsynced when written,
for all that must be known after a kill. Invariant: only complete lines count; what a kill cut off at the end
did not happen and is done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.checkpoint.commit.catalog import parse_step, step_dirname
from penstock.checkpoint.commit.protocol import is_lease_expired, lease_text
from penstock.errors import DataDamaged
from penstock.storage.files.durable import sync_folder, sync_open_file, write_durably
from penstock.storage.process_id import ProcessId, current_process


class PresenceFiles:
    """Presence files of one kind, in a folder of their own.

    Each names its process, so that no one waits for a process that is gone.
    """

    def __init__(self, folder: Path, kind: str, *, owner: Callable[[], ProcessId] = current_process) -> None:
        self._folder = folder / kind
        self._owner = owner

    @contextmanager
    def present(self) -> Iterator[None]:
        """Keep a presence file of this process for the duration of the block."""
        path = self.put()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def put(self) -> Path:
        """Create a presence file of this process."""
        owner = self._owner()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{owner.host}-{owner.pid}-{secrets.token_hex(4)}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_bytes(lease_text(owner))
        unfinished.replace(path)
        return path

    def any_alive(self) -> bool:
        """Whether any of the processes is alive; files of dead ones are removed on the way."""
        names = _list_names(self._folder)
        return any(self._is_alive(self._folder / name) for name in names if not name.startswith("."))

    def _is_alive(self, path: Path) -> bool:
        try:
            age_s = time.time() - path.stat().st_mtime
            if not is_lease_expired(path.read_bytes(), age_s=age_s, observer=self._owner()):
                return True
            path.unlink()
        except FileNotFoundError:
            return False
        return False


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - called before every block, and several times a second
    except FileNotFoundError:
        return []


FOLDER: Final = ".penstock-flush"
"""In each cache, beside its steps: orders, journal, presence files, the lock and log of the daemon."""

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OrderedFile(_StrictModel):
    """One file of a step."""

    name: Text
    size_bytes: Count


class FlushOrder(_StrictModel):
    """The order to make this node's share of a step durable. Has all that a daemon needs to know."""

    format: Literal[1] = 1
    step: Count
    save_id: Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")]
    durable: Text
    """The URI of the durable level, with its options."""
    node: Count
    """The index of this cache in `nodes`."""
    nodes: Annotated[list[list[OrderedFile]], Field(min_length=1)]
    """By node: the files in its cache. Those of all nodes become durable together."""
    keep: Annotated[int, Field(ge=1)] | None
    """How many durable steps to keep."""
    bytes_per_s: Annotated[float, Field(gt=0)] | None
    threads: Annotated[int, Field(ge=1)]
    pause_while_saving: bool
    cores: list[Count]
    """The cores that no rank of this node uses; empty if all are in use."""
    given_s: float
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        """The name of the checkpoint, on both levels."""
        return step_dirname(self.step)

    @property
    def files(self) -> list[OrderedFile]:
        """The files of this node."""
        return self.nodes[self.node]

    @property
    def size_bytes(self) -> int:
        """The bytes of this node's share."""
        return sum(file.size_bytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every file of every node."""
        return {file.name: file.size_bytes for files in self.nodes for file in files}


def read_order(content: bytes, where: str) -> FlushOrder:
    """Parse an order; `DataDamaged` if it is not one."""
    try:
        return FlushOrder.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataDamaged(
            f"The flush order cannot be parsed: {place or 'text'}: {first['msg']}",
            where=where,
            fix="Remove the file; the step stays cached, and later steps are flushed.",
        ) from error


class FlushOrders:
    """The orders of one cache: trainers add them, the daemon removes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def put(self, order: FlushOrder) -> None:
        """Add an order, durably."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / f"{order.name}.json", order.model_dump_json().encode())

    def all(self) -> dict[int, FlushOrder | DataDamaged]:
        """All orders by step; for one that cannot be parsed, its error."""
        orders: dict[int, FlushOrder | DataDamaged] = {}
        for step in self.steps():
            path = self._folder / f"{step_dirname(step)}.json"
            try:
                orders[step] = read_order(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except DataDamaged as error:
                orders[step] = error
        return orders

    def steps(self) -> list[int]:
        """The steps with an order, ascending."""
        names = [name for name in _list_names(self._folder) if name.endswith(".json")]
        texts = [name.removeprefix("step-").removesuffix(".json") for name in names]
        return sorted(int(text) for text in texts if text.isdecimal())

    def remove(self, order: FlushOrder) -> None:
        """Remove an order, unless a newer save of its step has replaced it."""
        path = self._folder / f"{order.name}.json"
        try:
            if read_order(path.read_bytes(), str(path)).save_id != order.save_id:
                return
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(self._folder)


class DueSteps:
    """The steps that threads of a trainer are to make durable, which end with it: the next one goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "due"

    def put(self, step: int, save_id: str) -> None:
        """Note a save of a step, durably."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / step_dirname(step), save_id.encode())

    def all(self) -> dict[int, str]:
        """The save ID of each step."""
        saves = {}
        for name in _list_names(self._folder):
            step = parse_step(name)
            if step is not None:
                with suppress(FileNotFoundError):
                    saves[step] = (self._folder / name).read_text()
        return dict(sorted(saves.items()))

    def remove(self, step: int, save_id: str) -> None:
        """Remove the note of a save, unless a newer one of its step has replaced it."""
        path = self._folder / step_dirname(step)
        with suppress(FileNotFoundError):
            if path.read_text() == save_id:
                path.unlink()


LOG_TAIL_BYTES: Final = 4096


class DaemonProgress(_StrictModel):
    """What the daemon is doing, as it reported last."""

    at_s: float
    step: int | None
    copied_bytes: int
    """Of this node's share of the step, with files that were durable before."""
    moved_bytes: int
    """Since the daemon was started."""
    bytes_per_s: float
    is_paused: bool


class FlushFolder:
    """The flush folder of one cache."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.path = cache / FOLDER
        self.orders = FlushOrders(self.path)
        self.due = DueSteps(self.path)
        self.trainers = PresenceFiles(self.path, "trainers")
        self.saving = PresenceFiles(self.path, "saving")
        self.journal = self.path / "journal"
        self.log = self.path / "log"
        self._lock = self.path / "lock"
        self._progress_path = self.path / "progress.json"

    def daemon_is_running(self) -> bool:
        """Whether a process holds the lock."""
        try:
            with self._lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def daemon_pid(self) -> int | None:
        """The PID of the daemon, if one is running."""
        if not self.daemon_is_running():
            return None
        try:
            return int(json.loads(self._lock.read_bytes())["owner"]["pid"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextmanager
    def locked(self) -> Iterator[DaemonLock]:
        """Take the lock of the daemon; BlockingIOError if another process has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(lease_text(current_process()))
            file.flush()
            yield DaemonLock(file, self._lock)

    def write_progress(self, progress: DaemonProgress) -> None:
        """Report the progress to other processes; not worth an fsync."""
        unfinished = self._progress_path.with_name(".progress.json")
        unfinished.write_text(progress.model_dump_json())
        unfinished.replace(self._progress_path)

    def progress(self) -> DaemonProgress | None:
        """The progress that the daemon reported last."""
        try:
            return DaemonProgress.model_validate_json(self._progress_path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def log_tail(self) -> str:
        """The last lines of the daemon's log."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""


class DaemonLock:
    """The lock that a daemon holds."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path

    def is_valid(self) -> bool:
        """Whether the lock file is still there: a cache may be removed while its daemon runs."""
        try:
            facts = self._path.stat()
        except OSError:
            return False
        own = os.fstat(self._file.fileno())
        return (facts.st_dev, facts.st_ino) == (own.st_dev, own.st_ino)


NUM_KEPT: Final = 200
"""How many past outcomes stay when the journal is rewritten."""

EntryKind = Literal["begun", "copied", "marked", "failed", "durable", "superseded", "replaced"]


class JournalEntry(_StrictModel):
    """One event of one save of a step."""

    at_s: float
    what: EntryKind
    step: int
    save_id: str
    file: str = ""
    size_bytes: int = 0
    sum: Annotated[str, Field(pattern=r"\A([0-9a-f]{32})?\z")] = ""
    reason: str = ""
    """Of a failure; for a superseded step, by which others."""
    is_lasting: bool = False
    """Of a failure: it will not go away by itself, or has lasted for long. It is still retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """The state of one save of a step, as the journal tells it."""

    step: int
    copied: Mapping[str, JournalEntry] = field(default_factory=dict)
    """By file name: the files that are durable in the draft, with size and checksum."""
    is_marked: bool = False
    outcome: JournalEntry | None = None
    """Durable, superseded, or replaced by a newer save of the step."""
    failure: JournalEntry | None = None
    """The last failure, if nothing has succeeded since."""
    failing_since_s: float = 0.0
    num_failures: int = 0

    @property
    def copied_bytes(self) -> int:
        """The bytes of all durable files."""
        return sum(entry.size_bytes for entry in self.copied.values())


SaveStates = dict[tuple[int, str], SaveState]
"""By step and save ID."""


def replay(entries: Iterable[JournalEntry], before: SaveStates | None = None) -> SaveStates:
    """The states after these entries, the oldest first, and the states `before` them."""
    states = dict(before or {})
    for entry in entries:
        key = entry.step, entry.save_id
        states[key] = _after(states.get(key, SaveState(step=entry.step)), entry)
    return states


def _after(state: SaveState, entry: JournalEntry) -> SaveState:
    match entry.what:
        case "begun":
            return replace(state, is_marked=False, outcome=None)
        case "copied":
            copied = {**state.copied, entry.file: entry}
            return replace(state, copied=copied, failure=None, num_failures=0)
        case "marked":
            return replace(state, is_marked=True, failure=None, num_failures=0)
        case "failed":
            since_s = state.failing_since_s if state.failure else entry.at_s
            number = state.num_failures + 1
            return replace(state, failure=entry, failing_since_s=since_s, num_failures=number)
        case "durable" | "superseded" | "replaced":
            return replace(state, outcome=entry, failure=None, num_failures=0)


class Journal:
    """The journal of one cache, for the one process that may write it. Rewrites one that has become long."""

    def __init__(self, path: Path, *, longest_bytes: int = 1 << 20) -> None:
        content = path.read_bytes() if path.exists() else b""
        whole = _cut_last_line(content)
        entries = parse_entries(whole)
        self.states = replay(entries)
        """The states after all entries."""
        if len(content) > longest_bytes:
            kept = _still_needed(entries, self.states)
            write_durably(path, b"".join(_format_line(entry) for entry in kept))
        elif whole != content:
            # Else the next line would become part of an incomplete last one.
            os.truncate(path, len(whole))
        self._file = path.open("ab")

    def write(self, entry: JournalEntry) -> None:
        """Append an entry; on return it survives a power cut."""
        self._file.write(_format_line(entry))
        sync_open_file(self._file)
        self.states = replay([entry], self.states)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JournalReader:
    """Reads a growing journal, from any process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._read_bytes = 0
        self._states: SaveStates = {}

    def states(self) -> SaveStates:
        """The states after all complete lines."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._read_bytes:
                    self._inode, self._read_bytes, self._states = facts.st_ino, 0, {}
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return {}
        whole = _cut_last_line(new)
        self._read_bytes += len(whole)
        self._states = replay(parse_entries(whole), self._states)
        return self._states


def _cut_last_line(content: bytes) -> bytes:
    """Without the incomplete line at the end that a kill may have left."""
    return content[: content.rfind(b"\n") + 1]


def parse_entries(content: bytes) -> list[JournalEntry]:
    """The entries of a journal, without incomplete lines and those of other versions."""
    entries = []
    for text in content.splitlines():
        try:
            entries.append(JournalEntry.model_validate_json(text))
        except ValidationError:
            continue
    return entries


def _still_needed(entries: Iterable[JournalEntry], states: SaveStates) -> list[JournalEntry]:
    """All entries of saves that are not over, and the last outcomes of those that are."""
    over = {key for key, state in states.items() if state.outcome}
    outcomes = [state.outcome for state in states.values() if state.outcome][-NUM_KEPT:]
    return [*outcomes, *(entry for entry in entries if (entry.step, entry.save_id) not in over)]


def _format_line(entry: JournalEntry) -> bytes:
    return entry.model_dump_json(exclude_defaults=True).encode() + b"\n"
