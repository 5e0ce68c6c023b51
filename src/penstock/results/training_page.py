"""The page of a training run: whether accelerators got their samples in time, and if not, what delayed them.

    run.json, stages.json, steps, counters -> series, troubles -> report

The page of an active or interrupted run covers what the run has completed.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import ObjectNotFound
from penstock.reports.report import (
    Banner,
    Chart,
    Kind,
    Look,
    Report,
    Section,
    Series,
    Tone,
    Trouble,
    bar_chart,
    table_section,
)
from penstock.results.counter_files import (
    HostRates,
    ReconciliationVerdict,
    host_rates,
    read_counters,
    read_series,
)
from penstock.results.event_files import read_events, recompute_figures
from penstock.results.phase_figures import (
    FROM_MEMORY,
    STRAGGLER,
    Bottleneck,
    PhaseFigures,
    TimeBreakdown,
    counted_ceiling,
    epoch_rows,
    judge,
    resident_share,
    time_rows,
)
from penstock.results.run_folder import STAGES_FILE
from penstock.results.run_record import RunRecord, read_recorded_workload
from penstock.results.step_events import wait_ns
from penstock.results.step_series import Numbers, RunSteps, WaitShift, find_wait_shift, heat_rows
from penstock.storage.files.local_files import parse_json, read_document
from penstock.units import format_bytes, format_count, format_rate, format_seconds

BUSY: Final = 0.85
"""Readers or CPUs that are busy for this share of the time count as fully used."""
LEAST_WAIT: Final = 0.02
"""Waits that take a smaller share of a step's time are not reported."""
_HARDLY: Final = 0.01
"""A smaller share of waiting is drawn as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The data that the page shows.

    `passed` is true if the utilization that the workload requires was reached; `ceiling` is the result on
    zero-cost storage, None if that was not measured or does not count.
    """

    record: RunRecord
    figures: PhaseFigures | None
    steps: RunSteps
    stages: Mapping[str, Any]
    hosts: Mapping[str, HostRates]
    asked_percent: float
    shift: WaitShift | None
    passed: bool
    ceiling: Mapping[str, Any] | None
    storage_uri: str

    @property
    def cpu_busy_shares(self) -> list[float]:
        """The mean busy share of each host whose CPUs were sampled."""
        shares = (rates["cpu_busy_share"] for rates in self.hosts.values())
        return [float(np.nanmean(share)) for share in shares if not np.isnan(share).all()]


def make_training_page(folder: Path, record: RunRecord) -> tuple[Report, dict[str, str]]:
    """Build the page for the run in `folder`; return it with facts for its table of settings.

    Raises `ObjectNotFound` if the run has left nothing to show.
    """
    run = _read_run(folder, record)
    page = Report(
        title=f"Training run {record.id}",
        subtitle="",
        banner=_banner(run),
        highlights=list(_highlights(run)),
        sections=list(_sections(run)),
    )
    return page, {"storage": run.storage_uri}


def _read_run(folder: Path, record: RunRecord) -> TrainingRun:
    steps = RunSteps.of_events(read_events(folder))
    if steps is None:
        raise ObjectNotFound("This run has no steps yet", uri=str(folder))
    workload = read_recorded_workload(record, folder)
    stages: dict[str, Any] = {}
    if (folder / STAGES_FILE).is_file():
        stages = parse_json(read_document(folder / STAGES_FILE))
    rates: dict[str, HostRates] = {}
    with suppress(ObjectNotFound):  # a run without counters
        hosts, counters = read_counters(folder)
        ranks, machines = {rank.clock.rank: rank.clock for rank in steps.ranks}, set()
        for host in hosts:
            # Hosts on the same machine count the same drives and CPUs.
            if host.rank in ranks and host.boot_id not in machines:
                edges_ns = steps.edges * 1e9 - (ranks[host.rank].shift_ns - steps.origin_ns)
                rates[host.host] = host_rates(host, read_series(counters, host.host), edges_ns)
                machines |= {host.boot_id} - {""}
    figures = record.train or recompute_figures(folder, record)
    return TrainingRun(
        record=record,
        figures=figures,
        steps=steps,
        stages=stages,
        hosts=rates,
        asked_percent=workload.metric.au * 100,
        shift=find_wait_shift(steps, first=workload.metric.exclude_start_steps),
        passed=figures is not None and figures.meets_threshold,
        ceiling=counted_ceiling(
            stages.get("ceiling"), figures.au_compat_percent.mean if figures is not None else 0.0
        ),
        storage_uri=str(stages.get("storage", {}).get("uri", "URI")),
    )


# Answers


def _banner(run: TrainingRun) -> Banner:
    figures, ranks, troubles = run.figures, run.record.ranks, list(_find_troubles(run))
    verdict = judge(figures, run.record.deliveries, run.stages.get("epochs", []))
    figure = "no epoch is complete"
    if figures is not None:
        measured, excuse = (
            run.stages.get("ceiling"),
            "" if run.ceiling else ": does not count, the run exceeded it",
        )
        ceiling = f" (ceiling of this client {measured['au_compat']:.1f} %{excuse})" if measured else ""
        figure = (
            f"AU {figures.au_compat_percent.mean:.2f} %, {run.asked_percent:.0f} % asked{ceiling}; "
            f"{figures.samples_per_s_strict:,.1f} samples/s and {format_rate(figures.read_bytes_per_s)} for "
            f"{format_count(ranks, run.record.accelerator.upper() or 'accelerator')}"
        )
    limit, found = "not known: no step counts", figures.verdict if figures else None
    to_do = "Nothing. `penstock training sweep` finds how many accelerators this storage feeds."
    if found is not None:
        is_unlimited = found.bottleneck is Bottleneck.NONE
        limit = f"{'nothing:' if is_unlimited else f'{found.bottleneck}.'} {found.evidence[0]}"
        if not is_unlimited:
            to_do = _REMEDIES[found.bottleneck].format(uri=shlex.quote(run.storage_uri))
    if troubles:
        to_do = troubles[0].to_do
    if (waits := run.stages.get("waits")) and waits["bottleneck"] != "consumer":
        to_do = f"{waits['answer']}."
    if figures is None or figures.au_strict_percent is None:
        to_do = figures.notes[0] if figures and figures.notes else to_do
    since, shift = "the first step" if not run.passed else "no change", run.shift
    if figures is not None and figures.times is not None:
        wait = figures.times.over_ranks["wait"]
        since += (
            f": waits had no lasting change (p50 {format_seconds(wait.p50_s)}, p99 "
            f"{format_seconds(wait.p99_s)} a step)"
        )
    if shift is not None:
        since = f"{format_seconds(shift.at_s)} after the first step: epoch {shift.epoch}, step {shift.step}"
    if shift is not None and shift.after_s <= shift.before_s:
        since = (
            f"the start, until {format_seconds(shift.at_s)} (epoch {shift.epoch}, step {shift.step}): then "
            f"waits fell from {format_seconds(shift.before_s)} to {format_seconds(shift.after_s)} a step"
        )
    return Banner(
        verdict=verdict,
        look={"passed": Look.GOOD, "failed": Look.BAD}.get(verdict, Look.DOUBT),
        figure=figure,
        limited_by=limit,
        since=since,
        to_do=to_do,
        troubles=[trouble.says for trouble in troubles],
    )


_REMEDIES: Final[Mapping[Bottleneck, str]] = {
    Bottleneck.STORAGE: "Compare with the storage's limits: `penstock storage probe {uri}`.",
    Bottleneck.CLIENT_CPU: "Use fewer ranks for each host, or hosts with more or faster cores.",
    Bottleneck.BARRIER: "Look for cores that ranks share, for the network, and for uneven computation.",
}


# Troubles, the most serious first: a figure that does not measure the storage, then what costs the most.


def _find_troubles(run: TrainingRun) -> Iterator[Trouble]:
    yield from _from_memory(run)
    if run.ceiling is not None and run.ceiling["au_compat"] < run.asked_percent:
        yield Trouble(
            f"On storage that costs nothing this client reaches AU {run.ceiling['au_compat']:.1f} %: no "
            f"storage can give it {run.asked_percent:.0f} %.",
            _REMEDIES[Bottleneck.CLIENT_CPU],
        )
    times = run.figures.times if run.figures else None
    if times is not None:
        waits = times.skew["wait"]
        of_one, of_all = _slow_rank(run, times), _too_few_readers(run, times)
        # If even the fastest rank waits long, all wait for the same reason.
        all_wait = waits.fastest_s > waits.slowest_s - waits.fastest_s
        found = (of_all, of_one) if all_wait else (of_one, of_all)
        yield from filter(None, found)
    shift = run.shift
    if shift is not None and shift.after_s > shift.before_s:
        yield Trouble(
            f"From {format_seconds(shift.at_s)} on (epoch {shift.epoch}, step {shift.step}) a step waits "
            f"{format_seconds(shift.after_s)} for samples instead of {format_seconds(shift.before_s)}.",
            "Look at what else used the storage then: other jobs, a rebuild, a full cache or write buffer.",
        )
    # Emulated computation keeps cores busy, too. Busy cores are therefore trouble only if ranks wait for
    # them.
    busy = max(run.cpu_busy_shares, default=0.0)
    awaits_samples = (
        times and times.shares.wait + times.shares.held_up > times.shares.barrier + times.shares.harness
    )
    if times is not None and busy >= BUSY and not run.passed and not awaits_samples:
        yield Trouble(
            f"The hosts' CPUs were busy {busy:.0%} of the time.",
            "Use fewer ranks for each host, or hosts with more cores.",
        )


def _from_memory(run: TrainingRun) -> Iterator[Trouble]:
    to_do = (
        "Read past the page cache (direct://...), or use a data set several times as large as the memory of "
        "all hosts."
    )
    for delivery in run.record.deliveries:
        if delivery.direction == "read" and delivery.verdict is ReconciliationVerdict.FAIL:
            delivered, asked = delivery.delivered_bytes or 0, delivery.application_bytes
            says = (
                f"The page cache served {1 - delivered / asked:.0%} of what was read: devices and networks "
                f"delivered {format_bytes(delivered)} of {format_bytes(asked)}. This is not the storage's "
                "speed."
            )
            yield Trouble(says, to_do)
            return
    share = resident_share(run.stages.get("epochs", []))
    if share > FROM_MEMORY:
        says = f"Up to {share:.0%} of the data set stayed in the page cache before an epoch."
        yield Trouble(says, to_do)


def _slow_rank(run: TrainingRun, times: TimeBreakdown) -> Trouble | None:
    ranks = run.steps.ranks
    step_s = sum(times.over_ranks[part].mean_s for part in ("wait", "compute", "barrier"))
    for measure, does in (("wait", "waits for samples"), ("compute", "computes")):
        skew = times.skew[measure]
        # With two ranks, the median is halfway to the slowest.
        usual_s = skew.fastest_s if len(ranks) == 2 else skew.median_s
        is_late = skew.slowest_s - skew.median_s >= LEAST_WAIT * step_s
        if len(ranks) > 1 and is_late and skew.slowest_s >= STRAGGLER * usual_s:
            host = next(
                (each.clock.host for each in ranks if each.clock.rank == skew.slowest_rank), "its host"
            )
            return Trouble(
                f"Rank {skew.slowest_rank} on {host} {does} {format_seconds(skew.slowest_s)} a step, the "
                f"usual rank {format_seconds(usual_s)}: all others wait for it.",
                f"Look at rank {skew.slowest_rank}'s path to storage and what else its host does, or leave "
                "the host out.",
            )
    return None


def _too_few_readers(run: TrainingRun, times: TimeBreakdown) -> Trouble | None:
    loader = run.stages.get("loader", {})
    readers = int(loader.get("threads") or loader.get("workers") or 0)
    steps = np.concatenate([rank.steps for rank in run.steps.ranks])
    spent_ns = int((steps["barrier_ns"] - steps["start_ns"]).sum())
    if not (readers and spent_ns) or times.shares.wait + times.shares.held_up < LEAST_WAIT:
        return None
    busy = int((steps["read_ns"] + steps["decode_ns"]).sum()) / (readers * spent_ns)
    if busy < BUSY:
        return None
    named = "The only reader of each rank was" if readers == 1 else f"All {readers} readers of each rank were"
    return Trouble(
        f"{named} busy {min(busy, 1.0):.0%} of the time: the storage is never asked for more at once.",
        f"Raise reader.read_threads ({readers} now) until AU stops rising; `penstock storage probe "
        f"{shlex.quote(run.storage_uri)}` says whether the storage has more to give.",
    )


# Charts and tables


def _highlights(run: TrainingRun) -> Iterator[Chart]:
    name, steps, ceiling = run.record.id, run.steps, run.ceiling
    epochs = run.figures.epochs if run.figures else ()
    limits = {f"asked {run.asked_percent:.0f} %": run.asked_percent}
    if ceiling:
        limits[f"ceiling {ceiling['au_compat']:.1f} %"] = ceiling["au_compat"]
    yield bar_chart(
        "AU of each epoch",
        name,
        {f"{rate.epoch}": rate.au_compat_percent for rate in epochs},
        "%",
        y_end=100,
        limits=limits,
        note=format_count(len(epochs), "epoch"),
    )
    rates = steps.rates("samples")
    yield Chart(
        kind=Kind.AREA,
        title="Samples per second",
        run=name,
        series=[Series(x=steps.edges, y=rates)],
        limits={f"ceiling {ceiling['samples_per_s']:,.1f}": ceiling["samples_per_s"]} if ceiling else {},
        note=f"mean {rates.mean():,.1f}, time between epochs included",
    )
    shares = steps.shares("start_ns", "loaded_ns")
    rows = np.where(shares < _HARDLY, 0.0, np.minimum(shares, 1.0))
    yield Chart(
        kind=Kind.HEAT,
        title="Waiting for samples, by rank",
        run=name,
        series=heat_rows([f"rank {rank.clock.rank}" for rank in steps.ranks], rows, steps.edges, tone="bad"),
        y_end=1.0,
        note="full tone: all of the time",
    )


def _sections(run: TrainingRun) -> Iterator[Section]:
    figures = run.figures
    if waits := run.stages.get("waits"):
        spent = {name.removesuffix("_s"): spent_s for name, spent_s in waits["stages"].items() if spent_s}
        chart = bar_chart(
            "Seconds of waiting, by what was waited for",
            run.record.id,
            dict(sorted(spent.items(), key=lambda item: -item[1])),
            "s",
            note=f"{waits['wait_s']:.2f} s in all, {waits['wait_share']:.1%} of the time",
        )
        title = "Where the seconds of waiting went"
        yield Section(name="waits", title=title, text=[f"{waits['answer']}."], charts=[chart])
    if figures and figures.times:
        shares = figures.times.shares
        parts = {
            "computation": shares.compute,
            "waiting for samples": shares.wait,
            "held up by other ranks' samples": shares.held_up,
            "other barriers": shares.barrier,
            "between steps": shares.harness,
        }
        percents = {name: 100 * share for name, share in parts.items()}
        note = ", ".join(f"{name} {percent:.1f} %" for name, percent in percents.items())
        title = "Time of all accelerators"
        chart = bar_chart(title, run.record.id, percents, "%", y_end=100, note=note)
        yield Section(
            name="time",
            title="Where the accelerators' time went",
            text=figures.verdict.evidence[1:] if figures.verdict else (),
            charts=[chart],
        )
    yield Section(
        name="latency",
        title="How long steps wait, and batches take",
        text=[
            "A wait is how long a step had no batch.",
            "The read time of a batch sums over its readers, which overlap with the computation.",
        ],
        charts=list(_latencies(run)),
    )
    yield Section(
        name="bytes",
        title="Bytes asked for, and bytes delivered by devices",
        text=["Steps count their bytes when they take their batch; devices count those of all programs."],
        charts=list(_bytes(run)),
    )
    processors = [host["cpu_busy_share"] for host in run.hosts.values()]
    busy = run.cpu_busy_shares
    chart = Chart(
        kind=Kind.HEAT,
        title="Busy CPUs, by host",
        run=run.record.id,
        series=heat_rows(list(run.hosts), np.nan_to_num(processors), run.steps.edges) if processors else (),
        y_end=1.0,
        note=f"on average {np.mean(busy):.0%} busy; full tone: all cores" if busy else "nothing was counted",
    )
    yield Section(
        name="hosts",
        title="CPUs of the hosts",
        charts=[chart] if processors else (),
        why_empty="This run has no sampled counters of its hosts.",
    )
    if figures is not None:
        yield table_section("epochs", "Epochs", epoch_rows(figures.epochs), bars="AU %")
        if figures.times is not None:
            yield table_section("times", "Times of a step", time_rows(figures.times))


def _latencies(run: TrainingRun) -> Iterator[Chart]:
    middles, (p50, p99) = run.steps.percentiles(wait_ns)
    yield Chart(
        kind=Kind.LINES,
        title="Wait of a step over time",
        run=run.record.id,
        unit="s",
        series=[Series(name="p99", x=middles, y=p99, tone="bad"), Series(name="p50", x=middles, y=p50)],
        x_end=run.steps.end_s,
        note=f"p50 at most {format_seconds(p50.max())}, p99 {format_seconds(p99.max())}",
    )


def _bytes(run: TrainingRun) -> Iterator[Chart]:
    asked = run.steps.rates("read_bytes")
    hosts = list(run.hosts.values())
    delivered: Numbers = np.sum([host["drives_read"] + host["networks_received"] for host in hosts], axis=0)
    most = max(asked.max(), delivered.max() if hosts else 0.0)
    total, mean = run.figures.read_bytes if run.figures else 0, format_rate(float(asked.mean()))
    notes = [delivery.why for delivery in run.record.deliveries if delivery.direction == "read"]
    drawn: list[tuple[str, Tone, Numbers, str]] = [
        (
            "Asked for by steps",
            "full",
            asked,
            f"{format_bytes(total)} in all epochs; mean {mean}, time between epochs included",
        ),
        ("Delivered by drives and networks", "dark", delivered, "; ".join(notes)),
    ]
    for title, tone, rates, note in drawn if hosts else drawn[:1]:
        yield Chart(
            kind=Kind.AREA,
            title=title,
            run=run.record.id,
            unit="B/s",
            series=[Series(x=run.steps.edges, y=rates, tone=tone)],
            y_end=most,
            note=note,
        )
