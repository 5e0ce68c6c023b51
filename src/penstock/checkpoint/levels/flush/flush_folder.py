"""The flush folder of one cache: where trainers, the daemon and `status` meet. One module knows its names.

orders/step-N.json   what is to become durable          trainers/, saving/   notes of living processes
journal              what has become of it              progress.json        how fast it goes just now
lock                 held by the daemon, names it        log                  what the daemon says
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
from penstock.checkpoint.commit.protocol import is_dead, lease_text
from penstock.errors import DataDamaged
from penstock.storage.process_id import ProcessId, current_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO


class Notes:
    """The notes of one kind, in a folder of their own."""

    def __init__(self, folder: Path, kind: str, *, owner: Callable[[], ProcessId] = current_process) -> None:
        self._folder = folder / kind
        self._owner = owner

    @contextmanager
    def left(self) -> Iterator[None]:
        """A note of this process, for as long as the block runs."""
        path = self.put()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def put(self) -> Path:
        """Leave a note of this process."""
        owner = self._owner()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{owner.host}-{owner.pid}-{secrets.token_hex(4)}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_bytes(lease_text(owner))
        unfinished.replace(path)
        return path

    def any_living(self) -> bool:
        """Whether one of them lives; notes of the dead may go on the way."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked before every block
        except FileNotFoundError:
            return False
        return any(self._lives(self._folder / name) for name in names if not name.startswith("."))

    def _lives(self, path: Path) -> bool:
        try:
            age_s = time.time() - path.stat().st_mtime
            if not is_dead(path.read_bytes(), age_s=age_s, observer=self._owner()):
                return True
            path.unlink()
        except FileNotFoundError:
            return False
        return False


FOLDER: Final = ".penstock-flush"
"""In each cache, beside its steps: orders, journal, notes of trainers, the daemon's lock and log."""

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class _OrderModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OrderedFile(_OrderModel):
    """One file of a step, as its writer tells it."""

    name: Text
    size_bytes: Count


class Order(_OrderModel):
    """Make this node's share of a step durable, and the step with it."""

    format: Literal[1] = 1
    step: Count
    save_id: Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")]
    durable: Text
    """URI of the durable level, with its options."""
    node: Count
    """Which of `nodes` this cache is."""
    nodes: Annotated[list[list[OrderedFile]], Field(min_length=1)]
    """By node: the files that lie in its cache, and become durable with the others'."""
    keep: Annotated[int, Field(ge=1)] | None
    """How many durable steps stay."""
    bytes_per_s: Annotated[float, Field(gt=0)] | None
    threads: Annotated[int, Field(ge=1)]
    pause_while_saving: bool
    cores: list[Count]
    """Those that no rank of this node uses; all are in use where there are none."""
    given_s: float
    """When, by the clock on the wall."""

    @property
    def name(self) -> str:
        """What the checkpoint is called, on both levels."""
        return step_dirname(self.step)

    @property
    def files(self) -> list[OrderedFile]:
        """The share of this node."""
        return self.nodes[self.node]

    @property
    def size_bytes(self) -> int:
        """Of this node's share."""
        return sum(file.size_bytes for file in self.files)

    @property
    def sizes(self) -> dict[str, int]:
        """Every file of every node."""
        return {file.name: file.size_bytes for files in self.nodes for file in files}


def read_order(content: bytes, where: str) -> Order:
    """An order as it lies in a cache; `DataDamaged` if it is none."""
    try:
        return Order.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataDamaged(
            f"The order's {place or 'text'}: {first['msg']}",
            where=where,
            fix="Remove the file; the step stays cached, and the next one is flushed again.",
        ) from error


class OrderBook:
    """The orders of one cache. Trainers `put`, the daemon takes away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "orders"

    def put(self, order: Order) -> None:
        """Give an order, durably."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / f"{order.name}.json", order.model_dump_json().encode())

    def all(self) -> dict[int, Order | DataDamaged]:
        """By step; what cannot be read is told as its error."""
        found: dict[int, Order | DataDamaged] = {}
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
        """The steps that are ordered, ascending."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked several times a second
        except FileNotFoundError:
            return []
        texts = [name.removeprefix("step-").removesuffix(".json") for name in names if name.endswith(".json")]
        return sorted(int(text) for text in texts if text.isdecimal())

    def remove(self, order: Order) -> None:
        """Take an order away, unless a newer save of its step has replaced it."""
        path = self._folder / f"{order.name}.json"
        try:
            if read_order(path.read_bytes(), str(path)).save_id != order.save_id:
                return
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(self._folder)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file so that it is there whole and durably, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
