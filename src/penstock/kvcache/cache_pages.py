"""Pages of key-value caches: hits against the size of a cache, a run on a storage, several storages.

Pure: documents of `penstock kvcache` in, pages out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.reports import charts
from penstock.reports.answer_page import AnswerPage, Banner, Look, folded_table
from penstock.reports.charts import Curve, ValueAxis
from penstock.reports.panels import Panel, assign_hues
from penstock.units import format_bytes, format_seconds

GIB: Final = 1 << 30
_ENOUGH: Final = 0.95
"""The smallest cache with this share of the hits of an unlimited one is large enough."""


def make_simulation_page(document: Mapping[str, Any]) -> AnswerPage:
    """Hits against the size of the cache, and what each tier serves."""
    rows = sorted(
        (row for row in document["rows"] if row["capacity_blocks"] is not None),
        key=lambda row: row["capacity_blocks"],
    )
    most = max(row["prefix_hit_ratio"] for row in document["rows"])
    enough = next((row for row in rows if row["prefix_hit_ratio"] >= _ENOUGH * most), None)
    hue = assign_hues([document["model"]])[document["model"]]
    hits = charts.curves(
        "Prefix hits against the size of the cache",
        hue,
        [format_bytes(row["capacity_bytes"]) for row in rows],
        [
            Curve(
                "hits",
                "tone-2",
                list(range(len(rows))),
                [100 * row["prefix_hit_ratio"] for row in rows],
            )
        ],
        ValueAxis.of_percent(),
        limits={"no limit": 100 * most},
    )
    return AnswerPage(
        title=f"Hits of a key-value cache for {document['model']}",
        subtitle=(
            f"{document['requests']:,} requests in {format_seconds(document['span_s'])}, "
            f"{document['blocks']:,} blocks of {document['block_tokens']} tokens"
        ),
        banner=Banner(
            verdict="simulated",
            look=Look.PLAIN,
            figure=f"{most:.1%} of all blocks hit where the cache has no limit",
            limited_by=f"{document['used_once']:.1%} of different blocks are used once",
            since=(
                f"{format_bytes(enough['capacity_bytes'])} on, more room brings less than "
                f"{1 - _ENOUGH:.0%} more hits"
                if enough
                else "none of these sizes is large enough for nearly all hits"
            ),
            to_do="`penstock kvcache replay` shows what a storage makes of it.",
        ),
        first=[hits],
        exhibits=[
            folded_table("sizes", "Sizes", [_size_row(row) for row in document["rows"]]),
            folded_table("tiers", "Tiers", [_tier_row(tier) for tier in document["tiers"]]),
        ],
    )


def _size_row(row: Mapping[str, Any]) -> dict[str, str]:
    blocks, size = row["capacity_blocks"], row["capacity_bytes"]
    return {
        "blocks": "no limit" if blocks is None else f"{blocks:,}",
        "cache": "-" if size is None else format_bytes(size),
        "prefix hits": f"{row['prefix_hit_ratio']:.3f}",
    }


def _tier_row(tier: Mapping[str, Any]) -> dict[str, str]:
    return {
        "tier": tier["tier"],
        "hits": f"{tier['hit_ratio']:.3f}",
        "read": format_bytes(tier["read_bytes"]),
        "written": format_bytes(tier["written_bytes"]),
    }


def make_run_page(document: Mapping[str, Any]) -> AnswerPage:
    """A run on a storage: rates, latencies, break-even, and the load that it sustains."""
    hue = assign_hues([document["target"]])[document["target"]]
    saved, misses = document["time_to_first_token"], sum(document["misses"].values())
    read, write = (document[name]["gib_per_s"] * GIB for name in ("read", "write"))
    break_even = saved["break_even_gib_per_s"] * GIB
    rates = charts.bar_chart(
        "Throughput",
        hue,
        {"read": read, "write": write},
        ValueAxis.of_rates([read, write, break_even]),
        limits={"break-even of one accelerator": break_even},
    )
    worth = saved["hits_worth_it"]
    return AnswerPage(
        title=f"A key-value cache on {document['target']}",
        subtitle=(
            f"{document['plan']['name']}, {document['ranks']} ranks x {document['engine']['streams']} "
            f"streams, operations {document['plan']['digest']}"
        ),
        banner=Banner(
            verdict="misses" if misses else "whole",
            look=Look.BAD if misses else Look.GOOD,
            figure=f"read {format_bytes(read)}/s, wrote {format_bytes(write)}/s of payload",
            limited_by=_say_limit(document),
            since=f"{format_seconds(document['elapsed_s'])} of {document['kind']}",
            to_do=(
                "Look for what damaged or removed entries."
                if misses
                else f"Loading was faster than computing for {worth:.1%} of requests with hits."
                if worth is not None
                else "Use a workload with hits: this one reads nothing back."
            ),
            troubles=[
                f"{count:,} entries were {name}" for name, count in document["misses"].items() if count
            ],
        ),
        first=[rates, *_load_charts(document, hue)],
        exhibits=[
            folded_table("latency", "Latencies, ms", _latency_rows(document)),
        ],
    )


def _say_limit(document: Mapping[str, Any]) -> str:
    ceiling = (document["ceiling"] or {}).get("read_gib_per_s")
    if ceiling and document["read"]["gib_per_s"] > 0.8 * ceiling:
        return "this client: the same streams are hardly faster on objects in memory"
    return "the storage, or the streams in flight"


def _load_charts(document: Mapping[str, Any], hue: int) -> list[Panel]:
    """Latency against load, where a load was searched for."""
    sustained = document.get("sustained")
    if not sustained:
        return []
    points = sorted(sustained["points"], key=lambda point: point["speedup"])
    return [
        charts.curves(
            "Load time (p95) against load",
            hue,
            [f"{point['requests_per_s']:.3g}/s" for point in points],
            [
                Curve(
                    "p95",
                    "tone-2",
                    list(range(len(points))),
                    [point["load_p95_ms"] / 1e3 for point in points],
                )
            ],
            ValueAxis.of_seconds(
                [sustained["objective_ms"] / 1e3, *(point["load_p95_ms"] / 1e3 for point in points)]
            ),
            limits={"objective": sustained["objective_ms"] / 1e3},
        )
    ]


def _latency_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    named: Sequence[tuple[str, Mapping[str, Any]]] = (
        ("objects read", document["read"]["latency_ms"]),
        ("objects written", document["write"]["latency_ms"]),
        ("requests loaded", document["requests"]["load_ms"]),
        ("lag", document["lag_ms"] or {"count": 0}),
    )
    return [
        {"of": name, **{key: f"{figures[key]:,.2f}" for key in ("p50", "p95", "p99", "max")}}
        for name, figures in named
        if figures["count"]
    ]


def make_comparison_page(comparison: Mapping[str, Any]) -> AnswerPage:
    """Several storages: a chart for each rate, and all figures with the order that they give."""
    targets = [f"{index + 1}: {target}" for index, target in enumerate(comparison["targets"])]
    hue = assign_hues(["comparison"])["comparison"]
    rates = {
        name: [value or 0.0 for value in figure["values"]]
        for name, figure in comparison["figures"].items()
        if name.endswith(("gib_per_s", "bandwidth_gbps, honest"))
    }
    is_same = comparison["is_comparable"]
    return AnswerPage(
        title="Storages for a key-value cache",
        subtitle=", ".join(targets),
        banner=Banner(
            verdict="comparable" if is_same else "not comparable",
            look=Look.GOOD if is_same else Look.DOUBT,
            figure="; ".join(
                f"{name}: {targets[figure['best_first'][0]]}"
                for name, figure in comparison["figures"].items()
                if name in rates and figure["best_first"]
            ),
            limited_by="what each run says",
            since="all runs executed the same operations" if is_same else "the operations differ",
            to_do="Read the table: each figure has the order of the storages that it gives.",
        ),
        first=[
            charts.bar_chart(
                name,
                hue,
                {target: value * GIB for target, value in zip(targets, values, strict=True)},
                ValueAxis.of_rates([value * GIB for value in values]),
                limits={},
            )
            for name, values in rates.items()
        ],
        exhibits=[
            folded_table(
                "figures",
                "All figures",
                [
                    {
                        "figure": name,
                        **{
                            target: "-" if value is None else f"{value:,.3f}"
                            for target, value in zip(targets, figure["values"], strict=True)
                        },
                        "best first": ", ".join(str(index + 1) for index in figure["best_first"]),
                    }
                    for name, figure in comparison["figures"].items()
                ],
            )
        ],
    )
