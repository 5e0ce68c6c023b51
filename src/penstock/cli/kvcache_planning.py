"""`penstock kvcache models`, `size`, `simulate` and `inspect`: plan a cache, and look into one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.option_groups import PAGE, STORAGE, write_page
from penstock.cli.options import argument, flag, group, option, optional_argument, refuse_ignored, verb
from penstock.cli.parsers import FILE, SIZE, TEXT, URI, choice, several, whole
from penstock.cli.terminal import Terminal, TextTable, View, table
from penstock.environment import process_environment
from penstock.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from penstock.kvcache.block_trace import BlockTrace

DAMAGED = 1
KV_MODEL: Final = option(
    "--model",
    TEXT,
    "Model from `penstock kvcache models`, or the path of a config.json.",
    default="llama3.1-8b",
)
KV_DTYPE: Final = option(
    "--dtype",
    choice("float32", "float16", "bfloat16", "float8", "int8"),
    "Data type of the cache (default: the model's).",
)


@dataclass(frozen=True, kw_only=True)
class TraceFormatOptions:
    """The options for reading a trace of requests."""

    kind: str = option(
        "--format",
        choice("auto", "mooncake", "bailian", "burstgpt", "sharegpt"),
        "Format of TRACE.",
        default="auto",
    )
    block_tokens: int | None = option(
        "--block-tokens",
        whole(1),
        "Tokens per block of TRACE (default: stated or implied by TRACE).",
    )
    chunk_tokens: int | None = option(
        "--chunk-tokens", whole(1), "Tokens per cached chunk (default: one block)."
    )
    max_requests: int | None = option("--max-requests", whole(1), "Use only the first N requests.")

    def load(self, path: Path, terminal: Terminal) -> BlockTrace:
        """Read the trace, print the remarks about it, and apply the limits of these options."""
        from penstock.kvcache.read_traces import read_trace

        trace = read_trace(path, kind=self.kind, block_tokens=self.block_tokens)
        terminal.notes(trace.notes)
        if self.max_requests is not None:
            trace = trace.head(self.max_requests)
        return trace if self.chunk_tokens is None else trace.with_chunks_of(self.chunk_tokens)


@verb
def models(
    terminal: Terminal,
    *,
    model: str = KV_MODEL,
    dtype: str | None = KV_DTYPE,
) -> None:
    """List models with the bytes of key-value cache that each needs per token; --model adds your own.

    Examples:

      penstock kvcache models

      penstock kvcache models --model my-model/config.json --dtype float8 --json
    """
    from penstock.kvcache.models import MODELS, find_model

    chosen = find_model(model, dtype=dtype)
    listed = [*MODELS.values(), *([] if chosen.name in MODELS else [chosen])]
    entries: list[dict[str, Any]] = [
        asdict(one) | {"attention": one.attention, "bytes_per_token": one.bytes_per_token} for one in listed
    ]
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


@verb
def size(
    terminal: Terminal,
    *,
    trace: Path | None = optional_argument(
        "[TRACE]", FILE, "Trace of requests (default: none, calculate for --users only)."
    ),
    model: str = KV_MODEL,
    dtype: str | None = KV_DTYPE,
    users: int = option("--users", whole(1), "Number of concurrent users.", default="200"),
    tokens: int | None = option("--tokens", whole(1), "Tokens per user (default: typical for the model)."),
    tensor: int = option("--tensor-parallel", whole(1), "Divide heads over this many ranks.", default="1"),
    pipeline: int = option(
        "--pipeline-parallel", whole(1), "Divide layers over this many ranks.", default="1"
    ),
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace"),
) -> None:
    """Calculate the cache size that a number of users or a TRACE of requests needs, and show the calculation.

    Examples:

      penstock kvcache size --model llama3.1-70b-instruct --users 70

      penstock kvcache size conversation_trace.jsonl --model deepseek-v3 --json
    """
    from penstock.kvcache.models import find_model, size_for_trace, size_for_users

    if trace is None:
        refuse_ignored(
            ("--format", "--block-tokens", "--chunk-tokens", "--max-requests"),
            "no trace is read",
            fix="Leave it out, or name a TRACE.",
        )
    cached = find_model(model, dtype=dtype)
    document = size_for_users(cached, users, tokens=tokens, tensor=tensor, pipeline=pipeline)
    if trace is not None:
        document["trace"] = size_for_trace(reading.load(trace, terminal), cached)
    terminal.notes(document["uneven"])
    terminal.result(document, _view_size(document))


def _view_size(document: dict[str, Any]) -> View:
    yield (
        f"{document['users']:,} users x {document['tokens_per_user']:,} tokens x "
        f"{document['bytes_per_token']:,} B a token = {document['total_bytes']:,} B = "
        f"{format_bytes(document['total_bytes'])}"
    )
    if document["ranks"] > 1:
        each = document["rank_bytes_per_token"]
        rank_bytes = document["users"] * document["tokens_per_user"] * each
        yield (
            f"each of {document['ranks']} ranks keeps at most {each:,} B a token = {format_bytes(rank_bytes)}"
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
                "cache": format_bytes(row["capacity_bytes"], at_least=True),
            }
            for row in trace["capacities"]
        ]
        yield TextTable("Cache (LRU) for a share of these hits", rows)


@verb
def simulate(
    terminal: Terminal,
    *,
    trace: Path = argument(
        "TRACE", FILE, "Trace of Mooncake, Dynamo, AIPerf, Bailian, BurstGPT or ShareGPT."
    ),
    blocks: tuple[int, ...] = option(
        "--blocks", several(whole(0)), "Cache sizes to try, in blocks.", default="1000,10000,100000"
    ),
    sizes: tuple[int, ...] | None = option(
        "--sizes", several(SIZE), "More cache sizes to try, e.g. 100GiB,1TiB."
    ),
    gpu: int = option("--gpu", SIZE, "Size of the cache in accelerator memory.", default="0B"),
    cpu: int = option("--cpu", SIZE, "Size of the cache in host memory.", default="0B"),
    storage: int | None = option("--storage", SIZE, "Size of the cache on storage (default: no limit)."),
    model: str = KV_MODEL,
    dtype: str | None = KV_DTYPE,
    page: Path | None = PAGE,
    reading: TraceFormatOptions = group(TraceFormatOptions, panel="Trace"),
) -> None:
    """Calculate the prefix hits of a TRACE for caches of any size (LRU), and what each tier serves.

    A block counts as a hit only if every earlier block of its request hits too; cached blocks after a miss
    cannot be used.

    Examples:

      penstock kvcache simulate conversation_trace.jsonl --blocks 1000,10000 --json

      penstock kvcache simulate trace.jsonl --model deepseek-v3 --gpu 40GiB --cpu 512GiB --storage 10TiB
    """
    from penstock.kvcache.block_trace import find_reuse, simulate_tiers
    from penstock.kvcache.cache_pages import make_simulation_page
    from penstock.kvcache.models import find_model

    requests = reading.load(trace, terminal)
    reuse = find_reuse(requests)
    cached = find_model(model, dtype=dtype)
    block_bytes = requests.block_tokens * cached.bytes_per_token
    capacities = [*blocks, *(size // block_bytes for size in sizes or ()), None]
    tiers = {
        "gpu": gpu // block_bytes,
        "cpu": cpu // block_bytes,
        "storage": None if storage is None else storage // block_bytes,
    }
    document = {
        **requests.statistics(),
        "model": cached.name,
        "block_bytes": block_bytes,
        "rows": [
            {
                "capacity_blocks": capacity,
                "capacity_bytes": None if capacity is None else capacity * block_bytes,
                "prefix_hit_ratio": reuse.prefix_hit_ratio(capacity),
            }
            for capacity in capacities
        ],
        "tiers": [
            figures
            | {
                "hit_ratio": figures["hit_blocks"] / requests.num_blocks if requests.num_blocks else 0.0,
                "read_bytes": figures["hit_blocks"] * block_bytes,
                "written_bytes": figures["written_blocks"] * block_bytes,
            }
            for figures in simulate_tiers(reuse, tiers)
        ],
    }
    terminal.result(document, _view_simulation(document))
    write_page(page, lambda: make_simulation_page(document), terminal)


def _view_simulation(document: dict[str, Any]) -> View:
    from penstock.kvcache.cache_pages import size_rows, tier_rows

    yield (
        f"{document['requests']:,} requests in {document['span_s']:,.0f} s, {document['blocks']:,} blocks of "
        f"{document['block_tokens']} tokens ({format_bytes(document['block_bytes'])}, {document['model']}); "
        f"{document['unique_blocks']:,} different ones, {document['used_once']:.1%} of these used once"
    )
    best = max((row["prefix_hit_ratio"] for row in document["rows"]), default=0.0) or 1.0
    bars = ["#" * round(30 * row["prefix_hit_ratio"] / best) for row in document["rows"]]
    rows = [row | {"": bar} for row, bar in zip(size_rows(document), bars, strict=True)]
    yield TextTable("Prefix hits by the size of the cache (LRU)", rows)
    yield TextTable("What each tier serves and takes", tier_rows(document))


@verb
def inspect(
    terminal: Terminal,
    *,
    store: str = argument(
        "STORE", URI, "Entries of vLLM, LMCache or Penstock: a directory or s3://bucket/prefix."
    ),
    storage: tuple[tuple[str, str], ...] = STORAGE,
    model: str | None = option(
        "--model",
        TEXT,
        "Model for calculating token counts that STORE does not state: one of `penstock kvcache models`, or "
        "the path of a config.json.",
    ),
    verifies: bool = flag(
        "--verify", "Read all contents: verify checksums if there are any, else look for pages of zeros."
    ),
) -> int:
    """Show what a STORE of cache entries holds: engines, models, tokens, and damaged or unfinished entries.

    Reads the files that vLLM (offloading to a file system), LMCache (disk and fs backends, and server) and
    Penstock write. Changes nothing. Exits with 1 if an entry is damaged.

    Examples:

      penstock kvcache inspect /mnt/kv

      penstock kvcache inspect /mnt/lmcache --model llama3.1-8b --verify --json
    """
    from penstock.kvcache.inspect_store import inspect_store
    from penstock.kvcache.models import find_model
    from penstock.storage import open_storage

    opened = open_storage(store, process_environment(), options=dict(storage))
    with terminal.progress() as progress:
        assumed = None if model is None else find_model(model)
        document = inspect_store(opened, progress, model=assumed, verifies=verifies)
    terminal.result(document, _view_store(document))
    return DAMAGED if document["damaged"] else 0


def _view_store(document: dict[str, Any]) -> View:
    """Show the description of a store as text."""
    yield (
        f"{document['target']}: {document['entries']:,} entries, {format_bytes(document['bytes'])}, "
        f"{document['damaged']:,} damaged"
        + ("" if document["verified"] else " by their names and sizes (--verify reads their contents)")
    )
    for series in document["series"]:
        yield from _view_series(series)
    for name, meaning in (("unfinished", "begun and not finished"), ("unknown", "of no layout known here")):
        if (found := document[name])["objects"]:
            yield (
                f"{found['objects']:,} objects {meaning}, {format_bytes(found['bytes'])}, the oldest "
                f"{format_seconds(found['oldest_age_s'])} old: {', '.join(found['examples'])}"
            )
    if document["wrong"]:
        yield TextTable("Damaged", document["wrong"])


def _view_series(series: dict[str, Any]) -> View:
    tokens = series["tokens_per_entry"]
    per_token = format_number(series["bytes_per_token"], ",.0f")
    like = f" (as {', '.join(series['like_models'])})" if series["like_models"] else ""
    rows = [
        {"": "model", "value": series["model"] or "not stated"},
        {"": "entries", "value": f"{series['entries']:,}, {format_bytes(series['bytes'])}"},
        {"": "whole", "value": f"{series['whole']:,}, {series['partial']:,} of them shorter than others"},
        {"": "ranks", "value": f"{series['ranks']:,}"},
        {
            "": "blocks",
            "value": f"{series['blocks']:,}, {series['usable_blocks']:,} of them whole on all ranks",
        },
        {
            "": "tokens",
            "value": "not known" if tokens is None else f"{tokens:,} an entry, {series['tokens']:,} in all",
        },
        {"": "bytes a token", "value": f"{per_token}{like}"},
    ]
    if series["config_problem"]:
        rows.append({"": "configuration", "value": series["config_problem"]})
    misses = {name: count for name, count in series["misses"].items() if count}
    if misses:
        rows.append(
            {"": "damaged", "value": ", ".join(f"{count:,} {name}" for name, count in misses.items())}
        )
    yield TextTable(f"{series['layout']}: {series['name']}", rows)
