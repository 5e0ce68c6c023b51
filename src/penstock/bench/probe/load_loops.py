"""The timed loops of a load: threads over any storage, or one thread over io_uring for files past the cache.

Both take operations in the order of the schedule, as soon as one is due and a slot is free, and note when it
was due, a slot was free, it began and it ended. Without a schedule the next one is due when a slot is free: a
closed loop, which finds out how fast a storage answers at most.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.bench.probe.block_targets import BlockTarget, FileTarget, check_moved
from penstock.bench.probe.io_uring import RequestRing
from penstock.bench.probe.load_plan import NS, LoadShape, OperationTimes
from penstock.bench.probe.timed_streams import Blocks, StreamStopped
from penstock.storage.files.system_calls import translate_os_errors

_T = TypeVar("_T", bound=np.generic)
_PATTERN: Final = 1 << 14
"""So many operations are chosen in advance, then again from the first."""
_SEED: Final = 18


@dataclass(frozen=True, slots=True)
class Operations:
    """What the operations of a load are, one after the other, again and again: where, and whether writes."""

    offsets: NDArray[np.int64]
    writes: NDArray[np.bool_]

    @classmethod
    def of(cls, shape: LoadShape, size_bytes: int, rank: int) -> Operations:
        """Blocks of one object, each once before any comes again, with writes spread evenly among reads."""
        blocks = max(1, size_bytes // shape.block_bytes)
        random = np.random.Generator(np.random.SFC64(_SEED + rank))
        order = np.arange(blocks) if shape.is_sequential else random.permutation(blocks)
        # Writes in exact proportion and random order: shuffled within each hundred.
        hundred = np.arange(100) >= shape.read_percent
        writes = np.concatenate([random.permutation(hundred) for _ in range(-(-_PATTERN // 100))])
        return cls(order * shape.block_bytes, writes)

    def take(self, first: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Offsets of `number` operations from `first` on, and whether each is a write."""
        return _part_of_cycle(self.offsets, first, number), _part_of_cycle(self.writes, first, number)

    def each(self, first: int) -> Iterator[tuple[int, int, bool]]:
        """A number, an offset, and whether it is a write, from `first` on; many threads may take in turn."""
        # Its items are made without the interpreter, so that no other thread comes between.
        offsets = np.roll(self.offsets, -first % self.offsets.size).tolist()
        writes = np.roll(self.writes, -first % self.writes.size).tolist()
        return zip(count(), cycle(offsets), cycle(writes))


def _part_of_cycle(values: NDArray[_T], first: int, number: int) -> NDArray[_T]:
    """So many of the values, which come again and again; almost always they lie side by side."""
    at = first % values.size
    part = values[at : at + number]
    return part if part.size == number else values[(at + np.arange(number)) % values.size]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One load of this rank: due times in nanoseconds from the start, or None for a closed loop."""

    operations: Operations
    due_ns: Sequence[int] | None
    seconds: float
    first: int = 0
    """Where in the operations to begin, so that a second run does not repeat the first."""
    start: Callable[[], None] = lambda: None
    """Returns once all ranks are ready."""

    @property
    def stop_ns(self) -> int:
        """When to give up what has not begun: a little after the end, so that what is late may still come."""
        grace_s = min(1.0, 0.25 * self.seconds) if self.due_ns is not None else 0.0
        return round((self.seconds + grace_s) * NS)


class LoadLoop(Protocol):
    """A way to keep operations in flight."""

    name: str

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load and return when everything that began has ended."""


class ThreadLoop:
    """A thread for each of `slots`: works on every storage."""

    name = "threads"

    def __init__(self, target: BlockTarget, blocks: Blocks, slots: int, uri: str) -> None:
        self._target = target
        self._blocks = blocks
        self._slots = slots
        self._uri = uri

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load; the first failure of a thread stops all and is raised."""
        slots = self._slots
        state = _ThreadsState(run, threading.Barrier(slots + 1), run.operations.each(run.first))
        with ThreadPoolExecutor(slots, thread_name_prefix="penstock-load") as pool, ExitStack() as undo:
            undo.callback(state.stop)
            futures = [pool.submit(self._serve, state, slot) for slot in range(slots)]
            with suppress(threading.BrokenBarrierError):  # the thread that broke it carries the reason
                state.ready.wait()
                run.start()
                state.start_ns = time.monotonic_ns()
                state.ready.wait()
            failures = [error for future in futures if (error := future.exception()) is not None]
            causes = [error for error in failures if not isinstance(error, StreamStopped)]
            if failures:
                raise (causes or failures)[0]
            columns = np.concatenate([future.result() for future in futures], axis=1)
            return _as_times(run, columns[:, np.argsort(columns[0], kind="stable")])

    def _serve(self, state: _ThreadsState, slot: int) -> NDArray[np.int64]:
        with _stops_others(state), translate_os_errors("Moving a block", self._uri):
            _wake_up_on_time()
            state.ready.wait()
            state.ready.wait()
            return (self._in_turn if state.run.due_ns is None else self._on_schedule)(state, slot)

    def _in_turn(self, state: _ThreadsState, slot: int) -> NDArray[np.int64]:
        """A closed loop: nothing that could be done after it is done between two operations."""
        buffer, renew, clock = self._blocks.view(slot), self._blocks.renew, time.monotonic_ns
        read, write = self._target.reader(buffer), self._target.writer(buffer, slot)
        size, until_ns = buffer.nbytes, state.start_ns + state.run.stop_ns
        numbers: list[int] = []
        moments = [clock()]
        for number, offset, is_write in state.operations:
            if is_write:
                renew(slot)
                moved = write(offset)
            else:
                moved = read(offset)
            now = clock()
            numbers.append(number)
            moments.append(now)
            if moved != size or now >= until_ns or state.is_stopped:
                break
        check_moved(moved, size, self._uri)
        passed = np.array(moments, dtype=np.int64) - state.start_ns
        return np.array([numbers, passed[:-1], passed[:-1], passed[:-1], passed[1:]], dtype=np.int64)

    def _on_schedule(self, state: _ThreadsState, slot: int) -> NDArray[np.int64]:
        run, clock, start_ns = state.run, time.monotonic_ns, state.start_ns
        buffer = self._blocks.view(slot)
        read, write = self._target.reader(buffer), self._target.writer(buffer, slot)
        rows: list[tuple[int, int, int, int, int]] = []
        for (number, offset, is_write), due_ns in state.due:
            free_ns = clock() - start_ns
            if free_ns >= run.stop_ns or state.is_stopped:
                break
            if due_ns > free_ns:
                _sleep_until(start_ns + due_ns, state)
            if is_write:
                self._blocks.renew(slot)
            begun_ns = clock() - start_ns
            moved = write(offset) if is_write else read(offset)
            rows.append((number, due_ns, free_ns, begun_ns, clock() - start_ns))
            check_moved(moved, buffer.nbytes, self._uri)
        return np.array(rows, dtype=np.int64).reshape(-1, 5).T


@dataclass(slots=True)
class _ThreadsState:
    """What the threads of one run share; each takes the next of its operations."""

    run: LoadRun
    ready: threading.Barrier
    operations: Iterator[tuple[int, int, bool]]
    due: Iterator[tuple[tuple[int, int, bool], int]] = field(init=False)
    is_stopped: bool = False
    start_ns: int = 0

    def __post_init__(self) -> None:
        self.due = zip(self.operations, self.run.due_ns or ())  # noqa: B905 - as many as are due

    def stop(self) -> None:
        """Have no thread begin another operation, nor wait for others."""
        self.is_stopped = True
        self.ready.abort()


@contextmanager
def _stops_others(state: _ThreadsState) -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(state.stop)
        try:
            yield
        except threading.BrokenBarrierError:
            raise StreamStopped from None
        if state.is_stopped:
            raise StreamStopped
        undo.pop_all()


_LONGEST_SLEEP_S: Final = 0.1


def _sleep_until(moment_ns: int, state: _ThreadsState) -> None:
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        if state.is_stopped:
            raise StreamStopped
        time.sleep(min(left_ns / NS, _LONGEST_SLEEP_S))


_PR_SET_TIMERSLACK: Final = 29


def _wake_up_on_time() -> None:
    """Ask the kernel not to let sleeps of this thread end up to 50 us late, to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


_AHEAD: Final = 128
_LEAST_AHEAD: Final = 4
_AHEAD_BYTES: Final = 1 << 20


def blocks_ahead(block_bytes: int) -> int:
    """How many operations io_uring plans at once: enough to share the cost, few enough to stay in a cache.

    Each takes another block of memory, and a virtual disk copies: with 128 blocks of 128 KiB it was slower by
    a tenth than with 8, because the copies missed the processor's cache.
    """
    return max(_LEAST_AHEAD, min(_AHEAD, _AHEAD_BYTES // block_bytes))


class RingLoop:
    """One thread with up to `depth` operations in flight in the kernel; more `blocks` are for planning."""

    name = "io_uring"

    def __init__(self, target: FileTarget, blocks: Blocks, depth: int, uri: str) -> None:
        self._target = target
        self._blocks = blocks
        self._depth = depth
        self._uri = uri

    def check(self) -> None:
        """Raise `Unavailable` where the kernel does not let us."""
        with self._open():
            pass

    def _open(self) -> RequestRing:
        return RequestRing(self._target.descriptor, self._blocks.views, self._depth, self._uri)

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load."""
        _wake_up_on_time()
        turns = _Turns()
        with self._open() as ring:
            planned = self._look(ring, run, turns)
            run.start()
            operate = self._in_turn if run.due_ns is None else self._on_schedule
            start_ns, number = operate(ring, run, turns, planned)
            while turns.done[-1] < number:
                turns.note(time.monotonic_ns() - start_ns, number, ring.turn(number, 1))
            turns.ended.append(ring.collect())
        return turns.describe(run, self._depth)

    def _in_turn(self, ring: RequestRing, run: LoadRun, turns: _Turns, planned: int) -> tuple[int, int]:
        """A closed loop: what has a slot begins, a few at once, then something must end."""
        turn, depth, stop_ns, clock = ring.turn, self._depth, run.stop_ns, time.monotonic_ns
        see, begin, end = turns.moments.append, turns.begun.append, turns.done.append
        number = done = now = look_ns = 0
        start_ns = clock()
        while now < stop_ns:
            most = done + depth
            number += _AT_ONCE
            if number > most:  # noqa: PLR1730 - `min` costs more than a turn's share of the call
                number = most
            if number >= planned or now > look_ns:
                # What was planned begins now, so that the storage works meanwhile.
                number, look_ns = min(number, planned), now + _LOOK_NS
                done = turn(number, 0)
                planned = self._look(ring, run, turns, planned, number)
            else:
                done = turn(number, number == most)
            now = clock() - start_ns
            see(now)
            begin(number)
            end(done)
        return start_ns, number

    def _on_schedule(self, ring: RequestRing, run: LoadRun, turns: _Turns, planned: int) -> tuple[int, int]:
        """What is due and has a slot begins, a few at once; then something ends, or the next is due."""
        due, depth, stop_ns, turn, clock = (
            run.due_ns or (),
            self._depth,
            run.stop_ns,
            ring.turn,
            time.monotonic_ns,
        )
        last = len(due)
        number = done = now = look_ns = 0
        start_ns = clock()
        while now < stop_ns and done < last:
            most = min(planned, done + depth, number + _AT_ONCE)
            while number < most and due[number] <= now:
                number += 1
            if number == planned < last or now > look_ns:
                done, look_ns = turn(number, 0), now + _LOOK_NS
                planned = self._look(ring, run, turns, planned, number)
            elif number < most:
                # With a slot free, the next operation may become due before anything ends.
                done = ring.turn_until(number, due[number] - now)
            else:
                done = turn(number, number == done + depth or number == last)
            now = clock() - start_ns
            turns.note(now, number, done)
        return start_ns, number

    def _look(self, ring: RequestRing, run: LoadRun, turns: _Turns, planned: int = 0, number: int = 0) -> int:
        """See whether what ended went well; if all that was planned has begun, plan the next."""
        turns.ended.append(ring.collect())
        left = len(run.due_ns) - planned if run.due_ns is not None else ring.room
        if number == planned and left:
            offsets, writes = run.operations.take(run.first + planned, min(ring.room, left))
            blocks = ring.plan(offsets, writes)
            if writes.any():
                self._blocks.renew_all(blocks[writes])
            planned += offsets.size
        return planned


_AT_ONCE: Final = 2
"""So many begin in one call. Of more than two the kernel tells the device only once all are prepared."""
_LOOK_NS: Final = NS // 10
"""An operation that failed is noticed after so long, however slow the storage is."""


@dataclass(slots=True)
class _Turns:
    """What one thread saw: after each turn the time, and how many operations had begun and ended by then."""

    moments: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    ended: list[NDArray[np.int64]] = field(default_factory=list)
    """Numbers of operations in the order in which they ended."""

    def note(self, moment_ns: int, begun: int, done: int) -> None:
        """A turn has ended."""
        self.moments.append(moment_ns)
        self.begun.append(begun)
        self.done.append(done)

    def describe(self, run: LoadRun, depth: int) -> OperationTimes:
        """The times of each operation: it began as its turn did, and ended by the end of a turn."""
        moments = np.array(self.moments, dtype=np.int64)
        order = np.concatenate(self.ended)
        begun_ns = np.repeat(np.append(0, moments[:-1]), np.diff(self.begun, prepend=0))
        seen_ns = np.repeat(moments, np.diff(self.done, prepend=0))
        ended_ns = np.empty_like(seen_ns)
        ended_ns[order] = seen_ns
        # The first to end leaves its slot to the next to begin.
        free_ns = np.append(np.zeros(depth, dtype=np.int64), seen_ns)[: order.size]
        due_ns = free_ns if run.due_ns is None else np.array(run.due_ns[: order.size], dtype=np.int64)
        return _as_times(run, np.stack((np.arange(order.size), due_ns, free_ns, begun_ns, ended_ns)))


def _as_times(run: LoadRun, columns: NDArray[np.int64]) -> OperationTimes:
    """Operations in the order of the schedule, and behind them what was due and never began.

    `columns` are numbers in order, and when each was due, a slot was free, it began and ended.
    """
    if run.due_ns is not None and columns.shape[1] < len(run.due_ns):
        missing = np.setdiff1d(np.arange(len(run.due_ns)), columns[0])
        never = np.full(missing.size, run.stop_ns)
        rest = np.stack((missing, np.array(run.due_ns)[missing], never, never, never))
        columns = np.append(columns, rest, axis=1)
    numbers, due, free, begun, ended = columns
    writes = run.operations.writes
    return OperationTimes(due, free, begun, ended, writes[(run.first + numbers) % writes.size])
