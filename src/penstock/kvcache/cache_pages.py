"""Pages of key-value caches: hits by size of the cache, a run on one storage system, a comparison of several.

Pure: turns the documents of `penstock kvcache` into pages.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.kvcache.cache_figures import (
    has_small_objects,
    is_latency,
    is_limited_by_client,
    latency_note,
    metric_rows,
    say_doubts,
)
from penstock.reports.report import (
    Banner,
    Chart,
    Kind,
    Look,
    Report,
    Section,
    Series,
    Tone,
    bar_chart,
    table_section,
)
from penstock.units import format_bytes, format_count, format_number, format_rate, format_seconds

GIB: Final = 1 << 30
_ENOUGH: Final = 0.95
"""The smallest cache that reaches this share of an unlimited cache's hits is large enough."""


def make_simulation_page(document: Mapping[str, Any]) -> Report:
    """Return the page of a simulation: the hits by size of the cache, and what each tier serves."""
    rows = sorted(
        (row for row in document["rows"] if row["capacity_blocks"] is not None),
        key=lambda row: row["capacity_blocks"],
    )
    most = max(row["prefix_hit_ratio"] for row in document["rows"])
    enough = next((row for row in rows if row["prefix_hit_ratio"] >= _ENOUGH * most), None)
    hits = Chart(
        kind=Kind.LINES,
        title="Prefix hits against the size of the cache",
        run=document["model"],
        unit="%",
        names=[format_bytes(row["capacity_bytes"]) for row in rows],
        series=[Series(y=[100 * row["prefix_hit_ratio"] for row in rows])],
        y_end=100,
        limits={"no limit": 100 * most},
    )
    return Report(
        title=f"Hits of a key-value cache for {document['model']}",
        subtitle=(
            f"{document['requests']:,} requests in {format_seconds(document['span_s'])}, "
            f"{document['blocks']:,} blocks of {document['block_tokens']} tokens"
        ),
        banner=Banner(
            verdict="simulated",
            look=Look.PLAIN,
            figure=f"{most:.1%} of all blocks hit if the cache has no limit",
            limited_by=f"{document['used_once']:.1%} of different blocks are used once",
            since=(
                f"{format_bytes(enough['capacity_bytes'], at_least=True)} on, more room brings less than "
                f"{1 - _ENOUGH:.0%} more hits"
                if enough
                else "none of these sizes is large enough for nearly all hits"
            ),
            to_do="`penstock kvcache replay` measures this on storage.",
        ),
        highlights=[hits],
        sections=[
            table_section("sizes", "Sizes", size_rows(document)),
            table_section("tiers", "Tiers", tier_rows(document)),
        ],
    )


def size_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row for each size of the cache."""
    return [
        {
            "blocks": _count_blocks(row["capacity_blocks"]),
            "cache": "-" if row["capacity_bytes"] is None else format_bytes(row["capacity_bytes"]),
            "prefix hits": f"{row['prefix_hit_ratio']:.3f}",
        }
        for row in document["rows"]
    ]


def tier_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row for each tier."""
    return [
        {
            "tier": tier["tier"],
            "blocks": _count_blocks(tier["capacity_blocks"]),
            "hits": f"{tier['hit_ratio']:.3f}",
            "read": format_bytes(tier["read_bytes"]),
            "written": format_bytes(tier["written_bytes"]),
        }
        for tier in document["tiers"]
    ]


def _count_blocks(blocks: int | None) -> str:
    return "no limit" if blocks is None else f"{blocks:,}"


_MOSTLY: Final = 0.9


def _say_what_pays(worth: float | None, break_even: float) -> str:
    """Return advice on the share of requests for which loading was worth it."""
    if worth is None:
        return "Use a workload with hits: this one reads nothing back."
    paid = f"loading was faster than computing for {worth:.1%} of requests with hits"
    if worth >= _MOSTLY:
        return f"Nothing: {paid}."
    needed = format_rate(break_even, at_least=True)
    return f"Read with more than {needed} for each accelerator, or load less: {paid}."


def make_run_page(document: Mapping[str, Any]) -> Report:
    """Return the page of a run: rates, latencies, break-even, and the load that the storage sustains."""
    if "options" in document:
        return _make_mlperf_page(document)
    saved, misses = document["time_to_first_token"], sum(document["misses"].values())
    read, write = (document[name]["gib_per_s"] * GIB for name in ("read", "write"))
    break_even = saved["break_even_gib_per_s"] * GIB
    rates = bar_chart(
        "Throughput",
        document["target"],
        {"read": read, "write": write},
        "B/s",
        limits={"break-even of one accelerator": break_even},
    )
    worth = saved["hits_worth_it"]
    ranks = format_count(document["ranks"], "rank")
    planned, loads = _hit_charts(document), _load_charts(document)
    first = loads or planned[:1]
    return Report(
        title=f"A key-value cache on {document['target']}",
        subtitle=(
            f"{document['plan']['name']}, {ranks} x {format_count(document['engine']['streams'], 'stream')}, "
            f"operations {document['plan']['digest']}"
        ),
        banner=Banner(
            verdict="misses" if misses else "whole",
            look=Look.BAD if misses else Look.GOOD,
            figure=f"read {format_bytes(read)}/s, wrote {format_bytes(write)}/s of payload",
            limited_by="this client: the same streams are hardly faster on objects in memory"
            if is_limited_by_client(document)
            else "the storage, or the streams in flight",
            since=f"the start: the run took {format_seconds(document['elapsed_s'])}",
            to_do="Look for what damaged or removed entries."
            if misses
            else "Move whole objects, without --scale, to see whether loading pays."
            if has_small_objects(document)
            else _say_what_pays(worth, break_even),
            troubles=[
                *(f"{count:,} entries were {name}" for name, count in document["misses"].items() if count),
                *say_doubts(document),
            ],
        ),
        highlights=[rates, *first],
        sections=[
            Section(
                name="workload",
                title="Over the workload's time, by tier",
                text=["As planned: which tier has the requested chunks, and how many bytes that moves."],
                charts=planned if loads else planned[1:],
                why_empty="This workload has no chunks.",
            ),
            Section(
                name="run",
                title="Over the run",
                text=["As measured on storage; memory tiers are planned and not moved."],
                charts=_run_charts(document),
                why_empty="Nothing was moved.",
            ),
            table_section("latency", "Latencies, ms", _latency_rows(document)),
        ],
    )


def _make_mlperf_page(document: Mapping[str, Any]) -> Report:
    """Return the page of a run of mlperf-v3: each option's honest rates, and all metrics next to them."""
    options = document["options"]
    misses = sum(option["misses"] for option in options.values())
    rates = {
        direction: {
            f"option {number}": option["metrics"][f"aggregated_{direction}_bandwidth_gbps"]["honest"]
            for number, option in options.items()
        }
        for direction in ("read", "write")
    }
    figure = "; ".join(
        f"{direction} at " + ", ".join(f"{rate:.2f} GiB/s ({name})" for name, rate in of_options.items())
        for direction, of_options in rates.items()
    )
    return Report(
        title=f"MLPerf's key-value cache on {document['target']}",
        subtitle=(
            f"{format_count(document['ranks'], 'rank')} x "
            f"{format_count(document['engine']['streams'], 'stream')}"
        ),
        banner=Banner(
            verdict="misses" if misses else "whole",
            look=Look.BAD if misses else Look.GOOD,
            figure=figure,
            limited_by="the storage, or the streams in flight",
            since="the start",
            to_do="Look for what damaged or removed entries." if misses else "Nothing.",
            troubles=[f"{misses:,} entries were missing or wrong"] if misses else [],
        ),
        highlights=[
            bar_chart(
                f"Bytes {'read' if direction == 'read' else 'written'}",
                document["target"],
                {name: (rate or 0.0) * GIB for name, rate in of_options.items()},
                "B/s",
            )
            for direction, of_options in rates.items()
        ],
        sections=[
            table_section(f"option{number}", f"Option {number} ({option['kind']})", metric_rows(option))
            for number, option in options.items()
        ],
    )


def _load_charts(document: Mapping[str, Any]) -> list[Chart]:
    """Return charts of latency by load, if the run searched for the largest load."""
    sustained = document.get("sustained")
    if not sustained:
        return []
    points = sorted(sustained["points"], key=lambda point: point["speedup"])
    return [
        Chart(
            kind=Kind.LINES,
            title="Load time (p95) against load, in times the workload's pace",
            run=document["target"],
            unit="s",
            names=[f"{point['speedup']:.3g}" for point in points],
            series=[Series(y=[point["load_p95_ms"] / 1e3 for point in points])],
            limits={"objective": sustained["objective_ms"] / 1e3},
        )
    ]


_TIERS: Final[Mapping[str, Tone]] = {"gpu": "light", "cpu": "dark", "storage": "full"}
_DIRECTIONS: Final[Mapping[str, Tone]] = {"read": "full", "write": "dark"}


def _hit_charts(document: Mapping[str, Any]) -> list[Chart]:
    """Return charts of each tier's hits and bytes over the workload's time."""
    rows = document["over_workload"]
    if not rows or not any(row["chunks"] for row in rows):
        return []
    middles, end_s = _middles(rows)
    tiers = [tier for tier in _TIERS if any(row[f"{tier}_hits"] for row in rows)]
    shares = [
        _known_series(
            tier,
            _TIERS[tier],
            middles,
            [100 * row[f"{tier}_hits"] / row["chunks"] if row["chunks"] else None for row in rows],
        )
        for tier in tiers or ["storage"]
    ]
    width_s = end_s / len(rows)
    read = [
        Series(
            name=tier, tone=_TIERS[tier], x=middles, y=[row[f"{tier}_read_bytes"] / width_s for row in rows]
        )
        for tier in tiers
    ]
    written = [row["storage_written_bytes"] / width_s for row in rows]
    # Several lines have a legend. A single line has none, so its title names the tier.
    hits_by = ", by tier" if len(shares) > 1 else f" in {shares[0].name}"
    read_by = ", by tier" if len(read) > 1 else f" from {''.join(tiers)}"
    lines = [
        (f"Chunks that hit{hits_by}", "%", 100.0, shares),
        *([(f"Read{read_by}", "B/s", 0.0, read)] if read else []),
        ("Written to storage", "B/s", 0.0, [Series(x=middles, y=written)]),
    ]
    return [
        Chart(
            kind=Kind.LINES,
            title=title,
            run=document["target"],
            unit=unit,
            series=series,
            x_end=end_s,
            y_end=y_end,
        )
        for title, unit, y_end, series in lines
    ]


def _run_charts(document: Mapping[str, Any]) -> list[Chart]:
    """Return charts of rates and latencies on storage over the run's time."""
    rows = document["over_run"]
    directions = [name for name in _DIRECTIONS if any(row[f"{name}_bytes"] for row in rows)]
    if not directions:
        return []
    middles, end_s = _middles(rows)
    width_s = end_s / len(rows)
    moved = [
        Series(
            name=name,
            tone=_DIRECTIONS[name],
            x=middles,
            y=[row[f"{name}_bytes"] / width_s for row in rows],
        )
        for name in directions
    ]
    latencies = [
        _known_series(
            name,
            _DIRECTIONS[name],
            middles,
            [None if row[f"{name}_p95_ms"] is None else row[f"{name}_p95_ms"] / 1e3 for row in rows],
        )
        for name in directions
    ]
    only = f": {directions[0]}" if len(directions) == 1 else ""
    lines = [
        (f"Throughput on storage{only}", "B/s", moved),
        (f"Latency of objects, p95{only}", "s", latencies),
    ]
    return [
        Chart(kind=Kind.LINES, title=title, run=document["target"], unit=unit, series=series, x_end=end_s)
        for title, unit, series in lines
    ]


def _middles(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], float]:
    """Return the middle of each part, followed by the end of the last one."""
    width_s = rows[1]["begin_s"] if len(rows) > 1 else 1.0
    return [row["begin_s"] + width_s / 2 for row in rows], width_s * len(rows)


def _known_series(name: str, tone: Tone, xs: Sequence[float], ys: Sequence[float | None]) -> Series:
    """Return a line through the points that have a value."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    return Series(name=name, tone=tone, x=[x for x, _ in pairs], y=[y for _, y in pairs])


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


_RATES: Final = ("gib_per_s", "bandwidth_gbps, honest")


def make_comparison_page(comparison: Mapping[str, Any]) -> Report:
    """Return the page of several runs: a chart for each rate and latency, and all figures with rankings."""
    runs = [f"run {index + 1}" for index in range(len(comparison["targets"]))]
    figures: Mapping[str, Mapping[str, Any]] = comparison["figures"]
    rates = {
        name: figure for name, figure in figures.items() if name.endswith(_RATES) and any(figure["values"])
    }
    is_same = comparison["is_comparable"]
    return Report(
        title="Storage systems for a key-value cache",
        subtitle=", ".join(
            f"{run}: {target}" for run, target in zip(runs, comparison["targets"], strict=True)
        ),
        banner=Banner(
            verdict="comparable" if is_same else "not comparable",
            look=Look.GOOD if is_same else Look.DOUBT,
            figure="; ".join(
                f"{_in_words(name)}: {runs[figure['best_first'][0]]} is best"
                for name, figure in rates.items()
                if figure["best_first"]
            )
            or "no rate ranks these runs",
            limited_by="; ".join(
                f"{_in_words(name)}: best over worst {max(known) / min(known):.2f}x"
                for name, figure in rates.items()
                if figure["best_first"] and (known := [value for value in figure["values"] if value])
            )
            or "not known",
            since="all runs executed the same operations" if is_same else "the operations differ",
            to_do="Read the table: it has the order in which each figure ranks the runs, if it can.",
        ),
        highlights=[_compare_bars(name, runs, figure["values"]) for name, figure in rates.items()],
        sections=[
            Section(
                name="latencies",
                title="Latencies",
                text=[note] if (note := latency_note(comparison)) else (),
                charts=[
                    _compare_bars(name, runs, figure["values"])
                    for name, figure in figures.items()
                    if is_latency(name) and any(figure["values"])
                ],
                why_empty="None was measured.",
            ),
            table_section("figures", "All figures", figure_rows(comparison)),
        ],
    )


def _in_words(name: str) -> str:
    return (
        name.replace("_gib_per_s", "")
        .replace("_bandwidth_gbps, honest", "")
        .replace("_ms", "")
        .replace("_", " ")
    )


def _compare_bars(name: str, runs: Sequence[str], values: Sequence[float | None]) -> Chart:
    is_time = "_ms" in name
    bars = {run: (value or 0.0) * (1e-3 if is_time else GIB) for run, value in zip(runs, values, strict=True)}
    return bar_chart(_in_words(name), "comparison", bars, "s" if is_time else "B/s")


def figure_rows(comparison: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return one row for each figure, with the order in which it ranks the runs."""
    return [
        {
            "figure": name,
            **{
                f"run {number}": format_number(value, ",.3f")
                for number, value in enumerate(figure["values"], start=1)
            },
            "best first": ", ".join(str(index + 1) for index in figure["best_first"]) or "-",
        }
        for name, figure in comparison["figures"].items()
    ]
