"""The charts of loads on a probe's page: latency against load with the knee, and what happened over time."""

from collections.abc import Iterator, Sequence

from penstock.bench.probe.load_plan import MOST_SLOWDOWN, OfferedLoad
from penstock.bench.probe.load_run import LoadResult, load_rows
from penstock.bench.probe.metadata_rates import MetadataRate, metadata_rows
from penstock.reports.report import Banner, Chart, Kind, Look, Section, Series, table_section
from penstock.units import format_bytes, format_rate

GIB = 2**30
_LIMITS = {
    "storage": "the storage: beyond it, operations themselves take longer",
    "depth": "the operations in flight: slots were used up while the storage was as fast as before. "
    "Try more with --depth.",
    "host": "this host, which began operations late although it had a slot for them",
    "": "nothing yet: no load offered was too much",
}


def describe_shape(load: LoadResult) -> str:
    """What one operation of a load is, in words."""
    kind = {100: "reads", 0: "writes"}.get(load.read_percent, f"operations ({load.read_percent} % reads)")
    return f"random {format_bytes(load.block_bytes)} {kind}"


def say_knee(load: LoadResult) -> str:
    """The knee in a sentence, or the highest load if it was kept up with."""
    if load.knee is None:
        return f"{describe_shape(load)}: no load offered was kept up with"
    knee = load.knee
    above = "" if knee.limited_by else "at least "
    rate = format_rate(knee.gib_per_s * GIB)
    shape = describe_shape(load)
    return f"{above}{knee.operations_per_s:,.0f} {shape} a second ({rate}), p99 {knee.p99_ms:.2f} ms"


def say_limit(load: LoadResult) -> str:
    """What sets the knee, in a sentence."""
    return f"Limited by {_LIMITS[load.knee.limited_by]}".rstrip(".") + "." if load.knee else ""


def load_banner(load: LoadResult, feeds: str, notes: Sequence[str]) -> Banner:
    """The answers of a probe that looked for the knee alone."""
    most = load.saturation
    light = load.points[0]
    return Banner(
        verdict="measured",
        look=Look.PLAIN,
        figure=f"the knee is at {say_knee(load)}" + (f"; {feeds}" if feeds else ""),
        limited_by=_LIMITS[load.knee.limited_by]
        if load.knee
        else "the storage: even light load was too much",
        since=(
            f"light load of {light.offered_per_s:,.0f} a second has a p99 of {light.p99_ms:.2f} ms; "
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
    """The answers of a probe that counted files alone."""
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
        to_do="Compare with the files that a job creates or opens a second; larger files need fewer.",
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
    """Charts and tables of all loads, and of calls on files."""
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
    """Latency and throughput against the offered load."""
    points = list({point.offered_per_s: point for point in load.points}.values())
    points.sort(key=lambda point: point.offered_per_s)
    names = [_short(point.offered_per_s) for point in points]
    knee = f"; knee at {_short(load.knee.operations_per_s)}" if load.knee else ""
    note = f"offered a second{knee}"
    # Beyond the knee latency is only a matter of how long one waits: cut, so that the rest can be read.
    limit_s = MOST_SLOWDOWN * load.points[0].storage_p99_ms / 1e3
    latency = [
        Series(name="p50", y=[min(point.p50_ms / 1e3, 2 * limit_s) for point in points]),
        Series(name="p99", y=[min(point.p99_ms / 1e3, 2 * limit_s) for point in points], tone="dark"),
    ]
    rate = [
        Series(name="offered", y=[point.offered_per_s for point in points]),
        Series(name="answered", y=[point.achieved_per_s for point in points], tone="dark"),
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
    point = _point_at_knee(load)
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


def _point_at_knee(load: LoadResult) -> OfferedLoad | None:
    at = load.knee.operations_per_s if load.knee else None
    return next((point for point in reversed(load.points) if point.offered_per_s == at), None)
