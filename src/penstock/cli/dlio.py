"""`penstock-dlio`: the command line of `dlio_benchmark`, on Penstock's generator, loader and timed loop.

DLIO's arguments become a workload, whose stages run in DLIO's order and leave DLIO's files in its folder.
Invariant: every request is carried out, or else a remark or an error reports that it is not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.cli import app, dlio_storage
from penstock.cli.terminal import Terminal
from penstock.cluster.comm import Comm
from penstock.environment import Environment, process_environment
from penstock.errors import StorageError, Unavailable, UsageError
from penstock.results.provenance import redact
from penstock.storage import Storage, open_storage
from penstock.units import format_count
from penstock.workload.enums import DataFormat, LoaderKind, StorageKind
from penstock.workload.settings import parse_dlio_words
from penstock.workload.spec import Workload

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.bench.loader.loader_protocol import LoaderOptions, OpenStorage

DEFAULT_WORKLOAD: Final = "default"
"""The workload that DLIO runs unless another is named."""

OUTPUT_VARIABLE: Final = "DLIO_OUTPUT_FOLDER"

LONGEST_WAIT_S: Final = 3600.0
"""The longest wait for other ranks. DLIO has no option for it, so it must allow for slow data generation."""

_USUAL_THREADS: Final = 4

HELP: Final = f"""\
Usage: penstock-dlio [workload=NAME] [++workload.SECTION.KEY=VALUE ...]
                     [hydra.run.dir=FOLDER] [hydra.output_subdir=NAME] [--config-dir FOLDER]

Run a workload with DLIO's command line, and write DLIO's files: summary.json, dlio.log, RANK_output.json,
RANK_per_epoch_stats.json and .hydra. Runs alone, or as ranks under mpiexec, mpirun, srun or torchrun.
Without arguments it trains the workload "default", as DLIO does.

Arguments:
  workload=unet3d_h100               Shipped workload (`penstock workloads`), one of DLIO's, or NAME.yaml in
                                     --config-dir (default: "default", as in DLIO).
  ++workload.dataset.num_files_train=42
                                     Override any setting of the workload; one + or none works, too.
  ++workload.workflow.generate_data=True ++workload.workflow.train=False
                                     Choose the stages: generate_data, train, evaluation, checkpoint.
  ~workload.SECTION.KEY              Reset a setting of the workload to its default.
  hydra.run.dir=FOLDER               Directory for the results, which may contain ${{now:%Y-%m-%d}} and
                                     ${{workload.model.name}} (default: hydra_log/MODEL/DATE-TIME).
  hydra.output_subdir=NAME           Folder for the configuration, in that directory (default: .hydra).

Options:
  --config-dir FOLDER                Directory of your own workloads.
  --debug                            Show a traceback with every error.
  --version                          Print the version and exit.
  -h, --help                         Show this message and exit.

Examples:
  mpiexec -n 4 penstock-dlio workload=unet3d_h100 ++workload.dataset.num_files_train=42 \\
    ++workload.workflow.generate_data=True ++workload.dataset.data_folder=/data/unet3d hydra.run.dir=out

{app.EXIT_CODES}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own), and return its exit code."""
    words, debug = app.take_debug(arguments)
    return app.run_at_edge(lambda: _run_as_rank(words), debug=debug)


def _run_as_rank(words: Sequence[str]) -> None:
    """Run the workload as this process's rank, which is rank 0 of 1 unless a launcher started it."""
    from penstock.cluster.supervision import join_job

    if {"-h", "--help"} & set(words):
        print(HELP, end="")
        return
    if "--version" in words:
        print(f"penstock-dlio {__version__}")
        return
    environment = process_environment()
    with join_job(environment, timeout_s=LONGEST_WAIT_S) as comm:
        _run_workload(words, comm, environment)


def _run_workload(words: Sequence[str], comm: Comm, environment: Environment) -> None:
    """Check everything that is requested, then run the stages that are switched on, in DLIO's order."""
    from penstock.bench.loader import loader_options
    from penstock.bench.training.training_files import open_files
    from penstock.bench.training.training_run import list_unsupported
    from penstock.dataset.data_files import remove
    from penstock.results.dlio_files import HYDRA_FOLDER, write_configuration, write_log
    from penstock.workload.load_workload import load

    overrides, arguments = parse_dlio_words(words)
    name = arguments.get("workload") or DEFAULT_WORKLOAD
    config_dir = Path(arguments["--config-dir"]) if "--config-dir" in arguments else None
    if config_dir is not None and not config_dir.is_dir():
        raise UsageError("No such directory", where=f"--config-dir {config_dir}", fix="Name another.")
    loaded = load(name, overrides=overrides, config_dir=config_dir, prefers_dlio=True)
    workload, stages = loaded.workload, loaded.workload.workflow
    require_runnable_stages(workload)
    location = dlio_storage.data_location(workload, environment)
    folder = comm.broadcast(
        choose_run_folder(
            arguments.get("hydra.run.dir"), workload, environment, now=datetime.now().astimezone()
        ),
        awaiting="rank 0 to name the folder of the run",
    )
    opener = partial(
        open_storage, location.uri, location.environment, options=location.options, rank=comm.rank
    )
    remarks = (*loaded.remarks, *list_unused_stages(workload))
    loader = loader_options("native", workload, None)
    if stages.train:
        loader, replacements = choose_loader(workload)
        remarks += (*list_unsupported(workload), *replacements, *list_replaced(workload))
    storage, terminal = opener(), Terminal(as_json=False, speaks=comm.rank == 0)
    terminal.notes(remarks)
    log = _generate(workload, storage, comm, terminal) if stages.generate_data else []
    sources = tuple(override.source for override in overrides)
    subfolder = arguments.get("hydra.output_subdir", HYDRA_FOLDER)
    # The files that DLIO leaves even if nothing is trained, or if training fails.
    if terminal.speaks:
        write_configuration(folder, workload, redact(sources), subfolder=subfolder, run_folder=folder)
        write_log(folder, workload, log)
    settings: dict[str, Any] = {
        "results": folder.parent,
        "run_folder": folder,
        "command": ("penstock-dlio", *words),
        "overrides": sources,
        "remarks": remarks,
        "hydra_subfolder": subfolder,
        "log_before": tuple(log),
    }
    result: CheckpointResult | None = None
    if stages.train:
        _train(workload, loader=loader, opener=opener, settings=settings, comm=comm, terminal=terminal)
    elif stages.checkpoint:
        result = _run_checkpoints(name, workload, settings, comm, terminal)
    if terminal.speaks and (stages.train or stages.checkpoint):
        # The lines that this run has added to the log.
        lines = (folder / workload.output.log_file).read_text(encoding="utf-8").splitlines()
        print("\n".join(lines[len(log) :]))
    if result is not None and not result.is_right:
        raise StorageError(
            "The bytes read back differ from those that were written",
            uri=result.target,
            fix=f"{result.results_dir}/checkpoints.json lists the places.",
        )
    if not workload.dataset.keep_files:
        files = open_files(workload.dataset, storage, seed=workload.train.seed, evaluates=True)
        comm.barrier(awaiting="all ranks to know the files to delete")
        threads = workload.reader.write_threads or _USUAL_THREADS
        num_removed = remove(files.data_files, storage, comm=comm, threads=threads)
        terminal.note(f"dataset.keep_files is false: {format_count(num_removed, 'file')} deleted")


def _generate(workload: Workload, storage: Storage, comm: Comm, terminal: Terminal) -> list[str]:
    """Generate the data set; return the lines to log about it."""
    from penstock.dataset.content import Reduction
    from penstock.dataset.dataset_manifest import DatasetRecipe
    from penstock.dataset.generate import generate
    from penstock.results.dlio_files import log_line

    log: list[str] = []

    def say(text: str) -> None:
        log.append(log_line(datetime.now(UTC), text))
        if terminal.speaks:
            print(log[-1], flush=True)

    if workload.dataset.format is DataFormat.SYNTHETIC:
        say("Synthetic samples need no files: nothing is generated")
        return log
    say("Starting data generation")
    recipe = DatasetRecipe(dataset=workload.dataset, seed=workload.train.seed, reduction=Reduction())
    threads = workload.reader.write_threads or _USUAL_THREADS
    with terminal.progress() as progress:
        report = generate(recipe, storage, comm=comm, threads=threads, progress=progress)
    if workload.storage.storage_type is StorageKind.S3:
        # DLIO also waits, because listings of some services show new objects late.
        time.sleep(workload.storage.post_generation_settle_s)
    say(f"Generation done: {format_count(report.written_files, 'file')} written, {report.kept_files} existed")
    return log


def _train(
    workload: Workload,
    *,
    loader: LoaderOptions,
    opener: OpenStorage,
    settings: dict[str, Any],
    comm: Comm,
    terminal: Terminal,
) -> None:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.training.training_checkpoints import plan_checkpoints
    from penstock.bench.training.training_run import TrainingRequest, choose_seed, train

    environment = process_environment()
    location = dlio_storage.checkpoint_location(workload, environment)
    request = TrainingRequest(
        workload=workload,
        seed=choose_seed(comm, workload, None),
        division=Remainder.DROP,
        loader=loader,
        reopen=opener,
        checkpoints=plan_checkpoints(
            workload,
            location.uri,
            num_ranks=comm.size,
            rank=comm.rank,
            environment=location.environment,
            options=location.options,
        ),
        environment=environment,
        **settings,
    )
    with terminal.progress() as progress:
        result = train(request, opener(), comm=comm, progress=progress)
    terminal.notes((*result.stages.remarks, *result.train.notes, *result.stages.advice))


def _run_checkpoints(
    name: str, workload: Workload, settings: dict[str, Any], comm: Comm, terminal: Terminal
) -> CheckpointResult:
    """Write and read checkpoints without training."""
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest
    from penstock.bench.state_layout import plan_layout
    from penstock.cli.checkpoint_benchmark import perform_run
    from penstock.transfer.pipeline import PipelineSettings
    from penstock.workload.load_workload import model_of_workload

    model, mode = model_of_workload(name, workload), workload.checkpoint.mode
    location = dlio_storage.checkpoint_location(workload, process_environment())
    request = CheckpointRequest(
        model=model,
        layout=plan_layout(model, num_processes=comm.size, mode=mode),
        scale=Fraction(1),
        pipe=PipelineSettings(),
        environment=location.environment,
        **settings,
    )
    return perform_run(request, location.uri, location.options, comm=comm, terminal=terminal)


def require_runnable_stages(workload: Workload) -> None:
    """Raise `UsageError`, naming the key to change, if all stages are switched off."""
    stages = workload.workflow
    if not (stages.generate_data or stages.train or stages.checkpoint):
        raise UsageError(
            "All stages are switched off",
            where="workflow",
            fix="Write ++workload.workflow.generate_data=True or ++workload.workflow.train=True.",
        )


def list_unused_stages(workload: Workload) -> tuple[str, ...]:
    """Return remarks on stages that are switched on but, as in DLIO, have nothing to do."""
    stages = workload.workflow
    if not stages.evaluation or stages.train:
        return ()
    return ("workflow.evaluation: it follows epochs of training, and workflow.train is false",)


def choose_run_folder(
    run_dir: str | None, workload: Workload, environment: Environment, *, now: datetime
) -> Path:
    """Choose the folder for DLIO's files: the workload's, else the environment's, else Hydra's default."""
    name = workload.output.folder or environment.get(OUTPUT_VARIABLE) or run_dir
    if not name:
        return Path("hydra_log", workload.model.name, f"{now:%Y-%m-%d-%H-%M-%S}").absolute()
    name = _NOW.sub(lambda found: now.strftime(found[1]), name).replace(_MODEL, workload.model.name)
    if "${" in name:
        raise UsageError(
            f"Of interpolations only ${{now:FORMAT}} and {_MODEL} are resolved: {name!r}",
            where="hydra.run.dir",
            fix="Write the folder's name itself.",
        )
    return Path(name).absolute()


_NOW: Final = re.compile(r"\$\{now:([^}]*)\}")
_MODEL: Final = "${workload.model.name}"


def choose_loader(workload: Workload) -> tuple[LoaderOptions, tuple[str, ...]]:
    """Return torch's loader if the workload names it and torch is installed, else ours, with a remark."""
    from penstock.bench.loader import loader_options

    name = workload.reader.data_loader
    reason = "is not used"
    if name is LoaderKind.PYTORCH:
        try:
            return loader_options("pytorch", workload, None), ()
        except Unavailable:
            reason = "is not used, because torch is not installed"
    remark = (
        f"reader.data_loader: {name} {reason}; penstock's own loader takes the same batches, read_threads "
        "and prefetch_size"
    )
    return loader_options("native", workload, None), (remark,)


def list_replaced(workload: Workload) -> Sequence[str]:
    """Return remarks on options that have no effect here, each with the option that takes its place."""
    options = workload.storage.storage_options
    remarks = []
    if options.prefetch_window or options.prefetch_workers:
        remarks.append(
            "storage.storage_options.prefetch_window and prefetch_workers: reader.read_threads says how many "
            "reads a rank keeps in flight"
        )
    if options.columns:
        remarks.append(
            "storage.storage_options.columns: those of dataset.parquet.columns marked `read` are read"
        )
    return remarks
