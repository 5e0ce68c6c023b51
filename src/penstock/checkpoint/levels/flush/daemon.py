"""The daemon itself: serves the orders of one cache, newest first, until nobody is left who could give more.

Between `folder`, where orders come from, and `job`, which does what one asks. Invariant: an order leaves the
cache only when its outcome is in the journal; what fails is tried again, at longer and longer intervals.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

import penstock
from penstock.checkpoint.commit.protocol import LEASE_S
from penstock.checkpoint.levels.flush.file_copy import BURST_S, Pace
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, Held, Speed
from penstock.checkpoint.levels.flush.flush_task import Job, in_order, pause_after
from penstock.checkpoint.levels.flush.journal import Journal, Line
from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, StorageError, Unavailable, UsageError
from penstock.storage.registry import open_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.checkpoint.levels.flush.flush_folder import Order
    from penstock.storage import Storage


NICEST = 19
LEAST_URGENT = 7


def free_cores(used: Iterable[Iterable[int]], num_cores: int) -> list[int]:
    """The cores that no rank may run on, from the cores that each may."""
    taken = {core for cores in used for core in cores}
    return [core for core in range(num_cores) if core not in taken]


def step_behind(cores: list[int]) -> None:
    """Give this process and its future threads the lowest priority, and `cores` alone if there are any."""
    os.setpriority(os.PRIO_PROCESS, 0, NICEST)
    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LEAST_URGENT)
    except (psutil.Error, OSError) as error:
        logger.info("The disks' turns cannot be ordered here: %s", error)
    if cores:
        keep_to(cores)


def keep_to(cores: list[int]) -> None:
    """Run on these cores alone, from now on."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.info("Cores %s cannot be had here: %s", cores, error)


POLL_S: Final = 0.1
LINGER_S: Final = 2.0
"""So long it stays when no trainer lives and nothing is left to do."""
PATIENCE_S: Final = 3600.0
"""So long it tries alone what fails, or waits for other nodes, when no trainer lives."""
TELL_AFTER_S: Final = 60.0
"""A failure that lasts so long is told to the trainer, though it is tried again."""
LOCK_ATTEMPTS: Final = 40
LOG_BYTES: Final = 4 << 20

logger = logging.getLogger(__name__)


def main(cache: str) -> None:
    """Be the daemon of this cache, unless there is one."""
    folder = FlushFolder(Path(cache))
    _log_to(folder)
    for _ in range(LOCK_ATTEMPTS):
        try:
            with folder.locked() as held:
                step_behind([])
                logger.info("Process %d flushes what is handed over in %s", os.getpid(), cache)
                Daemon(folder, held).run()
                logger.info("Process %d ends: nothing is left to do", os.getpid())
                return
        except BlockingIOError:
            # Who only asks whether there is a daemon holds the lock for a moment, too.
            time.sleep(0.05)
    logger.info("Process %d ends: another one flushes", os.getpid())


class Meter:
    """Lets bytes pass: not while a save is to be left alone, not faster than the cap; and counts them."""

    def __init__(self, folder: FlushFolder) -> None:
        self._folder = folder
        self._pace = Pace(None)
        self._pauses = False
        self._lock = threading.Lock()
        self.step: int | None = None
        self.copied_bytes = 0
        self.moved_bytes = 0
        self.is_paused = False

    def begin(self, order: Order) -> None:
        """What passes from now on belongs to this order."""
        if self._pace.bytes_per_s != order.bytes_per_s:
            self._pace = Pace(order.bytes_per_s, burst_s=BURST_S)
        self._pauses = order.pause_while_saving
        self.step, self.copied_bytes = order.step, 0

    def take(self, num_bytes: int) -> None:
        """Return when so many bytes may go."""
        while self._pauses and self._folder.saving.any_living():
            self.is_paused = True
            time.sleep(0.02)
        self.is_paused = False
        self._pace.take(num_bytes)
        with self._lock:
            self.copied_bytes += num_bytes
            self.moved_bytes += num_bytes


class Daemon:
    """Serves the orders in one cache's folder, which it holds."""

    def __init__(
        self,
        folder: FlushFolder,
        held: Held,
        *,
        open_storage: Callable[[str], Storage] = open_here,
        clock: Callable[[], float] = time.time,
        linger_s: float = LINGER_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._held = held
        self._linger_s = linger_s
        self._patience_s = patience_s
        self._open_storage = open_storage
        self._clock = clock
        self._journal = Journal(folder.journal)
        self._meter = Meter(folder)
        self._jobs: dict[tuple[int, str], Job] = {}
        self._busy_at_s = clock()
        self._succeeded_at_s = clock()
        self._unreadable: set[int] = set()
        self._said: Speed | None = None

    def run(self) -> None:
        """Serve until there is nothing to do and no trainer lives, or the cache is gone."""
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), name="penstock-flush-beat", daemon=True)
        beat.start()
        try:
            while self._held.is_valid():
                if self._serve_one():
                    continue
                if self._is_over():
                    return
                time.sleep(POLL_S)
        finally:
            ended.set()
            beat.join()
            self._journal.close()

    def _serve_one(self) -> bool:
        """Look at all orders, newest first, until something is done; whether anything was."""
        orders = self._folder.orders.all()
        for step in in_order(orders):
            order = orders[step]
            if isinstance(order, DataDamaged):
                self._warn_once(step, order)
                continue
            job = self._job_of(order)
            if job.not_before_s > self._clock():
                continue
            if self._advance(job):
                return True
        if orders:
            self._busy_at_s = self._clock()
        return False

    def _advance(self, job: Job) -> bool:
        """Whether the order is over."""
        order = job.order
        self._meter.begin(order)
        if order.cores:
            keep_to(order.cores)
        try:
            if not job.advance(self._meter.take, partial(self._has_newer_to_copy, order)):
                return False
            self._folder.orders.remove(order)
        except (PenstockError, OSError) as error:
            self._note_failure(job, error)
            return False
        finally:
            self._meter.step = None
        del self._jobs[order.step, order.save_id]
        self._succeeded_at_s = self._clock()
        return True

    def _has_newer_to_copy(self, order: Order) -> bool:
        """Whether a newer step has come that could be copied now."""
        jobs = {job.order.step: job for job in list(self._jobs.values())}
        now_s = self._clock()
        return any(
            step not in jobs or not (jobs[step].standing.is_marked or jobs[step].not_before_s > now_s)
            for step in self._folder.orders.steps()
            if step > order.step and step not in self._unreadable
        )

    def _note_failure(self, job: Job, error: Exception) -> None:
        standing, now_s = job.standing, self._clock()
        job.not_before_s = now_s + pause_after(standing.num_failures + 1)
        since_s = standing.failing_since_s if standing.failure else now_s
        is_lasting = _is_lasting(error) or now_s - since_s > TELL_AFTER_S
        logger.warning("%s: %s", job.order.name, error)
        # Journaled where it says something new: a durable level that is away for a day fills no disk.
        was = standing.failure
        if was is None or was.reason != str(error) or was.is_lasting != is_lasting:
            line = Line(
                at_s=now_s,
                what="failed",
                step=job.order.step,
                save_id=job.order.save_id,
                reason=str(error),
                is_lasting=is_lasting,
            )
            try:
                self._journal.write(line)
            except OSError as journal_error:
                logger.warning("The journal cannot be written: %s", journal_error)

    def _job_of(self, order: Order) -> Job:
        key = order.step, order.save_id
        if key not in self._jobs:
            # A job of another save of this step is forgotten: its order was replaced.
            self._jobs = {each: job for each, job in self._jobs.items() if each[0] != order.step}
            cache = self._open_storage(str(self._folder.cache))
            self._jobs[key] = Job(order, cache, self._open_storage, self._journal, clock=self._clock)
        return self._jobs[key]

    def _is_over(self) -> bool:
        now_s = self._clock()
        if self._folder.trainers.any_living():
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
        """Say how it goes, and show other nodes that this one lives."""
        renewed_s, speedometer = time.monotonic(), Speedometer()
        while not ended.wait(0.25):
            self._tell_speed(speedometer)
            if time.monotonic() - renewed_s > LEASE_S / 4:
                renewed_s = time.monotonic()
                for job in list(self._jobs.values()):
                    try:
                        job.renew()
                    except (PenstockError, OSError) as error:
                        logger.warning("%s cannot be shown to be wanted: %s", job.order.name, error)

    def _tell_speed(self, speedometer: Speedometer) -> None:
        meter = self._meter
        speed = Speed(
            at_s=self._clock(),
            step=meter.step,
            copied_bytes=meter.copied_bytes,
            moved_bytes=meter.moved_bytes,
            bytes_per_s=speedometer.rate(time.monotonic(), meter.moved_bytes),
            is_paused=meter.is_paused,
        )
        if self._said is not None and speed == self._said.model_copy(update={"at_s": speed.at_s}):
            return
        try:
            self._folder.tell_speed(speed)
            self._said = speed
        except OSError as error:
            logger.debug("Progress cannot be told: %s", error)


class Speedometer:
    """The rate of the last seconds, from readings of a counter."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._readings: list[tuple[float, int]] = []

    def rate(self, now_s: float, count: int) -> float:
        """How much a second, over the window up to this reading."""
        self._readings = [each for each in self._readings if now_s - each[0] <= self._window_s]
        self._readings.append((now_s, count))
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


def _is_lasting(error: Exception) -> bool:
    """Whether trying again will not help before somebody has done something."""
    if isinstance(error, ObjectNotFound | DataDamaged | UsageError):
        return True
    return isinstance(error, PenstockError) and not isinstance(error, StorageError)


def _log_to(folder: FlushFolder) -> None:
    """Write the log of this process into the cache."""
    folder.path.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(folder.log, maxBytes=LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


START_LIMIT_S: Final = 120.0

_PROGRAM: Final = """\
import os, sys
sys.path.append({above!r})
if os.fork():
    os._exit(0)
from penstock.checkpoint.levels.flush.daemon import main
main({cache!r})
"""
"""Forks while nothing is loaded yet, so that the daemon is nobody's child and no thread is lost."""


def start_daemon(folder: FlushFolder) -> None:
    """Start a daemon for this cache; it takes a moment until it holds the lock."""
    folder.path.mkdir(parents=True, exist_ok=True)
    above = Path(penstock.__file__).resolve().parent.parent
    program = _PROGRAM.format(above=str(above), cache=str(folder.cache))
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
                fix='Look into this log, or let the trainer flush: pc.Flush(by="trainer").',
            ) from error
