"""The tour of the system on this machine's own disk: each benchmark once, small, and one page of results.

Invariant: the tour writes only below its own folder, and leaves nothing there but its report and its runs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import Any

from penstock import __version__
from penstock.bench.checkpoint import checkpoint_run
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.probe import ProbeRequest, ProbeResult, probe, probe_run
from penstock.bench.state_layout import LayoutRequest, plan_layout
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.checkpoint.saving.pipeline import PipelineSettings
from penstock.cluster.comm import SoloComm
from penstock.cluster.doctor import Diagnosis, examine
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.environment import Environment
from penstock.progress import Progress
from penstock.reports.html_page import Section, render_sections
from penstock.storage import open_storage
from penstock.units import format_bytes, format_seconds
from penstock.workload.load_workload import load, load_model
from penstock.workload.overrides import parse_settings

_NUM_FILES = 28
_SAMPLE_BYTES = 8 << 20
_NUM_EPOCHS = 2
_MODEL = "llama3-8b"
_NUM_CHECKPOINTS = 2
PROBE_SIZE_BYTES = 512 << 20
PROBE_MAX_SECONDS = 4.0

_LIMITS = (
    "The fastest of each kind at {uri}, measured from one process. Everything that a training job does here "
    "is somewhere below these limits."
)
_METHOD = (
    "Each sequential measurement moved up to {size}. A write ends when its last byte is durable, fsync of "
    "file and folder included. Before a buffered read the files were dropped from memory. Streams are "
    "threads with one block in flight each."
)
_TRAINING = (
    "{workload} with {files} small files, its computation emulated and its reading real. AU is the share of "
    "time in which the accelerator computed instead of waiting: by DLIO's formula, and strictly."
)
_CHECKPOINTS = (
    "{checkpoints} checkpoints of {model}, each scaled to {size}, at {target}: every byte is generated "
    "while it is written, durable at the end, read from storage and verified. GiB/s: all bytes over all time."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """The results of the tour, and its page."""

    report: Path
    probe: ProbeResult
    training: TrainingResult
    checkpoints: CheckpointResult
    diagnoses: tuple[Diagnosis, ...]

    def document(self) -> Mapping[str, Any]:
        """The results as plain data."""
        return {
            "report": str(self.report),
            "probe": asdict(self.probe),
            "training": self.training.document(),
            "checkpoints": self.checkpoints.document(),
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
        }


def tour(
    out: Path, *, environment: Environment, progress: Progress, probe_size_bytes: int = PROBE_SIZE_BYTES
) -> Tour:
    """Run every benchmark below `out`, for about a minute, and write `out/report.html` and `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    diagnoses = tuple(examine(out, environment))
    limits = probe(
        ProbeRequest(uri=str(out.resolve()), size_bytes=probe_size_bytes, max_seconds=PROBE_MAX_SECONDS),
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
        report=out / "report.html",
        probe=limits,
        training=training,
        checkpoints=checkpoints,
        diagnoses=diagnoses,
    )
    results.report.write_text(_render(results), encoding="utf-8")
    results.report.with_suffix(".json").write_text(json.dumps(results.document(), indent=2), encoding="utf-8")
    return results


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


def _train(out: Path, *, environment: Environment, progress: Progress) -> TrainingResult:
    """Train a small U-Net 3D: generate its data past the page cache, read them, and remove them."""
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
    layout = plan_layout(LayoutRequest(model=model, num_processes=comm.size))
    scale = Fraction(1, max(1, layout.total_bytes // size_bytes))
    with TemporaryDirectory(dir=out.resolve(), prefix="checkpoints-") as folder:
        request = checkpoint_run.CheckpointRequest(
            model=model,
            layout=layout.scaled(scale),
            scale=scale,
            pipe=PipelineSettings(),
            results=out / "runs",
            command=("penstock", "demo"),
            environment=environment,
        )
        return checkpoint_run.run_checkpoints(
            request, partial(open_storage, f"{scheme}://{folder}", environment), comm=comm, progress=progress
        )


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


def _render(results: Tour) -> str:
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    limitations = [diagnosis for diagnosis in results.diagnoses if diagnosis.state != "ok"]
    return render_sections(
        title="Penstock: a tour of this machine",
        subtitle=f"{', '.join(results.probe.hosts)}, {when}, penstock {__version__}",
        sections=(
            Section(
                title="What this storage can do at best",
                prose=(_LIMITS.format(uri=results.probe.uri),),
                rows=probe_run.headline_rows(results.probe.measurements),
                bars="GiB/s",
            ),
            Section(
                title="All measurements",
                prose=(_METHOD.format(size=format_bytes(results.probe.size_bytes)), *results.probe.notes),
                rows=probe_run.measurement_rows(results.probe.measurements),
                bars="GiB/s",
            ),
            Section(
                title="Can it feed an accelerator?",
                prose=(
                    _TRAINING.format(workload=results.training.workload, files=_NUM_FILES),
                    *(results.training.train.verdict.evidence if results.training.train.verdict else ()),
                ),
                rows=training_rows(results.training),
                bars="AU %",
            ),
            Section(
                title="Can it take checkpoints and give them back?",
                prose=(
                    _CHECKPOINTS.format(
                        checkpoints=_NUM_CHECKPOINTS,
                        model=results.checkpoints.model,
                        size=format_bytes(results.checkpoints.total_bytes),
                        target=results.checkpoints.target,
                    ),
                ),
                rows=checkpoint_rows(results.checkpoints),
                bars="GiB/s",
            ),
            Section(
                title="This machine",
                prose=() if limitations else ("Nothing is missing or limited.",),
                rows=[
                    {"what": entry.subject, "state": entry.state, "found": entry.found, "fix": entry.fix}
                    for entry in limitations
                ],
            ),
        ),
    )
