"""The tour of the system on this machine's own disk: each benchmark once, small, and one page of results.

Invariant: the tour writes only below its own folder, and leaves nothing there but its report and its runs.
"""

import json
from fractions import Fraction
from functools import partial
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

from penstock.bench.checkpoint import checkpoint_run
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.probe import ProbeRequest, probe
from penstock.bench.state_layout import LayoutRequest, plan_layout
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.cluster.doctor import examine
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.environment import Environment
from penstock.progress import Progress
from penstock.reports.page import render_report
from penstock.storage import open_storage
from penstock.transfer.pipeline import PipelineSettings
from penstock.workflows import demo_page
from penstock.workflows.demo_page import Tour
from penstock.workload.load_workload import load, load_model
from penstock.workload.settings import parse_settings

_NUM_FILES = 28
_SAMPLE_BYTES = 8 << 20
_NUM_EPOCHS = 2
_MODEL = "llama3-8b"
_NUM_CHECKPOINTS = 2
PROBE_SIZE_BYTES = 512 << 20
PROBE_MAX_SECONDS = 4.0


def tour(
    out: Path, *, environment: Environment, progress: Progress, probe_size_bytes: int = PROBE_SIZE_BYTES
) -> Tour:
    """Run every benchmark below `out`, for about a minute, and write `out/report.html` and `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
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
        report=out / "report.html",
        probe=limits,
        training=training,
        checkpoints=checkpoints,
        model_bytes=plan_layout(LayoutRequest(model=load_model(_MODEL), num_processes=1)).total_bytes,
        diagnoses=diagnoses,
    )
    results.report.write_text(render_report(demo_page.make_demo_page(results)), encoding="utf-8")
    results.report.with_suffix(".json").write_text(json.dumps(results.document(), indent=2), encoding="utf-8")
    return results


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
