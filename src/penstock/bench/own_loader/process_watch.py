"""Read the kernel's figures of the loader's processes: bytes read, memory, and how busy their threads are.

This is all that can be known of a loader that torch did not make. One thread reads /proc now and then, and
spends at most a thousandth of the time on it.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

WATCH_THREAD: Final = "penstock-watch"
_LEAST_INTERVAL_S: Final = 0.1
_MOST_COST: Final = 0.001
"""The share of the time that watching may take."""
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - not a file that is written
_HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")


_own_reads: Counter[str] = Counter()
"""Reads by the measurement itself in this process, which are not the loader's."""


def read_proc(path: str) -> str:
    """A file of /proc; empty if its process or thread is gone."""
    with suppress(OSError):
        file = os.open(f"/proc/{path}", os.O_RDONLY)
        try:
            return read_open_proc(file)
        finally:
            os.close(file)
    return ""


def read_open_proc(file: int) -> str:
    """An open file of /proc, as it is now."""
    content = os.pread(file, 1 << 16, 0)
    _own_reads["syscr"] += 1
    _own_reads["rchar"] += len(content)
    return content.decode(errors="replace")


def read_io(process: int, *, without: Iterable[int | None] = ()) -> Counter[str]:
    """The kernel's figures of what a process has read, without the reads of some threads and of measuring."""
    own_reads = _own_reads.copy() if process == os.getpid() else Counter[str]()
    found = _parse_io(f"{process}/io")
    if found:
        found.subtract(own_reads)
        for thread in without:
            found.subtract(_parse_io(f"{process}/task/{thread}/io"))
    return found


def _parse_io(path: str) -> Counter[str]:
    pairs = (line.partition(": ") for line in read_proc(path).splitlines())
    return Counter({name: int(value) for name, _, value in pairs})


def find_descendants() -> list[int]:
    """The processes that this one has started, and theirs, without those that serve `multiprocessing`."""
    found: list[int] = []
    unseen = [(os.getpid(), False)]
    while unseen:
        pid, is_server = unseen.pop()
        for task in _tasks(pid):
            for child in map(int, read_proc(f"{pid}/task/{task}/children").split()):
                command = read_proc(f"{child}/cmdline").encode()
                # A process that a fork server has forked has the server's command line.
                is_helper = not is_server and any(helper in command for helper in _HELPERS)
                unseen.append((child, is_helper))
                if not is_helper:
                    found.append(child)
    return found


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    return []


class ProcessWatch:
    """Watches this process and those that it starts while its block runs.

    `waited_ns` returns how long the consumer has waited so far.
    """

    def __init__(self, waited_ns: Callable[[], int]) -> None:
        self.memory: dict[str, int] = dict.fromkeys(
            (
                "worker_rss_bytes",
                "workers_rss_bytes",
                "workers_shared_bytes",
                "shm_used_bytes",
                "shm_total_bytes",
            ),
            0,
        )
        self.num_workers = 0
        """The most processes that were there at two looks in turn: a helper that reads one sample is none."""
        self._waited_ns = waited_ns
        self._strangers = frozenset(find_descendants())
        self._busy_ns = self._observed_ns = 0.0
        self._io: dict[int, Counter[str]] = {}
        self._threads: dict[str, int] = {}
        self._present: frozenset[int] = frozenset()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCH_THREAD, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._look_at_memory([])  # a loader may be gone before the first look
        self._first_io = read_io(os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """End the watching thread."""
        self._stopped.set()
        self._thread.join(5.0)

    def read_so_far(self) -> Counter[str]:
        """The reads since the start: of the loader's processes if there are any, else of this one."""
        for pid in self._find_pids():
            self._io[pid] = read_io(pid) or self._io.get(pid, Counter())
        if self._io:
            return sum(self._io.values(), Counter())
        found = read_io(os.getpid())
        found.subtract(self._first_io)
        return found

    @property
    def busy_share(self) -> float:
        """For which part of the waits the busiest thread of the loader computed, or wanted to."""
        return min(self._busy_ns / self._observed_ns, 1.0) if self._observed_ns else 0.0

    def _find_pids(self) -> list[int]:
        return [pid for pid in find_descendants() if pid not in self._strangers]

    def _run(self) -> None:
        interval_s, looked_ns, waited_ns, cost_s = _LEAST_INTERVAL_S, time.monotonic_ns(), 0, 0.0
        while not self._stopped.wait(interval_s):
            now_ns, total_ns, pids = time.monotonic_ns(), self._waited_ns(), self._find_pids()
            self._look_at_threads(pids, now_ns - looked_ns, total_ns - waited_ns)
            looked_ns, waited_ns = now_ns, total_ns
            self._look_at_memory(pids)
            self.read_so_far()  # of a process that has ended the last figures count
            self.num_workers = max(self.num_workers, len(self._present.intersection(pids)))
            self._present = frozenset(pids)
            before_s, cost_s = cost_s, time.thread_time()
            interval_s = max(_LEAST_INTERVAL_S, (cost_s - before_s) / _MOST_COST)

    def _look_at_threads(self, pids: list[int], elapsed_ns: int, waited_ns: int) -> None:
        """Find the busiest thread since the last look, and count it if the consumer mostly waited."""
        own = {str(threading.main_thread().native_id), str(self._thread.native_id)}
        times = {}
        for pid in (os.getpid(), *pids):
            for task in _tasks(pid):
                if task not in own and (figures := read_proc(f"{pid}/task/{task}/schedstat").split()):
                    times[task] = int(figures[0]) + int(figures[1])  # computed, and waited for a core
        busiest_ns = max((times[task] - self._threads.get(task, times[task]) for task in times), default=0)
        self._threads = times
        if waited_ns > elapsed_ns // 2:
            self._busy_ns += waited_ns * min(busiest_ns / elapsed_ns, 1.0)
            self._observed_ns += waited_ns

    def _look_at_memory(self, pids: list[int]) -> None:
        rss, shared = [0], [0]
        for pid in pids:
            lines = (line.split() for line in read_proc(f"{pid}/status").splitlines())
            status = {words[0]: int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
            rss.append(status.get("VmRSS:", 0))
            shared.append(status.get("RssShmem:", 0))
        found = {
            "worker_rss_bytes": max(rss),
            "workers_rss_bytes": sum(rss),
            "workers_shared_bytes": sum(shared),
        }
        with suppress(OSError):
            room = os.statvfs(_SHARED_MEMORY)
            found["shm_total_bytes"] = room.f_blocks * room.f_frsize
            found["shm_used_bytes"] = (room.f_blocks - room.f_bfree) * room.f_frsize
        for name, value in found.items():
            self.memory[name] = max(self.memory[name], value)
