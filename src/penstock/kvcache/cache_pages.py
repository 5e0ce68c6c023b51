"""Pages of key-value caches: hits against the size of a cache, a run on a storage, several storages.

Pure: documents of `penstock kvcache` in, pages out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.kvcache.cache_figures import has_small_objects, limited_by_client, say_doubts
from penstock.kvcache.compare_runs import is_latency, latency_note
from penstock.reports import charts
from penstock.reports.answer_page import AnswerPage, Banner, Exhibit, Look, folded_table
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


_MOSTLY: Final = 0.9


def _say_what_pays(worth: float | None, break_even: float) -> str:
    """What to do about the share of requests that it was worth loading for."""
    if worth is None:
        return "Use a workload with hits: this one reads nothing back."
    paid = f"loading was faster than computing for {worth:.1%} of requests with hits"
    if worth >= _MOSTLY:
        return f"Nothing: {paid}."
    return f"Read with more than {format_bytes(break_even)}/s for each accelerator, or load less: {paid}."


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
    ranks = "1 rank" if document["ranks"] == 1 else f"{document['ranks']} ranks"
    planned, loads = _hit_charts(document, hue), _load_charts(document, hue)
    first = loads or planned[:1]
    return AnswerPage(
        title=f"A key-value cache on {document['target']}",
        subtitle=(
            f"{document['plan']['name']}, {ranks} x {document['engine']['streams']} streams, "
            f"operations {document['plan']['digest']}"
        ),
        banner=Banner(
            verdict="misses" if misses else "whole",
            look=Look.BAD if misses else Look.GOOD,
            figure=f"read {format_bytes(read)}/s, wrote {format_bytes(write)}/s of payload",
            limited_by=_say_limit(document),
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
        first=[rates, *first],
        exhibits=[
            Exhibit(
                name="workload",
                title="Over the workload's time, by tier",
                says="As planned: which tier has the chunks that requests ask for, and what that moves.",
                panels=planned if loads else planned[1:],
                why_empty="This workload has no chunks.",
            ),
            Exhibit(
                name="run",
                title="Over the run",
                says="As measured on storage; memory tiers are planned and not moved.",
                panels=_run_charts(document, hue),
                why_empty="Nothing was moved.",
            ),
            folded_table("latency", "Latencies, ms", _latency_rows(document)),
        ],
    )


def _say_limit(document: Mapping[str, Any]) -> str:
    if any(limited_by_client(document, name) for name in ("read", "write")):
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
            "Load time (p95) against load, in times the workload's pace",
            hue,
            [f"{point['speedup']:.3g}" for point in points],
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


_TIERS: Final = {"gpu": "tone-1", "cpu": "tone-3", "storage": "tone-2"}
_DIRECTIONS: Final = {"read": "tone-2", "write": "tone-3"}


def _hit_charts(document: Mapping[str, Any], hue: int) -> list[Panel]:
    """Hits and bytes of each tier over the workload's time."""
    rows = document["over_workload"]
    if not rows or not any(row["chunks"] for row in rows):
        return []
    middles, end_s = _middles(rows)
    tiers = [tier for tier in _TIERS if any(row[f"{tier}_hits"] for row in rows)]
    shares = [
        Curve(
            tier,
            _TIERS[tier],
            *_known(middles, [_percent(row[f"{tier}_hits"], row["chunks"]) for row in rows]),
        )
        for tier in tiers or ["storage"]
    ]
    width_s = end_s / len(rows)
    read = [
        Curve(tier, _TIERS[tier], middles, [row[f"{tier}_read_bytes"] / width_s for row in rows])
        for tier in tiers
    ]
    written = [row["storage_written_bytes"] / width_s for row in rows]
    return [
        charts.time_lines(
            _title("Chunks that hit", "in", shares), hue, end_s, shares, ValueAxis.of_percent()
        ),
        *(
            [charts.time_lines(_title("Read", "from", read), hue, end_s, read, _rates_of(read))]
            if read
            else []
        ),
        charts.time_lines(
            "Written to storage",
            hue,
            end_s,
            [Curve("", "tone-2", middles, written)],
            ValueAxis.of_rates(written),
        ),
    ]


def _title(what: str, word: str, series: Sequence[Curve]) -> str:
    """Lines have a legend; one alone has none, so that its title names it."""
    return f"{what}, by tier" if len(series) > 1 else f"{what} {word} {series[0].name}"


def _rates_of(series: Sequence[Curve]) -> ValueAxis:
    return ValueAxis.of_rates([value for line in series for value in line.ys])


def _run_charts(document: Mapping[str, Any], hue: int) -> list[Panel]:
    """Rates and latencies on storage over the run's time."""
    rows = document["over_run"]
    directions = [name for name in _DIRECTIONS if any(row[f"{name}_bytes"] for row in rows)]
    if not directions:
        return []
    middles, end_s = _middles(rows)
    width_s = end_s / len(rows)
    moved = [
        Curve(name, look, middles, [row[f"{name}_bytes"] / width_s for row in rows])
        for name, look in _DIRECTIONS.items()
        if name in directions
    ]
    latencies = {
        name: _known(
            middles, [None if row[f"{name}_p95_ms"] is None else row[f"{name}_p95_ms"] / 1e3 for row in rows]
        )
        for name in directions
    }
    only = f": {directions[0]}" if len(directions) == 1 else ""
    return [
        charts.time_lines(f"Throughput on storage{only}", hue, end_s, moved, _rates_of(moved)),
        charts.time_lines(
            f"Latency of objects, p95{only}",
            hue,
            end_s,
            [Curve(name, _DIRECTIONS[name], xs, ys) for name, (xs, ys) in latencies.items()],
            ValueAxis.of_seconds([value for _, ys in latencies.values() for value in ys]),
        ),
    ]


def _middles(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], float]:
    """The middle of each part, and the end of the last one."""
    width_s = rows[1]["begin_s"] if len(rows) > 1 else 1.0
    return [row["begin_s"] + width_s / 2 for row in rows], width_s * len(rows)


def _known(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """The points that have a value."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _percent(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


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


def make_comparison_page(comparison: Mapping[str, Any]) -> AnswerPage:
    """Several storages: a chart for each rate and latency, and all figures with the order that they give."""
    runs = [f"run {index + 1}" for index in range(len(comparison["targets"]))]
    figures: Mapping[str, Mapping[str, Any]] = comparison["figures"]
    rates = {
        name: figure for name, figure in figures.items() if name.endswith(_RATES) and any(figure["values"])
    }
    is_same = comparison["is_comparable"]
    return AnswerPage(
        title="Storages for a key-value cache",
        subtitle=", ".join(
            f"{run}: {target}" for run, target in zip(runs, comparison["targets"], strict=True)
        ),
        banner=Banner(
            verdict="comparable" if is_same else "not comparable",
            look=Look.GOOD if is_same else Look.DOUBT,
            figure="; ".join(
                f"{_in_words(name)}: {runs[figure['best_first'][0]]} is best"
                for name, figure in rates.items()
            )
            or "no run moved anything on its storage",
            limited_by="; ".join(
                f"{_in_words(name)}: best over worst {_spread(figure['values'])}"
                for name, figure in rates.items()
            )
            or "the workload: nothing was moved",
            since="all runs executed the same operations" if is_same else "the operations differ",
            to_do="Read the table: each figure has the order of the storages that it gives.",
        ),
        first=[_compare_bars(name, runs, figure["values"]) for name, figure in rates.items()],
        exhibits=[
            Exhibit(
                name="latencies",
                title="Latencies",
                says=latency_note(comparison) or "",
                panels=[
                    _compare_bars(name, runs, figure["values"])
                    for name, figure in figures.items()
                    if is_latency(name) and any(figure["values"])
                ],
                why_empty="None was measured.",
            ),
            folded_table("figures", "All figures", _figure_rows(comparison, runs)),
        ],
    )


def _in_words(name: str) -> str:
    return (
        name.replace("_gib_per_s", "")
        .replace("_bandwidth_gbps, honest", "")
        .replace("_ms", "")
        .replace("_", " ")
    )


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value]
    return f"{max(known) / min(known):.2f}x"


def _compare_bars(name: str, runs: Sequence[str], values: Sequence[float | None]) -> Panel:
    is_time = "_ms" in name
    bars = {run: (value or 0.0) * (1e-3 if is_time else GIB) for run, value in zip(runs, values, strict=True)}
    axis = ValueAxis.of_seconds(bars.values()) if is_time else ValueAxis.of_rates(bars.values())
    return charts.bar_chart(_in_words(name), assign_hues(["comparison"])["comparison"], bars, axis, limits={})


def _figure_rows(comparison: Mapping[str, Any], runs: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            "figure": name,
            **{
                run: "-" if value is None else f"{value:,.3f}"
                for run, value in zip(runs, figure["values"], strict=True)
            },
            "best first": ", ".join(str(index + 1) for index in figure["best_first"]) or "-",
        }
        for name, figure in comparison["figures"].items()
    ]
