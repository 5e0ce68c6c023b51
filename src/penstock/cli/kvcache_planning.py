"""`penstock kvcache models`, `size` and `simulate`: capacity planning by arithmetic, without any I/O."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import PageOption
from penstock.cli.options import argument, group, option, optional_argument, verb
from penstock.cli.parsers import FILE, SIZE, TEXT, above_zero, choice, number, several, whole
from penstock.cli.terminal import Terminal, TextTable, View, table
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.kvcache.block_trace import BlockTrace
    from penstock.kvcache.lru_simulation import Reuse
    from penstock.kvcache.models import KvModel
    from penstock.reports.report import Report

_DEFAULT_BLOCKS = "1000,10000,100000"
TRACE_FORMAT = choice("auto", "mooncake", "bailian", "burstgpt", "sharegpt")


@dataclass(frozen=True, kw_only=True)
class KvModelOptions:
    """A model: one of the list, or the user's own by its configuration."""

    name: str = option(
        "--model",
        TEXT,
        "Model from `penstock kvcache models`, or the path of a config.json.",
        default="llama3.1-8b",
    )
    dtype: str | None = option(
        "--dtype",
        choice("float32", "float16", "bfloat16", "float8", "int8"),
        "Data type of the cache (default: the model's).",
    )

    def load(self) -> KvModel:
        """The model, with the data type that was asked for."""
        from penstock.kvcache.models import find_model

        return find_model(self.name, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class TraceFormatOptions:
    """The options for reading a trace of requests."""

    kind: str = option("--format", TRACE_FORMAT, "Format of TRACE.", default="auto")
    block_tokens: int | None = option(
        "--block-tokens",
        whole(1),
        "Tokens per block of TRACE (default: as its requests say).",
    )
    chunk_tokens: int | None = option(
        "--chunk-tokens", whole(1), "Tokens per cached chunk (default: one block each)."
    )
    request_rate: float = option(
        "--request-rate",
        above_zero(number()),
        "Requests per second to assume if TRACE has no times.",
        default="1",
    )
    max_requests: int | None = option("--max-requests", whole(1), "Number of requests to use.")

    def load(self, path: Path, terminal: Terminal) -> BlockTrace:
        """Read the trace in chunks, and print its remarks."""
        from penstock.kvcache.read_traces import read_trace

        trace = read_trace(
            path, kind=self.kind, block_tokens=self.block_tokens, request_rate=self.request_rate
        )
        terminal.notes(trace.notes)
        if self.max_requests is not None:
            trace = trace.head(self.max_requests)
        return trace if self.chunk_tokens is None else trace.with_chunks_of(self.chunk_tokens)


@dataclass(frozen=True, kw_only=True)
class _ModelsOptions:
    model: KvModelOptions = group(KvModelOptions)


@verb(_ModelsOptions)
def models(options: _ModelsOptions, terminal: Terminal) -> None:
    """List models with the bytes of key-value cache that a token takes; options describe one of your own.

    Examples:

      penstock kvcache models

      penstock kvcache models --model my-model/config.json --dtype float8 --json
    """
    from penstock.kvcache.models import MODELS

    chosen = options.model.load()
    listed = [*MODELS.values(), *([] if chosen.name in MODELS else [chosen])]
    entries = [_describe_model(model) for model in listed]
    rows = [
        {
            "model": entry["name"],
            "attention": entry["attention"],
            "layers": f"{entry['layers']}",
            "bytes/token": f"{entry['bytes_per_token']:,}",
            "256 tokens": format_bytes(256 * entry["bytes_per_token"]),
        }
        for entry in entries
    ]
    terminal.result({"models": entries}, table("Key-value cache of a token", rows))


def _describe_model(model: KvModel) -> dict[str, Any]:
    return asdict(model) | {"attention": model.attention, "bytes_per_token": model.bytes_per_token}


@dataclass(frozen=True, kw_only=True)
class _SizeOptions:
    trace: Path | None = optional_argument("TRACE", FILE, "A trace of requests (default: users alone).")
    model: KvModelOptions = group(KvModelOptions)
    users: int = option("--users", whole(1), "Assume this many users at a time.", default="200")
    tokens: int | None = option(
        "--tokens", whole(1), "Assume this many tokens a user (default: typical of the model)."
    )
    tensor: int = option("--tensor-parallel", whole(1), "Divide heads over this many ranks.", default="1")
    pipeline: int = option(
        "--pipeline-parallel", whole(1), "Divide layers over this many ranks.", default="1"
    )
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace")


@verb(_SizeOptions)
def size(options: _SizeOptions, terminal: Terminal) -> None:
    """Calculate the cache that users or a TRACE of requests need, and prove it.

    Examples:

      penstock kvcache size --model llama3.1-70b-instruct --users 70

      penstock kvcache size conversation_trace.jsonl --model deepseek-v3 --json
    """
    from penstock.kvcache.models import size_for_trace, size_for_users

    model = options.model.load()
    document = size_for_users(
        model, options.users, tokens=options.tokens, tensor=options.tensor, pipeline=options.pipeline
    )
    if options.trace is not None:
        document["trace"] = size_for_trace(options.reading.load(options.trace, terminal), model)
    terminal.result(document, _view_size(document))


def _view_size(document: dict[str, Any]) -> View:
    yield (
        f"{document['users']:,} users x {document['tokens_per_user']:,} tokens x "
        f"{document['bytes_per_token']:,} B a token = {document['total_bytes']:,} B = "
        f"{format_bytes(document['total_bytes'])}"
    )
    if theirs := document["upstream"]:
        yield (
            f"mlpstorage datasize (v3.0) counts {theirs['bytes_per_token']:,} B a token: "
            f"{format_bytes(theirs['total_bytes'])}, {theirs['times_too_small']:g} times too small"
        )
    if trace := document.get("trace"):
        yield (
            f"The trace writes {format_bytes(trace['unique_bytes'])} in blocks of "
            f"{format_bytes(trace['block_bytes'])}; with room for all it reads "
            f"{format_bytes(trace['hit_bytes'])} ({trace['prefix_hit_ratio']:.1%} of all blocks)"
        )
        rows = [
            {
                "share of hits": f"{row['share_of_hits']:.0%}",
                "blocks": f"{row['capacity_blocks']:,}",
                "cache": format_bytes(row["capacity_bytes"]),
            }
            for row in trace["capacities"]
        ]
        yield TextTable("Cache (LRU) for a share of these hits", rows)


@dataclass(frozen=True, kw_only=True)
class _SimulateOptions:
    trace: Path = argument("TRACE", FILE, "Requests: Mooncake, Dynamo, AIPerf, Bailian, BurstGPT, ShareGPT.")
    blocks: tuple[int, ...] = option(
        "--blocks", several(whole(0)), "Try caches of these numbers of blocks.", default=_DEFAULT_BLOCKS
    )
    sizes: tuple[int, ...] | None = option("--sizes", several(SIZE), "Try caches of these sizes, too.")
    gpu: int = option("--gpu", SIZE, "Give the cache this much accelerator memory.", default="0B")
    cpu: int = option("--cpu", SIZE, "Give the cache this much host memory.", default="0B")
    storage: int | None = option(
        "--storage", SIZE, "Give the cache this much storage (default: without limit)."
    )
    model: KvModelOptions = group(KvModelOptions)
    page: PageOption = group(PageOption)
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace")


@verb(_SimulateOptions)
def simulate(options: _SimulateOptions, terminal: Terminal) -> None:
    """Calculate the prefix hits of a TRACE for caches of any size (LRU), and what each tier serves.

    A hit counts only while all blocks before it in its request hit, too: others cannot be used.

    Examples:

      penstock kvcache simulate conversation_trace.jsonl --blocks 1000,10000 --json

      penstock kvcache simulate trace.jsonl --model deepseek-v3 --gpu 40GiB --cpu 512GiB --storage 10TiB
    """
    from penstock.kvcache.lru_simulation import find_reuse

    model = options.model.load()
    trace = options.reading.load(options.trace, terminal)
    reuse = find_reuse(trace)
    block_bytes = trace.block_tokens * model.bytes_per_token
    capacities = [*options.blocks, *(size // block_bytes for size in options.sizes or ())]
    document = {
        **trace.statistics(),
        "model": model.name,
        "block_bytes": block_bytes,
        "rows": [_row(reuse, capacity, block_bytes) for capacity in [*capacities, None]],
        "tiers": _simulate_tiers(options, trace, reuse, block_bytes),
    }
    terminal.result(document, _view_simulation(document))
    options.page.write(lambda: _draw_simulation(document), terminal)


def _draw_simulation(document: dict[str, Any]) -> Report:
    from penstock.kvcache.cache_pages import make_simulation_page

    return make_simulation_page(document)


def _row(reuse: Reuse, capacity: int | None, block_bytes: int) -> dict[str, Any]:
    return {
        "capacity_blocks": capacity,
        "capacity_bytes": None if capacity is None else capacity * block_bytes,
        "prefix_hit_ratio": reuse.prefix_hit_ratio(capacity),
    }


def _simulate_tiers(
    options: _SimulateOptions, trace: BlockTrace, reuse: Reuse, block_bytes: int
) -> list[dict[str, Any]]:
    from penstock.kvcache.lru_simulation import simulate_tiers

    tiers = {
        "gpu": options.gpu // block_bytes,
        "cpu": options.cpu // block_bytes,
        "storage": None if options.storage is None else options.storage // block_bytes,
    }
    return [
        asdict(figures)
        | {
            "hit_ratio": figures.hit_blocks / trace.num_blocks if trace.num_blocks else 0.0,
            "read_bytes": figures.hit_blocks * block_bytes,
            "written_bytes": figures.written_blocks * block_bytes,
        }
        for figures in simulate_tiers(reuse, tiers)
    ]


def _view_simulation(document: dict[str, Any]) -> View:
    yield (
        f"{document['requests']:,} requests in {document['span_s']:,.0f} s, {document['blocks']:,} blocks of "
        f"{document['block_tokens']} tokens ({format_bytes(document['block_bytes'])}, {document['model']}); "
        f"{document['unique_blocks']:,} different ones, {document['used_once']:.1%} of these used once"
    )
    best = max((row["prefix_hit_ratio"] for row in document["rows"]), default=0.0) or 1.0
    rows = [
        {
            "blocks": "no limit" if row["capacity_blocks"] is None else f"{row['capacity_blocks']:,}",
            "cache": "-" if row["capacity_bytes"] is None else format_bytes(row["capacity_bytes"]),
            "prefix hits": f"{row['prefix_hit_ratio']:.3f}",
            "": "#" * round(30 * row["prefix_hit_ratio"] / best),
        }
        for row in document["rows"]
    ]
    yield TextTable("Prefix hits by the size of the cache (LRU)", rows)
    tiers = [
        {
            "tier": tier["tier"],
            "blocks": "no limit" if tier["capacity_blocks"] is None else f"{tier['capacity_blocks']:,}",
            "hits": f"{tier['hit_ratio']:.3f}",
            "read": format_bytes(tier["read_bytes"]),
            "written": format_bytes(tier["written_bytes"]),
        }
        for tier in document["tiers"]
    ]
    yield TextTable("What each tier serves and takes", tiers)
