"""From the caches to the durable level: each rank copies its files, all commit them as one checkpoint.

Runs beside training, on a thread of its own; the pace is capped, so that training keeps its share of the
network. Invariant: what is committed durably has the very manifest of the cached step, so its sums prove the
copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.place import begin
from penstock.cluster.collect import collect
from penstock.errors import UsageError
from penstock.storage.aligned import aligned_buffer
from penstock.storage.powers import for_large_files
from penstock.units import parse_rate

if TYPE_CHECKING:
    from penstock.checkpoint.commit.base import Committed
    from penstock.checkpoint.commit.place import Place
    from penstock.checkpoint.stored import Stored
    from penstock.checkpoint.tiers.cache import Cached
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage

BLOCK_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """Which checkpoints become durable, and how fast: `Flush(every=10, bandwidth="2GiB/s", threads=4)`.

    `bandwidth` is what one rank may write, as a rate or in bytes a second; None is no limit.
    """

    every: int = 1
    bandwidth: str | float | None = None
    threads: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.threads < 1:
            raise UsageError(f"Flush(every={self.every}, threads={self.threads})", fix="Both are 1 or more.")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise UsageError(f"Flush(bandwidth={self.bandwidth!r})", fix="Give a rate above 0, or None.")

    @property
    def bytes_per_s(self) -> float | None:
        """The cap as a number."""
        return parse_rate(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth


EACH: Final = Flush()
"""Every checkpoint becomes durable, as fast as it can."""


@dataclass(slots=True)
class Pace:
    """Lets bytes pass at a rate, whichever thread asks: each waits until those before it are paid for."""

    bytes_per_s: float | None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: Lock = field(default_factory=Lock)
    _free_at_s: float = 0.0

    def take(self, num_bytes: int) -> None:
        """Return when so many bytes may go."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now_s = self.clock()
            begins_s = max(self._free_at_s, now_s)
            self._free_at_s = begins_s + num_bytes / self.bytes_per_s
        if begins_s > now_s:
            self.sleep(begins_s - now_s)


def flush_step(
    cached: Cached,
    held: Stored,
    durable: Storage,
    comm: Comm,
    *,
    settings: Flush,
    timeout_s: float,
    pace: Pace | None = None,
) -> Committed:
    """Copy a cached step to the durable level and commit it there. Collective; it ends on all ranks alike."""
    measured = pace or Pace(settings.bytes_per_s)
    with ExitStack() as undo:
        place = begin(durable, cached.name, comm)
        undo.callback(place.abandon)
        names = [file.name for file in cached.shares[comm.rank].files]
        collect(
            comm,
            lambda: _copy_files(names, held, place, threads=settings.threads, pace=measured),
            awaiting=f"all ranks to copy their files of {cached.name}",
            timeout_s=timeout_s,
        )
        committed = place.commit(lambda: cached.seal)
        undo.pop_all()
    return committed


def _copy_files(names: Sequence[str], held: Stored, place: Place, *, threads: int, pace: Pace) -> None:
    source = for_large_files(held.storage)
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-flush") as crew:
        copies = [
            crew.submit(_copy_file, source, held.key(name), place.for_data, place.key(name), pace)
            for name in names
        ]
        for copy in copies:
            copy.result()


def _copy_file(source: Storage, from_key: str, target: Storage, to_key: str, pace: Pace) -> None:
    """One file, by two buffers in turn: one is read into while the other is written."""
    with closing(source.open(from_key)) as file, ExitStack() as undo:
        size_bytes = file.size_bytes
        sink = target.create(to_key, size_bytes)
        undo.callback(sink.abort)
        buffers = [(aligned_buffer(min(BLOCK_BYTES, max(size_bytes, 1))), Event()) for _ in range(2)]
        for _, free in buffers:
            free.set()
        for number, start in enumerate(range(0, size_bytes, BLOCK_BYTES)):
            buffer, free = buffers[number % 2]
            free.wait()
            free.clear()
            block = buffer[: min(BLOCK_BYTES, size_bytes - start)]
            file.read_into(start, block)
            pace.take(block.nbytes)
            sink.submit(block, free.set)
        sink.finish()
        undo.pop_all()
