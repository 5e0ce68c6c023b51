"""The result of a checkpoint benchmark: each round, the totals of all writes and of all reads, as plain data.

Pure. The rate of reads that may have come from the page cache has a separate name and does not count in the
throughput; a wrong byte fails the run however fast it was.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from penstock.bench.page_cache_eviction import CacheEviction
from penstock.bench.state_layout import checkpoint_folder
from penstock.results import checkpoint_files, phase_figures
from penstock.results.counter_files import IoReconciliation
from penstock.storage import Counters
from penstock.storage.protocol import OptionValue
from penstock.transfer.ledger import PipelineFigures, StreamRecord, WrongByte, summarize_latencies
from penstock.units import format_bytes, format_number, format_seconds

Direction = Literal["write", "read"]

GIB: Final = 2**30
MAX_WRONG_PLACES: Final = 100
EPOCH: Final = 1
"""DLIO's checkpoint-only runs have one epoch, and a step for each checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRound:
    """One checkpoint that all ranks write or read together; `number` counts the rounds of its direction."""

    direction: Direction
    number: int
    step: int
    epoch: int = EPOCH

    @property
    def folder(self) -> str:
        """The folder of the checkpoint's files, relative to the storage's root."""
        return checkpoint_folder(self.epoch, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFigures:
    """The figures of one checkpoint written or read.

    `began_at_s` and `ended_at_s` are times of rank 0's wall clock. `cold` is the eviction before a read.
    """

    round: CheckpointRound
    began_at_s: float
    ended_at_s: float
    phase: PipelineFigures
    cold: CacheEviction | None = None
    wrong: tuple[WrongByte, ...] = ()
    """The places of the first wrong bytes, at most `MAX_WRONG_PLACES`."""

    @property
    def is_from_memory(self) -> bool:
        """True if the page cache may have served this round."""
        return self.cold is not None and not self.cold.is_cold

    def document(self) -> dict[str, Any]:
        """Return the figures as plain data."""
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


def total_direction(rounds: Sequence[RoundFigures]) -> dict[str, Any] | None:
    """Return the totals of all writes, or of all reads, as plain data; None if there are no rounds.

    Times are summed over the rounds; a round lasts as long as its slowest rank takes. `gib_per_s` is the
    bytes of cold rounds divided by their time; `mean_gib_per_s` is the mean of the checkpoints' own rates,
    which is what MLPerf Storage publishes. Both are None if memory may have served every read.
    """
    if not rounds:
        return None
    phases = [checkpoint.phase for checkpoint in rounds]
    cold = [checkpoint.phase for checkpoint in rounds if not checkpoint.is_from_memory]
    warm = [checkpoint.phase for checkpoint in rounds if checkpoint.is_from_memory]
    measured = cold or phases
    # Only cold rounds say something about storage; content is generated or verified in every round.
    rate = phase_figures.mean_and_stdev([phase.gib_per_s for phase in cold]) if cold else None
    content, store = _overall_rate(phases, "content_busy_s"), _overall_rate(cold, "storage_busy_s")
    direction = rounds[0].round.direction
    verb, content_thread, storage_thread = _WORDS[direction]

    def add_up(name: str) -> float:
        return math.fsum(getattr(phase, name) for phase in phases)

    figures = {
        "checkpoints": len(rounds),
        "bytes": sum(phase.moved_bytes for phase in phases),
        "duration_s": add_up("duration_s"),
        "gib_per_s": _overall_rate(cold, "duration_s"),
        "mean_gib_per_s": rate.mean if rate else None,
        "stdev_gib_per_s": rate.stdev if rate else None,
        "min_gib_per_s": min((phase.min_gib_per_s for phase in cold), default=None),
        "max_duration_s": max(phase.duration_s for phase in measured),
        "setup_s": add_up("setup_s"),
        "pipeline_s": add_up("pipeline_s"),
        "drain_s": add_up("drain_s"),
        "call_time_sum_s": add_up("call_time_sum_s"),
        "storage_busy_s": add_up("storage_busy_s"),
        f"{verb}_busy_s": add_up("content_busy_s"),
        f"{content_thread}_stall_s": add_up("content_stall_s"),
        f"{storage_thread}_stall_s": add_up("storage_stall_s"),
        f"{verb}_gib_per_s": content,
        "store_gib_per_s": store,
        f"{verb}_to_store": content / store if content and store else None,
        "overhead_percent": math.fsum(phase.overhead_percent for phase in measured) / len(measured),
        **summarize_latencies(np.concatenate([phase.latencies_ns for phase in measured])),
        "bottleneck": find_bottleneck(rounds),
        "streams": [asdict(stream) for stream in _merge_streams(phases)],
    }
    if direction == "read":
        figures |= {
            "verified_bytes": sum(phase.verified_bytes for phase in phases),
            "wrong_chunks": sum(phase.wrong_bytes for phase in phases),
            "memory_checkpoints": len(warm),
            "memory_gib_per_s": _overall_rate(warm, "duration_s"),
            "from_memory": bool(warm),
        }
    return figures


_WORDS: Final = {"write": ("generate", "generator", "writer"), "read": ("verify", "verifier", "reader")}
"""For each direction, the names used in figures: the work on content, its threads, and the threads that do
I/O.
"""


def _merge_streams(phases: Sequence[PipelineFigures]) -> Iterator[StreamRecord]:
    """Yield the figures of each stream of each rank, added up over all rounds."""
    merged: dict[tuple[int, int], StreamRecord] = {}
    for stream in (stream for phase in phases for stream in phase.streams):
        key = (stream.rank, stream.stream)
        if key in merged:
            sums = {name: getattr(merged[key], name) + getattr(stream, name) for name in _STREAM_SUMS}
            merged[key] = replace(stream, **sums)
        else:
            merged[key] = stream
    yield from (merged[key] for key in sorted(merged))


_STREAM_SUMS: Final = (
    *("objects", "chunks", "moved_bytes", "busy_s", "stall_s"),
    *("requests", "retries", "errors"),
)


def find_bottleneck(rounds: Sequence[RoundFigures]) -> str:
    """Return what limited these rounds, writes and reads together, for most of their time.

    Reads from memory say nothing about storage, so they count only if there is nothing else.
    """
    times: Counter[str] = Counter()
    for checkpoint in [checkpoint for checkpoint in rounds if not checkpoint.is_from_memory] or rounds:
        name = "page cache" if checkpoint.is_from_memory else checkpoint.phase.bottleneck
        times[name] += checkpoint.phase.duration_s  # type: ignore[assignment]  # seconds count as well as whole numbers
    return times.most_common(1)[0][0]


def _overall_rate(phases: Sequence[PipelineFigures], time_name: str) -> float | None:
    """Return the rate in GiB/s: all bytes divided by the sum of one kind of time; None if that is 0."""
    elapsed_s = math.fsum(getattr(phase, time_name) for phase in phases)
    return sum(phase.moved_bytes for phase in phases) / GIB / elapsed_s if elapsed_s > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """The result of one run.

    `gap_s` is the time from the last byte written, perhaps by an earlier run, to the first read.
    """

    model: str
    ranks: int
    results_dir: str
    target: str
    total_bytes: int
    seed: int
    rounds: tuple[RoundFigures, ...]
    gap_s: float | None
    earlier: Mapping[str, Any] | None
    """The run folder and kept steps of the earlier run whose checkpoints this one read."""
    shift: int
    storage_options: Mapping[str, OptionValue]
    peak_rss_bytes: tuple[int, ...]
    full_bytes: int
    """The size of one checkpoint without `--scale`."""
    deliveries: tuple[IoReconciliation, ...] = ()

    @property
    def write(self) -> dict[str, Any] | None:
        """The totals of all writes."""
        return total_direction([figures for figures in self.rounds if figures.round.direction == "write"])

    @property
    def read(self) -> dict[str, Any] | None:
        """The totals of all reads."""
        return total_direction([figures for figures in self.rounds if figures.round.direction == "read"])

    def full_seconds(self) -> dict[str, float]:
        """The seconds that a checkpoint of full size would take at the rates of a scaled run."""
        found = {"write": self.write, "read": self.read} if self.full_bytes != self.total_bytes else {}
        rates = {name: figures["gib_per_s"] for name, figures in found.items() if figures}
        return {f"{name}_s": self.full_bytes / GIB / rate for name, rate in rates.items() if rate}

    @property
    def is_right(self) -> bool:
        """True if every byte that was verified is correct."""
        return not any(figures.phase.wrong_bytes for figures in self.rounds)

    @property
    def is_from_memory(self) -> bool:
        """True if the page cache may have served any read."""
        return any(figures.is_from_memory for figures in self.rounds)

    @property
    def verdict(self) -> str:
        """The verdict on the page, on the terminal and in `--json`; only "failed" makes the command fail."""
        return checkpoint_files.judge(
            is_right=self.is_right, is_from_memory=self.is_from_memory, deliveries=self.deliveries
        )

    def document(self) -> dict[str, Any]:
        """Return the result as plain data. `write` and `read` are None if there was no write or no read."""
        return {
            "format": checkpoint_files.FORMAT_VERSION,
            "model": self.model,
            "ranks": self.ranks,
            "target": self.target,
            "checkpoint_bytes": self.total_bytes,
            "at_full_size": {"bytes": self.full_bytes, **self.full_seconds()},
            "seed": self.seed,
            "write": self.write,
            "read": self.read,
            "bottleneck": find_bottleneck(self.rounds),
            "verdict": self.verdict,
            "is_right": self.is_right,
            "from_memory": self.is_from_memory,
            "gap_s": self.gap_s,
            "earlier": dict(self.earlier) if self.earlier else None,
            "recovery_rank_shift": self.shift,
            "storage_options": dict(self.storage_options),
            "trace": self.storage_options.get("trace"),
            "storage_counters": sum((figures.phase.counters for figures in self.rounds), Counters()).record(),
            "deliveries": [asdict(delivery) for delivery in self.deliveries],
            "peak_rss_bytes": list(self.peak_rss_bytes),
            "checkpoints": [figures.document() for figures in self.rounds],
            "results_dir": self.results_dir,
        }


def direction_rows(result: CheckpointResult) -> list[dict[str, str]]:
    """Return a table row for each direction; "content" is the rate of generating or verifying the bytes."""
    return [
        {
            "": name,
            "bytes": format_bytes(figures["bytes"]),
            "took": format_seconds(figures["duration_s"]),
            "GiB/s": format_number(figures["gib_per_s"], ".2f"),
            "each": format_number(figures["mean_gib_per_s"], ".2f"),
            "content": format_number(figures[f"{verb}_gib_per_s"], ".2f"),
            "drain": format_seconds(figures["drain_s"]),
            "p99": f"{figures['p99_ms']:.1f} ms",
        }
        for name, figures, verb in (("write", result.write, "generate"), ("read", result.read, "verify"))
        if figures is not None
    ]
