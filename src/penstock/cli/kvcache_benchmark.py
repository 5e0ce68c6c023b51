"""`penstock kvcache run`, `replay` and `compare`: cache operations on a storage, measured."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.kvcache_planning import KvModelOptions, TraceFormatOptions
from penstock.cli.option_groups import BackendOptions
from penstock.cli.options import argument, command_line, flag, group, option, required
from penstock.cli.parsers import FILE, FOLDER, SCALE, SIZE, TIME, URI, above_zero, choice, number, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, TextTable, View, format_number
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.kvcache.block_trace import BlockTrace
    from penstock.kvcache.cache_run import CacheRequest
    from penstock.kvcache.io_plan import IoPlan

MISSED = 1


@dataclass(frozen=True, kw_only=True)
class KvCacheOptions:
    """The cache: its tiers, its objects, and the storage that they are on."""

    destination: str = required(
        "--to", URI, "Keep entries here: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: BackendOptions = group(BackendOptions)
    results: Path = option("--results", FOLDER, "Make the run's folder in this directory.", default="results")
    model: KvModelOptions = group(KvModelOptions)
    gpu: int = option("--gpu", SIZE, "Accelerator memory for the cache: no I/O.", default="0B")
    cpu: int = option("--cpu", SIZE, "Host memory for the cache: no I/O.", default="0B")
    capacity: int | None = option("--capacity", SIZE, "Room for entries on storage (default: without limit).")
    tensor: int = option("--tensor-parallel", whole(1), "One object for each tensor rank.", default="1")
    pipeline: int = option("--pipeline-parallel", whole(1), "One for each pipeline rank.", default="1")
    is_per_layer: bool = flag("--per-layer", "One object for each layer.")
    layout: str = option(
        "--layout",
        choice("penstock", "vllm", "lmcache"),
        "Name objects as this engine's file tier does; penstock's have a checksum.",
        default="penstock",
    )
    scale: Fraction = option("--scale", SCALE, "Move only this share of every object's bytes.", default="1")

    def plan(self, trace: BlockTrace) -> IoPlan:
        """The operations that these tiers make of a trace."""
        from penstock.kvcache.io_plan import ObjectLayout, TierSizes, plan_blocks

        model = self.model.load()
        chunk_bytes = trace.block_tokens * model.bytes_per_token
        return plan_blocks(
            trace,
            model,
            tiers=TierSizes(
                gpu=self.gpu // chunk_bytes,
                cpu=self.cpu // chunk_bytes,
                storage=None if self.capacity is None else self.capacity // chunk_bytes,
            ),
            layout=ObjectLayout(
                tensor=self.tensor,
                pipeline=self.pipeline,
                is_per_layer=self.is_per_layer,
                scale=self.scale,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How operations are executed and judged."""

    streams: int = option(
        "--streams", whole(1), "Keep this many objects in flight on each rank.", default="8"
    )
    chunk_bytes: int = option(
        "--chunk", SIZE, "Move objects in requests of up to this size.", default="32MiB"
    )
    speedup: float = option(
        "--speedup",
        number(0),
        "Begin requests at their times divided by this; 0: as soon as a stream is free.",
        default="0",
    )
    duration_s: float | None = option("--duration", TIME, "Begin no more operations after this time.")
    prefill: float = option(
        "--prefill-rate",
        above_zero(number()),
        "Tokens a second that the accelerator computes.",
        default="20000",
    )
    seed: int = option("--seed", whole(0), "Seed the contents, and the requests of `run`.", default="42")
    keeps: bool = flag("--keep", "Leave the entries on storage at the end.")


@dataclass(frozen=True, kw_only=True)
class _ReplayOptions:
    trace: Path = argument("TRACE", FILE, "Requests: Mooncake, Dynamo, AIPerf, Bailian, BurstGPT, ShareGPT.")
    cache: KvCacheOptions = group(KvCacheOptions)
    engine: EngineOptions = group(EngineOptions)
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace")


@ranked(_ReplayOptions)
def replay(options: _ReplayOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Replay a TRACE of requests: read the prefixes that hit, write what is new, and report both.

    What is read, written and evicted is decided before, from the trace and the tiers alone; the digest of
    these operations is in the result. Every entry that is read is verified.

    Examples:

      penstock kvcache replay conversation_trace.jsonl --to direct:///mnt/kv --capacity 2TiB

      penstock kvcache replay trace.jsonl --to s3://bucket/kv --speedup 2 --model deepseek-v3 --json
    """
    return _run(options.cache, options.engine, options.reading.load(options.trace, terminal), comm, terminal)


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    cache: KvCacheOptions = group(KvCacheOptions)
    engine: EngineOptions = group(EngineOptions)
    requests: int = option("--requests", whole(1), "Generate this many requests.", default="1000")
    users: int = option("--users", whole(1), "Requests come from this many users.", default="100")
    think_s: float = option("--think", TIME, "Time between a user's requests, on average.", default="30s")
    chunk_tokens: int = option("--chunk-tokens", whole(1), "Cache chunks of this many tokens.", default="256")


@ranked(_RunOptions)
def run(options: _RunOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Generate requests with the statistics of a published trace, and run what a cache does for them.

    Examples:

      penstock kvcache run --to direct:///mnt/kv --requests 2000 --capacity 500GiB

      penstock kvcache run --to /mnt/kv --scale 1/100 --users 50 --speedup 1 --json
    """
    from penstock.kvcache.trace_generator import GeneratorSettings, generate_trace

    trace = generate_trace(
        GeneratorSettings(
            requests=options.requests,
            users=options.users,
            think_s=options.think_s,
            block_tokens=options.chunk_tokens,
            seed=options.engine.seed,
        )
    )
    return _run(options.cache, options.engine, trace, comm, terminal)


def _run(
    cache: KvCacheOptions, engine: EngineOptions, trace: BlockTrace, comm: Comm, terminal: Terminal
) -> int:
    from penstock.kvcache.cache_run import run_plan
    from penstock.storage import open_storage

    request = _build_request(cache, engine, cache.plan(trace))
    storage = open_storage(
        cache.destination, process_environment(), options=cache.storage.values, rank=comm.rank
    )
    with terminal.progress() as progress:
        result = run_plan(request, storage, comm=comm, progress=progress)
    terminal.notes(_warnings(result.document))
    terminal.result(result.document, view_cache_run(result.document))
    return 0 if result.is_right else MISSED


def _build_request(cache: KvCacheOptions, engine: EngineOptions, plan: IoPlan) -> CacheRequest:
    from penstock.kvcache.cache_run import CacheRequest
    from penstock.kvcache.entries import EntryLayout
    from penstock.kvcache.io_engine import EngineSettings

    model = cache.model.load()
    return CacheRequest(
        results=cache.results,
        command=command_line(),
        environment=process_environment(),
        plan=plan,
        layout=EntryLayout(
            name=cache.layout,  # type: ignore[arg-type]  # one of the three words
            namespace=f"{plan.name}:{engine.seed}",
            model=model.name,
            chunk_tokens=plan.facts["chunk_tokens"],
            parts=plan.parts,
            dtype=model.dtype,
        ),
        engine=EngineSettings(
            streams=engine.streams,
            chunk_bytes=engine.chunk_bytes,
            speedup=engine.speedup,
            duration_s=engine.duration_s,
            seed=engine.seed,
        ),
        prefill_tokens_per_s=engine.prefill,
        keeps=engine.keeps,
    )


def _warnings(document: dict[str, Any]) -> list[str]:
    """What keeps the figures from being the storage's."""
    texts = []
    if document["kind"] != "storage":
        texts.append(f"This run measures no reads from storage: {document['kind']}.")
    if document["cold"]["resident_share"] > 0.01:
        texts.append("Reads were not cold: the page cache kept what it was asked to drop.")
    if document["cold"]["path"] == "not known" and document["read"]["bytes"]:
        texts.append("Whether reads were cold is not known.")
    for name in ("read", "write"):
        ceiling = (document["ceiling"] or {}).get(f"{name}_gib_per_s")
        if ceiling and document[name]["gib_per_s"] > 0.8 * ceiling:
            texts.append(f"The {name} rate is close to what this client can do at all: {ceiling:.2f} GiB/s.")
    if (
        document["plan"]["reads"]["operations"] + document["plan"]["writes"]["operations"]
        > document["operations_done"]
    ):
        texts.append("The run ended by its duration before all operations were done.")
    return texts


def view_cache_run(document: dict[str, Any]) -> View:
    """A run for people."""
    plan, saved = document["plan"], document["time_to_first_token"]
    yield (
        f"{plan['name']} on {document['target']}: {plan['requests']:,} requests, {document['ranks']} ranks x "
        f"{document['engine']['streams']} streams, {format_seconds(document['elapsed_s'])}; operations "
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
        yield (
            f"Time to first token: {format_seconds(saved['saved_s'])} saved in all; loading was faster than "
            f"computing for {saved['hits_worth_it']:.1%} of requests with hits; break-even at "
            f"{saved['break_even_gib_per_s']:.2f} GiB/s for {saved['prefill_tokens_per_s']:,.0f} tokens/s"
        )
    misses = {name: count for name, count in document["misses"].items() if count}
    if misses:
        yield [("Misses: " + ", ".join(f"{count:,} {name}" for name, count in misses.items()), "red")]
