"""The flush folder of one cache, where trainers, the daemon and `status` meet. Only here are its file names.

    orders/step-N.json   what is to become durable       trainers/, saving/   presence files of live processes
    journal              what happened to it             progress.json        the current rate
    lock                 held by the daemon, names it    log                  the log of the daemon

They meet in files rather than over a socket, because each may be killed at any time and the files tell its
successor where to continue. Invariant: an order appears as a whole or not at all, and stays until its step is
durable or superseded, or until a newer save of that step replaces it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.checkpoint.commit.catalog import step_dirname
from penstock.checkpoint.commit.protocol import is_lease_expired, lease_text
from penstock.errors import DataDamaged
from penstock.storage.files.durable import sync_folder, write_durably
from penstock.storage.process_id import ProcessId, current_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO


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
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked before every block
        except FileNotFoundError:
            return False
        return any(self._lives(self._folder / name) for name in names if not name.startswith("."))

    def _lives(self, path: Path) -> bool:
        try:
            age_s = time.time() - path.stat().st_mtime
            if not is_lease_expired(path.read_bytes(), age_s=age_s, observer=self._owner()):
                return True
            path.unlink()
        except FileNotFoundError:
            return False
        return False


FOLDER: Final = ".penstock-flush"
"""In each cache, beside its steps: orders, journal, presence files, the lock and log of the daemon."""

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class _OrderModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OrderedFile(_OrderModel):
    """One file of a step."""

    name: Text
    size_bytes: Count


class FlushOrder(_OrderModel):
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
        found: dict[int, FlushOrder | DataDamaged] = {}
        for step in self.steps():
            path = self._folder / f"{step_dirname(step)}.json"
            try:
                found[step] = read_order(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except DataDamaged as error:
                found[step] = error
        return found

    def steps(self) -> list[int]:
        """The steps with an order, ascending."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked several times a second
        except FileNotFoundError:
            return []
        texts = [name.removeprefix("step-").removesuffix(".json") for name in names if name.endswith(".json")]
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


LOG_TAIL_BYTES: Final = 4096


class DaemonProgress(BaseModel):
    """What the daemon is doing, as it reported last."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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
        self.trainers = PresenceFiles(self.path, "trainers")
        self.saving = PresenceFiles(self.path, "saving")
        self.journal = self.path / "journal"
        self.log = self.path / "log"
        self._lock = self.path / "lock"
        self._progress = self.path / "progress.json"

    def exists(self) -> bool:
        """Whether anything was ever handed over here."""
        return self.path.is_dir()

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

    def write_progress(self, speed: DaemonProgress) -> None:
        """Report the progress to other processes; not worth an fsync."""
        unfinished = self._progress.with_name(".progress.json")
        unfinished.write_text(speed.model_dump_json())
        unfinished.replace(self._progress)

    def speed(self) -> DaemonProgress | None:
        """The progress that the daemon reported last."""
        try:
            return DaemonProgress.model_validate_json(self._progress.read_bytes())
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
