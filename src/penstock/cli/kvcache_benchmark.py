"""`penstock kvcache run`, `replay` and `compare`: measure cache operations on a storage system."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.kvcache_planning import KV_DTYPE, KV_MODEL, TraceFormatOptions
from penstock.cli.option_groups import PAGE, STORAGE, write_page
from penstock.cli.options import (
    argument,
    arguments,
    command_line,
    flag,
    group,
    option,
    optional_argument,
    refuse_ignored,
    required,
    verb,
)
from penstock.cli.parsers import (
    FILE,
    FOLDER,
    SCALE,
    SIZE,
    TIME,
    URI,
    above_zero,
    choice,
    number,
    several,
    whole,
)
from penstock.cli.rank_options import followed
from penstock.cli.run_reports import PAGES
from penstock.cli.terminal import Terminal, TextTable, View, bold, table
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.units import format_bytes, format_count, format_number, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.kvcache.block_trace import BlockTrace

MISSED = 1
_MLPERF_ONLY: Final = ("--options", "--trials", "--pause")
_EARLY: Final = 0.9
_BLOCKS_ONLY: Final = (
    "--page", "--model", "--dtype", "--gpu", "--cpu", "--tensor-parallel", "--pipeline-parallel",
    "--per-layer", "--layout", "--speedup", "--prefill-rate", "--keep", "--requests", "--users", "--think",
    "--chunk-tokens", "--objective",
)  # fmt: skip
"""Options of `kvcache run` that apply only to the workload `blocks`."""


@dataclass(frozen=True, kw_only=True)
class KvCacheOptions:
    """The tiers and objects of a cache, the storage of its objects, and the pace of its operations."""

    destination: str = required(
        "--to", URI, "Storage for the entries: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: tuple[tuple[str, str], ...] = STORAGE
    results: Path = option("--results", FOLDER, "Create this run's directory below DIR.", default="runs")
    model: str = KV_MODEL
    dtype: str | None = KV_DTYPE
    gpu: int = option("--gpu", SIZE, "Size of the cache in accelerator memory (no I/O).", default="0B")
    cpu: int = option("--cpu", SIZE, "Size of the cache in host memory (no I/O).", default="0B")
    capacity: int | None = option(
        "--capacity", SIZE, "Maximum total size of the entries on storage, after scaling (default: no limit)."
    )
    tensor: int = option(
        "--tensor-parallel",
        whole(1),
        "Number of tensor-parallel ranks, each with its own objects.",
        default="1",
    )
    pipeline: int = option(
        "--pipeline-parallel",
        whole(1),
        "Number of pipeline-parallel ranks, each with its own objects.",
        default="1",
    )
    page: Path | None = PAGE
    is_per_layer: bool = flag("--per-layer", "Write each layer of a chunk as a separate object.")
    layout: str = option(
        "--layout",
        choice("penstock", "vllm", "lmcache"),
        "Name objects as this program does; only Penstock's own objects have a checksum.",
        default="penstock",
    )
    scale: Fraction = option(
        "--scale", SCALE, "Multiply the size of every object by this factor, e.g. 1/100.", default="1"
    )
    streams: int = option("--streams", whole(1), "Maximum objects in flight per rank.", default="8")
    chunk_bytes: int = option("--chunk", above_zero(SIZE), "Maximum size of a request.", default="32MiB")
    speedup: float = option(
        "--speedup",
        number(),
        "Divide the requests' start times by this; 0: start each request as soon as a stream is free.",
        default="0",
    )
    duration_s: float | None = option(
        "--duration",
        TIME,
        "Time after which no more operations start (default: no limit; for mlperf-v3, as in the rules).",
    )
    prefill: float = option(
        "--prefill-rate",
        number(1),
        "Prefill throughput to assume, in tokens/s.",
        default="20000",
    )
    seed: int = option("--seed", whole(0), "Seed of the contents and of generated requests.", default="42")
    keeps: bool = flag("--keep", "Leave the entries on storage at the end.")


@followed
def replay(
    comm: Comm,
    terminal: Terminal,
    *,
    trace: Path = argument(
        "TRACE", FILE, "Trace of Mooncake, Dynamo, AIPerf, Bailian, BurstGPT or ShareGPT."
    ),
    cache: KvCacheOptions = group(KvCacheOptions),
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace"),
) -> int:
    r"""Replay a TRACE of requests: read the prefixes that hit, write what is new, and report both.

    All reads, writes and evictions are planned beforehand, from the trace and the tiers alone; the result
    contains a digest of this plan. Every entry that is read is verified.

    Examples:

      penstock kvcache replay conversation_trace.jsonl --to direct:///mnt/kv --capacity 2TiB

      penstock kvcache replay trace.jsonl --to s3://bucket/kv --speedup 2 --model deepseek-v3 --json
    """
    return _measure(reading.load(trace, terminal), cache, comm, terminal)


@followed
def run(
    comm: Comm,
    terminal: Terminal,
    *,
    workload: str = optional_argument(
        "[WORKLOAD]", choice("blocks", "mlperf-v3"), "Workload: blocks or mlperf-v3.", default="blocks"
    ),
    cache: KvCacheOptions = group(KvCacheOptions),
    requests: int = option("--requests", whole(1), "Number of requests to generate.", default="1000"),
    users: int = option("--users", whole(1), "Number of users who send the requests.", default="100"),
    think_s: float = option("--think", TIME, "Mean time between a user's requests.", default="30s"),
    chunk_tokens: int = option("--chunk-tokens", whole(1), "Tokens per cached chunk.", default="256"),
    objective_s: float | None = option(
        "--objective", TIME, "Find the largest number of users whose p95 load time stays below this."
    ),
    mlperf_options: tuple[int, ...] = option(
        "--options",
        several(whole(1, 3)),
        "MLPerf's options to run, numbered as in its rules.",
        default="1,2,3",
        panel="mlperf-v3",
    ),
    trials: int = option(
        "--trials", whole(1), "Number of trials of each option.", default="3", panel="mlperf-v3"
    ),
    pause_s: float | None = option(
        "--pause", TIME, "Pause between options (default: 90s, as in the rules).", panel="mlperf-v3"
    ),
) -> int:
    r"""Run a generated workload: `blocks`, which follows the statistics of a published trace, or `mlperf-v3`.

    `mlperf-v3` has the users, options and files of MLPerf Storage v3.0, and shows a corrected value next to
    each of its metrics. Options that shape `blocks`, such as --model, --gpu and --requests, do not apply.

    Examples:

      penstock kvcache run --to direct:///mnt/kv --requests 2000 --capacity 500GiB

      penstock kvcache run --to /mnt/kv --scale 1/100 --users 50 --speedup 1 --json

      penstock kvcache run --to /mnt/kv --users 20 --requests 300 --objective 500ms

      penstock kvcache run mlperf-v3 --to /mnt/kv --capacity 2TiB --ranks 4

      penstock kvcache run mlperf-v3 --to /mnt/kv --scale 1/1000 --duration 10s --trials 1 --pause 0s
    """
    if workload == "blocks":
        refuse_ignored(_MLPERF_ONLY, "only mlperf-v3 takes it")
        from penstock.kvcache.block_trace import generate_trace

        trace = generate_trace(
            requests=requests, users=users, think_s=think_s, block_tokens=chunk_tokens, seed=cache.seed
        )
        objective_ms = None if objective_s is None else objective_s * 1e3
        return _measure(trace, cache, comm, terminal, objective_ms=objective_ms, users=users)
    refuse_ignored(_BLOCKS_ONLY, "mlperf-v3 does not take it")
    from penstock.kvcache.io_engine import EngineSettings
    from penstock.kvcache.mlperf_run import MlperfRequest, load_limits, run_mlperf
    from penstock.storage import open_storage

    environment = process_environment()
    request = MlperfRequest(
        pages=PAGES,
        results=cache.results,
        command=command_line(),
        environment=environment,
        limits=load_limits(),
        engine=EngineSettings(streams=cache.streams, chunk_bytes=cache.chunk_bytes, seed=cache.seed),
        cache=cache.destination,
        options=mlperf_options,
        trials=trials,
        scale=cache.scale,
        duration_s=cache.duration_s,
        pause_s=pause_s,
        capacity_bytes=cache.capacity,
    )
    storage = open_storage(cache.destination, environment, options=dict(cache.storage), rank=comm.rank)
    with terminal.progress() as progress:
        document = run_mlperf(request, storage, comm=comm, progress=progress)
    terminal.result(document, view_cache_run(document))
    return MISSED if any(option["misses"] for option in document["options"].values()) else 0


def _measure(
    trace: BlockTrace,
    cache: KvCacheOptions,
    comm: Comm,
    terminal: Terminal,
    *,
    objective_ms: float | None = None,
    users: int = 1,
) -> int:
    """Plan the operations that the trace causes with these tiers, execute them, and print the result."""
    from penstock.kvcache.cache_figures import say_doubts
    from penstock.kvcache.cache_pages import make_run_page
    from penstock.kvcache.cache_run import CacheRequest, run_plan
    from penstock.kvcache.entries import EntryLayout
    from penstock.kvcache.io_engine import EngineSettings
    from penstock.kvcache.io_plan import ObjectLayout, TierSizes, plan_blocks
    from penstock.kvcache.models import find_model
    from penstock.storage import open_storage

    environment, model = process_environment(), find_model(cache.model, dtype=cache.dtype)
    chunk_bytes = trace.block_tokens * model.bytes_per_token
    layout = ObjectLayout(
        tensor=cache.tensor, pipeline=cache.pipeline, is_per_layer=cache.is_per_layer, scale=cache.scale
    )
    entry_bytes = sum(layout.part_bytes(model, trace.block_tokens))
    plan = plan_blocks(
        trace,
        model,
        tiers=TierSizes(
            gpu=cache.gpu // chunk_bytes,
            cpu=cache.cpu // chunk_bytes,
            storage=None if cache.capacity is None else cache.capacity // entry_bytes,
        ),
        layout=layout,
    )
    request = CacheRequest(
        pages=PAGES,
        results=cache.results,
        command=command_line(),
        environment=environment,
        plan=plan,
        layout=EntryLayout(
            name=cache.layout,  # type: ignore[arg-type]  # one of the three words
            namespace=f"{plan.name}:{cache.seed}",
            model=model.name,
            chunk_tokens=plan.facts["chunk_tokens"],
            parts=plan.parts,
            pipeline=cache.pipeline if plan.parts % cache.pipeline == 0 else 1,
            layers=model.layers,
            dtype=model.dtype,
        ),
        engine=EngineSettings(
            streams=cache.streams,
            chunk_bytes=cache.chunk_bytes,
            speedup=cache.speedup,
            duration_s=cache.duration_s,
            seed=cache.seed,
        ),
        prefill_tokens_per_s=cache.prefill,
        keeps=cache.keeps,
        objective_ms=objective_ms,
        users=users,
    )
    storage = open_storage(cache.destination, environment, options=dict(cache.storage), rank=comm.rank)
    with terminal.progress() as progress:
        result = run_plan(request, storage, comm=comm, progress=progress)
    terminal.notes(say_doubts(result.document))
    terminal.result(result.document, view_cache_run(result.document))
    write_page(cache.page, lambda: make_run_page(result.document), terminal)
    return 0 if result.is_right else MISSED


def _view_mlperf(document: Mapping[str, Any]) -> View:
    from penstock.kvcache.cache_figures import metric_rows

    for name, figures in document["options"].items():
        ranks = format_count(document["ranks"], "rank")
        yield TextTable(f"Option {name} on {ranks} ({figures['kind']})", metric_rows(figures))
        limit_s = document.get("durations_s", {}).get(name, 0.0)  # earlier versions did not record it
        if limit_s and figures["elapsed_s"] < _EARLY * limit_s:
            yield (
                f"A trial ended after {format_seconds(figures['elapsed_s'])}: by then all requests of its "
                f"{format_seconds(limit_s)} were answered, as they do not wait for their times."
            )
    yield f"Files of the tool: {document['leaf']}"


def view_cache_run(document: Mapping[str, Any]) -> View:
    """Show a run's figures as text."""
    from penstock.kvcache.cache_figures import has_small_objects

    if "options" in document:
        yield from _view_mlperf(document)
        return
    plan, saved = document["plan"], document["time_to_first_token"]
    ranks = format_count(document["ranks"], "rank")
    yield (
        f"{plan['name']} on {document['target']}: {plan['requests']:,} requests, {ranks} x "
        f"{format_count(document['engine']['streams'], 'stream')}, "
        f"{format_seconds(document['elapsed_s'])}; operations "
        f"{plan['digest']}"
    )
    rows = []
    for name in ("read", "write"):
        figures, latency = document[name], document[name]["latency_ms"]
        ceiling = (document["ceiling"] or {}).get(f"{name}_gib_per_s")
        rows.append(
            {
                "": name,
                "objects": f"{latency['count']:,}",
                "bytes": format_bytes(figures["bytes"]),
                "GiB/s": f"{figures['gib_per_s']:.3f}",
                "ceiling": format_number(ceiling, ".2f"),
                **{f"{p} ms": format_number(latency.get(p), ".2f") for p in ("p50", "p95", "p99", "max")},
            }
        )
    yield TextTable("Objects on storage", rows)
    load = document["requests"]["load_ms"]
    if load["count"]:
        yield (
            f"Requests with hits: {load['count']:,}; loading took p50 {load['p50']:.1f} ms, "
            f"p95 {load['p95']:.1f} ms, p99 {load['p99']:.1f} ms"
        )
    if (lag := document["lag_ms"]) and lag["count"]:
        yield f"Lag behind the workload's times: p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f} ms"
    if saved["hits_worth_it"] is not None:
        # Loading part of an object shows nothing about loading a whole one.
        saving = (
            "move whole objects, without --scale, to see what loading saves"
            if has_small_objects(document)
            else f"{format_seconds(saved['saved_s'])} saved in all; loading was faster than computing for "
            f"{saved['hits_worth_it']:.1%} of requests with hits"
        )
        yield (
            f"Time to first token: {saving}; break-even at {saved['break_even_gib_per_s']:.2f} GiB/s for "
            f"{saved['prefill_tokens_per_s']:,.0f} tokens/s"
        )
    if sustained := document.get("sustained"):
        rows = [
            {
                "load": f"{point['speedup']:.3g}",
                "requests/s": f"{point['requests_per_s']:.2f}",
                "load p95 ms": f"{point['load_p95_ms']:.1f}",
                "lag p95 ms": f"{point['lag_p95_ms']:.1f}",
                "answered": format_number(point.get("answered"), ".1%"),
                "objective": "met" if point["meets"] else "missed",
            }
            for point in sustained["points"]
        ]
        yield TextTable(f"Load against the objective of {sustained['objective_ms']:g} ms", rows)
        yield bold(f"Users sustained: {sustained['users'] or 'fewer than measured'}")
    misses = {name: count for name, count in document["misses"].items() if count}
    if misses:
        yield [("Misses: " + ", ".join(f"{count:,} {name}" for name, count in misses.items()), "red")]


@verb
def compare(
    terminal: Terminal,
    *,
    runs: tuple[Path, ...] = arguments("RUN...", FOLDER, "Folders of runs of `penstock kvcache`."),
    page: Path | None = PAGE,
) -> int:
    """Compare runs on several storage systems, and rank the systems by each figure.

    Exits with 1 if the runs did not execute the same operations.

    Examples:

      penstock kvcache compare runs/kvcache-*

      penstock kvcache compare runs/fast runs/slow --json
    """
    from penstock.kvcache.cache_figures import compare_cache_runs, latency_note, read_cache_run
    from penstock.kvcache.cache_pages import figure_rows, make_comparison_page

    comparison = compare_cache_runs([read_cache_run(folder) for folder in runs])
    names = [f"run {index + 1}: {target}" for index, target in enumerate(comparison["targets"])]
    terminal.result(comparison, [*names, *table("Figures", figure_rows(comparison))])
    write_page(page, lambda: make_comparison_page(comparison), terminal)
    if not comparison["is_comparable"]:
        terminal.note("These runs executed different operations: their figures cannot be compared.")
    if note := latency_note(comparison):
        terminal.note(note)
    return 0 if comparison["is_comparable"] else MISSED
