"""The result of a checkpoint benchmark: each round, the totals of all writes and of all reads, as plain data.

Pure. A read that may have come from the page cache has a rate under its own name and no share in the
throughput; a wrong byte fails the run whatever its speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.results.checkpoint_figures import FORMAT_VERSION
from penstock.results.phase_figures import mean_and_stdev
from penstock.storage.protocol import OptionValue

if TYPE_CHECKING:
    from penstock.bench.cache_eviction import ObjectEviction
    from penstock.bench.checkpoint.round_plan import CheckpointRound, Direction
    from penstock.checkpoint.saving.measurement import PipelineFigures, StreamRecord, WrongByte
    from penstock.results.io_reconciliation import IoReconciliation


GIB: Final = 2**30
MAX_WRONG_PLACES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """One checkpoint written or read. The two moments are by rank 0's wall clock; writes have no `cold`."""

    round: CheckpointRound
    began_at_s: float
    ended_at_s: float
    phase: PipelineFigures
    cold: ObjectEviction | None = None
    wrong: tuple[WrongByte, ...] = ()
    """Where the first of the wrong bytes are, `MAX_WRONG_PLACES` places at most."""

    @property
    def is_from_memory(self) -> bool:
        """Whether the page cache may have served it."""
        return self.cold is not None and not self.cold.is_cold

    def document(self) -> dict[str, Any]:
        """As plain data."""
        cold = self.cold
        return {
            "direction": self.round.direction,
            "number": self.round.number,
            "step": self.round.step,
            "folder": self.round.folder,
            "began_at_s": self.began_at_s,
            "ended_at_s": self.ended_at_s,
            "from_memory": self.is_from_memory,
            "cold": cold.document() if cold else None,
            "wrong": [asdict(place) for place in self.wrong],
            **self.phase.record(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionFigures:
    """All writes, or all reads that were cold. Times are sums over rounds, each of its slowest rank.

    `gib_per_s` is all bytes over all time; `mean_gib_per_s` the mean of the checkpoints' own rates, which is
    what MLPerf Storage publishes. Both are None where nothing counts, because memory served every read.
    """

    checkpoints: int
    num_bytes: int
    verified_bytes: int
    wrong_chunks: int
    duration_s: float
    gib_per_s: float | None
    mean_gib_per_s: float | None
    stdev_gib_per_s: float | None
    min_gib_per_s: float | None
    max_duration_s: float
    setup_s: float
    pipeline_s: float
    drain_s: float
    call_time_sum_s: float
    storage_busy_s: float
    content_busy_s: float
    content_stall_s: float
    storage_stall_s: float
    content_gib_per_s: float | None
    store_gib_per_s: float | None
    content_to_store: float | None
    overhead_percent: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    bottleneck: str
    memory_checkpoints: int
    memory_gib_per_s: float | None
    streams: tuple[StreamRecord, ...]

    def document(self, direction: Direction) -> dict[str, Any]:
        """As plain data, in the words of the direction: content is generated or verified."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["bytes"] = plain.pop("num_bytes")
        plain["streams"] = [asdict(stream) for stream in self.streams]
        maker, mover = ("generate", "writer") if direction == "write" else ("verify", "reader")
        plain[f"{maker}_gib_per_s"] = plain.pop("content_gib_per_s")
        plain[f"{maker}_busy_s"] = plain.pop("content_busy_s")
        plain[f"{maker}_to_store"] = plain.pop("content_to_store")
        plain["generator_stall_s" if direction == "write" else "verifier_stall_s"] = plain.pop(
            "content_stall_s"
        )
        plain[f"{mover}_stall_s"] = plain.pop("storage_stall_s")
        if direction == "write":
            for name in ("verified_bytes", "wrong_chunks", "memory_checkpoints", "memory_gib_per_s"):
                del plain[name]
        else:
            plain["from_memory"] = self.memory_checkpoints > 0
        return plain


def direction_figures(rounds: Sequence[RoundFigures]) -> DirectionFigures | None:
    """Everything of one direction; None where there was no round of it."""
    if not rounds:
        return None
    every = [each.phase for each in rounds]
    counted = [each.phase for each in rounds if not each.is_from_memory]
    warm = [each.phase for each in rounds if each.is_from_memory]
    return DirectionFigures(
        checkpoints=len(rounds),
        bottleneck=_most_of_the_time(rounds),
        memory_checkpoints=len(warm),
        memory_gib_per_s=_overall(warm, "duration_s"),
        streams=tuple(merged_streams(every)),
        **_sums(every),
        **_rates(counted, every),
        **_latencies(counted or every),
    )


def _sums(every: Sequence[PipelineFigures]) -> dict[str, Any]:
    return {
        "num_bytes": sum(phase.moved_bytes for phase in every),
        "verified_bytes": sum(phase.verified_bytes for phase in every),
        "wrong_chunks": sum(phase.wrong_bytes for phase in every),
        **{name: math.fsum(getattr(phase, name) for phase in every) for name in _SUMMED},
    }


def _rates(counted: Sequence[PipelineFigures], every: Sequence[PipelineFigures]) -> dict[str, Any]:
    """Rates of storage over the rounds that count; that of content over all, as memory does not serve it."""
    rate = mean_and_stdev([phase.gib_per_s for phase in counted]) if counted else None
    content, store = _overall(every, "content_busy_s"), _overall(counted, "storage_busy_s")
    return {
        "gib_per_s": _overall(counted, "duration_s"),
        "mean_gib_per_s": rate.mean if rate else None,
        "stdev_gib_per_s": rate.stdev if rate else None,
        "min_gib_per_s": min((phase.min_gib_per_s for phase in counted), default=None),
        "content_gib_per_s": content,
        "store_gib_per_s": store,
        "content_to_store": content / store if content and store else None,
    }


def _latencies(phases: Sequence[PipelineFigures]) -> dict[str, Any]:
    return {
        "max_duration_s": max(phase.duration_s for phase in phases),
        "overhead_percent": math.fsum(phase.overhead_percent for phase in phases) / len(phases),
        "p50_ms": sorted(phase.p50_ms for phase in phases)[len(phases) // 2],
        "p99_ms": max(phase.p99_ms for phase in phases),
        "max_ms": max(phase.max_ms for phase in phases),
    }


_SUMMED: Final = (
    "duration_s",
    "setup_s",
    "pipeline_s",
    "drain_s",
    "call_time_sum_s",
    "storage_busy_s",
    "content_busy_s",
    "content_stall_s",
    "storage_stall_s",
)


def merged_streams(phases: Sequence[PipelineFigures]) -> Iterator[StreamRecord]:
    """Each stream of each rank over all rounds; none is overwritten by another."""
    merged: dict[tuple[int, int], StreamRecord] = {}
    for stream in (stream for phase in phases for stream in phase.streams):
        key = (stream.rank, stream.stream)
        merged[key] = _both(merged[key], stream) if key in merged else stream
    yield from (merged[key] for key in sorted(merged))


def job_bottleneck(rounds: Sequence[RoundFigures]) -> str:
    """What held the run back for most of its time, writing and reading."""
    return _most_of_the_time(rounds)


def _both(one: StreamRecord, other: StreamRecord) -> StreamRecord:
    return replace(
        one,
        objects=one.objects + other.objects,
        chunks=one.chunks + other.chunks,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        busy_s=one.busy_s + other.busy_s,
        stall_s=one.stall_s + other.stall_s,
        requests=one.requests + other.requests,
        retries=one.retries + other.retries,
        errors=one.errors + other.errors,
    )


def _overall(phases: Sequence[PipelineFigures], time_name: str) -> float | None:
    """All bytes over the sum of one kind of time."""
    elapsed_s = math.fsum(getattr(phase, time_name) for phase in phases)
    return sum(phase.moved_bytes for phase in phases) / GIB / elapsed_s if elapsed_s > 0 else None


def _most_of_the_time(rounds: Sequence[RoundFigures]) -> str:
    """Reads from memory say nothing about storage, so they count only where there is nothing else."""
    times: Counter[str] = Counter()
    for each in [each for each in rounds if not each.is_from_memory] or rounds:
        name = "page cache" if each.is_from_memory else each.phase.bottleneck
        times[name] += each.phase.duration_s  # type: ignore[assignment]  # seconds count as well as whole numbers
    return times.most_common(1)[0][0]


def plain_counters(phases: Sequence[PipelineFigures]) -> Mapping[str, Any]:
    """What all storages of a run counted."""
    first, *others = [phase.counters for phase in phases]
    return sum(others, first).record()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """Which earlier run wrote the checkpoints that this one read, and how long ago; by wall clocks."""

    run_folder: str
    kept_steps: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"run_folder": self.run_folder, "kept_steps": list(self.kept_steps)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """One run. `gap_s` lies between the last byte written, perhaps by another run, and the first read."""

    model: str
    ranks: int
    results_dir: str
    target: str
    total_bytes: int
    seed: int
    rounds: tuple[RoundFigures, ...]
    gap_s: float | None
    earlier: EarlierRun | None
    shift: int
    storage_options: Mapping[str, OptionValue]
    peak_rss_bytes: tuple[int, ...]
    deliveries: tuple[IoReconciliation, ...] = ()

    @property
    def write(self) -> DirectionFigures | None:
        """All writes."""
        return direction_figures([each for each in self.rounds if each.round.direction == "write"])

    @property
    def read(self) -> DirectionFigures | None:
        """All reads."""
        return direction_figures([each for each in self.rounds if each.round.direction == "read"])

    @property
    def is_right(self) -> bool:
        """Whether every byte that was verified is the one that was written."""
        return all(not each.phase.wrong_bytes for each in self.rounds)

    @property
    def is_from_memory(self) -> bool:
        """Whether the page cache may have served any read."""
        return any(each.is_from_memory for each in self.rounds)

    def document(self) -> dict[str, Any]:
        """As plain data: `write` and `read` are None where there was none."""
        write, read = self.write, self.read
        return {
            "format": FORMAT_VERSION,
            "model": self.model,
            "ranks": self.ranks,
            "target": self.target,
            "checkpoint_bytes": self.total_bytes,
            "seed": self.seed,
            "write": write.document("write") if write else None,
            "read": read.document("read") if read else None,
            "bottleneck": job_bottleneck(self.rounds),
            "is_right": self.is_right,
            "from_memory": self.is_from_memory,
            "gap_s": self.gap_s,
            "earlier": self.earlier.document() if self.earlier else None,
            "recovery_rank_shift": self.shift,
            "storage_options": dict(self.storage_options),
            "storage_counters": plain_counters([each.phase for each in self.rounds]),
            "deliveries": [asdict(each) for each in self.deliveries],
            "peak_rss_bytes": list(self.peak_rss_bytes),
            "checkpoints": [each.document() for each in self.rounds],
            "results_dir": self.results_dir,
        }
