"""The page of a probe: what this storage can do at best, how many streams that takes, and whom it feeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from penstock.bench.probe.load_page import (
    load_banner,
    load_charts,
    load_exhibits,
    metadata_banner,
    say_knee,
)
from penstock.bench.probe.probe_run import ProbeMeasurement, ProbeResult, headline_rows, measurement_rows
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Section, Series, Tone, table_section
from penstock.units import format_bytes, format_rate
from penstock.workload import load_workload
from penstock.workload.accelerator_forecast import forecast_accelerators
from penstock.workload.spec import Workload

GIB: Final = 2**30
_KNEE: Final = 0.9
"""The fewest streams with this share of the best rate are enough."""
_SEQUENTIAL: Final[Mapping[str, Tone]] = {"read": "full", "write": "dark"}
_NAMED: Final = "unet3d_h100"


def make_probe_page(result: ProbeResult) -> Report:
    """The page of a probe."""
    modes = list(dict.fromkeys(seen.mode for seen in result.measurements))
    charts_by_mode = {mode: _charts(result, mode) for mode in modes}
    first = charts_by_mode.pop(best(result, "read").mode) if modes else []
    if result.loads and not modes:
        first = load_charts(result.loads[0], result.uri)
    return Report(
        title=f"What {result.uri} can do at best",
        subtitle=(
            f"probed from {', '.join(result.hosts)} with {result.ranks} rank{'s' * (result.ranks > 1)}, "
            f"up to {format_bytes(result.size_bytes)} a measurement"
        ),
        banner=_banner(result),
        highlights=first,
        sections=[
            *(
                Section(name=mode, title=f"The same, {_MODES.get(mode, mode)}", charts=charts)
                for mode, charts in charts_by_mode.items()
            ),
            *([_best_over_time(result)] if modes else []),
            *load_exhibits(result.loads, result.metadata, result.uri, draws_knee=bool(modes)),
            *(_tables(result) if modes else ()),
            *(
                [table_section("feeds", "Accelerators that this storage feeds", feed_rows(result))]
                if read_rate(result)
                else []
            ),
        ],
    )


def _best_over_time(result: ProbeResult) -> Section:
    """The fastest read and write as they went: a cache that fills, or credit that is spent, shows here."""
    charts = []
    for op, tone in _SEQUENTIAL.items():
        seen = best(result, op)
        edges = [*(one.start_s for one in seen.intervals), seen.elapsed_s]
        rates = [one.operations_per_s * seen.block_bytes for one in seen.intervals]
        charts.append(
            Chart(
                kind=Kind.AREA,
                title=f"Best {op} over time",
                run=result.uri,
                unit="B/s",
                series=[Series(x=edges, y=rates, tone=tone)],
                note=f"{seen.mode}, {describe(seen)}",
            )
        )
    return Section(name="series", title="The best read and write over time", charts=charts)


def _tables(result: ProbeResult) -> Iterator[Section]:
    yield table_section("best", "The best of each kind", headline_rows(result.measurements))
    yield table_section("all", "All measurements", measurement_rows(result.measurements), bars="GiB/s")


_MODES: Final = {"buffered": "through the page cache, dropped before each read", "direct": "with O_DIRECT"}


def best(result: ProbeResult, op: str) -> ProbeMeasurement:
    """The fastest measurement of an operation."""
    return max(_of(result, op), key=lambda seen: seen.gib_per_s)


def throughput_curve(result: ProbeResult, *, limits: Mapping[str, float]) -> Chart:
    """Throughput against streams, in the mode that reads fastest."""
    return _curve(result, best(result, "read").mode, _CURVES[0], limits)


def describe(seen: ProbeMeasurement) -> str:
    """Streams and block, in words."""
    return f"{seen.streams} stream{'s' * (seen.streams > 1)} of {format_bytes(seen.block_bytes)}"


def _of(result: ProbeResult, op: str, mode: str = "") -> list[ProbeMeasurement]:
    return [seen for seen in result.measurements if seen.op == op and mode in ("", seen.mode)]


def read_rate(result: ProbeResult) -> float:
    """The bytes a second that a reader can count on: the best rate, or the knee's; 0 if neither is known.

    Of a mix only its reads count.
    """
    rates = [seen.gib_per_s for seen in _of(result, "read")]
    rates = rates or [load.knee.gib_per_s * load.read_percent / 100 for load in result.loads if load.knee]
    return max(rates, default=0.0) * GIB


def feeds(result: ProbeResult, workload: Workload) -> int:
    """How many accelerators of a workload that rate feeds."""
    return forecast_accelerators(workload, Fraction(read_rate(result))).num_accelerators


def say_feeds(result: ProbeResult) -> str:
    """How many accelerators of the best-known workload the rate of reading feeds; "" if that is not known."""
    rate = read_rate(result)
    if not rate:
        return ""
    count = feeds(result, load_workload.load(_NAMED).workload)
    at = "" if result.measurements else " at its knee"
    return f"feeds {count or 'no'} H100 of unet3d{at}"


def _banner(result: ProbeResult) -> Banner:
    if result.measurements:
        return _best_banner(result)
    if result.loads:
        return load_banner(result.loads[0], say_feeds(result), result.notes)
    return metadata_banner(result.metadata, result.notes)


def _best_banner(result: ProbeResult) -> Banner:
    read, write = best(result, "read"), best(result, "write")
    random = best(result, "random_read")
    enough = _enough(result, read)
    return Banner(
        verdict="measured",
        look=Look.PLAIN,
        figure=f"reads with {_rate(read)}, writes with {_rate(write)}, durable; {say_feeds(result)}",
        limited_by=_say_limit(result, read),
        since=(
            f"{describe(enough)}, which reach {_rate(enough)}; "
            f"random reads of {format_bytes(random.block_bytes)}: {random.operations_per_s:,.0f} a second, "
            f"p99 {random.p99_ms:.1f} ms"
        ),
        to_do=(
            f"Read with at least {enough.streams} streams (reader.read_threads) and requests of "
            f"{format_bytes(enough.block_bytes)}; `penstock training run` shows what a workload makes of it."
        ),
        troubles=[*result.notes, *_from_memory(result)],
        more={"Knee": say_knee(result.loads[0])} if result.loads else {},
    )


def _rate(seen: ProbeMeasurement) -> str:
    return format_rate(seen.gib_per_s * GIB)


def _enough(result: ProbeResult, top: ProbeMeasurement) -> ProbeMeasurement:
    """The fewest streams that come near the best rate."""
    near = [seen for seen in _of(result, top.op, top.mode) if seen.gib_per_s >= _KNEE * top.gib_per_s]
    return min(near, key=lambda seen: (seen.streams * seen.block_bytes, seen.streams))


def _say_limit(result: ProbeResult, read: ProbeMeasurement) -> str:
    tried = _of(result, "read", read.mode)
    most, largest = max(seen.streams for seen in tried), max(seen.block_bytes for seen in tried)
    at = f"{describe(read)}, {read.mode}"
    if len(tried) == 1:
        return f"what was tried: only {at}. Try more with --streams and --blocks."
    if read.streams == most:
        return f"the streams tried: {at} were the most, and the fastest. Try more with --streams."
    if read.block_bytes == largest and len({seen.block_bytes for seen in tried}) > 1:
        return f"the storage, or this host: the fastest were {at}; more streams were not faster."
    return f"the storage, or this host: the fastest were {at}; neither more streams nor larger blocks helped."


def _from_memory(result: ProbeResult) -> Iterator[str]:
    held = [seen.resident_before for seen in _of(result, "read") if seen.resident_before]
    if held and max(held) > _HELD:
        yield f"Memory still held up to {max(held):.0%} of the files before a buffered read."


_HELD: Final = 0.01


def _charts(result: ProbeResult, mode: str) -> list[Chart]:
    """Throughput against streams and against blocks, and latency against streams."""
    return [_curve(result, mode, shown, {}) for shown in _CURVES]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """What is drawn against what: `at` is where a measurement is, `value` how high."""

    title: str
    at: Callable[[ProbeMeasurement], int]
    name: Callable[[int], str]
    value: Callable[[ProbeMeasurement], float]
    unit: str


_CURVES: Final = (
    _Chart(
        title="Throughput by streams",
        at=lambda seen: seen.streams,
        name=str,
        value=lambda seen: seen.gib_per_s * GIB,
        unit="B/s",
    ),
    _Chart(
        title="Throughput by block",
        at=lambda seen: seen.block_bytes,
        name=format_bytes,
        value=lambda seen: seen.gib_per_s * GIB,
        unit="B/s",
    ),
    _Chart(
        title="p99 of a block by streams",
        at=lambda seen: seen.streams,
        name=str,
        value=lambda seen: seen.p99_ms / 1e3,
        unit="s",
    ),
)


def _curve(result: ProbeResult, mode: str, shown: _Chart, limits: Mapping[str, float]) -> Chart:
    """At each place the fastest measurement, as a line for reading and one for writing."""
    places = sorted({shown.at(seen) for op in _SEQUENTIAL for seen in _of(result, op, mode)})
    return Chart(
        kind=Kind.LINES,
        title=shown.title,
        run=result.uri,
        unit=shown.unit,
        names=list(map(shown.name, places)),
        series=[_line(_of(result, op, mode), op, places, shown) for op in _SEQUENTIAL],
        limits=limits,
        note=f"{mode}; the fastest at each",
    )


def _line(measured: Sequence[ProbeMeasurement], op: str, places: Sequence[int], shown: _Chart) -> Series:
    fastest = [
        max(
            (seen for seen in measured if shown.at(seen) == place),
            key=lambda seen: seen.gib_per_s,
            default=None,
        )
        for place in places
    ]
    known = [(number, shown.value(seen)) for number, seen in enumerate(fastest) if seen is not None]
    return Series(name=op, tone=_SEQUENTIAL[op], x=[number for number, _ in known], y=[y for _, y in known])


def feed_rows(result: ProbeResult) -> list[dict[str, str]]:
    """What the rate of reading means for the shipped workloads."""
    return list(_feeds(read_rate(result)))


def _feeds(rate: float) -> Iterator[dict[str, str]]:
    for loaded in load_workload.shipped():
        workload = loaded.workload
        if workload.train.computation_time.is_zero or not workload.metric.au:
            continue
        forecast = forecast_accelerators(workload, Fraction(rate))
        yield {
            "workload": workload.full_name,
            "feeds": str(forecast.num_accelerators),
            "each takes": format_rate(float(forecast.bytes_per_accelerator_per_s)),
            "AU of one": f"{min(float(forecast.au), 1.0) * 100:.1f} %"
            if not forecast.num_accelerators
            else f"at least {float(forecast.threshold) * 100:.0f} %",
        }
