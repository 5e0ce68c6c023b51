"""The narrow waist of the pipe: who makes and checks bytes, what is to move, what was seen to move.

Producer -> buffers -> storage on the way out, storage -> buffers -> Verifier on the way back. Users implement
these two, call `write.write_objects` or `read.read_objects`, and look at what comes back through the pure
`report`, `judge` and `ranks`. Invariant: each planned byte is accounted for, or the phase fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from penstock.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.storage.counters import Counters

Direction = Literal["write", "read"]
VerifyMode = Literal["full", "sample", "off"]
FillOrder = Literal["chunk by chunk", "all first"]
"""Whether a chunk is settled and handed on before the next is filled, or all are filled before any is.

"all first" needs buffers for everything, and lets go of the source as early as can be.
"""

MIN_BUFFERS_PER_STREAM = 2
"""One buffer with the storage and one being filled: with fewer, one side always waits for the other."""


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object that is to be written or read, whole; its `key` is relative to the storage's root."""

    key: str
    size_bytes: int


class Producer(Protocol):
    """Makes the bytes of planned objects."""

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite all of `buffer` with the object's bytes from `offset` on.

        Called front to back for each object, by one thread; for different objects by several at once. What
        it raises ends the phase. It should leave the GIL alone while it works.
        """


@runtime_checkable
class SupportsSettling(Protocol):
    """A `Producer` that leaves something to do for when nobody waits for the source of its bytes any more."""

    def catch_up(self) -> None:
        """Return when all that the calling thread has filled is in its buffers: the source may change."""

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Finish what `fill` left. Called once for each range, in its order, by the same thread."""


class Verifier(Protocol):
    """Knows the bytes that planned objects ought to have."""

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Where in `buffer`, which was read at `offset`, the first wrong byte is; None if all are right.

        Called from several threads at once, in no order, at most once for each range.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeSettings:
    """How a rank moves its objects. `streams` objects are under way at once, each with a writer of its own.

    Reading, `streams` requests are under way at once. `silence_s` is how long a storage may take and give
    back nothing before it counts as dead.
    """

    streams: int = 2
    chunk_bytes: int = 16 << 20
    buffer_memory_bytes: int = 256 << 20
    verify: VerifyMode = "full"
    sample_every: int = 16
    """With verify="sample": one chunk of so many is verified, and always an object's last one."""
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("streams", "chunk_bytes", "sample_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", fix="Give at least 1.")
        least = MIN_BUFFERS_PER_STREAM * self.streams * self.chunk_bytes
        if self.buffer_memory_bytes < least:
            raise UsageError(
                f"{self.buffer_memory_bytes} bytes of buffers are too few for {self.streams} streams of "
                f"{MIN_BUFFERS_PER_STREAM} x {self.chunk_bytes} bytes",
                fix=f"Give at least {least} bytes, smaller chunks or fewer streams.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes at each station. Writing uses all but the last two, reading `planned`, `read` and `verified`."""

    planned_bytes: int
    generated_bytes: int = 0
    submitted_bytes: int = 0
    acknowledged_bytes: int = 0
    durable_bytes: int = 0
    read_bytes: int = 0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WrongByte:
    """Where the first wrong byte of one chunk was read; the rest of the object is still read and verified."""

    key: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """What one writer or reader of one rank did. Kept for each and merged, none overwritten.

    `requests`, `retries` and `errors` are those of the storage that this stream used: its own where each was
    given one, else they stand with stream 0 alone. `stall_s` is how long it waited for the other side.
    """

    rank: int
    stream: int
    objects: int
    chunks: int
    moved_bytes: int
    busy_s: float
    stall_s: float
    requests: int
    retries: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one rank saw of one phase. All `*_ns` are CLOCK_MONOTONIC; `origin_ns` is one moment of all ranks.

    Content is made (writing) or verified (reading) beside the storage: `content_busy_s` is the union of these
    times, `content_stall_s` what its threads waited for buffers, `storage_stall_s` what the streams waited
    for content, or for free buffers to read into. `latencies_ns` has one entry a chunk.
    """

    direction: Direction
    rank: int
    ledger: Ledger
    origin_ns: int
    entered_ns: int
    first_submit_ns: int
    last_submit_ns: int
    end_ns: int
    storage_busy_s: float
    call_time_sum_s: float
    content_busy_s: float
    content_stall_s: float
    storage_stall_s: float
    latencies_ns: NDArray[np.int64]
    streams: tuple[StreamRecord, ...]
    counters: Counters
    wrong_bytes: tuple[WrongByte, ...] = ()
