"""Small trees of v3.0: a valid key-value cache and a valid vector search, as values that tests change."""

from datetime import timedelta
from statistics import fmean
from typing import Any, Final

from tests.support.submission.timed_tree import (
    BEGIN,
    SYSTEM,
    Round,
    finished,
    made_once,
    pointer,
    sealed,
    shared_files,
)

CACHE: Final = f"closed/acme/results/{SYSTEM}/kv_cache/llama3.1-8b"
VECTORS: Final = f"closed/acme/results/{SYSTEM}/vector_database/milvus/DISKANN"
OPTIONS: Final = {
    1: "--model llama3.1-8b --num-users 200 --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 0 "
    "--max-concurrent-allocs 16 --generation-mode none",
    2: "--model llama3.1-8b --num-users 100 --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 4 "
    "--max-concurrent-allocs 16 --generation-mode none",
    3: "--model llama3.1-70b-instruct --num-users 70 --duration 300 --gpu-mem-gb 0 --cpu-mem-gb 0 "
    "--max-concurrent-allocs 4 --generation-mode none",
}
NUM_RANKS: Final = 4
NUM_TRIALS: Final = 3


@made_once
def valid_cache() -> Round:
    """Three options in three trials each, on two ranks of each of two hosts."""
    time = f"{BEGIN:%Y%m%d_%H%M%S}"
    run = f"{CACHE}/run/{time}"
    ranks = {
        f"{run}/option_{option}/trial_{trial}/rank_{rank}/kvcache_results_{time}.json": _rank(
            option, trial, rank
        )
        for option in OPTIONS
        for trial in range(NUM_TRIALS)
        for rank in range(NUM_RANKS)
    }
    files: dict[str, Any] = {
        **shared_files("v3.0"),
        **pointer("v3.0", run),
        **ranks,
        **sealed("v3.0", run),
        f"{run}/kv_cache_{time}_metadata.json": _metadata(
            "kv_cache",
            "llama3.1-8b",
            "run",
            time,
            num_processes=NUM_RANKS,
            command_output_files=[
                {"command": _command(option, trial, f"/home/acme/results/{run}")}
                for option in OPTIONS
                for trial in range(NUM_TRIALS)
            ],
            args={
                "cache_dir": "/mnt/cache",
                "results_dir": "/home/acme/results",
                "inter_option_delay": 90,
                "enable_autoscaling": True,
                "params": None,
            },
        ),
        f"{run}/summary.json": {
            "schema_version": "1.0",
            "run_datetime": time,
            "npernode": 2,
            "host_count": 2,
            "total_ranks": NUM_RANKS,
            "trials_per_option": NUM_TRIALS,
            "options": {str(option): _option(option) for option in OPTIONS},
            "partial_failure": False,
            "trial_failures": {},
        },
    }
    return finished(files, "v3.0")


def _command(option: int, trial: int, run: str) -> str:
    return (
        f"mpirun -n {NUM_RANKS} -host a:2,b:2 --npernode 2 python3 mlperf_wrapper.py --rank-output-base "
        f"{run}/option_{option}/trial_{trial} --rank-cache-base /mnt/cache --seed-base 42 "
        f"--config config.yaml {OPTIONS[option]}"
    )


def _rank(option: int, trial: int, rank: int) -> dict[str, Any]:
    each = option + trial / 10 + rank / 100
    return {
        "summary": {
            "cache_stats": {
                "tier_storage_read_bandwidth_gbps": each,
                "tier_storage_write_bandwidth_gbps": each / 2,
                "storage_entries": 4000,
            },
            "avg_throughput_tokens_per_sec": 100 * each,
            "storage_throughput_tokens_per_sec": 10 * each,
            "storage_io_latency_ms": {"p95": 1000 * each},
        }
    }


def _option(option: int) -> dict[str, Any]:
    summed = [
        sum(option + trial / 10 + rank / 100 for rank in range(NUM_RANKS)) for trial in range(NUM_TRIALS)
    ]
    each = fmean(tuple(summed))
    last = option + (NUM_TRIALS - 1) / 10 + (NUM_RANKS - 1) / 100
    return {
        "option": option,
        "aggregated_read_bandwidth_gbps": each,
        "aggregated_write_bandwidth_gbps": each / 2,
        "aggregated_avg_throughput_tokens_per_sec": 100 * each,
        "aggregated_storage_throughput_tokens_per_sec": 10 * each,
        "aggregated_p95_latency_ms": 1000 * last,
        "rank_count": NUM_RANKS,
        "trial_count": NUM_TRIALS,
        "partial_failure": False,
        "missing_files": [],
        "cpu_tier_ranks": [],
    }


@made_once
def valid_vectors() -> Round:
    """Milvus with DISKANN: loaded once, searched five times by four ranks."""
    files = shared_files("v3.0")
    loaded = f"{BEGIN - timedelta(hours=1):%Y%m%d_%H%M%S}"
    folder = f"{VECTORS}/datagen/{loaded}"
    files |= {
        **pointer("v3.0", folder),
        f"{folder}/vector_database_{loaded}_metadata.json": _metadata(
            "vector_database", "milvus_DISKANN", "datagen", loaded, args={"vdb_engine": "milvus"}
        ),
        f"{folder}/summary.json": _scale(),
    }
    for number in range(5):
        time = f"{BEGIN + timedelta(minutes=2 * number):%Y%m%d_%H%M%S}"
        folder, begin = f"{VECTORS}/run/{time}", 1_780_000_000.5 + 120 * number
        ranks = [_searched(begin, rank) for rank in range(4)]
        files |= {
            **pointer("v3.0", folder),
            **sealed("v3.0", folder),
            f"{folder}/vector_database_{time}_metadata.json": _metadata(
                "vector_database",
                "milvus_DISKANN",
                "run",
                time,
                override_parameters={},
                args={
                    "vdb_engine": "milvus",
                    "vector_dim": 1536,
                    "storage_root": "/mnt/vectors",
                    "results_dir": "/home/acme/results",
                    "data_access_protocol": "file",
                    "storage_type": "local_fs",
                    "num_client_hosts": 2,
                    "params": [],
                },
            ),
            f"{folder}/summary.json": _scale() | _found(ranks),
            f"{folder}/result_verdict.json": {"flat_setup": {"ok": True, "coverage": 1.0}},
            f"{folder}/vectordb/simple/vdb_multi_node_summary.json": {
                "disk_io": {"applicable": True, "total_bytes_read": 5_000_000_000},
                "rank_summaries": ranks,
                "recall": {"mean_recall": 0.95},
            },
        }
    return finished(files, "v3.0")


def _scale() -> dict[str, Any]:
    return {
        "num_vectors": 1_000_000,
        "dimension": 1536,
        "inserted_vectors": 1_000_000,
        "index_type": "DISKANN",
        "database": {"database": "milvus"},
    }


def _searched(begin: float, rank: int) -> dict[str, Any]:
    return {
        "total_queries": 900_000 + rank,
        "start_time": begin + rank / 1000,
        "end_time": begin + 60 + rank / 100,
    }


def _found(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    queries = sum(rank["total_queries"] for rank in ranks)
    seconds = max(rank["end_time"] for rank in ranks) - min(rank["start_time"] for rank in ranks)
    return {
        "throughput_qps": queries / seconds,
        "total_time_seconds": seconds,
        "query_count": queries,
        "mean_latency_ms": 6.3,
        "p95_latency_ms": 19.6,
        "p99_latency_ms": 107.4,
        "p999_latency_ms": 160.1,
        "recall": 0.95,
    }


def _metadata(benchmark: str, model: str, command: str, time: str, **values: Any) -> dict[str, Any]:
    return {
        "benchmark_type": benchmark,
        "model": model,
        "command": command,
        "run_datetime": time,
        "verification": "CLOSED",
        "exit_status": 0,
        **({"provenance_file": "provenance.json"} if command == "run" else {}),
        **values,
    }
