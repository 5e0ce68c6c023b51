"""Figures of runs of cache operations: rates, latencies, misses, time saved, and comparisons of runs.

The histograms of all ranks are added up, so that a percentile covers all operations. The load time of a
request is that of its slowest rank, from its first read to its last. Runs are comparable if the digests of
their plans are equal. Latencies rank runs only if all of them kept equally many operations in flight, because
on the same storage, operations wait longer when more are in flight. For runs of mlperf-v3, the published
metrics stand next to our own, each with the order in which it ranks the runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.kvcache.block_trace import Integers
from penstock.kvcache.entries import MISSES, EntryOutcome
from penstock.kvcache.io_plan import IoPlan, Op, Operations, TierNumber
from penstock.results.published_files import read_json
from penstock.results.run_folder import MEASURED_FILES
from penstock.units import format_bytes

_SUB_BITS: Final = 8
"""Each power of two is divided into 2**8 buckets."""
_NUM_BUCKETS: Final = 64 << _SUB_BITS
_COARSER: Final = 32
COARSE_BUCKETS: Final = _NUM_BUCKETS // _COARSER
"""Eight buckets for each power of two, used if there are many small histograms, such as one for each part of
a run.
"""
PERCENTILES: Final[Mapping[str, float]] = {"p50": 50, "p95": 95, "p99": 99, "p999": 99.9, "p9999": 99.99}


@dataclass(slots=True)
class LatencyHistogram:
    """Counts of latencies in nanoseconds, with their exact sum, smallest and largest."""

    counts: Integers = field(default_factory=lambda: np.zeros(_NUM_BUCKETS, np.int64))
    sum_ns: float = 0.0
    max_ns: int = 0

    @classmethod
    def of(cls, latencies_ns: ArrayLike) -> Self:
        """Make the histogram of these latencies; negative latencies count as 0."""
        values = np.maximum(np.asarray(latencies_ns, np.int64), 0)
        if not len(values):
            return cls()
        counts = np.bincount(_bucket(values), minlength=_NUM_BUCKETS)
        return cls(counts, float(values.sum(dtype=np.float64)), int(values.max()))

    @classmethod
    def merged(cls, parts: Iterable[LatencyHistogram]) -> Self:
        """Add up several histograms."""
        total = cls()
        for part in parts:
            total.counts = total.counts + part.counts
            total.sum_ns += part.sum_ns
            total.max_ns = max(total.max_ns, part.max_ns)
        return total

    def percentile_ms(self, percent: float) -> float | None:
        """Return the latency below which this share of operations lies, within 0.4 %; None without values."""
        bucket = _bucket_at(self.counts, percent)
        return None if bucket is None else min(_middle(bucket), self.max_ns) / 1e6

    def document(self) -> dict[str, Any]:
        """Return the distribution in milliseconds, as plain data."""
        num = int(self.counts.sum())
        if not num:
            return {"count": 0}
        return {
            "count": num,
            "mean": self.sum_ns / num / 1e6,
            **{name: self.percentile_ms(percent) for name, percent in PERCENTILES.items()},
            "max": self.max_ns / 1e6,
        }


def _bucket_at(counts: Integers, percent: float) -> int | None:
    """Find the bucket of the latency below which this share of operations lies; None without values."""
    num = int(counts.sum())
    wanted = max(1, int(np.ceil(num * percent / 100)))
    return int(np.searchsorted(np.cumsum(counts), wanted)) if num else None


def _bucket(values: Integers) -> Integers:
    """Find each value's bucket.

    Values below 2**8 have their own buckets; the bucket of a larger value is given by its power of two and
    the 8 bits below that.
    """
    _, exponents = np.frexp(values.astype(np.float64))
    shift = np.maximum(exponents.astype(np.int64) - (_SUB_BITS + 1), 0)
    return (shift << _SUB_BITS) + (values >> shift)


def _middle(bucket: int) -> float:
    shift = max((bucket >> _SUB_BITS) - 1, 0)
    return ((bucket - (shift << _SUB_BITS)) << shift) + ((1 << shift) - 1) / 2


PARTS: Final = 48
_DIRECTIONS: Final = {"read": Op.READ, "write": Op.WRITE}


def hits_over_time(plan: IoPlan) -> list[dict[str, Any]]:
    """Return, for each part of the workload's time, the chunks requested, and each tier's hits and writes."""
    if plan.arrival_s is None or plan.chunks is None or not plan.num_requests:
        return []
    span_s = float(plan.arrival_s[-1]) or 1.0
    of_request = _parts(plan.arrival_s, span_s)
    columns: dict[str, list[Any]] = {
        "begin_s": [part * span_s / PARTS for part in range(PARTS)],
        "requests": _count(of_request),
        "chunks": _count(of_request, plan.chunks),
    }
    for tier in TierNumber:
        name, in_tier = tier.name.lower(), plan.operations[plan.operations["tier"] == tier]
        reads, writes = (in_tier[in_tier["op"] == op] for op in (Op.READ, Op.WRITE))
        columns[f"{name}_hits"] = _count(of_request[reads["request"][reads["part"] == 0]])
        columns[f"{name}_read_bytes"] = _count(of_request[reads["request"]], reads["bytes"])
        columns[f"{name}_written_bytes"] = _count(of_request[writes["request"]], writes["bytes"])
    return _rows(columns)


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _parts(times: NDArray[np.float64], end: float) -> Integers:
    return np.clip((times / end * PARTS).astype(np.int64), 0, PARTS - 1)


def _count(parts: Integers, weights: Integers | None = None) -> list[int]:
    return [int(value) for value in np.bincount(parts, weights, minlength=PARTS)]


def count_rank(operations: Operations, timed: NDArray[np.void], end_ns: int) -> Integers:
    """Return one rank's bytes and latencies in each part of the run; the arrays of all ranks can be added up.

    For each direction and part, the array has the bytes, then the number of operations with a latency in each
    bucket. An operation belongs to the part in which it ended.
    """
    counts: Integers = np.zeros((len(_DIRECTIONS), PARTS, 1 + COARSE_BUCKETS), np.int64)
    is_done = timed["outcome"] == EntryOutcome.DONE
    for direction, op in enumerate(_DIRECTIONS.values()):
        which = is_done & (operations["op"] == op)
        parts = _parts(timed["end_ns"][which].astype(np.float64), float(max(end_ns, 1)))
        np.add.at(counts[direction, :, 0], parts, operations["bytes"][which])
        buckets = _bucket(np.maximum(timed["busy_ns"][which], 0)) // _COARSER
        np.add.at(counts[direction], (parts, 1 + buckets), 1)
    return counts


def run_over_time(ranks: Sequence[Integers], end_ns: int) -> list[dict[str, Any]]:
    """Return, for each part of the run's time, the bytes, and the median and 95th percentile of latencies."""
    if not end_ns:
        return []
    total = np.sum(ranks, axis=0)
    columns: dict[str, list[Any]] = {"begin_s": [part * end_ns / PARTS / 1e9 for part in range(PARTS)]}
    for direction, name in enumerate(_DIRECTIONS):
        columns[f"{name}_bytes"] = total[direction, :, 0].tolist()
        for percent in (50, 95):
            buckets = [_bucket_at(counts, percent) for counts in total[direction, :, 1:]]
            columns[f"{name}_p{percent}_ms"] = [
                None if bucket is None else _middle(bucket * _COARSER + _COARSER // 2) / 1e6
                for bucket in buckets
            ]
    return _rows(columns)


FORMAT_VERSION: Final = 1
FILE: Final = MEASURED_FILES["kvcache"]
GIB: Final = 1 << 30
_NEARLY_ALL: Final = 0.8
_SMALL_BYTES: Final = 1 << 20
"""The time for an object smaller than this depends on the request, not on the object's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of one rank, or of all. `load_ns` is the time of each request's reads, -1 if it had none.

    Of the operations that were `done`, those that succeeded before the run's requests ended were `answered`.
    """

    elapsed_ns: int
    read_bytes: int
    written_bytes: int
    reads: LatencyHistogram
    writes: LatencyHistogram
    lags: LatencyHistogram
    load_ns: Integers
    missed_requests: NDArray[np.bool_]
    done: int
    answered: int
    outcomes: Counter[str]

    @property
    def elapsed_s(self) -> float:
        """The time from the common start to the end of the last operation."""
        return self.elapsed_ns / 1e9

    @property
    def loads(self) -> LatencyHistogram:
        """The load times of requests that read something."""
        return LatencyHistogram.of(self.load_ns[self.load_ns >= 0])


def sum_up_rank(operations: Operations, timed: NDArray[np.void], num_requests: int, end_s: float) -> Times:
    """Sum up one rank's operations in a run whose requests end at `end_s`."""
    ran = timed["outcome"] != EntryOutcome.NOT_RUN
    operations, timed = operations[ran], timed[ran]
    is_done = timed["outcome"] == EntryOutcome.DONE
    is_read, is_write = operations["op"] == Op.READ, operations["op"] == Op.WRITE
    missed = np.zeros(num_requests, bool)
    missed[operations["request"][is_read & ~is_done]] = True
    return Times(
        elapsed_ns=int(timed["end_ns"].max(initial=0)),
        read_bytes=int(operations["bytes"][is_read & is_done].sum()),
        written_bytes=int(operations["bytes"][is_write & is_done].sum()),
        reads=LatencyHistogram.of(timed["busy_ns"][is_read & is_done]),
        writes=LatencyHistogram.of(timed["busy_ns"][is_write & is_done]),
        lags=LatencyHistogram.of(timed["lag_ns"]),
        load_ns=_load_times(operations[is_read], timed[is_read], num_requests),
        missed_requests=missed,
        done=len(operations),
        answered=int((is_done & (timed["end_ns"] <= end_s * 1e9)).sum()),
        outcomes=Counter(
            {outcome.name.lower(): int((timed["outcome"][is_read] == outcome).sum()) for outcome in MISSES}
        ),
    )


def _load_times(reads: Operations, timed: NDArray[np.void], num_requests: int) -> Integers:
    begin = np.full(num_requests, np.iinfo(np.int64).max)
    end = np.full(num_requests, -1, np.int64)
    # From when the read was due: a read that had to wait for a stream delayed its request too.
    np.minimum.at(begin, reads["request"], timed["begin_ns"] - np.maximum(timed["lag_ns"], 0))
    np.maximum.at(end, reads["request"], timed["end_ns"])
    return np.where(end >= 0, end - begin, -1)


def merge_ranks(ranks: Sequence[Times]) -> Times:
    """Merge the times of all ranks: add counts, merge histograms, take the slowest rank for shared waits."""
    return Times(
        elapsed_ns=max(rank.elapsed_ns for rank in ranks),
        read_bytes=sum(rank.read_bytes for rank in ranks),
        written_bytes=sum(rank.written_bytes for rank in ranks),
        reads=LatencyHistogram.merged(rank.reads for rank in ranks),
        writes=LatencyHistogram.merged(rank.writes for rank in ranks),
        lags=LatencyHistogram.merged(rank.lags for rank in ranks),
        load_ns=np.max([rank.load_ns for rank in ranks], axis=0),
        missed_requests=np.any([rank.missed_requests for rank in ranks], axis=0),
        done=sum(rank.done for rank in ranks),
        answered=sum(rank.answered for rank in ranks),
        outcomes=sum((rank.outcomes for rank in ranks), Counter()),
    )


def direction_document(moved_bytes: int, elapsed_s: float, latencies: LatencyHistogram) -> dict[str, Any]:
    """Return the figures of one direction: payload bytes, rates of the run and per busy stream, latencies."""
    return {
        "bytes": moved_bytes,
        "gib_per_s": moved_bytes / GIB / elapsed_s if elapsed_s else 0.0,
        "gib_per_busy_s": moved_bytes / GIB / (latencies.sum_ns / 1e9) if latencies.sum_ns else None,
        "latency_ms": latencies.document(),
    }


def time_saved_document(plan: IoPlan, times: Times, *, prefill_tokens_per_s: float) -> dict[str, Any]:
    """Return the time to first token that loading saves over computing, and the break-even bandwidth.

    Loading pays off above a bandwidth of bytes per token x the tokens per second that an accelerator
    computes. A request that missed an entry saved nothing, because what it loaded after the gap is useless.
    If objects are scaled down, so is the computation: otherwise, loading a thousandth would be compared with
    computing everything.
    """
    has_loaded = times.load_ns >= 0
    tokens = np.where(times.missed_requests, 0, plan.hit_tokens)[has_loaded]
    saved_s = tokens * plan.scale / prefill_tokens_per_s - times.load_ns[has_loaded] / 1e9
    computed_s = plan.input_tokens.sum() * plan.scale / prefill_tokens_per_s
    return {
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "break_even_gib_per_s": plan.bytes_per_token * prefill_tokens_per_s / GIB,
        "requests_with_hits": int(has_loaded.sum()),
        "hits_worth_it": float(np.mean(saved_s > 0)) if len(saved_s) else None,
        "saved_s": float(saved_s.sum()),
        "saved_if_only_worth_it_s": float(saved_s[saved_s > 0].sum()),
        "computing_everything_s": float(computed_s),
        "mean_saved_ms": float(saved_s.mean() * 1e3) if len(saved_s) else None,
    }


def name_kind(plan: IoPlan) -> str:
    """Name what a run of this plan measures: storage, only its writes, or none of it."""
    storage = plan.in_storage
    if not len(storage):
        return "memory tiers only" if len(plan.operations) else "no traffic"
    return "storage" if (storage["op"] == Op.READ).any() else "storage, writes only"


def has_small_objects(document: Mapping[str, Any]) -> bool:
    """Return True if objects are scaled down so far that their latencies are not those of whole objects."""
    plan = document["plan"]
    return plan["scale"] != "1" and bool(plan["chunk_bytes"] // plan["objects_per_chunk"] < _SMALL_BYTES)


def client_share(document: Mapping[str, Any]) -> float | None:
    """Return the share of a run's time that moving its bytes in memory would take; None if not measured.

    Reads and writes share the time of a run, whereas each ceiling was measured with one direction alone.
    """
    ceiling = document["ceiling"]
    if not ceiling:
        return None
    return float(
        sum(document[name]["gib_per_s"] / ceiling[f"{name}_gib_per_s"] for name in ("read", "write"))
    )


def is_limited_by_client(document: Mapping[str, Any]) -> bool:
    """Return True if a run was hardly slower than memory. If it was faster, the measured ceiling is wrong."""
    return _NEARLY_ALL < (client_share(document) or 0.0) <= 1


def say_doubts(document: Mapping[str, Any]) -> list[str]:
    """Say in sentences why the figures of a run may not be the storage's."""
    plan, texts = document["plan"], []
    if document["kind"] != "storage":
        texts.append(f"This run measures no reads from storage: {document['kind']}.")
    if document["cold"]["resident_share"] > 0.01:
        texts.append("Reads were not cold: the page cache kept what it was asked to drop.")
    if document["cold"]["path"] == "not known" and document["read"]["bytes"]:
        texts.append("Whether reads were cold is not known.")
    texts += [
        f"{delivery['direction'].capitalize()}s: {delivery['why']}."
        for delivery in document["deliveries"]
        if delivery["verdict"] in ("fail", "warning")
    ]
    if (share := client_share(document)) and share > _NEARLY_ALL:
        texts.append(
            f"For the same bytes in memory this client needs {share:.0%} of the run's time: its limit, not "
            "the storage's."
            if share <= 1
            else "Objects in memory took longer than those on storage: something else used this host, and "
            "the ceiling does not count."
        )
    if plan["reads"]["operations"] + plan["writes"]["operations"] > document["operations_done"]:
        texts.append("The run reached its duration before all operations were done.")
    if has_small_objects(document):
        texts.append(
            f"Objects have {format_bytes(plan['chunk_bytes'] // plan['objects_per_chunk'])} at "
            f"--scale {plan['scale']}: latencies and the time saved are figures of small objects, and say "
            "nothing about whole ones."
        )
    return texts


_FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "read_gib_per_s": ("read", "gib_per_s"),
    "write_gib_per_s": ("write", "gib_per_s"),
    "read_p99_ms": ("read", "latency_ms", "p99"),
    "write_p99_ms": ("write", "latency_ms", "p99"),
    "load_p95_ms": ("requests", "load_ms", "p95"),
    "hits_worth_it": ("time_to_first_token", "hits_worth_it"),
    "saved_s": ("time_to_first_token", "saved_s"),
}


def read_cache_run(folder: Path) -> dict[str, Any]:
    """Read the document of the run in a folder."""
    return read_json(folder / FILE, formats=[FORMAT_VERSION])


def metric_rows(option: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row for each metric of an option of mlperf-v3."""
    return [
        {
            "metric": metric.removeprefix("aggregated_"),
            "theirs": f"{values['theirs']:,.3f}",
            "honest": "-" if values["honest"] is None else f"{values['honest']:,.3f}",
            "why": values["why"],
        }
        for metric, values in option["metrics"].items()
    ]


def compare_cache_runs(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all runs by name, each with the order in which it ranks the runs, best first.

    The order is empty if the figure has ties or cannot rank these runs.
    """
    figures = [_figures(document) for document in documents]
    names = [name for name in figures[0] if all(name in of_run for of_run in figures)]
    streams = [document.get("engine", {}).get("streams") for document in documents]
    in_flight = [
        None if count is None else int(count) * int(document.get("ranks", 1))
        for count, document in zip(streams, documents, strict=True)
    ]
    identities = {
        json.dumps(document.get("digests") or document["plan"]["digest"], sort_keys=True)
        for document in documents
    }
    ranks_latencies, is_comparable = len(set(in_flight)) == 1, len(identities) == 1
    return {
        "targets": [document["target"] for document in documents],
        "is_comparable": is_comparable,
        "in_flight": in_flight,
        "figures": {
            name: {
                "values": [of_run[name] for of_run in figures],
                "best_first": _order([of_run[name] for of_run in figures], name)
                if is_comparable and (ranks_latencies or not is_latency(name))
                else [],
            }
            for name in names
        },
    }


def is_latency(name: str) -> bool:
    """Return True if a figure is one of our own latencies; published ones keep the order they claim."""
    return "_ms" in name and not name.endswith("theirs")


def latency_note(comparison: Mapping[str, Any]) -> str | None:
    """Say why the latencies cannot rank these runs; None if they can."""
    in_flight = comparison["in_flight"]
    if len(set(in_flight)) <= 1:
        return None
    counts = ", ".join("an unknown number of" if count is None else f"{count:,}" for count in in_flight)
    return f"Latencies cannot rank these runs, which had {counts} operations in flight."


def _figures(document: Mapping[str, Any]) -> dict[str, float | None]:
    if "options" in document:
        return {
            f"option {number}, {name.removeprefix('aggregated_')}, {whose}": metric[whose]
            for number, option in document["options"].items()
            for name, metric in option["metrics"].items()
            for whose in ("honest", "theirs")
        }
    figures = {}
    for figure, path in _FIGURES.items():
        value: Any = document
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        figures[figure] = None if value is None else float(value)
    return figures


def _order(values: Sequence[float | None], name: str) -> list[int]:
    """Return the numbers of the runs, best first, or none if there are ties; unknown values are left out."""
    known = {value: number for number, value in enumerate(values) if value is not None}
    has_ties = len(known) < len(values) - values.count(None)
    return [] if has_ties else [known[value] for value in sorted(known, reverse="_ms" not in name)]
