"""The steps of a probe, decided before the first byte moves. Pure.

Files are written, read back and removed group by group: a probe never holds more than one size on disk.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal

from penstock.bench.probe.load_plan import LoadRequest
from penstock.errors import UsageError
from penstock.storage.uri import Location, is_plain_path, parse_uri

Operation = Literal["write", "read", "random_read", "small_write", "small_read", "fsync"]
Mode = Literal["buffered", "direct", "objects", "memory"]
Part = Literal["best", "knee", "metadata"]
"""The parts of a probe: the best rates, the load up to the knee, calls on files."""

RANDOM_BLOCK_BYTES: Final = 128 << 10
SMALL_OBJECT_BYTES: Final = 64 << 10
FSYNC_BLOCK_BYTES: Final = 4 << 10
MAX_RANDOM_READS: Final = 4096
NUM_SMALL_OBJECTS: Final = 256
NUM_FSYNCS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The user's request; each measurement moves `size_bytes`, over all streams and ranks.

    Measurements that would take longer than `max_seconds` move less. `load` is offered up to the knee.
    """

    uri: str
    size_bytes: int = 2 << 30
    streams: tuple[int, ...] = (1, 8)
    block_bytes: tuple[int, ...] = (1 << 20, 8 << 20)
    max_seconds: float = 20.0
    parts: tuple[Part, ...] = ("best",)
    load: LoadRequest = field(default_factory=LoadRequest)

    def __post_init__(self) -> None:
        if min(self.size_bytes, *self.streams, *self.block_bytes) < 1 or self.max_seconds <= 0:
            raise UsageError(
                "Sizes, streams, blocks and seconds must be positive",
                fix="Leave an option out for its default.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One thing to time on every rank: `streams` threads with one block in flight each.

    `blocks_per_stream` blocks of `block_bytes` are moved by each stream; a small object is one block.
    """

    op: Operation
    mode: Mode
    streams: int
    block_bytes: int
    blocks_per_stream: int

    @property
    def size_bytes(self) -> int:
        """The bytes that one rank moves in this step."""
        return self.streams * self.blocks_per_stream * self.block_bytes


StepGroup = tuple[ProbeStep, ...]
"""Steps on one set of files: the first writes them, the others read them, then they are removed."""


def probe_locations(uri: str) -> tuple[Location, ...]:
    """The places to measure: a plain path with and without the page cache, a URI only as it says."""
    location = parse_uri(uri)
    if is_plain_path(uri):
        return (location, Location("direct", location.root))
    return (location,)


def load_location(uri: str) -> Location:
    """The place for loads: a plain path is passed the page cache, which would answer from memory."""
    return probe_locations(uri)[-1]


def plan_groups(request: ProbeRequest, mode: Mode, *, num_ranks: int) -> tuple[StepGroup, ...]:
    """All steps of one mode, in order."""
    share_bytes = max(1, request.size_bytes // num_ranks)
    groups = [
        _sequential(mode, streams, block_bytes, share_bytes)
        for streams in request.streams
        for block_bytes in request.block_bytes
    ]
    most = max(request.streams)
    groups[-1] = (*groups[-1], _random(groups[-1][0]))
    groups.append(_small_objects(mode, most, share_bytes))
    if mode in ("buffered", "direct"):
        groups.append((_fsync(mode),))
    return tuple(groups)


def _sequential(mode: Mode, streams: int, block_bytes: int, share_bytes: int) -> StepGroup:
    blocks = max(1, share_bytes // (streams * block_bytes))
    write = ProbeStep(
        op="write", mode=mode, streams=streams, block_bytes=block_bytes, blocks_per_stream=blocks
    )
    return (write, replace(write, op="read"))


def _random(write: ProbeStep) -> ProbeStep:
    """Random reads of the files that `write` left, only as many as a stable figure needs."""
    stream_bytes = write.block_bytes * write.blocks_per_stream
    block_bytes = min(RANDOM_BLOCK_BYTES, stream_bytes)
    return ProbeStep(
        op="random_read",
        mode=write.mode,
        streams=write.streams,
        block_bytes=block_bytes,
        blocks_per_stream=min(stream_bytes // block_bytes, max(1, MAX_RANDOM_READS // write.streams)),
    )


def _small_objects(mode: Mode, streams: int, share_bytes: int) -> StepGroup:
    count = min(NUM_SMALL_OBJECTS, max(1, share_bytes // SMALL_OBJECT_BYTES))
    per_stream = max(1, count // streams)
    write = ProbeStep(
        op="small_write",
        mode=mode,
        streams=streams,
        block_bytes=SMALL_OBJECT_BYTES,
        blocks_per_stream=per_stream,
    )
    return (write, replace(write, op="small_read"))


def _fsync(mode: Mode) -> ProbeStep:
    return ProbeStep(
        op="fsync", mode=mode, streams=1, block_bytes=FSYNC_BLOCK_BYTES, blocks_per_stream=NUM_FSYNCS
    )
