"""The page of a probe: the storage's best rates, the streams they need, and the accelerators they feed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final

from penstock.bench.probe.load_plan import MOST_SLOWDOWN
from penstock.bench.probe.load_run import LoadResult, load_rows
from penstock.bench.probe.metadata_rates import MetadataRate, metadata_rows
from penstock.bench.probe.probe_run import ProbeMeasurement, ProbeResult, headline_rows, measurement_rows
from penstock.reports.report import Banner, Chart, Kind, Look, Report, Section, Series, Tone, table_section
from penstock.units import format_bytes, format_count, format_rate
from penstock.workload import load_workload
from penstock.workload.sizing import forecast_accelerators, record_bytes
from penstock.workload.spec import Workload

GIB: Final = 2**30
_KNEE: Final = 0.9
"""The smallest number of streams that reaches this share of the best rate is enough."""
_SEQUENTIAL: Final[Mapping[str, Tone]] = {"read": "full", "write": "dark"}
_NAMED: Final = "unet3d_h100"
HUGE_PAGES: Final = "Buffers were in huge pages, as in training runs; fio: mem=mmaphuge"


def make_probe_page(result: ProbeResult) -> Report:
    """Build the page of a probe."""
    modes = list(dict.fromkeys(one.mode for one in result.measurements))
    # Throughput against streams and against blocks, and latency against streams.
    charts_by_mode = {mode: [_curve(result, mode, title, {}) for title in _CURVES] for mode in modes}
    first = charts_by_mode.pop(best(result, "read").mode) if modes else []
    if result.loads and not modes:
        first = load_charts(result.loads[0], result.uri)
    return Report(
        title=f"What {result.uri} can do",
        subtitle=(
            f"probed from {', '.join(result.hosts)} with {format_count(result.ranks, 'rank')}, "
            f"up to {format_bytes(result.size_bytes)} per measurement{_say_place(result)}. {HUGE_PAGES}"
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
            *(
                (
                    table_section("best", "The best of each kind", headline_rows(result.measurements)),
                    table_section(
                        "all", "All measurements", measurement_rows(result.measurements), bars="GiB/s"
                    ),
                )
                if modes
                else ()
            ),
            *(
                [table_section("feeds", "Accelerators that this storage feeds", rows)]
                if (rows := feed_rows(result))
                else []
            ),
        ],
    )


def _say_place(result: ProbeResult) -> str:
    place = result.place
    on = f", on {place['file_system']} of {place['device']}" if "device" in place else ""
    return f"{on}, {place['measured_at'][:16].replace('T', ' ')} UTC, {place['kernel']}" if place else ""


def _best_over_time(result: ProbeResult) -> Section:
    """Return the fastest read and write over time, which shows a full cache or spent burst credit."""
    charts = []
    for op, tone in _SEQUENTIAL.items():
        fastest = best(result, op)
        edges = [*(one.start_s for one in fastest.intervals), fastest.elapsed_s]
        rates = [one.operations_per_s * fastest.block_bytes for one in fastest.intervals]
        charts.append(
            Chart(
                kind=Kind.AREA,
                title=f"Best {op} over time",
                run=result.uri,
                unit="B/s",
                series=[Series(x=edges, y=rates, tone=tone)],
                note=f"{fastest.mode}, {describe(fastest)}",
            )
        )
    return Section(name="series", title="The best read and write over time", charts=charts)


_MODES: Final = {"buffered": "through the page cache, dropped before each read", "direct": "with O_DIRECT"}


def best(result: ProbeResult, op: str) -> ProbeMeasurement:
    """Return the fastest measurement of an operation."""
    return max(_of(result, op), key=lambda measured: measured.gib_per_s)


def throughput_curve(result: ProbeResult, *, limits: Mapping[str, float]) -> Chart:
    """Return throughput against streams, in the mode with the fastest reads."""
    return _curve(result, best(result, "read").mode, "Throughput by streams", limits)


def describe(measured: ProbeMeasurement) -> str:
    """Describe the streams and blocks of a measurement in words."""
    streams = measured.streams
    return f"{format_count(streams, 'stream')} of {format_bytes(measured.block_bytes)}"


def _of(result: ProbeResult, op: str, mode: str = "") -> list[ProbeMeasurement]:
    return [one for one in result.measurements if one.op == op and mode in ("", one.mode)]


def read_rate(result: ProbeResult, workload: Workload) -> tuple[float, str]:
    """Return the bytes per second that a workload can expect, and the measurement that shows it.

    This is the rate of random reads if each file holds one sample that is smaller than the smallest measured
    block, otherwise that of sequential reads. Without measured reads, it is the rate of the reads at the
    highest knee; 0 if there is none.
    """
    dataset = workload.dataset
    reads = _of(result, "read")
    smallest = min((one.block_bytes for one in reads), default=0)
    is_small = dataset.num_samples_per_file == 1 and record_bytes(dataset) < smallest
    if reads:
        used = best(result, "random_read" if is_small else "read")
        return used.gib_per_s * GIB, f"{'random' if is_small else 'sequential'} reads, {describe(used)}"
    knees = [load.knee.gib_per_s * load.read_percent / 100 for load in result.loads if load.knee]
    return max(knees, default=0.0) * GIB, "the knee"


def say_feeds(result: ProbeResult, name: str = _NAMED) -> str:
    """Describe how many accelerators of a workload this storage feeds, or what one needs; "" if unknown."""
    workload = load_workload.load(name).workload
    rate, _ = read_rate(result, workload)
    if not rate:
        return ""
    forecast = forecast_accelerators(workload, Fraction(rate))
    family, _, accelerator = name.rpartition("_")
    of = f"{accelerator.upper()} of {family}"
    if forecast.num_accelerators:
        return f"feeds {forecast.num_accelerators} {of}"
    needed = format_rate(float(forecast.bytes_per_accelerator_per_s * forecast.threshold), at_least=True)
    return f"is too slow for 1 {of}, which needs {needed}"


def _banner(result: ProbeResult) -> Banner:
    if not result.measurements:
        if result.loads:
            return load_banner(result.loads[0], say_feeds(result), result.notes)
        return metadata_banner(result.metadata, result.notes)
    read, write = best(result, "read"), best(result, "write")
    random = best(result, "random_read")
    near = [one for one in _of(result, "read", read.mode) if one.gib_per_s >= _KNEE * read.gib_per_s]
    enough = min(near, key=lambda one: (one.streams * one.block_bytes, one.streams))
    held = max((measured.resident_before or 0.0 for measured in _of(result, "read")), default=0.0)
    from_memory = f"Memory still held up to {held:.0%} of the files before a buffered read."
    read_rate_text, write_rate, enough_rate = (
        format_rate(one.gib_per_s * GIB) for one in (read, write, enough)
    )
    rates = [format_rate(rate * GIB) for rate in read.repeats]
    spread = f"{rates[0]} to {rates[-1]} in {len(rates)}" if len(rates) > 1 else "measured once"
    return Banner(
        verdict="measured",
        look=Look.PLAIN,
        figure=(
            f"sequentially reads at {read_rate_text} (median; {spread}), writes at {write_rate}, "
            f"durable; {say_feeds(result)}"
        ),
        limited_by=_say_limit(result, read),
        since=(
            f"{describe(enough)}, which reach {enough_rate}; "
            f"random reads of {format_bytes(random.block_bytes)}: {random.operations_per_s:,.0f} a second, "
            f"p99 {random.p99_ms:.1f} ms"
        ),
        to_do=(
            f"Read with at least {enough.streams} streams (reader.read_threads) and requests of "
            f"{format_bytes(enough.block_bytes)}; `penstock training run` shows what a workload makes of it."
        ),
        troubles=[*result.notes, *([from_memory] if held > _HELD else [])],
        more={"Knee": say_knee(result.loads[0])} if result.loads else {},
    )


def _say_limit(result: ProbeResult, read: ProbeMeasurement) -> str:
    tried = _of(result, "read", read.mode)
    most, largest = max(one.streams for one in tried), max(one.block_bytes for one in tried)
    at = f"{describe(read)}, {read.mode}"
    if len(tried) == 1:
        return f"what was tried: only {at}. Try more with --streams and --blocks."
    if read.streams == most:
        return f"the streams tried: {at} were the most, and the fastest. Try more with --streams."
    if read.block_bytes == largest and len({one.block_bytes for one in tried}) > 1:
        return f"the storage, or this host: the fastest were {at}; more streams were not faster."
    return f"the storage, or this host: the fastest were {at}; neither more streams nor larger blocks helped."


_HELD: Final = 0.01


_CURVES: Final[Mapping[str, tuple[Callable[[ProbeMeasurement], int], Callable[[int], str], str]]] = {
    "Throughput by streams": (lambda measured: measured.streams, str, "B/s"),
    "Throughput by block": (lambda measured: measured.block_bytes, format_bytes, "B/s"),
    "p99 of a block by streams": (lambda measured: measured.streams, str, "s"),
}
"""For each chart, a measurement's position on the x axis, the label of that position, and the y axis' unit.
"""


def _curve(result: ProbeResult, mode: str, title: str, limits: Mapping[str, float]) -> Chart:
    """Return the fastest measurement at each position on the x axis: one line for reads, one for writes."""
    at, name, unit = _CURVES[title]
    places = sorted({at(one) for op in _SEQUENTIAL for one in _of(result, op, mode)})
    lines = []
    for op, tone in _SEQUENTIAL.items():
        # Ordered by rate, so that the fastest at each position replaces the others.
        ordered = sorted(_of(result, op, mode), key=lambda one: one.gib_per_s)
        fastest = dict(sorted({places.index(at(one)): one for one in ordered}.items()))
        heights = [one.p99_ms / 1e3 if unit == "s" else one.gib_per_s * GIB for one in fastest.values()]
        lines.append(Series(name=op, tone=tone, x=list(fastest), y=heights))
    return Chart(
        kind=Kind.LINES,
        title=title,
        run=result.uri,
        unit=unit,
        names=list(map(name, places)),
        series=lines,
        limits=limits,
        note=f"{mode}; the fastest at each",
    )


def feed_rows(result: ProbeResult) -> list[dict[str, str]]:
    """Return rows that show which shipped workloads the read rates suffice for; none if no rate is known."""
    rows = []
    for loaded in load_workload.shipped():
        workload = loaded.workload
        if workload.train.computation_time.is_zero or not workload.metric.au:
            continue
        rate, by = read_rate(result, workload)
        if not rate:
            return []
        forecast = forecast_accelerators(workload, Fraction(rate))
        rows.append(
            {
                "workload": workload.full_name,
                "feeds": str(forecast.num_accelerators),
                "each takes": format_rate(float(forecast.bytes_per_accelerator_per_s)),
                "AU of one": f"{min(float(forecast.au), 1.0) * 100:.1f} %"
                if not forecast.num_accelerators
                else f"at least {float(forecast.threshold) * 100:.0f} %",
                "from": f"{format_rate(rate)}: {by}",
            }
        )
    return rows


_LIMITS = {
    "storage": "the storage: beyond it, operations themselves take longer",
    "depth": "the operations in flight: slots were used up while the storage was as fast as before. "
    "Try more with --depth.",
    "host": "this host, which began operations late although it had a slot for them",
    "": "nothing yet: no load offered was too much",
}


def describe_shape(load: LoadResult) -> str:
    """Describe one operation of a load."""
    kind = {100: "reads", 0: "writes"}.get(load.read_percent, f"operations ({load.read_percent} % reads)")
    return f"random {format_bytes(load.block_bytes)} {kind}"


def say_knee(load: LoadResult) -> str:
    """Describe the knee in a sentence, or the highest load if the storage kept up with all loads."""
    if load.knee is None:
        return f"{describe_shape(load)}: the storage kept up with no load"
    knee = load.knee
    above = "" if knee.limited_by else "at least "
    rate = format_rate(knee.gib_per_s * GIB)
    shape = describe_shape(load)
    return f"{above}{knee.operations_per_s:,.0f} {shape} a second ({rate}), p99 {knee.p99_ms:.2f} ms"


def say_limit(load: LoadResult) -> str:
    """Name what sets the knee, in a sentence."""
    return f"Limited by {_LIMITS[load.knee.limited_by]}".rstrip(".") + "." if load.knee else ""


def load_banner(load: LoadResult, feeds: str, notes: Sequence[str]) -> Banner:
    """Return the banner of a probe that measured only the knee."""
    most = load.saturation
    light = load.points[0]
    # A lower load cannot take longer, so something else used the storage or this host.
    is_disturbed = light.storage_p99_ms > most.p99_ms
    return Banner(
        verdict="doubtful" if is_disturbed else "measured",
        look=Look.DOUBT if is_disturbed else Look.PLAIN,
        figure=f"the knee is at {say_knee(load)}" + (f"; {feeds}" if feeds else ""),
        limited_by=_LIMITS[load.knee.limited_by]
        if load.knee
        else "the storage: even light load was too much",
        since=(
            f"light load of {light.offered_per_s:,.0f} a second has a p99 of {light.p99_ms:.2f} ms "
            f"({light.storage_p99_ms:.2f} ms not counting this host's own delay); "
            f"{load.depth} in flight all the time reach {most.operations_per_s:,.0f} a second, "
            f"p99 {most.p99_ms:.2f} ms"
        ),
        to_do=(
            "Plan for loads below the knee: beyond it waits grow for as long as the load lasts."
            if load.knee
            else "Look for other users of this storage, then try again."
        ),
        troubles=[*notes, *_first_phase(load)],
    )


def metadata_banner(rates: Sequence[MetadataRate], notes: Sequence[str]) -> Banner:
    """Return the banner of a probe that measured only calls on files."""
    best: dict[str, MetadataRate] = {}
    for rate in rates:
        best[rate.op] = max(rate, best.get(rate.op, rate), key=lambda one: one.files_per_s)
    slowest = min(best.values(), key=lambda rate: rate.files_per_s)
    figure = ", ".join(f"{op} {rate.files_per_s:,.0f}" for op, rate in best.items())
    return Banner(
        verdict="measured",
        look=Look.PLAIN,
        figure=f"files a second: {figure}",
        limited_by=f"{slowest.op}, at most {slowest.files_per_s:,.0f} files a second",
        since=f"{slowest.threads} threads; a p99 of {slowest.p99_ms:.2f} ms",
        to_do="Compare with the files that a job creates or opens per second; larger files need fewer.",
        troubles=list(notes),
    )


def _first_phase(load: LoadResult) -> Iterator[str]:
    most = load.saturation
    if most.first_seconds:
        yield (
            f"The first {most.first_seconds:g} s were another phase: {most.first_operations_per_s:,.0f} "
            f"operations a second, then {most.operations_per_s:,.0f}."
        )


def load_exhibits(
    loads: Sequence[LoadResult], rates: Sequence[MetadataRate], run: str, *, draws_knee: bool
) -> Iterator[Section]:
    """Yield the charts and tables of all loads, and of calls on files."""
    for load in loads:
        yield Section(
            name="knee",
            title=f"Up to the knee: {describe_shape(load)}",
            text=[f"The knee is at {say_knee(load)}: {load.knee.rule}."] if load.knee else (),
            charts=load_charts(load, run) if draws_knee else (),
            why_empty="The charts are at the top.",
        )
        yield Section(
            name="time",
            title="Over time",
            text=list(_first_phase(load)) or ["The closed loop had one phase from its first second."],
            charts=list(_over_time(load, run)),
        )
        yield table_section("loads", "All loads", load_rows(load))
    if rates:
        yield table_section("files", "Calls on files", metadata_rows(rates), bars="files/s")


def load_charts(load: LoadResult, run: str) -> list[Chart]:
    """Return latency and throughput against the offered load."""
    points = list({point.offered_per_s: point for point in load.points}.values())
    points.sort(key=lambda point: point.offered_per_s)
    names = [_short(point.offered_per_s) for point in points]
    knee = f"; knee at {_short(load.knee.operations_per_s)}" if load.knee else ""
    note = f"offered a second{knee}"
    # Beyond the knee, latency depends only on how long the test lasts: cut it off so that the rest is
    # readable.
    limit_s = MOST_SLOWDOWN * load.points[0].storage_p99_ms / 1e3
    latency = [
        Series(name="p50", y=[min(point.p50_ms / 1e3, 2 * limit_s) for point in points]),
        Series(name="p99", y=[min(point.p99_ms / 1e3, 2 * limit_s) for point in points], tone="dark"),
    ]
    rate = [
        Series(name="offered", y=[point.offered_per_s for point in points]),
        Series(name="answered", y=[point.answered_per_s for point in points], tone="dark"),
    ]
    cut = "; cut at twice the limit" if any(point.p99_ms / 1e3 > 2 * limit_s for point in points) else ""
    limits = {f"limit of p99 {1e3 * limit_s:,.3g} ms": limit_s}
    return [
        Chart(
            kind=Kind.LINES,
            title="Latency by load",
            run=run,
            unit="s",
            names=names,
            series=latency,
            limits=limits,
            note=note + cut,
        ),
        Chart(kind=Kind.LINES, title="Operations a second", run=run, names=names, series=rate, note=note),
    ]


def _short(rate: float) -> str:
    return f"{rate / 1e3:.3g}k" if rate >= 1e3 else f"{rate:.3g}"


def _over_time(load: LoadResult, run: str) -> Iterator[Chart]:
    series = load.saturation.intervals
    edges = [*(one.start_s for one in series), load.saturation.seconds]
    values = [one.operations_per_s for one in series]
    yield Chart(
        kind=Kind.AREA,
        title="Closed loop, operations a second",
        run=run,
        series=[Series(x=edges, y=values)],
    )
    at_knee = load.knee.operations_per_s if load.knee else None
    point = next((point for point in reversed(load.points) if point.offered_per_s == at_knee), None)
    if point is not None:
        note = f"at {_short(point.offered_per_s)} a second"
        starts = [one.start_s for one in point.intervals]
        yield Chart(
            kind=Kind.LINES,
            title="Latency at the knee",
            run=run,
            unit="s",
            series=[
                Series(name="p50", x=starts, y=[one.p50_ms / 1e3 for one in point.intervals]),
                Series(name="p99", x=starts, y=[one.p99_ms / 1e3 for one in point.intervals], tone="dark"),
            ],
            x_end=point.seconds,
            note=note,
        )
