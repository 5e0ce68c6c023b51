"""The flush folder of one cache: where trainers, the daemon and `status` meet. One module knows its names.

orders/step-N.json   what is to become durable          trainers/, saving/   notes of living processes
journal              what has become of it              progress.json        how fast it goes just now
lock                 held by the daemon, names it        log                  what the daemon says
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.checkpoint.commit.lease import lease_text
from penstock.checkpoint.tiers.daemon.notes import Notes
from penstock.checkpoint.tiers.daemon.orders import FOLDER, OrderBook
from penstock.storage.process_id import current_process

if TYPE_CHECKING:
    from typing import IO

LOG_TAIL_BYTES: Final = 4096


class Speed(BaseModel):
    """What the daemon is doing, as it last said."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    at_s: float
    step: int | None
    copied_bytes: int
    """Of this node's share of the step; files that were durable before included."""
    moved_bytes: int
    """Since the daemon was started."""
    bytes_per_s: float
    is_paused: bool


class FlushFolder:
    """The paths of one cache's flush folder, and what lies there."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.path = cache / FOLDER
        self.orders = OrderBook(self.path)
        self.trainers = Notes(self.path, "trainers")
        self.saving = Notes(self.path, "saving")
        self.journal = self.path / "journal"
        self.log = self.path / "log"
        self._lock = self.path / "lock"
        self._progress = self.path / "progress.json"

    def exists(self) -> bool:
        """Whether anything was ever handed over here."""
        return self.path.is_dir()

    def daemon_lives(self) -> bool:
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
        """The number of the daemon's process, where one lives."""
        if not self.daemon_lives():
            return None
        try:
            return int(json.loads(self._lock.read_bytes())["owner"]["pid"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextmanager
    def locked(self) -> Iterator[Held]:
        """Be the daemon of this cache; BlockingIOError where another process is."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(lease_text(current_process()))
            file.flush()
            yield Held(file, self._lock)

    def tell_speed(self, speed: Speed) -> None:
        """Let others see what goes on; not worth an fsync."""
        unfinished = self._progress.with_name(".progress.json")
        unfinished.write_text(speed.model_dump_json())
        unfinished.replace(self._progress)

    def speed(self) -> Speed | None:
        """What the daemon said last."""
        try:
            return Speed.model_validate_json(self._progress.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def log_tail(self) -> str:
        """The last lines of the daemon's log."""
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
        return ""


class Held:
    """The daemon's lock, as long as it is the one that others look at."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file = file
        self._path = path

    def is_valid(self) -> bool:
        """Whether the lock still lies where it was taken: a cache may be removed below its daemon."""
        try:
            facts = self._path.stat()
        except OSError:
            return False
        own = os.fstat(self._file.fileno())
        return (facts.st_dev, facts.st_ino) == (own.st_dev, own.st_ino)
