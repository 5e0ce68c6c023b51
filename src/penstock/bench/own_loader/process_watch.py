"""What the processes of a loader did while its consumer waited, by the kernel's own figures.

For loaders of any kind: threads, processes of their own, native code. A thread of this process reads /proc of
this process and its descendants now and then, and spends at most a thousandth of the time on it.
"""

import os
import threading
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.bench.own_loader.own_reads import OWN_THREADS, OwnReads

LEAST_INTERVAL_S: Final = 0.1
_MOST_COST: Final = 0.001
"""The share of the time that watching may take."""
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_NOT_LOADERS: Final = (OWN_THREADS, "MainThread")


@dataclass(slots=True)
class WaitingClock:
    """For how long the consumer has waited so far; set by its thread, read by another."""

    waited_ns: int = 0
    since_ns: int = 0
    """When the present wait began, or 0."""

    def total_ns(self) -> int:
        """All waits, the present one included."""
        since_ns = self.since_ns
        return self.waited_ns + (time.monotonic_ns() - since_ns if since_ns else 0)


@dataclass(slots=True)
class MemoryPeaks:
    """The most memory that was seen: of one worker, of all, shared, and the room for shared memory."""

    worker_rss_bytes: int = 0
    workers_rss_bytes: int = 0
    workers_shared_bytes: int = 0
    shm_used_bytes: int = 0
    shm_total_bytes: int = 0

    def document(self) -> dict[str, int]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class ProcessWatch:
    """Watches this process and its descendants from `start` to `stop`."""

    clock: WaitingClock
    reads: OwnReads = field(default_factory=OwnReads)
    strangers: AbstractSet[int] = frozenset()
    """Processes that were there before the loader."""
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    num_workers: int = 0
    """The most processes of the loader that were there at two looks in turn: not what reads one sample."""
    busy_ns: float = 0.0
    """Of `seen_ns` of waiting, for how long the busiest other thread computed, or waited for a core."""
    seen_ns: int = 0
    _io: dict[int, dict[str, int]] = field(default_factory=dict)
    _said: dict[int, dict[str, int]] = field(default_factory=dict)
    _first_io: dict[str, int] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)
    _seen: frozenset[int] = frozenset()
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._look_at_memory([])  # a loader may be over before the first look
        self._first_io = self.reads.io_of(os.getpid())
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5.0)
        self.look_at_io()

    def look_at_io(self) -> None:
        """Read what all processes have read so far; those that have ended keep their last figures."""
        self._look_at_io(self._find_pids())

    def _look_at_io(self, pids: list[int]) -> None:
        for pid in (os.getpid(), *pids):
            if found := self.reads.io_of(pid):
                self._io[pid] = found

    def hear(self, left: Mapping[str, Any]) -> None:
        """What a worker has left about itself; of one that goes on, the kernel knows more by now."""
        pid, before, found, own = left["pid"], left["io_before"], left["io"], left["own"]
        if not left["is_over"] and (now := self.reads.io_without(pid, left["messengers"])):
            found = {name: now[name] - value - own.get(name, 0) for name, value in before.items()}
        self._said[pid] = found

    def totals(self) -> dict[str, int]:
        """What was read since the start: by the workers if there are any, else by this process."""
        mine = self._io.get(os.getpid(), {})
        workers = [found for pid, found in {**self._io, **self._said}.items() if pid != os.getpid()]
        if workers:
            return {name: sum(one.get(name, 0) for one in workers) for name in mine}
        return {name: value - self._first_io.get(name, 0) for name, value in mine.items()}

    @property
    def busy_share(self) -> float | None:
        """How busy the busiest thread was while the consumer waited; None if it hardly did."""
        return min(self.busy_ns / self.seen_ns, 1.0) if self.seen_ns > 0 else None

    def _run(self) -> None:
        interval_s, looked_ns, waited_ns = LEAST_INTERVAL_S, time.monotonic_ns(), self.clock.total_ns()
        cost_s = 0.0
        while not self._stopped.wait(interval_s):
            began_ns = time.monotonic_ns()
            pids = self._find_pids()
            total_ns = self.clock.total_ns()
            self._look_at_threads(pids, began_ns - looked_ns, total_ns - waited_ns)
            looked_ns, waited_ns = began_ns, total_ns
            self._look_at_io(pids)
            self._look_at_memory(pids)
            self.num_workers = max(self.num_workers, len(self._seen.intersection(pids)))
            self._seen = frozenset(pids)
            before_s, cost_s = cost_s, time.thread_time()
            interval_s = max(LEAST_INTERVAL_S, (cost_s - before_s) / _MOST_COST)

    def _find_pids(self) -> list[int]:
        """The processes of the loader."""
        pids, helpers = find_descendants(self.reads)
        for pid in helpers:  # until it has its own name, it has that of the process that began it
            self._io.pop(pid, None)
        return [pid for pid in pids if pid not in self.strangers]

    def _look_at_threads(self, pids: list[int], elapsed_ns: int, waited_ns: int) -> None:
        own = {one.native_id for one in threading.enumerate() if one.name.startswith(_NOT_LOADERS)}
        times: dict[str, int] = {}
        for pid in (os.getpid(), *pids):
            for task in _tasks(pid):
                if pid == os.getpid() and int(task) in own:
                    continue
                if fields := self.reads.read(f"/proc/{pid}/task/{task}/schedstat").split():
                    times[task] = int(fields[0]) + int(fields[1])
        busiest_ns = max(
            (spent - self._threads[one] for one, spent in times.items() if one in self._threads), default=0
        )
        self._threads = times
        if waited_ns > elapsed_ns // 2:
            self.busy_ns += waited_ns * min(busiest_ns / elapsed_ns, 1.0)
            self.seen_ns += waited_ns

    def _look_at_memory(self, pids: list[int]) -> None:
        rss, shared = [], []
        for pid in pids:
            status = _read_status(self.reads.read(f"/proc/{pid}/status"))
            rss.append(status.get("VmRSS", 0))
            shared.append(status.get("RssShmem", 0))
        memory = self.memory
        memory.worker_rss_bytes = max(memory.worker_rss_bytes, *rss, 0)
        memory.workers_rss_bytes = max(memory.workers_rss_bytes, sum(rss))
        memory.workers_shared_bytes = max(memory.workers_shared_bytes, sum(shared))
        with suppress(OSError):
            found = os.statvfs(_SHARED_MEMORY)
            memory.shm_total_bytes = found.f_blocks * found.f_frsize
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            memory.shm_used_bytes = max(memory.shm_used_bytes, used)


def find_descendants(reads: OwnReads) -> tuple[list[int], list[int]]:
    """The processes that this one has started, and theirs; apart those that serve `multiprocessing`."""
    found: list[int] = []
    helpers: list[int] = []
    unseen = [(os.getpid(), False)]
    while unseen:
        pid, is_server = unseen.pop()
        for task in _tasks(pid):
            for child in map(int, reads.read(f"/proc/{pid}/task/{task}/children").split()):
                command = reads.read(f"/proc/{child}/cmdline")
                # What a fork server has forked goes by its name.
                is_helper = not is_server and any(helper in command for helper in _HELPERS)
                (helpers if is_helper else found).append(child)
                unseen.append((child, is_helper))
    return found, helpers


_HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


def _tasks(pid: int) -> list[str]:
    with suppress(OSError), os.scandir(f"/proc/{pid}/task") as tasks:
        return [task.name for task in tasks]
    return []


def _read_status(content: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in content.decode(errors="replace").splitlines():
        name, _, text = line.partition(":")
        if name in ("VmRSS", "RssShmem"):
            found[name] = int(text.split()[0]) * 1024
    return found
