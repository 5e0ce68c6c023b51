"""The page of the demo: three sentences with their figures and charts, and below them everything measured.

Invariant: no figure lies above a limit that the page states. Where a run was faster than the probe, the
limit is the run's, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from penstock import __version__
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.probe import ProbeResult, probe_page, probe_run
from penstock.bench.probe.probe_run import ProbeMeasurement
from penstock.bench.training.training_result import TrainingResult
from penstock.cluster.doctor import Diagnosis
from penstock.errors import name_some
from penstock.reports.report import (
    Banner,
    Chart,
    Kind,
    Look,
    Report,
    Section,
    Series,
    bar_chart,
    table_section,
)
from penstock.results.event_files import read_events
from penstock.results.step_series import RunSteps
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.workload.load_workload import load
from penstock.workload.sizing import forecast_accelerators

GIB: Final = 2**30
_NEAR: Final = 1.02
"""A run that is faster than the probe by this factor is reported; less is noise."""
_WORKLOADS: Final = ("unet3d_h100", "resnet50_h100", "cosmoflow_h100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """The results of the tour, and its page."""

    report: Path
    probe: ProbeResult
    training: TrainingResult
    checkpoints: CheckpointResult
    model_bytes: int
    """The size of a checkpoint of the whole model, of which `checkpoints` are a part."""
    diagnoses: tuple[Diagnosis, ...]

    def sentences(self) -> list[str]:
        """The sentences at the top of the page."""
        return [
            f"This storage {say_headline(self)}.",
            say_training(self),
            say_checkpoints(self),
            say_limits(self),
            *find_excess(self),
            f"What would help most: {say_what_helps(self)}",
        ]

    def document(self) -> Mapping[str, Any]:
        """The results as plain data."""
        return {
            "report": str(self.report),
            "probe": asdict(self.probe),
            "training": self.training.document(),
            "checkpoints": self.checkpoints.document(),
            "says": self.sentences(),
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """The best rate that anything reached in one direction, and what reached it."""

    bytes_per_s: float
    by: str
    probe: ProbeMeasurement

    @classmethod
    def of(cls, tour: Tour, op: str) -> Limit:
        """The faster of the probe and the checkpoints."""
        probed = probe_page.best(tour.probe, op)
        by = f"{probe_page.describe(probed)}, {probed.mode}"
        rates = [(probed.gib_per_s * GIB, by, probed)]
        totals = tour.checkpoints.write if op == "write" else tour.checkpoints.read
        if totals is not None:
            fastest = max(
                (one.phase.gib_per_s for one in tour.checkpoints.rounds if one.round.direction == op),
                default=0.0,
            )
            rates.append((fastest * GIB, "the checkpoints", probed))
        return cls(*max(rates, key=lambda rate: rate[0]))

    def excess(self) -> float:
        """The rate of the fastest as a multiple of the probe's."""
        return self.bytes_per_s / (self.probe.gib_per_s * GIB)


def say_headline(tour: Tour) -> str:
    """Three figures: accelerators, a checkpoint, and the limits."""
    rate = Fraction(Limit.of(tour, "read").bytes_per_s)
    fed = []
    for name in _WORKLOADS:
        family, _, accelerator = name.rpartition("_")
        count = forecast_accelerators(load(name).workload, rate).num_accelerators
        fed.append(f"{count or 'no'} {accelerator.upper()} of {family}")
    read, write = (format_rate(Limit.of(tour, op).bytes_per_s) for op in ("read", "write"))
    return f"feeds {name_some(fed)}; reads {read} and writes {write} at best"


def say_training(tour: Tour) -> str:
    """The result of a small training on this storage, and the needs of each accelerator."""
    train, ceiling = tour.training.train, tour.training.stages.ceiling
    above = f", {ceiling.au_compat_percent:.1f} % is this client's ceiling" if ceiling else ""
    each = forecast_accelerators(load(_WORKLOADS[0]).workload, Fraction(1)).bytes_per_accelerator_per_s
    return (
        f"A small {tour.training.workload} computed {train.au_compat_percent.mean:.1f} % of the time "
        f"({_ASKED:.0f} % asked{above}); the whole one takes {format_rate(float(each))} for each accelerator."
    )


def say_checkpoints(tour: Tour) -> str:
    """The time that a checkpoint of a named model takes to write and to read back."""
    write, read = tour.checkpoints.write, tour.checkpoints.read
    if write is None or read is None or not write.gib_per_s or not read.gib_per_s:
        return "Checkpoints were read from memory alone, which says nothing about this storage."
    size, model = tour.model_bytes, tour.checkpoints.model
    limits = {op: Limit.of(tour, op).bytes_per_s / GIB for op in ("write", "read")}
    durable, back = (format_seconds(size / GIB / rate) for rate in (write.gib_per_s, read.gib_per_s))
    return (
        f"{format_bytes(size)} of {model} are durable in {durable} ({write.gib_per_s:.2f} of "
        f"at best {limits['write']:.2f} GiB/s) and back, verified, in {back} ({read.gib_per_s:.2f} of "
        f"{limits['read']:.2f} GiB/s), by {format_bytes(tour.checkpoints.total_bytes)} of it."
    )


def say_limits(tour: Tour) -> str:
    """The best rates of this storage."""
    read, write = Limit.of(tour, "read"), Limit.of(tour, "write")
    random = probe_page.best(tour.probe, "random_read")
    return (
        f"Reads {format_rate(read.bytes_per_s)} ({read.by}) and writes "
        f"{format_rate(write.bytes_per_s)} durably ({write.by}); {random.operations_per_s:,.0f} random "
        f"reads of {format_bytes(random.block_bytes)} a second."
    )


def say_what_helps(tour: Tour) -> str:
    """The change that would help most."""
    ceiling, train = tour.training.stages.ceiling, tour.training.train
    if ceiling is not None and ceiling.au_compat_percent < _ASKED:
        return "More or faster cores: this client does not reach 90 % on storage that costs nothing."
    rate = Limit.of(tour, "read").bytes_per_s
    forecast = forecast_accelerators(load(_WORKLOADS[0]).workload, Fraction(rate))
    each, count = float(forecast.bytes_per_accelerator_per_s), forecast.num_accelerators + 1
    needed = max(count * each * float(forecast.threshold), rate)
    helps = f"Read bandwidth: {format_rate(needed)} would feed {count} H100 of unet3d."
    if not train.meets_threshold:
        return f"{helps} The small training waited, too: its page says for what."
    return helps


_ASKED: Final = 90.0


def find_excess(tour: Tour) -> Iterator[str]:
    """A sentence, where runs were faster than the probe."""
    above = [
        f"{doing} at up to {format_rate(limit.bytes_per_s)}, "
        f"{(limit.excess() - 1) * 100:.0f} % more than the probe's best"
        for op, doing in (("read", "read"), ("write", "written"))
        if (limit := Limit.of(tour, op)).excess() > _NEAR
    ]
    if above:
        yield (
            f"Checkpoints were {', and '.join(above)}: the speed of this storage varies, and the limits "
            "here are the highest seen."
        )


def make_demo_page(tour: Tour) -> Report:
    """The page of a tour."""
    results = tour.probe
    limitations = [diagnosis for diagnosis in tour.diagnoses if diagnosis.state != "ok"]
    passed = tour.training.train.meets_threshold
    return Report(
        title=f"What the storage at {results.uri} can do",
        subtitle=(
            f"{', '.join(results.hosts)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, penstock {__version__}; "
            "small runs of each benchmark"
        ),
        banner=Banner(
            verdict="passed" if passed else "failed",
            look=Look.GOOD if passed else Look.BAD,
            figure=say_headline(tour),
            more={
                "Training": say_training(tour),
                "Checkpoints": say_checkpoints(tour),
                "At best": say_limits(tour),
            },
            limited_by=_say_limit(tour),
            since="the start: nothing changed while it ran",
            to_do=say_what_helps(tour),
            troubles=list(find_excess(tour)),
        ),
        highlights=list(_first(tour)),
        sections=[
            *_tables(tour),
            table_section(
                "machine",
                "What this machine lacks",
                [
                    {"what": one.subject, "state": one.state, "found": one.found, "fix": one.fix}
                    for one in limitations
                ],
            ),
        ],
    )


def _say_limit(tour: Tour) -> str:
    verdict = tour.training.train.verdict
    held = [
        f"{name}: {totals.bottleneck}"
        for name, totals in (("writing", tour.checkpoints.write), ("reading", tour.checkpoints.read))
        if totals is not None
    ]
    training = "not known" if verdict is None else verdict.bottleneck.replace("none", "nothing")
    return f"training: {training}; checkpoints, {', '.join(held)}"


def _first(tour: Tour) -> Iterator[Chart]:
    yield _utilization(tour)
    yield _checkpoints(tour)
    read = Limit.of(tour, "read")
    beyond = {f"checkpoints read {format_rate(read.bytes_per_s)}": read.bytes_per_s}
    yield probe_page.throughput_curve(tour.probe, limits=beyond if read.excess() > _NEAR else {})


def _utilization(tour: Tour) -> Chart:
    steps = RunSteps.of_events(read_events(Path(tour.training.results_dir)))
    assert steps is not None, "a training that ended has steps"
    ceiling = tour.training.stages.ceiling
    limits = {"asked 90 %": _ASKED}
    if ceiling is not None:
        limits[f"ceiling {ceiling.au_compat_percent:.1f} %"] = ceiling.au_compat_percent
    return Chart(
        kind=Kind.AREA,
        title="Training: accelerator busy",
        run=tour.probe.uri,
        unit="%",
        series=[Series(x=steps.edges, y=100 * steps.compute_shares())],
        y_end=100,
        limits=limits,
        note=f"AU {tour.training.train.au_compat_percent.mean:.1f} %; dips: between epochs",
    )


def _checkpoints(tour: Tour) -> Chart:
    limits = {
        f"{name} at best {format_rate(limit.bytes_per_s)}": limit.bytes_per_s
        for name, limit in (("read", Limit.of(tour, "read")), ("written", Limit.of(tour, "write")))
    }
    bars = {
        f"{one.round.direction} {one.round.number}": one.phase.gib_per_s * GIB
        for one in tour.checkpoints.rounds
    }
    return bar_chart(
        "Checkpoints, GiB/s",
        tour.probe.uri,
        bars,
        "B/s",
        limits=limits,
        note=f"of {format_bytes(tour.checkpoints.total_bytes)} each",
    )


def _tables(tour: Tour) -> Iterator[Section]:
    measurements = tour.probe.measurements
    yield table_section(
        "best", "What this storage can do at best", probe_run.headline_rows(measurements), bars="GiB/s"
    )
    yield table_section(
        "training", "Can it feed an accelerator?", training_rows(tour.training), text=_TRAINING, bars="AU %"
    )
    yield table_section(
        "checkpoints",
        "Can it take checkpoints and give them back?",
        checkpoint_rows(tour.checkpoints),
        text=_CHECKPOINTS.format(target=tour.checkpoints.target),
        bars="GiB/s",
    )
    yield table_section(
        "all",
        "All measurements of the probe",
        probe_run.measurement_rows(measurements),
        text=" ".join([_METHOD.format(size=format_bytes(tour.probe.size_bytes)), *tour.probe.notes]),
        bars="GiB/s",
    )


_METHOD: Final = (
    "Each sequential measurement moved up to {size}, from one process. A write ends when its last byte is "
    "durable, fsync of file and folder included. Before a buffered read the files were dropped from memory. "
    "Streams are threads with one block in flight each; more of them, and other blocks, were tried until "
    "none was faster."
)
_TRAINING: Final = (
    "Its computation is emulated and its reading real. AU is the share of time in which the accelerator "
    "computed instead of waiting: by DLIO's formula, and strictly."
)
_CHECKPOINTS: Final = (
    "At {target}: every byte is generated while it is written, durable at the end, read from storage and "
    "verified. GiB/s: all bytes over all time."
)


def training_rows(result: TrainingResult) -> list[dict[str, str]]:
    """One row an epoch, and the ceiling: the same run on storage without cost."""
    rows = [
        {
            "run": f"epoch {rate.epoch}",
            "AU %": f"{rate.au_compat_percent:.2f}",
            "strictly": "-" if rate.au_strict_percent is None else f"{rate.au_strict_percent:.2f}",
            "samples/s": f"{rate.samples_per_s_strict:,.1f}",
        }
        for rate in result.train.epochs
    ]
    ceiling = result.stages.ceiling
    if ceiling is not None:
        strict = ceiling.au_strict_percent
        rows.append(
            {
                "run": "ceiling",
                "AU %": f"{ceiling.au_compat_percent:.2f}",
                "strictly": "-" if strict is None else f"{strict:.2f}",
                "samples/s": f"{ceiling.samples_per_s:,.1f}",
            }
        )
    return rows


def checkpoint_rows(result: CheckpointResult) -> list[dict[str, str]]:
    """One row for each direction."""
    return [
        {
            "direction": name,
            "GiB/s": "-" if figures.gib_per_s is None else f"{figures.gib_per_s:.2f}",
            "content, GiB/s": f"{figures.content_gib_per_s or 0:.2f}",
            "took": format_seconds(figures.duration_s),
            "held up by": figures.bottleneck,
        }
        for name, figures in (("write", result.write), ("read", result.read))
        if figures is not None
    ]
