"""The page of a training run: did the accelerators get their samples in time, and if not, what held them up.

    run.json, stages.json, steps, counters -> series, troubles -> banner and charts

Runs that are active or were interrupted have the page of what they completed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
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
    bar_chart,
    table_section,
)
from penstock.results.counter_files import read_counters
from penstock.results.event_files import read_events, recompute_figures
from penstock.results.host_activity import HostRates, host_rates
from penstock.results.phase_figures import Bottleneck, PhaseFigures, TimeBreakdown, time_rows
from penstock.results.run_facts import Trouble, fact_rows, outcome_verdict, run_subtitle
from penstock.results.run_folder import RUN_FILE, STAGES_FILE
from penstock.results.run_record import RunRecord, read_recorded_workload
from penstock.results.step_events import wait_ns
from penstock.results.step_series import Numbers, RunSteps, find_wait_shift, fold_rows
from penstock.results.training_troubles import TrainingEvidence, find_troubles, mean_or_none
from penstock.units import format_bytes, format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What the page is made of."""

    record: RunRecord
    figures: PhaseFigures | None
    steps: RunSteps
    stages: Mapping[str, Any]
    hosts: Mapping[str, HostRates]
    asked_percent: float
    first_step: int

    @property
    def ceiling(self) -> Mapping[str, Any] | None:
        """What the run reached on storage that costs nothing; None if that was not measured."""
        return self.stages.get("ceiling")

    @property
    def storage_uri(self) -> str:
        """Where the data set is."""
        return str(self.stages.get("storage", {}).get("uri", "URI"))


def make_training_page(folder: Path, record: RunRecord) -> Report:
    """The page of the run in `folder`; `StorageError` where it has left nothing to show."""
    run = read_training_run(folder, record)
    evidence = _evidence(run)
    troubles = find_troubles(evidence)
    return Report(
        title=f"Training run {record.id}",
        subtitle=run_subtitle(record),
        banner=_banner(run, evidence, troubles),
        highlights=[_utilization(run), _throughput(run), _waits(run)],
        sections=[*_exhibits(run), *_tables(run)],
    )


def read_training_run(folder: Path, record: RunRecord) -> TrainingRun:
    """All files of the run that the page needs."""
    events = read_events(folder)
    steps = RunSteps.of_events(events)
    if steps is None:
        raise ObjectNotFound("This run has no steps yet", uri=str(folder))
    workload = read_recorded_workload(
        record.workload, name=record.name, accelerator=record.accelerator, where=str(folder / RUN_FILE)
    )
    stages: dict[str, Any] = {}
    if (folder / STAGES_FILE).is_file():
        stages = json.loads((folder / STAGES_FILE).read_bytes())
    return TrainingRun(
        record=record,
        figures=record.train or recompute_figures(folder, record),
        steps=steps,
        stages=stages,
        hosts=_read_host_rates(folder, steps),
        asked_percent=workload.metric.au * 100,
        first_step=workload.metric.exclude_start_steps,
    )


def _read_host_rates(folder: Path, steps: RunSteps) -> dict[str, HostRates]:
    """What each sampled host did over the time of the steps; nothing of a run without counters."""
    try:
        hosts, counters = read_counters(folder)
    except ObjectNotFound:
        return {}
    ranks = {rank.rank: rank for rank in steps.ranks}
    rates, machines = {}, set()
    for host in hosts:
        # Hosts on one machine count the same drives and processors.
        if host.rank in ranks and host.boot_id not in machines:
            edges_ns = steps.edges * 1e9 - ranks[host.rank].shift_ns
            rates[host.host] = host_rates(host, counters, edges_ns)
            machines |= {host.boot_id} - {""}
    return rates


def _evidence(run: TrainingRun) -> TrainingEvidence:
    busy = [share for host in run.hosts.values() if (share := mean_or_none(host.cpu_busy_share)) is not None]
    ceiling = run.ceiling
    return TrainingEvidence(
        steps=run.steps,
        times=run.figures.times if run.figures else None,
        shift=find_wait_shift(run.steps, first=run.first_step),
        deliveries=run.record.deliveries,
        loader=dict(run.stages.get("loader", {})),
        evictions=[stage["cache"] for stage in run.stages.get("epochs", []) if stage.get("cache")],
        ceiling_au_percent=ceiling["au_compat"] if ceiling else None,
        asked_au_percent=run.asked_percent,
        cpu_busy_share=max(busy, default=None),
        storage_uri=run.storage_uri,
        passed=run.figures is not None and run.figures.meets_threshold,
    )


def _banner(run: TrainingRun, evidence: TrainingEvidence, troubles: Sequence[Trouble]) -> Banner:
    verdict, look = _verdict(run, troubles)
    return Banner(
        verdict=verdict,
        look=look,
        figure=_say_figure(run),
        limited_by=_say_limit(run),
        since=_say_since(run, evidence),
        to_do=_say_to_do(run, troubles),
        troubles=[*_say_outcome(run.record), *(trouble.says for trouble in troubles)],
    )


def _verdict(run: TrainingRun, troubles: Sequence[Trouble]) -> tuple[str, Look]:
    unfinished = outcome_verdict(run.record)
    if unfinished is not None:
        return unfinished
    if run.figures is None or _lacks_utilization(run.figures):
        return "no figure", Look.DOUBT
    if any(trouble.kind == "page cache" for trouble in troubles):
        return "doubtful", Look.DOUBT
    return ("passed", Look.GOOD) if run.figures.meets_threshold else ("failed", Look.BAD)


def _lacks_utilization(figures: PhaseFigures) -> bool:
    return figures.au_strict_percent is None


def _say_figure(run: TrainingRun) -> str:
    figures, ranks = run.figures, run.record.ranks
    if figures is None:
        return "no epoch is complete"
    ceiling = f" (ceiling of this client {run.ceiling['au_compat']:.1f} %)" if run.ceiling else ""
    return (
        f"AU {figures.au_compat_percent.mean:.2f} %, {run.asked_percent:.0f} % asked{ceiling}; "
        f"{figures.samples_per_s_strict:,.1f} samples/s and {format_rate(figures.read_bytes_per_s)} for "
        f"{ranks} {run.record.accelerator.upper() or 'accelerator'}{'s' * (ranks > 1)}"
    )


def _say_limit(run: TrainingRun) -> str:
    verdict = run.figures.verdict if run.figures else None
    if verdict is None:
        return "not known: no step counts"
    if verdict.bottleneck is Bottleneck.NONE:
        return f"nothing: {verdict.evidence[0]}"
    return f"{verdict.bottleneck}. {verdict.evidence[0]}"


def _say_since(run: TrainingRun, evidence: TrainingEvidence) -> str:
    shift = evidence.shift
    if shift is not None and shift.after_s > shift.before_s:
        return f"{format_seconds(shift.at_s)} after the first step: epoch {shift.epoch}, step {shift.step}"
    if shift is not None:
        return (
            f"the start, until {format_seconds(shift.at_s)} (epoch {shift.epoch}, step {shift.step}): then "
            f"waits fell from {format_seconds(shift.before_s)} to {format_seconds(shift.after_s)} a step"
        )
    if run.figures is not None and run.figures.meets_threshold:
        return "no change: waits were alike all the time"
    return "the first step: waits were alike all the time"


def _say_to_do(run: TrainingRun, troubles: Sequence[Trouble]) -> str:
    if run.figures is not None and _lacks_utilization(run.figures) and run.figures.notes:
        return run.figures.notes[0]
    if (waits := run.stages.get("waits")) and waits["bottleneck"] != "consumer":
        return f"{waits['answer']}."
    if troubles:
        return troubles[0].to_do
    verdict = run.figures.verdict if run.figures else None
    if verdict is None or verdict.bottleneck is Bottleneck.NONE:
        return "Nothing. `penstock training sweep` finds how many accelerators this storage feeds."
    return _REMEDIES[verdict.bottleneck].format(uri=run.storage_uri)


_REMEDIES: Final[Mapping[Bottleneck, str]] = {
    Bottleneck.STORAGE: "Compare with the storage's limits: `penstock storage probe {uri}`.",
    Bottleneck.CLIENT_CPU: "Use fewer ranks for each host, or hosts with more or faster cores.",
    Bottleneck.BARRIER: "Look for cores that ranks share, for the network, and for uneven computation.",
}


def _say_outcome(record: RunRecord) -> Iterator[str]:
    if record.why:
        yield f"The run is {record.outcome}: {record.why}"


def _utilization(run: TrainingRun) -> Chart:
    epochs = run.figures.epochs if run.figures else ()
    limits = {f"asked {run.asked_percent:.0f} %": run.asked_percent}
    if run.ceiling:
        limits[f"ceiling {run.ceiling['au_compat']:.1f} %"] = run.ceiling["au_compat"]
    return bar_chart(
        "AU of each epoch",
        run.record.id,
        {f"{rate.epoch}": rate.au_compat_percent for rate in epochs},
        "%",
        y_end=100,
        limits=limits,
        note=f"{len(epochs)} epoch{'s' * (len(epochs) != 1)}",
    )


def _throughput(run: TrainingRun) -> Chart:
    rates = run.steps.rates("samples")
    limits = {}
    if run.ceiling:
        limits = {f"ceiling {run.ceiling['samples_per_s']:,.1f}": run.ceiling["samples_per_s"]}
    return Chart(
        kind=Kind.AREA,
        title="Samples a second",
        run=run.record.id,
        series=[Series(x=run.steps.edges, y=rates)],
        limits=limits,
        note=f"mean {rates.mean():,.1f}",
    )


def _waits(run: TrainingRun) -> Chart:
    names = [f"rank {rank.rank}" for rank in run.steps.ranks]
    shares = run.steps.wait_shares()
    names, rows = fold_rows(names, np.where(shares < _HARDLY, 0.0, np.minimum(shares, 1.0)))
    return Chart(
        kind=Kind.HEAT,
        title="Waiting for samples, by rank",
        run=run.record.id,
        series=[
            Series(name=name, x=run.steps.edges, y=row, tone="bad")
            for name, row in zip(names, rows, strict=True)
        ],
        y_end=1.0,
        note="full tone: all of the time",
    )


_HARDLY: Final = 0.01
"""A share of waiting that is drawn as none."""


def _exhibits(run: TrainingRun) -> Iterator[Section]:
    if waits := run.stages.get("waits"):
        yield from _loader_waits(run, waits)
    if run.figures and run.figures.times:
        yield Section(
            name="time",
            title="Where the accelerators' time went",
            text=run.figures.verdict.evidence[1:] if run.figures.verdict else (),
            charts=[_shares(run, run.figures.times)],
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
    yield Section(
        name="hosts",
        title="Processors of the hosts",
        charts=list(_processors(run)),
        why_empty="This run has no sampled counters of its hosts.",
    )


def _loader_waits(run: TrainingRun, waits: Mapping[str, Any]) -> Iterator[Section]:
    """What a user's own loader was waited for, and what would help."""
    stages = {name.removesuffix("_s"): spent for name, spent in waits["stages"].items() if spent}
    chart = bar_chart(
        "Seconds of waiting, by what was waited for",
        run.record.id,
        dict(sorted(stages.items(), key=lambda item: -item[1])),
        "s",
        note=f"{waits['wait_s']:.2f} s in all, {waits['wait_share']:.1%} of the time",
    )
    yield Section(
        name="waits", title="Where the seconds of waiting went", text=[f"{waits['answer']}."], charts=[chart]
    )
    # Runs of 0.2.0 list predictions, some of which they have tried.
    trials = waits.get("trials") or [
        {"change": one["change"], "gain": one["tried"]}
        for one in waits.get("predictions", ())
        if one["tried"]
    ]
    rows = [{"change": one["change"], "samples per second": f"{one['gain']:.2f} x"} for one in trials]
    if rows:
        yield table_section("trials", "What changes brought", rows)


def _shares(run: TrainingRun, times: TimeBreakdown) -> Chart:
    shares = times.shares
    parts: list[tuple[str, Tone, float]] = [
        ("computation", "full", shares.compute),
        ("waiting for samples", "bad", shares.wait),
        ("held up by other ranks' samples", "dark", shares.held_up),
        ("other barriers", "doubt", shares.barrier),
        ("between steps", "faint", shares.harness),
    ]
    return Chart(
        kind=Kind.STACK,
        title="Time of all accelerators",
        run=run.record.id,
        series=[Series(name=name, tone=tone, y=[share]) for name, tone, share in parts],
        note=", ".join(f"{name} {share:.1%}" for name, _, share in parts),
    )


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
    waits = np.concatenate([wait_ns(rank.steps) for rank in run.steps.ranks]) / 1e9
    reads = np.concatenate([rank.steps["read_ns"] for rank in run.steps.ranks]) / 1e9
    series = {name: values.tolist() for name, values in (("wait", waits), ("read", reads)) if values.any()}
    if series:
        tones: Mapping[str, Tone] = {"wait": "light", "read": "dark"}
        yield Chart(
            kind=Kind.CUMULATIVE,
            title="Share of steps by their duration",
            run=run.record.id,
            series=[Series(name=name, y=values, tone=tones[name]) for name, values in series.items()],
            note="; ".join(f"{name} {_spread(values)}" for name, values in series.items()),
        )


def _spread(values: Sequence[float]) -> str:
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return f"p50 {format_seconds(p50)}, p90 {format_seconds(p90)}, p99 {format_seconds(p99)}"


def _bytes(run: TrainingRun) -> Iterator[Chart]:
    asked = run.steps.rates("read_bytes")
    delivered: Numbers | None = None
    if run.hosts:
        delivered = np.sum([host.drives_read + host.networks_received for host in run.hosts.values()], axis=0)
    most = max(rates.max() for rates in (asked, delivered) if rates is not None)
    total = run.figures.read_bytes if run.figures else 0
    yield Chart(
        kind=Kind.AREA,
        title="Asked for by steps",
        run=run.record.id,
        unit="B/s",
        series=[Series(x=run.steps.edges, y=asked)],
        y_end=most,
        note=f"{format_bytes(total)} in all epochs, {format_rate(float(asked.mean()))} on average",
    )
    if delivered is not None:
        notes = [delivery.why for delivery in run.record.deliveries if delivery.direction == "read"]
        yield Chart(
            kind=Kind.AREA,
            title="Delivered by drives and networks",
            run=run.record.id,
            unit="B/s",
            series=[Series(x=run.steps.edges, y=delivered, tone="dark")],
            y_end=most,
            note="; ".join(notes),
        )


def _processors(run: TrainingRun) -> Iterator[Chart]:
    if not run.hosts:
        return
    names, rows = fold_rows(
        list(run.hosts), np.nan_to_num([host.cpu_busy_share for host in run.hosts.values()])
    )
    means = [mean for host in run.hosts.values() if (mean := mean_or_none(host.cpu_busy_share)) is not None]
    note = f"on average {np.mean(means):.0%} busy; full tone: all cores" if means else "nothing was counted"
    yield Chart(
        kind=Kind.HEAT,
        title="Busy processors, by host",
        run=run.record.id,
        series=[Series(name=name, x=run.steps.edges, y=row) for name, row in zip(names, rows, strict=True)],
        y_end=1.0,
        note=note,
    )


def _tables(run: TrainingRun) -> Iterator[Section]:
    figures = run.figures
    if figures is not None:
        yield table_section("epochs", "Epochs", epoch_rows(figures), bars="AU %")
        if figures.times is not None:
            yield table_section("times", "Times of a step", time_rows(figures.times))
    yield table_section("facts", "Run and settings", fact_rows(run.record, {"storage": run.storage_uri}))


def epoch_rows(figures: PhaseFigures) -> list[dict[str, str]]:
    """One row for each epoch."""
    return [
        {
            "epoch": str(rate.epoch),
            "AU %": f"{rate.au_compat_percent:.2f}",
            "strict %": "-" if rate.au_strict_percent is None else f"{rate.au_strict_percent:.2f}",
            "samples/s": f"{rate.samples_per_s_strict:,.1f}",
            "samples": f"{rate.samples:,}",
            "read": format_bytes(rate.read_bytes),
            "took": format_seconds(rate.elapsed_s),
        }
        for rate in figures.epochs
    ]
