"""The files that MLPerf Storage v3.0's key-value cache benchmark leaves, and the honest figures next to them.

    kv_cache/MODEL/run/TIME/
        summary.json                                     figures of each option, over ranks and trials
        kv_cache_TIME_metadata.json                      the run, and the command of each trial
        option_O/trial_T/rank_N/kvcache_results_TIME.json
        honest_figures.json                              each of their metrics, and what it should have been

Names and units are those of the tool with whose results these are compared: its "gbps" are GiB/s, its "iops"
are counts. Pure, except for `write_files`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kvcache.block_trace import Integers
from penstock.kvcache.cache_figures import GIB, PERCENTILES, LatencyHistogram
from penstock.kvcache.entries import EntryOutcome
from penstock.kvcache.io_plan import IoPlan, Op, Operations, TierNumber
from penstock.kvcache.mlperf_plan import LEVELS, OptionSettings
from penstock.results import published_files
from penstock.submission.result_figures import SUMS

_TARGETS_MS: Final[Mapping[str, float]] = {"interactive": 50, "responsive": 100, "batch": 1000}
_LARGEST: Final[Mapping[str, tuple[str, ...]]] = {
    "aggregated_p95_latency_ms": ("storage_io_latency_ms", "p95"),
    "aggregated_device_read_p95_ms": ("cache_stats", "storage_read_device_p95_ms"),
    "aggregated_device_write_p95_ms": ("cache_stats", "storage_write_device_p95_ms"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One rank's file, and what is pooled over ranks: histograms and bytes."""

    option: int
    trial: int
    rank: int
    document: dict[str, Any]
    reads: LatencyHistogram
    writes: LatencyHistogram
    requests: LatencyHistogram
    read_bytes: int
    written_bytes: int
    tokens: int
    elapsed_s: float
    misses: int

    @property
    def summary(self) -> dict[str, Any]:
        """The part of the file that is aggregated over ranks."""
        found: dict[str, Any] = self.document["summary"]
        return found


def judge_trial(
    plan: IoPlan,
    settings: OptionSettings,
    planned: Operations,
    timed: NDArray[np.void],
    *,
    trial: int,
    rank: int,
) -> TrialResult:
    """Make one rank's file of one trial: the plan's storage operations with their times."""
    elapsed_s = float(timed["end_ns"].max(initial=0)) / 1e9
    ran = timed["outcome"] != EntryOutcome.NOT_RUN
    operations, timed = planned[ran], timed[ran]
    is_done = timed["outcome"] == EntryOutcome.DONE
    is_read = (operations["op"] == Op.READ) & is_done
    is_write = (operations["op"] == Op.WRITE) & is_done
    numbers, storage_s, span_s = _requests_done(plan, planned, operations, timed)
    rows = plan.requests[numbers]
    tokens, summed_s = int(rows["answer"].sum()), float(storage_s.sum())
    hits, misses = int(rows["turn_hits"].sum()), int(rows["turn_misses"].sum())
    prefix_misses = int(rows["asks_prefix"].sum())
    in_memory = plan.operations[
        np.isin(plan.operations["request"], numbers) & (plan.operations["tier"] != TierNumber.STORAGE)
    ]
    summary = {
        "total_requests": len(numbers),
        "total_tokens": tokens,
        "elapsed_time": elapsed_s,
        "avg_throughput_tokens_per_sec": _ratio(tokens, elapsed_s),
        "total_storage_io_time": summed_s,
        "storage_throughput_tokens_per_sec": _ratio(tokens, summed_s),
        "requests_per_second": _ratio(len(numbers), elapsed_s),
        "end_to_end_latency_ms": _distribution(span_s),
        "storage_io_latency_ms": _distribution(storage_s),
        "generation_latency_ms": _distribution(np.zeros(len(numbers))),
        "cache_stats": {
            **_cache_stats(operations, timed, in_memory, elapsed_s, misses=misses + prefix_misses),
            "cpu_memory_used_gb": settings.cpu_bytes / GIB,
            "multi_turn_hits": hits,
            "storage_tokens_processed": int(
                operations["bytes"][operations["op"] != Op.DELETE].sum() // plan.bytes_per_token
            ),
        },
        "qos_metrics": _levels(rows["level"], span_s),
        "prefix_cache_stats": {
            "prefix_hits": 0,
            "prefix_misses": prefix_misses,
            "system_prompt_reuse": 0,
            "common_phrase_reuse": 0,
            "bytes_saved": 0,
        },
        "autoscaling_stats": [],
        "autoscaling_summary": None,
        "multi_turn_stats": {
            "cache_hits": hits,
            "cache_misses": misses,
            "hit_rate": _ratio(hits, hits + misses),
        },
    }
    document = {
        "requests_completed": len(numbers),
        "total_tokens_generated": tokens,
        "total_storage_io_latency": summed_s,
        "total_generation_latency": 0.0,
        "end_to_end_latencies": span_s.tolist(),
        "storage_latencies": storage_s.tolist(),
        "generation_latencies": [0.0] * len(numbers),
        "prefill_latencies": (timed["busy_ns"][is_write] / 1e9).tolist(),
        "decode_latencies": (timed["busy_ns"][is_read] / 1e9).tolist(),
        "throughput_timeline": [],
        "multi_turn_cache_hits": hits,
        "multi_turn_cache_misses": misses,
        "seed": settings.seed,
        "summary": summary,
    }
    return TrialResult(
        option=settings.number,
        trial=trial,
        rank=rank,
        document=document,
        reads=LatencyHistogram.of(timed["busy_ns"][is_read]),
        writes=LatencyHistogram.of(timed["busy_ns"][is_write]),
        requests=LatencyHistogram.of(span_s * 1e9),
        read_bytes=int(operations["bytes"][is_read].sum()),
        written_bytes=int(operations["bytes"][is_write].sum()),
        tokens=tokens,
        elapsed_s=elapsed_s,
        misses=int((~is_done & (operations["op"] == Op.READ)).sum()),
    )


def _requests_done(
    plan: IoPlan, planned: Operations, operations: Operations, timed: NDArray[np.void]
) -> tuple[Integers, NDArray[np.float64], NDArray[np.float64]]:
    """Return the requests whose storage operations are done, with their times on storage and in total.

    Requests that memory alone served count up to the point that the run reached; requests that found
    no room did nothing and do not count.
    """
    requests, num = plan.requests, len(plan.requests)
    num_planned = np.bincount(planned["request"], minlength=num)
    num_done = np.bincount(operations["request"], minlength=num)
    found_room = np.bincount(plan.operations["request"], minlength=num) > 0
    reached_s = np.inf
    if len(operations) < len(planned):
        reached_s = float(operations["time_s"].max(initial=0.0))
    is_reached = (num_planned > 0) | (requests["taken_s"] <= reached_s)
    numbers = np.flatnonzero(requests["is_taken"] & found_room & (num_done == num_planned) & is_reached)
    busy_s = np.zeros(num)
    np.add.at(busy_s, operations["request"], timed["busy_ns"] / 1e9)
    begin_ns = np.full(num, np.iinfo(np.int64).max)
    end_ns = np.zeros(num, np.int64)
    np.minimum.at(begin_ns, operations["request"], timed["begin_ns"])
    np.maximum.at(end_ns, operations["request"], timed["end_ns"])
    span_s = np.where(num_done > 0, (end_ns - begin_ns) / 1e9, 0.0)
    return numbers, busy_s[numbers], span_s[numbers]


def _ratio(amount: float, by: float) -> float:
    return amount / by if by else 0.0


def _distribution(values_s: NDArray[np.float64]) -> dict[str, float]:
    milliseconds = values_s * 1e3
    if not len(milliseconds):
        return dict.fromkeys(("mean", *PERCENTILES), 0.0)
    return {
        "mean": float(milliseconds.mean()),
        **{name: float(np.percentile(milliseconds, share)) for name, share in PERCENTILES.items()},
    }


def _cache_stats(
    operations: Operations, timed: NDArray[np.void], in_memory: Operations, elapsed_s: float, *, misses: int
) -> dict[str, Any]:
    everything = np.concatenate([operations, in_memory])
    reads = int((everything["op"] == Op.READ).sum())
    writes = int((everything["op"] == Op.WRITE).sum())
    read_bytes, written_bytes = (
        int(everything["bytes"][everything["op"] == op].sum()) for op in (Op.READ, Op.WRITE)
    )
    stats: dict[str, Any] = {
        "cache_hit_rate": _ratio(reads, reads + misses),
        "cache_hits": reads,
        "cache_misses": misses,
        "gpu_entries": 0,
        "cpu_entries": len(np.unique(in_memory["entry"])),
        "storage_entries": len(np.unique(operations["entry"][operations["op"] == Op.WRITE])),
        "gpu_memory_used_gb": 0.0,
        "offloads_cpu": int((in_memory["op"] == Op.WRITE).sum()),
        "offloads_storage": int((operations["op"] == Op.WRITE).sum()),
        "prefill_writes": writes,
        "decode_reads": reads,
        "system_prompt_hits": 0,
        "common_phrase_hits": 0,
        "user_cache_hits": 0,
        "total_read_bytes": read_bytes,
        "total_write_bytes": written_bytes,
        "read_iops": reads,
        "write_iops": writes,
        "total_read_gb": read_bytes / GIB,
        "total_write_gb": written_bytes / GIB,
        "read_write_ratio": _ratio(read_bytes, written_bytes),
    }
    for op, word, done in ((Op.READ, "read", "read"), (Op.WRITE, "write", "written")):
        for tier in TierNumber:
            is_moved = (everything["op"] == op) & (everything["tier"] == tier)
            moved_gib, name = int(everything["bytes"][is_moved].sum()) / GIB, tier.name.lower()
            stats[f"tier_{name}_kv_bytes_{done}_gb"] = moved_gib
            stats[f"tier_{name}_{word}_bandwidth_gbps"] = _ratio(moved_gib, elapsed_s)
        latencies = _distribution(timed["busy_ns"][operations["op"] == op] / 1e9)
        for percentile in PERCENTILES:
            stats[f"storage_{word}_{percentile}_ms"] = latencies[percentile]
            # The whole time of a write or a read, which is spent waiting for the device.
            stats[f"storage_{word}_device_{percentile}_ms"] = latencies[percentile]
            stats[f"storage_{word}_host_{percentile}_ms"] = 0.0
    stats["storage_health"] = _health(stats)
    return stats


def _health(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Judge the figures by the tool's health criteria, which are not part of the benchmark."""
    criteria = [
        ("Storage Tier Write Device P95 < 500ms", 500, stats["storage_write_device_p95_ms"], "ms", True),
        ("Storage Tier Read Device P95 < 200ms", 200, stats["storage_read_device_p95_ms"], "ms", True),
        ("Cache Hit Rate > 30%", 0.3, stats["cache_hit_rate"], "ratio", False),
    ]
    judged = [
        {
            "name": name,
            "target": target,
            "actual": actual,
            "unit": unit,
            "passed": bool(actual < target if is_limit else actual > target),
        }
        for name, target, actual, unit, is_limit in criteria
    ]
    passed = sum(bool(one["passed"]) for one in judged)
    return {
        "overall_status": "PASS" if passed == len(judged) else "FAIL",
        "criteria": judged,
        "passed_count": passed,
        "total_count": len(judged),
    }


def _levels(of_requests: NDArray[np.uint8], span_s: NDArray[np.float64]) -> dict[str, Any]:
    levels: dict[str, Any] = {}
    for number, name in enumerate(LEVELS):
        spans_s = span_s[of_requests == number]
        if not len(spans_s):
            levels[name] = {"no_data": True}
            continue
        figures, target = _distribution(spans_s), _TARGETS_MS[name]
        kept = float(np.mean(spans_s * 1e3 <= target))
        levels[name] = {
            "total_requests": len(spans_s),
            "latency_ms": {key: figures[key] for key in ("mean", "p50", "p95", "p99")}
            | {"max": float(spans_s.max() * 1e3)},
            "sla": {
                "target_p95_ms": target,
                "actual_p95_ms": figures["p95"],
                "compliance": kept,
                "met": kept >= 0.95,
            },
        }
    return levels


def summarize(results: Sequence[TrialResult], *, time: str, hosts: int, ranks: int) -> dict[str, Any]:
    """Build `summary.json`: sums over ranks, means over trials, and the largest of the ranks' latencies."""
    options = sorted({result.option for result in results})
    return {
        "schema_version": "1.0",
        "run_datetime": time,
        "npernode": ranks // hosts,
        "host_count": hosts,
        "total_ranks": ranks,
        "trials_per_option": len({result.trial for result in results}),
        "options": {
            str(option): _summarize_option([result for result in results if result.option == option], ranks)
            for option in options
        },
        "partial_failure": False,
        "trial_failures": {},
    }


def _summarize_option(results: Sequence[TrialResult], ranks: int) -> dict[str, Any]:
    trials = sorted({result.trial for result in results})
    figures = {
        name: sum(_at(result.summary, path) for result in results) / len(trials)
        for name, path in SUMS.items()
    }
    largest = {name: max(_at(result.summary, path) for result in results) for name, path in _LARGEST.items()}
    return {
        "option": results[0].option,
        **figures,
        **largest,
        "rank_count": ranks,
        "trial_count": len(trials),
        "partial_failure": False,
        "missing_files": [],
        "cpu_tier_ranks": sorted(
            {result.rank for result in results if not result.summary["cache_stats"]["storage_entries"]}
        ),
    }


def _at(summary: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = summary
    for name in path:
        value = value[name]
    return float(value)


def honest_figures(results: Sequence[TrialResult]) -> dict[str, Any]:
    """Return the honest value next to each metric of an option, from all ranks and trials together."""
    return {
        str(option): _honest_option([result for result in results if result.option == option])
        for option in sorted({result.option for result in results})
    }


def _honest_option(results: Sequence[TrialResult]) -> dict[str, Any]:
    theirs = _summarize_option(results, len({result.rank for result in results}))
    # Trials follow each other, so their times add up. The ranks of one trial run at the same time, so its
    # time is that of the slowest.
    elapsed_s = sum(
        max(result.elapsed_s for result in results if result.trial == trial)
        for trial in {result.trial for result in results}
    )
    reads, writes, requests = (
        LatencyHistogram.merged(getattr(result, name) for result in results)
        for name in ("reads", "writes", "requests")
    )
    read_bytes = sum(result.read_bytes for result in results)
    written_bytes = sum(result.written_bytes for result in results)
    honest = {
        "aggregated_read_bandwidth_gbps": _ratio(read_bytes / GIB, elapsed_s),
        "aggregated_write_bandwidth_gbps": _ratio(written_bytes / GIB, elapsed_s),
        "aggregated_avg_throughput_tokens_per_sec": _ratio(sum(r.tokens for r in results), elapsed_s),
        "aggregated_storage_throughput_tokens_per_sec": _ratio(sum(r.tokens for r in results), elapsed_s),
        "aggregated_p95_latency_ms": requests.percentile_ms(95),
        "aggregated_device_read_p95_ms": reads.percentile_ms(95),
        "aggregated_device_write_p95_ms": writes.percentile_ms(95),
    }
    return {
        "metrics": {
            name: {"theirs": theirs[name], "honest": value, "why": _WHY[name]}
            for name, value in honest.items()
        },
        "kind": "storage" if read_bytes and written_bytes else "no storage traffic in one direction",
        "elapsed_s": _ratio(elapsed_s, len({result.trial for result in results})),
        "misses": sum(result.misses for result in results),
        "read_ms": reads.document(),
        "write_ms": writes.document(),
        "request_ms": requests.document(),
    }


_RATE_WHY: Final = "all bytes over the time of the slowest rank, not a sum of rates over different times"
_POOLED_WHY: Final = "of all operations of all ranks and trials, not the largest P95 of a rank"
_WHY: Final[Mapping[str, str]] = {
    "aggregated_read_bandwidth_gbps": _RATE_WHY,
    "aggregated_write_bandwidth_gbps": _RATE_WHY,
    "aggregated_avg_throughput_tokens_per_sec": "all tokens over the time of the slowest rank",
    "aggregated_storage_throughput_tokens_per_sec": (
        "tokens per second of elapsed time; summed waiting grows with every thread that waits"
    ),
    "aggregated_p95_latency_ms": (
        "from a request's first byte to its last, pooled; not the largest of the ranks' summed waits"
    ),
    "aggregated_device_read_p95_ms": _POOLED_WHY,
    "aggregated_device_write_p95_ms": f"{_POOLED_WHY}; the whole write, not its fsync alone",
}


def trial_command(
    settings: OptionSettings, *, trial: int, ranks: int, output: Path, cache: str, base_seed: int
) -> str:
    """Return the tool's command for one trial, with only the options that the edition allows."""
    option = settings.option
    values = {
        "rank-output-base": f"{output}/option_{settings.number}/trial_{trial}",
        "rank-cache-base": cache,
        "seed-base": base_seed,
        "model": option.model,
        "num-users": settings.num_users,
        "duration": f"{settings.duration_s:g}",
        "gpu-mem-gb": option.gpu_gib,
        "cpu-mem-gb": option.cpu_gib if settings.scale == 1 else f"{settings.cpu_bytes / GIB:g}",
        "max-concurrent-allocs": option.max_allocations,
        "generation-mode": option.generation,
    }
    words = " ".join(f"--{name} {value}" for name, value in values.items())
    return f"penstock-ranks -n {ranks} kvcache-mlperf-v3.py {words}"


def write_files(leaf: Path, time: str, metadata: Mapping[str, Any], results: Sequence[TrialResult]) -> None:
    """Write the files of the whole run; the ranks have already written theirs."""
    summary = summarize(
        results, time=time, hosts=metadata["num_client_hosts"], ranks=metadata["num_processes"]
    )
    published_files.write_json(leaf, "summary.json", summary)
    published_files.write_json(leaf, "honest_figures.json", {"options": honest_figures(results)})
    published_files.write_json(leaf, f"kv_cache_{time}_metadata.json", metadata)
