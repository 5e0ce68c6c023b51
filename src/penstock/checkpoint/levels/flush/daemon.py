"""The flush daemon of a node: executes the orders of one cache, newest first, until no trainer is left.

Between `flush_folder`, where orders come from, and `flush_task`, which executes one. It runs with the lowest
priority, on cores that training does not use. Invariant: an order leaves the cache only when its outcome is
in the journal; what fails is retried at growing intervals; what ends the trainer does not reach the daemon.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

import psutil

import penstock
from penstock.checkpoint.commit.protocol import LEASE_S
from penstock.checkpoint.levels.flush import flush_folder
from penstock.checkpoint.levels.flush.file_copy import BURST_S, RateLimiter
from penstock.checkpoint.levels.flush.flush_task import FlushTask, retry_delay
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, StorageError, Unavailable, UsageError
from penstock.storage import Storage
from penstock.storage.uri import open_here

NICEST = 19
LEAST_URGENT = 7


def free_cores(used: Iterable[Iterable[int]], num_cores: int) -> list[int]:
    """The cores that no rank may use, from those that each rank may."""
    taken = {core for cores in used for core in cores}
    return [core for core in range(num_cores) if core not in taken]


def lower_priority(cores: list[int]) -> None:
    """Give this process and its future threads the lowest priority, and only `cores` if there are any."""
    os.setpriority(os.PRIO_PROCESS, 0, NICEST)
    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LEAST_URGENT)
    except (psutil.Error, OSError) as error:
        logger.info("The I/O priority cannot be set here: %s", error)
    if cores:
        pin_to_cores(cores)


def pin_to_cores(cores: list[int]) -> None:
    """Run only on these cores from now on."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.info("The affinity to cores %s cannot be set here: %s", cores, error)


POLL_S: Final = 0.1
LINGER_S: Final = 2.0
"""How long it stays after the last trainer has ended and nothing is left to do."""
PATIENCE_S: Final = 3600.0
"""How long it retries failures or waits for other nodes after the last trainer has ended."""
REPORT_AFTER_S: Final = 60.0
"""A failure that lasts this long is reported to the trainer; it is still retried."""
LOCK_ATTEMPTS: Final = 40
LOG_BYTES: Final = 4 << 20

logger = logging.getLogger(__name__)


def main(cache: str) -> None:
    """Run the daemon of this cache, unless it has one."""
    folder = flush_folder.FlushFolder(Path(cache))
    _log_to(folder)
    for _ in range(LOCK_ATTEMPTS):
        try:
            with folder.locked() as lock:
                lower_priority([])
                logger.info("Process %d executes the flush orders in %s", os.getpid(), cache)
                Daemon(folder, lock).run()
                logger.info("Process %d ends: nothing is left to do", os.getpid())
                return
        except BlockingIOError:
            # A process that only checks for a daemon holds the lock for a moment, too.
            time.sleep(0.05)
    logger.info("Process %d ends: another daemon is running", os.getpid())


class CopyThrottle:
    """Limits and counts the bytes that are copied: none during a save if it pauses, else up to the rate."""

    def __init__(self, folder: flush_folder.FlushFolder) -> None:
        self._folder = folder
        self._pace = RateLimiter(None)
        self._pauses = False
        self._lock = threading.Lock()
        self.step: int | None = None
        self.copied_bytes = 0
        self.moved_bytes = 0
        self.is_paused = False

    def begin(self, order: flush_folder.FlushOrder) -> None:
        """Count what passes from now on for this order."""
        if self._pace.bytes_per_s != order.bytes_per_s:
            self._pace = RateLimiter(order.bytes_per_s, burst_s=BURST_S)
        self._pauses = order.pause_while_saving
        self.step, self.copied_bytes = order.step, 0

    def take(self, num_bytes: int) -> None:
        """Return when `num_bytes` more may pass."""
        while self._pauses and self._folder.saving.any_alive():
            self.is_paused = True
            time.sleep(0.02)
        self.is_paused = False
        self._pace.take(num_bytes)
        with self._lock:
            self.copied_bytes += num_bytes
            self.moved_bytes += num_bytes


class Daemon:
    """Executes the orders of one cache, whose lock it holds."""

    def __init__(
        self,
        folder: flush_folder.FlushFolder,
        lock: flush_folder.DaemonLock,
        *,
        open_storage: Callable[[str], Storage] = open_here,
        clock: Callable[[], float] = time.time,
        linger_s: float = LINGER_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._linger_s = linger_s
        self._patience_s = patience_s
        self._open_storage = open_storage
        self._clock = clock
        self._journal = flush_folder.Journal(folder.journal)
        self._meter = CopyThrottle(folder)
        self._tasks: dict[tuple[int, str], FlushTask] = {}
        self._busy_at_s = clock()
        self._succeeded_at_s = clock()
        self._unreadable: set[int] = set()
        self._last_reported: flush_folder.DaemonProgress | None = None

    def run(self) -> None:
        """Run until nothing is left to do and no trainer is alive, or the cache is gone."""
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), name="penstock-flush-beat", daemon=True)
        beat.start()
        try:
            while self._lock.is_valid():
                if self._execute_one():
                    continue
                if self._is_over():
                    return
                time.sleep(POLL_S)
        finally:
            ended.set()
            beat.join()
            self._journal.close()

    def _execute_one(self) -> bool:
        """Advance orders, newest first, until one is finished; returns whether one was."""
        orders = self._folder.orders.all()
        # A restart needs the newest step, and once durable, it may make older ones superfluous.
        for step in sorted(orders, reverse=True):
            order = orders[step]
            if isinstance(order, DataDamaged):
                self._warn_once(step, order)
                continue
            task = self._find_task(order)
            if task.not_before_s > self._clock():
                continue
            if self._advance(task):
                return True
        if orders:
            self._busy_at_s = self._clock()
        return False

    def _advance(self, task: FlushTask) -> bool:
        """Advance one order; returns whether it is over."""
        order = task.order
        self._meter.begin(order)
        if order.cores:
            pin_to_cores(order.cores)
        try:
            if not task.advance(self._meter.take, partial(self._has_newer_to_copy, order)):
                return False
            self._folder.orders.remove(order)
        except (PenstockError, OSError) as error:
            self._note_failure(task, error)
            return False
        finally:
            self._meter.step = None
        del self._tasks[order.step, order.save_id]
        self._succeeded_at_s = self._clock()
        return True

    def _has_newer_to_copy(self, order: flush_folder.FlushOrder) -> bool:
        """Whether a newer step has arrived that could be copied now."""
        tasks = {task.order.step: task for task in list(self._tasks.values())}
        now_s = self._clock()
        return any(
            step not in tasks or not (tasks[step].state.is_marked or tasks[step].not_before_s > now_s)
            for step in self._folder.orders.steps()
            if step > order.step and step not in self._unreadable
        )

    def _note_failure(self, task: FlushTask, error: Exception) -> None:
        state, now_s = task.state, self._clock()
        task.not_before_s = now_s + retry_delay(state.num_failures + 1)
        since_s = state.failing_since_s if state.failure else now_s
        is_lasting = _is_lasting(error) or now_s - since_s > REPORT_AFTER_S
        logger.warning("%s: %s", task.order.name, error)
        # Only what is new is journaled: a durable level that is down for a day must not fill the disk.
        last = state.failure
        if last is None or last.reason != str(error) or last.is_lasting != is_lasting:
            entry = flush_folder.JournalEntry(
                at_s=now_s,
                what="failed",
                step=task.order.step,
                save_id=task.order.save_id,
                reason=str(error),
                is_lasting=is_lasting,
            )
            try:
                self._journal.write(entry)
            except OSError as journal_error:
                logger.warning("The journal cannot be written: %s", journal_error)

    def _find_task(self, order: flush_folder.FlushOrder) -> FlushTask:
        key = order.step, order.save_id
        if key not in self._tasks or self._tasks[key].order != order:
            # The task of an older save of this step, or of other nodes, is dropped: its order was replaced.
            self._tasks = {save: task for save, task in self._tasks.items() if save[0] != order.step}
            cache = self._open_storage(str(self._folder.cache))
            self._tasks[key] = FlushTask(order, cache, self._open_storage, self._journal, clock=self._clock)
        return self._tasks[key]

    def _is_over(self) -> bool:
        now_s = self._clock()
        if self._folder.trainers.any_alive():
            self._busy_at_s = self._succeeded_at_s = now_s
            return False
        if self._folder.orders.steps():
            return now_s - self._succeeded_at_s > self._patience_s
        return now_s - self._busy_at_s > self._linger_s

    def _warn_once(self, step: int, error: DataDamaged) -> None:
        if step not in self._unreadable:
            self._unreadable.add(step)
            logger.warning("%s", error)

    def _beat(self, ended: threading.Event) -> None:
        """Report progress, and renew leases for other nodes to see."""
        renewed_s, rate_meter = time.monotonic(), RateMeter()
        while not ended.wait(0.25):
            self._report_progress(rate_meter)
            if time.monotonic() - renewed_s > LEASE_S / 4:
                renewed_s = time.monotonic()
                for task in list(self._tasks.values()):
                    try:
                        task.renew()
                    except (PenstockError, OSError) as error:
                        logger.warning("The lease of %s cannot be renewed: %s", task.order.name, error)

    def _report_progress(self, rate_meter: RateMeter) -> None:
        meter = self._meter
        progress = flush_folder.DaemonProgress(
            at_s=self._clock(),
            step=meter.step,
            copied_bytes=meter.copied_bytes,
            moved_bytes=meter.moved_bytes,
            bytes_per_s=rate_meter.rate(time.monotonic(), meter.moved_bytes),
            is_paused=meter.is_paused,
        )
        last = self._last_reported
        if last is not None and progress == last.model_copy(update={"at_s": progress.at_s}):
            return
        try:
            self._folder.write_progress(progress)
            self._last_reported = progress
        except OSError as error:
            logger.debug("The progress cannot be written: %s", error)


class RateMeter:
    """The rate over the last seconds, from readings of a counter."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._readings: list[tuple[float, int]] = []

    def rate(self, now_s: float, count: int) -> float:
        """The rate per second over the window that ends with this reading."""
        self._readings = [reading for reading in self._readings if now_s - reading[0] <= self._window_s]
        self._readings.append((now_s, count))
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def _is_lasting(error: Exception) -> bool:
    """Whether retrying is futile until someone fixes the cause."""
    if isinstance(error, ObjectNotFound | DataDamaged | UsageError):
        return True
    return isinstance(error, PenstockError) and not isinstance(error, StorageError)


def _log_to(folder: flush_folder.FlushFolder) -> None:
    """Log to the flush folder."""
    folder.path.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(folder.log, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


START_LIMIT_S: Final = 120.0

_PROGRAM: Final = """\
import os, sys
sys.path.append({packages!r})
if os.fork():
    os._exit(0)
from penstock.checkpoint.levels.flush.daemon import main
main({cache!r})
"""
"""Forks before anything is loaded: a fork copies only the thread that calls it, so locks that other threads
hold would stay locked in the daemon. The parent exits at once, so that init adopts the daemon: it is not a
child of the trainer, whose launcher may wait for, or kill, all of its children."""


def start_daemon(folder: flush_folder.FlushFolder) -> None:
    """Start a daemon for this cache; it takes a moment until it holds the lock.

    In a session of its own and without a parent, so that no signal to the job or its terminal reaches it.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    packages = Path(penstock.__file__).resolve().parent.parent
    program = _PROGRAM.format(packages=str(packages), cache=str(folder.cache))
    with folder.log.open("ab") as log:
        try:
            subprocess.run(
                [sys.executable, "-P", "-c", program],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                timeout=START_LIMIT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(
                f"The flush daemon could not be started: {error}",
                where=str(folder.log),
                fix='See its log, or let the trainer flush: pc.Flush(by="trainer").',
            ) from error
