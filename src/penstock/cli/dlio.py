"""`penstock-dlio`: the command line of `dlio_benchmark`, on our generator, loader and timed loop.

Place in the flow: DLIO's arguments become a workload, its stages run in DLIO's order, and DLIO's files are
left in its folder. Invariant: whatever is requested is done, or reported as a remark or an error.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock import __version__
from penstock.cli import app, dlio_storage
from penstock.cli.terminal import Terminal
from penstock.cluster.comm import Comm
from penstock.environment import Environment, process_environment
from penstock.errors import StorageError, Unavailable, UsageError
from penstock.results.provenance import redact
from penstock.storage import Storage, open_storage
from penstock.workload.enums import DataFormat, LoaderKind, StorageKind
from penstock.workload.settings import parse_dlio_words
from penstock.workload.spec import Workload

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.bench.loader.loader_protocol import LoaderOptions, OpenStorage
    from penstock.results.dlio_files import HydraFacts

DEFAULT_WORKLOAD: Final = "default"
"""The workload that DLIO runs if none is named."""

OUTPUT_VARIABLE: Final = "DLIO_OUTPUT_FOLDER"

LONGEST_WAIT_S: Final = 3600.0
"""DLIO has no option for it, so this must be enough for the slowest rank's share of data generation."""

HELP: Final = f"""\
Usage: penstock-dlio [workload=NAME] [++workload.SECTION.KEY=VALUE ...]
                     [hydra.run.dir=FOLDER] [hydra.output_subdir=NAME] [--config-dir FOLDER]

Run a workload with DLIO's command line, and write DLIO's files: summary.json, dlio.log, RANK_output.json,
RANK_per_epoch_stats.json and .hydra. Runs alone, or as ranks under mpiexec, mpirun, srun or torchrun.
Without arguments it trains the workload "default", as DLIO does.

Arguments:
  workload=unet3d_h100               Shipped workload (`penstock workloads`), one of DLIO's, or NAME.yaml of
                                     --config-dir (default: "default", as in DLIO).
  ++workload.dataset.num_files_train=42
                                     Change any value of the workload; also with one + or none.
  ++workload.workflow.generate_data=True ++workload.workflow.train=False
                                     Choose the stages: generate_data, train, evaluation, checkpoint.
  ~workload.SECTION.KEY              Leave a key of the workload at its default.
  hydra.run.dir=FOLDER               Directory for the results (default: hydra_log/MODEL/DATE-TIME); may hold
                                     ${{now:%Y-%m-%d}} and ${{workload.model.name}}.
  hydra.output_subdir=NAME           Name of the configuration's folder in it (default: .hydra).

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
    """Run one command line (default: the process's own) and return its exit code."""
    words, debug = app.take_debug(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(HELP, end="")
        return 0
    if "--version" in words:
        print(f"penstock-dlio {__version__}")
        return 0
    return app.run_at_edge(lambda: _run_as_rank(words), debug=debug)


def _run_as_rank(words: Sequence[str]) -> None:
    """Run as the rank that this process is: rank 0 of 1 if no launcher started it."""
    from penstock.cluster.supervision import join_job

    environment = process_environment()
    with join_job(environment, timeout_s=LONGEST_WAIT_S) as comm:
        _plan_stages(words, comm, environment).run()


def _plan_stages(words: Sequence[str], comm: Comm, environment: Environment) -> _Stages:
    """Parse and check everything that is requested, before anything is done."""
    from penstock.bench.loader import loader_options
    from penstock.bench.training.training_run import list_unsupported
    from penstock.workload.load_workload import load

    overrides, arguments = parse_dlio_words(words)
    name = arguments.get("workload") or DEFAULT_WORKLOAD
    config_dir = Path(arguments["--config-dir"]) if "--config-dir" in arguments else None
    loaded = load(name, overrides=overrides, config_dir=config_dir, prefers_dlio=True)
    workload = loaded.workload
    require_runnable_stages(workload)
    location = dlio_storage.data_location(workload, environment)
    run_dir = arguments.get("hydra.run.dir")
    folder = choose_run_folder(run_dir, workload, environment, now=datetime.now().astimezone())
    opener = partial(
        open_storage, location.uri, location.environment, options=location.options, rank=comm.rank
    )
    remarks = list_unused_stages(workload)
    loader = loader_options("native", workload, None)
    if workload.workflow.train:
        loader, replacements = choose_loader(workload)
        remarks += (*list_unsupported(workload), *replacements, *list_replaced(workload))
    return _Stages(
        name=name,
        workload=workload,
        comm=comm,
        terminal=Terminal(as_json=False, speaks=comm.rank == 0),
        storage=opener(),
        open_storage=opener,
        loader=loader,
        folder=comm.broadcast(folder, awaiting="rank 0 to name the folder of the run"),
        subfolder=arguments.get("hydra.output_subdir"),
        words=tuple(words),
        overrides=tuple(override.source for override in overrides),
        remarks=(*loaded.remarks, *remarks),
    )


def require_runnable_stages(workload: Workload) -> None:
    """Raise UsageError for stages that cannot be run, naming the key to change."""
    stages = workload.workflow
    if not (stages.generate_data or stages.train or stages.checkpoint):
        raise UsageError(
            "All stages are switched off",
            where="workflow",
            fix="Write ++workload.workflow.generate_data=True or ++workload.workflow.train=True.",
        )


def list_unused_stages(workload: Workload) -> tuple[str, ...]:
    """Remarks on stages that are switched on and, as with DLIO, have nothing to do."""
    stages = workload.workflow
    if not stages.evaluation or stages.train:
        return ()
    return ("workflow.evaluation: it follows epochs of training, and workflow.train is false",)


def choose_run_folder(
    run_dir: str | None, workload: Workload, environment: Environment, *, now: datetime
) -> Path:
    """The folder of DLIO's files, from the workload, the environment or hydra, in this order."""
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
    """Torch's loader if the workload names it and torch is installed; else ours, with a remark."""
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
    """Remarks on what is done by other means than the workload names: printed once, and recorded."""
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


@dataclass(slots=True, kw_only=True)
class _Stages:
    """One rank's part of all stages of one command line; `log` grows with each stage."""

    name: str
    workload: Workload
    comm: Comm
    terminal: Terminal
    storage: Storage
    open_storage: OpenStorage
    loader: LoaderOptions
    folder: Path
    subfolder: str | None
    words: tuple[str, ...]
    overrides: tuple[str, ...]
    remarks: tuple[str, ...]
    log: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Run the stages that are switched on, in DLIO's order."""
        stages = self.workload.workflow
        self.terminal.notes(self.remarks)
        if stages.generate_data:
            self._generate()
        self._write_configuration()
        if stages.train:
            self._train()
        elif stages.checkpoint:
            self._run_checkpoints()
        if not self.workload.dataset.keep_files:
            self._remove_data()

    def _generate(self) -> None:
        from penstock.dataset.content import Reduction
        from penstock.dataset.dataset_manifest import DatasetRecipe
        from penstock.dataset.generate import generate

        if self.workload.dataset.format is DataFormat.SYNTHETIC:
            self._log("Synthetic samples need no files: nothing is generated")
            return
        self._log("Starting data generation")
        recipe = DatasetRecipe(
            dataset=self.workload.dataset, seed=self.workload.train.seed, reduction=Reduction()
        )
        with self.terminal.progress() as progress:
            report = generate(
                recipe, self.storage, comm=self.comm, threads=self._write_threads, progress=progress
            )
        if self.workload.storage.storage_type is StorageKind.S3:
            # As DLIO does, for services whose listings show new objects late.
            time.sleep(self.workload.storage.post_generation_settle_s)
        self._log(f"Generation done: {report.written_files} files written, {report.kept_files} existed")

    def _train(self) -> None:
        from penstock.bench.epoch_order import Remainder
        from penstock.bench.training.training_checkpoints import plan_checkpoints
        from penstock.bench.training.training_run import TrainingRequest, choose_seed, train

        location = dlio_storage.checkpoint_location(self.workload, process_environment())
        request = TrainingRequest(
            workload=self.workload,
            results=self.folder.parent,
            run_folder=self.folder,
            seed=choose_seed(self.comm, self.workload, None),
            division=Remainder.DROP,
            loader=self.loader,
            reopen=self.open_storage,
            checkpoints=plan_checkpoints(
                self.workload,
                location.uri,
                num_ranks=self.comm.size,
                rank=self.comm.rank,
                environment=location.environment,
                options=location.options,
            ),
            command=("penstock-dlio", *self.words),
            environment=process_environment(),
            overrides=self.overrides,
            remarks=self.remarks,
            hydra_subfolder=self._hydra_facts().subfolder,
            log_before=tuple(self.log),
        )
        with self.terminal.progress() as progress:
            result = train(request, self.storage, comm=self.comm, progress=progress)
        self.terminal.notes((*result.stages.remarks, *result.train.notes, *result.stages.advice))
        self._print_log_of_run()

    def _run_checkpoints(self) -> None:
        """Write and read checkpoints alone; wrong bytes fail the run."""
        result = self._perform_checkpoints()
        self._print_log_of_run()
        if not result.is_right:
            raise StorageError(
                "The bytes read back differ from those that were written",
                uri=result.target,
                fix=f"{result.results_dir}/checkpoints.json lists the places.",
            )

    def _perform_checkpoints(self) -> CheckpointResult:
        from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest
        from penstock.bench.state_layout import LayoutRequest, plan_layout
        from penstock.cli.checkpoint_benchmark import perform_run
        from penstock.transfer.pipeline import PipelineSettings
        from penstock.workload.load_workload import model_of_workload

        model = model_of_workload(self.name, self.workload)
        mode = self.workload.checkpoint.mode
        location = dlio_storage.checkpoint_location(self.workload, process_environment())
        request = CheckpointRequest(
            model=model,
            layout=plan_layout(LayoutRequest(model=model, num_processes=self.comm.size, mode=mode)),
            scale=Fraction(1),
            pipe=PipelineSettings(),
            results=self.folder.parent,
            run_folder=self.folder,
            command=("penstock-dlio", *self.words),
            environment=location.environment,
            overrides=self.overrides,
            remarks=self.remarks,
            hydra_subfolder=self._hydra_facts().subfolder,
            log_before=tuple(self.log),
        )
        return perform_run(request, location.uri, location.options, comm=self.comm, terminal=self.terminal)

    def _print_log_of_run(self) -> None:
        """Print the lines that the run added to the log."""
        if self.terminal.speaks:
            lines = (self.folder / self.workload.output.log_file).read_text(encoding="utf-8").splitlines()
            print("\n".join(lines[len(self.log) :]))

    def _write_configuration(self) -> None:
        """Write what DLIO leaves even if nothing is trained, or training fails."""
        from penstock.results.dlio_files import write_configuration, write_log

        if self.terminal.speaks:
            write_configuration(self.folder, self.workload, self._hydra_facts())
            write_log(self.folder, self.workload, self.log)

    def _remove_data(self) -> None:
        from penstock.bench.training.training_files import open_files
        from penstock.dataset.data_files import remove

        files = open_files(self.workload.dataset, self.storage, seed=self.workload.train.seed, evaluates=True)
        self.comm.barrier(awaiting="all ranks to know the files to delete")
        num_removed = remove(files.data_files, self.storage, comm=self.comm, threads=self._write_threads)
        self.terminal.note(f"dataset.keep_files is false: {num_removed} files were deleted")

    @property
    def _write_threads(self) -> int:
        return self.workload.reader.write_threads or 4

    def _hydra_facts(self) -> HydraFacts:
        from penstock.results.dlio_files import HYDRA_FOLDER, HydraFacts

        return HydraFacts(
            subfolder=HYDRA_FOLDER if self.subfolder is None else self.subfolder,
            workload_name=self.workload.full_name,
            overrides=redact(self.overrides),
            working_folder=str(Path.cwd()),
            run_folder=str(self.folder),
        )

    def _log(self, text: str) -> None:
        """Add a line to the log, and print it."""
        from penstock.results.dlio_files import log_line

        self.log.append(log_line(datetime.now(UTC), text))
        if self.terminal.speaks:
            print(self.log[-1], flush=True)
