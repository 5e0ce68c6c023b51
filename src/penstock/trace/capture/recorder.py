"""Records a process's events: traced threads only append to memory, a background thread does the rest.

    with penstock.trace.span("evaluate", step=12): ...
    @penstock.trace.traced(cat="compute")
    for batch in penstock.trace.steps(loader, "train"): ...

These spans are traced if `PENSTOCK_TRACE` names a folder, or into the folder given to `tracing_to`; otherwise
they cost one lookup. A span never changes what it wraps, and exceptions pass through.

Recording takes no lock: each thread has its own queue and count; the count's memory survives the process.
Four times a second, the background thread writes the queues as a segment of the trace. A forked child begins
its own trace. Invariant: each event is in the trace, or the count shows that it is missing.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from multiprocessing import util as multiprocessing_ends
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from penstock.cluster.launcher_env import detect_rank
from penstock.environment import TRACE, TRACE_RANK, Environment, process_environment
from penstock.errors import PenstockError, UsageError
from penstock.storage.capabilities import SpanValue
from penstock.trace.capture.trace_writer import (
    COUNTED_THREADS,
    EventKind,
    LineFormatter,
    RecordedEvent,
    TraceFileWriter,
    span_kind,
)

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.25
"""The time that events stay in memory. A killed process loses at most the events of one interval, which the
count still includes.
"""
BATCH_EVENTS: Final = 20_000
MOST_WAITING: Final = 2_000_000
"""The most events kept in memory while they cannot be written; further events are dropped, and counted."""

Given = ParamSpec("Given")
Result = TypeVar("Result")
Item = TypeVar("Item")
Value = int | float | str | bool

clock_ns = time.monotonic_ns


@dataclass(slots=True)
class SharedCount:
    """The last of the counts, which all threads beyond `COUNTED_THREADS` share."""

    counts: memoryview
    lock: threading.Lock

    def __setitem__(self, place: int, recorded: int) -> None:
        with self.lock:
            self.counts[place] += 1


@dataclass(slots=True)
class ThreadQueue:
    """One thread's events on their way to the trace, and the place of the thread's count."""

    thread: int
    place: int
    counts: memoryview | SharedCount
    recorded: int = 0
    waiting: deque[RecordedEvent] = field(default_factory=deque)


def get_recorder(folder: str, place: str = "") -> TraceRecorder:
    """Return the process's only recorder for a folder; `place` is its rank and world size, such as `3/8`."""
    return _create_recorder(str(Path(folder).absolute()), place)


def recorder_of(environment: Environment) -> TraceRecorder | None:
    """Return the recorder of the folder in `PENSTOCK_TRACE`, with this process's rank; None if unset."""
    if TRACE not in environment:
        return None
    return get_recorder(environment[TRACE], environment.get(TRACE_RANK) or _find_place(environment))


def _find_place(environment: Environment) -> str:
    # A trace must not end the program, whatever the launcher's variables hold.
    with suppress(UsageError):
        if place := detect_rank(environment):
            return f"{place.rank}/{place.size}"
    return ""


@cache
def _create_recorder(folder: str, place: str) -> TraceRecorder:
    return TraceRecorder(Path(folder), place)


class TraceRecorder:
    """Records one process's events into a folder, from any thread; creates nothing before the first event."""

    def __init__(self, folder: Path, place: str = "") -> None:
        self.folder = folder
        self._place = place
        self._begin()
        os.register_at_fork(after_in_child=self._after_fork)

    def _begin(self) -> None:
        self._local = threading.local()
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._flushing = threading.Lock()
        self._queues: list[ThreadQueue] = []
        self._segments: TraceFileWriter | None = None
        self._lines = LineFormatter(socket.gethostname(), os.getpid(), time.time_ns() - clock_ns())
        self._stop = threading.Event()
        self._writer: threading.Thread | None = None
        self._num_lost = 0
        self._unwritten = b""

    def record(  # noqa: PLR0917 - names would cost a third of a microsecond
        self,
        kind: EventKind,
        began_ns: int,
        path: str | None = None,
        offset: int | None = None,
        count: int | None = None,
        ret: int | None = None,
        args: Mapping[str, Any] | None = None,
        ended_ns: int = 0,
    ) -> None:
        """Record an event that ends now, or at `ended_ns`. This is the hot path: about a microsecond."""
        ended_ns = ended_ns or clock_ns()
        # No lock: a deque appends atomically, and every thread has its own queue and its own count.
        try:
            queue: ThreadQueue = self._local.queue
        except AttributeError:
            queue = self._new_queue()
        queue.waiting.append((kind, began_ns, ended_ns, path, offset, count, ret, args))
        queue.recorded += 1
        queue.counts[queue.place] = queue.recorded

    def record_span(
        self, name: str, cat: str, began_ns: int, ended_ns: int, args: Mapping[str, SpanValue]
    ) -> None:
        """Record what this thread did between two readings of `clock_ns`."""
        self.record(span_kind(name, cat), began_ns, args=args, ended_ns=ended_ns)

    def trace(
        self, kind: EventKind, path: str, call: Callable[[], Result], *, ret: int | None = None
    ) -> Result:
        """Make the call, record it as an event if it succeeds, and return its result."""
        began_ns = clock_ns()
        result = call()
        self.record(kind, began_ns, path, ret=ret)
        return result

    def flush(self) -> None:
        """Write the events recorded so far to the trace. A failed write is tried again at the next call."""
        with self._flushing:
            if self._segments is None:
                return
            lines = self._waiting_lines()
            if not lines:
                return
            try:
                self._segments.append(lines)
            except PenstockError as error:
                num_events = lines.count(b'"ph":1')
                if num_events <= MOST_WAITING:
                    self._unwritten = lines
                    return
                self._num_lost += num_events
                self._lines.num_events -= num_events
                logger.warning("%d events are not in the trace: %s", num_events, error)

    def close(self) -> None:
        """Write the remaining events and close the trace; later events begin another. May be called twice."""
        self._stop.set()
        # The thread ends first, because two writers would mix up the order of segments.
        if self._writer is not None:
            self._writer.join()
        self.flush()
        with self._flushing:
            segments = self._segments
            if segments is None:
                return
            complete = not (self._num_lost or self._unwritten)
            if complete:
                try:
                    segments.append(self._lines.ending(clock_ns()))
                except PenstockError as error:
                    logger.warning("The trace has no ending: %s", error)
                    complete = False
            else:
                logger.warning("Not all events are in the trace %s", segments.path)
            segments.close(complete=complete)
            self._begin()

    def _new_queue(self) -> ThreadQueue:
        with self._lock:
            if self._segments is None:
                self._start()
            assert self._segments is not None
            place = min(len(self._queues), COUNTED_THREADS - 1)
            counts = self._segments.counts
            own = counts if place < COUNTED_THREADS - 1 else SharedCount(counts, self._counting)
            queue = ThreadQueue(threading.get_native_id(), place, own)
            self._queues.append(queue)
        self._local.queue = queue
        return queue

    def _start(self) -> None:
        """Create the files and the thread, at the process's first event."""
        rank, _, size = self._place.partition("/")
        who = f"{rank}-of-{size}-" if rank else ""
        self._segments = TraceFileWriter(self.folder, f"trace-{who}{socket.gethostname()}-{os.getpid()}")
        self._unwritten = self._lines.opening(rank=int(rank) if rank else None)
        # multiprocessing's workers end without running atexit.
        multiprocessing_ends.Finalize(None, self.close, exitpriority=100)
        atexit.register(self.close)
        self._writer = threading.Thread(target=self._write_periodically, name="penstock-trace", daemon=True)
        self._writer.start()

    def _write_periodically(self) -> None:
        stop = self._stop
        while not stop.wait(INTERVAL_S):
            self.flush()

    def _waiting_lines(self) -> bytes:
        """Return all waiting events as lines, after the lines that an earlier write failed to write."""
        parts, self._unwritten = [self._unwritten], b""
        with self._lock:
            queues = list(self._queues)
        for queue in queues:
            waiting = queue.waiting
            # Other threads only append, so at least the counted events are there.
            while batch := [waiting.popleft() for _ in range(min(len(waiting), BATCH_EVENTS))]:
                parts.append(self._lines.events(queue.thread, batch))
        return b"".join(parts)

    def _after_fork(self) -> None:
        """In a forked child, drop the events, files and thread so far, which belong to the parent."""
        if self._segments is not None:
            self._segments.forget()
        self._begin()


_CHOSEN: ContextVar[TraceRecorder | None] = ContextVar("recorder", default=None)


@contextmanager
def tracing_to(folder: str | Path, *, rank: int | None = None, size: int = 1) -> Iterator[None]:
    """Trace the spans of this thread or task into `folder`; the trace is complete when the block ends.

    In a program of several processes, give each its `rank` and the world `size`, unless a launcher has set
    them.
    """
    place = _find_place(process_environment()) if rank is None else f"{rank}/{size}"
    recorder = get_recorder(str(folder), place)
    chosen = _CHOSEN.set(recorder)
    try:
        yield
    finally:
        _CHOSEN.reset(chosen)
        recorder.flush()


@contextmanager
def span(name: str, *, cat: str = "app", **args: Value) -> Iterator[None]:
    """Trace the block as one event `name` of category `cat`, with `args` such as `step=` and `epoch=`."""
    recorder = _CHOSEN.get() or _from_environment()
    if recorder is None:
        yield
        return
    began_ns = clock_ns()
    try:
        yield
    finally:
        recorder.record(span_kind(name, cat), began_ns, args=args or None)


def traced(
    name: str | None = None, *, cat: str = "app"
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Decorate a function: every call is a span of category `cat`, named `name` or after the function."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            with span(name or function.__qualname__, cat=cat):
                return function(*args, **kwargs)

        return call

    return decorate


def steps(items: Iterable[Item], name: str = "loop", *, cat: str = "step", **args: Value) -> Iterator[Item]:
    """Iterate over `items` with two spans per step, whose names begin with `name`.

    `NAME.wait` is the wait for the next item, and `NAME.step`, of category `cat`, is the loop's body. The
    body may do anything: only spans inside it show which part of it is computation or a checkpoint. The wait
    that ends the loop belongs to no step.
    """
    recorder = _CHOSEN.get() or _from_environment()
    number, began_ns = 0, clock_ns()
    for item in items:
        if recorder is not None:
            recorder.record(span_kind(f"{name}.wait", "wait"), began_ns, args={"step": number, **args})
        with span(f"{name}.step", cat=cat, step=number, **args):
            yield item
        number, began_ns = number + 1, clock_ns()


@cache
def _from_environment() -> TraceRecorder | None:
    return recorder_of(process_environment())
