"""A tour of Penstock on this machine's own disk: each benchmark once, scaled down, and one page of results.

The page begins with a few sentences, their figures and charts; everything measured follows. Invariants: the
tour writes only below its own folder, and leaves nothing there except its report and its runs; no figure lies
above a limit that the page states: if checkpoints were faster than the probe, their rate is the limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import Any, Final

from penstock import __version__
from penstock.bench.checkpoint import checkpoint_run
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult, direction_rows
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.probe import ProbeRequest, ProbeResult, probe, probe_page, probe_run
from penstock.bench.state_layout import plan_layout
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.cluster.doctor import Diagnosis, examine
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.environment import Environment
from penstock.errors import name_some
from penstock.progress import Progress
from penstock.reports.page import require_replaceable, write_report
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
from penstock.results.phase_figures import epoch_rows
from penstock.results.published_files import write_text
from penstock.results.step_series import RunSteps
from penstock.storage import open_storage
from penstock.transfer.pipeline import PipelineSettings
from penstock.units import format_bytes, format_rate, format_seconds
from penstock.workload.load_workload import load, load_model
from penstock.workload.settings import parse_settings
from penstock.workload.sizing import forecast_accelerators

_NUM_FILES = 28
_SAMPLE_BYTES = 8 << 20
_NUM_EPOCHS = 2
_MODEL = "llama3-8b"
_NUM_CHECKPOINTS = 2
PROBE_SIZE_BYTES = 512 << 20
PROBE_MAX_SECONDS = 4.0
GIB: Final = 2**30
_WORKLOADS: Final = ("unet3d_h100", "resnet50_h100", "cosmoflow_h100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """The results of the tour."""

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


def tour(
    out: Path, *, environment: Environment, progress: Progress, probe_size_bytes: int = PROBE_SIZE_BYTES
) -> Tour:
    """Run all benchmarks below `out`, in about a minute; write `out/report.html` and `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    report = require_replaceable(out / "report.html")
    diagnoses = tuple(examine(out, environment))
    limits = probe(
        ProbeRequest(
            uri=str(out.resolve()),
            size_bytes=probe_size_bytes,
            streams=(1, 4, 16),
            block_bytes=(4 << 20,),
            max_seconds=PROBE_MAX_SECONDS,
        ),
        comm=SoloComm(gethostname()),
        environment=environment,
        options={},
        progress=progress,
    )
    training = _train(out, environment=environment, progress=progress)
    modes = {measurement.mode for measurement in limits.measurements}
    checkpoints = _take_checkpoints(
        out,
        scheme="direct" if "direct" in modes else "file",
        size_bytes=probe_size_bytes,
        environment=environment,
        progress=progress,
    )
    results = Tour(
        report=report,
        probe=limits,
        training=training,
        checkpoints=checkpoints,
        model_bytes=plan_layout(load_model(_MODEL), num_processes=1).total_bytes,
        diagnoses=diagnoses,
    )
    write_report(make_demo_page(results), results.report)
    write_text(results.report.parent, "report.json", json.dumps(results.document(), indent=2))
    return results


def _train(out: Path, *, environment: Environment, progress: Progress) -> TrainingResult:
    """Train a small U-Net 3D: generate its data set bypassing the page cache, read it, and remove it."""
    settings = (
        f"dataset.num_files_train={_NUM_FILES}",
        f"dataset.record_length_bytes={_SAMPLE_BYTES}",
        "dataset.record_length_bytes_stdev=0",
        f"train.epochs={_NUM_EPOCHS}",
    )
    workload = load("unet3d", accelerator="h100", overrides=parse_settings(settings)).workload
    comm, seed = SoloComm(gethostname()), workload.train.seed
    with TemporaryDirectory(dir=out.resolve(), prefix="data-") as folder:
        storage = open_storage(folder, environment)
        recipe = DatasetRecipe(dataset=workload.dataset, seed=seed, reduction=IRREDUCIBLE)
        generate(recipe, storage, comm=comm, threads=2, progress=progress)
        request = TrainingRequest(
            workload=workload,
            results=out / "runs",
            seed=seed,
            loader=NativeOptions(threads=workload.reader.read_threads or 4),
            command=("penstock", "demo"),
            overrides=tuple(f"++workload.{text}" for text in settings),
        )
        return train(request, storage, comm=comm, progress=progress)


def _take_checkpoints(
    out: Path, *, scheme: str, size_bytes: int, environment: Environment, progress: Progress
) -> CheckpointResult:
    """Write checkpoints of a language model, scaled to about `size_bytes`, read them back and remove them."""
    model = checkpoint_run.change_checkpoint_section(
        load_model(_MODEL),
        num_checkpoints_write=_NUM_CHECKPOINTS,
        num_checkpoints_read=_NUM_CHECKPOINTS,
        time_between_checkpoints_s=0.0,
    )
    comm = SoloComm(gethostname())
    whole = plan_layout(model, num_processes=comm.size)
    scale = Fraction(1, max(1, whole.total_bytes // size_bytes))
    with TemporaryDirectory(dir=out.resolve(), prefix="checkpoints-") as folder:
        request = checkpoint_run.CheckpointRequest(
            model=model,
            layout=plan_layout(model, num_processes=comm.size, scale=scale),
            scale=scale,
            pipe=PipelineSettings(),
            results=out / "runs",
            command=("penstock", "demo"),
            environment=environment,
        )
        return checkpoint_run.run_checkpoints(
            request, partial(open_storage, f"{scheme}://{folder}", environment), comm=comm, progress=progress
        )


def find_limit(tour: Tour, op: str) -> tuple[float, str]:
    """Return the best rate of one direction in bytes per second, and what reached it."""
    probed = probe_page.best(tour.probe, op)
    rounds = [one.phase.gib_per_s for one in tour.checkpoints.rounds if one.round.direction == op]
    fastest = max([probed.gib_per_s, *rounds])
    if fastest > probed.gib_per_s:
        return fastest * GIB, _CHECKPOINTS_LIMIT
    return fastest * GIB, f"{probe_page.describe(probed)}, {probed.mode}"


_CHECKPOINTS_LIMIT: Final = "the checkpoints, faster than the probe"


def say_headline(tour: Tour) -> str:
    """State how many accelerators of some workloads the storage feeds, and its best sequential rates."""
    fed = [probe_page.say_feeds(tour.probe, name) for name in _WORKLOADS]
    read, write = (format_rate(probe_page.best(tour.probe, op).gib_per_s * GIB) for op in ("read", "write"))
    return f"{name_some(fed)}; sequentially reads {read} and writes {write}"


def say_training(tour: Tour) -> str:
    """State the result of a small training run on this storage, and what each accelerator needs."""
    train, ceiling = tour.training.train, tour.training.ceiling
    above = f", {ceiling['au_compat']:.1f} % is this client's ceiling" if ceiling else ""
    each = forecast_accelerators(load(_WORKLOADS[0]).workload, Fraction(1)).bytes_per_accelerator_per_s
    return (
        f"A small {tour.training.workload} computed {train.au_compat_percent.mean:.1f} % of the time "
        f"({_ASKED:.0f} % required{above}); the full one needs {format_rate(float(each), at_least=True)} per "
        "accelerator."
    )


def say_checkpoints(tour: Tour) -> str:
    """State how long a checkpoint of a named model takes to write and to read back."""
    write, read = tour.checkpoints.write, tour.checkpoints.read
    rates = [totals["gib_per_s"] for totals in (write, read) if totals and totals["gib_per_s"]]
    if len(rates) < 2:
        return "Checkpoints were read from memory alone, which says nothing about this storage."
    size, model = tour.model_bytes, tour.checkpoints.model
    limits = {op: find_limit(tour, op)[0] / GIB for op in ("write", "read")}
    durable, back = (format_seconds(size / GIB / rate) for rate in rates)
    return (
        f"{format_bytes(size)} of {model} are durable in {durable} ({rates[0]:.2f} of "
        f"{limits['write']:.2f} GiB/s seen) and back, verified, in {back} ({rates[1]:.2f} of "
        f"{limits['read']:.2f} GiB/s), scaled up from {format_bytes(tour.checkpoints.total_bytes)}."
    )


def say_limits(tour: Tour) -> str:
    """State the best rates of this storage."""
    (read, read_by), (write, write_by) = find_limit(tour, "read"), find_limit(tour, "write")
    random = probe_page.best(tour.probe, "random_read")
    return (
        f"Sequentially reads up to {format_rate(read)} ({read_by}) and writes up to {format_rate(write)} "
        f"durably ({write_by}); "
        f"{random.operations_per_s:,.0f} random reads of {format_bytes(random.block_bytes)} a second."
    )


def say_what_helps(tour: Tour) -> str:
    """Name the change that would help most."""
    ceiling, train = tour.training.ceiling, tour.training.train
    if ceiling is not None and ceiling["au_compat"] < _ASKED:
        return "More or faster cores: this client does not reach 90 % on storage that costs nothing."
    rate, _ = probe_page.read_rate(tour.probe, load(_WORKLOADS[0]).workload)
    forecast = forecast_accelerators(load(_WORKLOADS[0]).workload, Fraction(rate))
    each, count = float(forecast.bytes_per_accelerator_per_s), forecast.num_accelerators + 1
    needed = max(count * each * float(forecast.threshold), rate)
    helps = f"Read bandwidth: {format_rate(needed, at_least=True)} would feed {count} H100 of unet3d."
    if not train.meets_threshold:
        return f"{helps} The small training run waited, too: its page says for what."
    return helps


_ASKED: Final = 90.0


def make_demo_page(tour: Tour) -> Report:
    """Make the page of a tour."""
    results = tour.probe
    limitations = [diagnosis for diagnosis in tour.diagnoses if diagnosis.state != "ok"]
    passed = tour.training.verdict == "passed"
    unet3d = load(_WORKLOADS[0]).workload
    rate, _ = probe_page.read_rate(results, unet3d)
    feeds_none = passed and not forecast_accelerators(unet3d, Fraction(rate)).num_accelerators
    read, read_by = find_limit(tour, "read")
    beyond = {f"checkpoints read {format_rate(read)}": read} if read_by == _CHECKPOINTS_LIMIT else {}
    verdict = tour.training.train.verdict
    training = "not known" if verdict is None else verdict.bottleneck.replace("none", "nothing")
    held = [
        f"{name}: {totals['bottleneck']}"
        for name, totals in (("writing", tour.checkpoints.write), ("reading", tour.checkpoints.read))
        if totals is not None
    ]
    return Report(
        title=f"What the storage at {results.uri} can do",
        subtitle=(
            f"{', '.join(results.hosts)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, penstock {__version__}; "
            "small runs of each benchmark"
        ),
        banner=Banner(
            verdict=tour.training.verdict if not feeds_none else "too slow",
            look=Look.BAD if feeds_none or not passed else Look.GOOD,
            figure=say_headline(tour),
            more={
                "Training": say_training(tour),
                "Checkpoints": say_checkpoints(tour),
                "Limits": say_limits(tour),
            },
            limited_by=f"training: {training}; checkpoints, {', '.join(held)}",
            since="the start: nothing changed while it ran",
            to_do=say_what_helps(tour),
        ),
        highlights=[
            _utilization(tour),
            _checkpoints(tour),
            probe_page.throughput_curve(tour.probe, limits=beyond),
        ],
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


def _utilization(tour: Tour) -> Chart:
    steps = RunSteps.of_events(read_events(Path(tour.training.results_dir)))
    assert steps is not None, "a training that ended has steps"
    ceiling = tour.training.ceiling
    limits = {"asked 90 %": _ASKED}
    if ceiling is not None:
        limits[f"ceiling {ceiling['au_compat']:.1f} %"] = ceiling["au_compat"]
    return Chart(
        kind=Kind.AREA,
        title="Training: accelerator busy",
        run=tour.probe.uri,
        unit="%",
        series=[Series(x=steps.edges, y=100 * steps.shares("loaded_ns", "computed_ns").mean(axis=0))],
        y_end=100,
        limits=limits,
        note=f"AU {tour.training.train.au_compat_percent.mean:.1f} %; dips: between epochs",
    )


def _checkpoints(tour: Tour) -> Chart:
    rates = {"read": find_limit(tour, "read")[0], "written": find_limit(tour, "write")[0]}
    limits = {f"most {name} {format_rate(rate)}": rate for name, rate in rates.items()}
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
        "best", "What this storage can do", probe_run.headline_rows(measurements), bars="GiB/s"
    )
    yield table_section(
        "training",
        "Can it feed an accelerator?",
        epoch_rows(tour.training.train.epochs),
        text=_TRAINING,
        bars="AU %",
    )
    yield table_section(
        "checkpoints",
        "Can it take checkpoints and give them back?",
        direction_rows(tour.checkpoints),
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
