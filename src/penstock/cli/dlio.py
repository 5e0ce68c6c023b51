"""`penstock-dlio`: the command line of `dlio_benchmark`, on our generator, loader and timed loop.

Place in the flow: DLIO's words become a workload, its stages run in DLIO's order, and DLIO's files are left
in its folder. Invariant: nothing that was asked for is left undone in silence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock import __version__
from penstock.cli.app import EXIT_CODES, at_the_edge, take_debug
from penstock.cli.terminal import Terminal
from penstock.environment import process_environment
from penstock.errors import StorageError, UsageError

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import LoaderOptions, OpenStorage
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.results.dlio.folder import HydraFacts
    from penstock.storage import Storage
    from penstock.workload.overrides import DlioWords
    from penstock.workload.spec import Workload

OUTPUT_VARIABLE: Final = "DLIO_OUTPUT_FOLDER"

LONGEST_WAIT_S: Final = 3600.0
"""No word of DLIO's sets a limit, so this one must outlast the slowest rank's share of generation."""

HELP: Final = f"""\
Usage: penstock-dlio workload=NAME [++workload.SECTION.KEY=VALUE ...]
                     [hydra.run.dir=FOLDER] [hydra.output_subdir=NAME] [--config-dir FOLDER]

Run a workload by DLIO's command line, and leave DLIO's files: summary.json, dlio.log, RANK_output.json,
RANK_per_epoch_stats.json and .hydra. Alone, or as ranks under mpiexec, mpirun, srun or torchrun.

  workload=unet3d_h100               a shipped workload (`penstock workloads`), or NAME.yaml of --config-dir
  ++workload.dataset.num_files_train=42
                                     any value of the workload; also with one + or none
  ++workload.workflow.generate_data=True ++workload.workflow.train=False
                                     which stages run: generate_data, train, evaluation, checkpoint
  hydra.run.dir=FOLDER               where results go; else hydra_log/MODEL/DATE-TIME
  hydra.output_subdir=NAME           the configuration's folder in it; else .hydra
  --config-dir FOLDER                a folder of your own workloads
  --debug                            show a traceback with every error

Example:
  mpiexec -n 4 penstock-dlio workload=unet3d_h100 ++workload.dataset.num_files_train=42 \\
    ++workload.workflow.generate_data=True ++workload.dataset.data_folder=/data/unet3d hydra.run.dir=out

{EXIT_CODES}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    words, debug = take_debug(sys.argv[1:] if arguments is None else arguments)
    if not words or {"-h", "--help"} & set(words):
        print(HELP, end="")
        return 0 if words else 2
    if "--version" in words:
        print(f"penstock-dlio {__version__}")
        return 0
    return at_the_edge(lambda: _as_rank(words), debug=debug)


def _as_rank(words: Sequence[str]) -> None:
    """Run as the rank that this process is, rank 0 of 1 where no launcher started it."""
    from penstock.cluster.supervision.rank_process import join_job

    environment = process_environment()
    with join_job(environment, timeout_s=LONGEST_WAIT_S) as comm:
        _open_session(words, comm, environment).run()


def _open_session(words: Sequence[str], comm: Comm, environment: Environment) -> _Session:
    """What the words ask for, understood and possible, before anything is done."""
    from functools import partial

    from penstock.cli.dlio_place import data_place
    from penstock.cli.training.reading import left_undone, loader_options
    from penstock.storage import open_storage
    from penstock.workload.loading import load
    from penstock.workload.overrides import parse_dlio_words

    asked = parse_dlio_words(words)
    if not asked.workload:
        raise UsageError(
            "No workload is named",
            fix="Write workload=NAME; `penstock workloads` lists them, `penstock-dlio --help` tells more.",
        )
    loaded = load(asked.workload, overrides=asked.overrides, config_dir=asked.config_dir)
    workload = loaded.workload
    check_stages(workload)
    place = data_place(workload, environment)
    folder = run_folder(asked, workload, environment, now=datetime.now().astimezone())
    reopen = partial(open_storage, place.uri, place.environment, options=place.options, rank=comm.rank)
    if workload.workflow.train:
        loader, replacing = chosen_loader(workload)
        about_training = (*left_undone(workload), *replacing, *replaced(workload))
    else:
        loader, about_training = loader_options("native", workload, None), ()
    return _Session(
        name=asked.workload,
        workload=workload,
        comm=comm,
        terminal=Terminal(as_json=False, speaks=comm.rank == 0),
        storage=reopen(),
        reopen=reopen,
        loader=loader,
        folder=comm.broadcast(folder, awaiting="rank 0 to name the folder of the run"),
        subfolder=asked.output_subdir,
        words=tuple(words),
        overrides=tuple(override.source for override in asked.overrides),
        remarks=(*map(str, loaded.remarks), *about_training),
    )


def check_stages(workload: Workload) -> None:
    """Refuse stages that cannot be run, naming the key to change."""
    stages = workload.workflow
    if stages.evaluation and not stages.train:
        raise UsageError(
            "Evaluation comes after epochs of training, and there are none",
            where="workflow.evaluation",
            fix="Write ++workload.workflow.train=True, or ++workload.workflow.evaluation=False.",
        )
    if not (stages.generate_data or stages.train or stages.checkpoint):
        raise UsageError(
            "All stages are switched off",
            where="workflow",
            fix="Write ++workload.workflow.generate_data=True or ++workload.workflow.train=True.",
        )


def run_folder(asked: DlioWords, workload: Workload, environment: Environment, *, now: datetime) -> Path:
    """Where DLIO would leave its files: as the workload, the environment or hydra say, in this order."""
    named = workload.output.folder or environment.get(OUTPUT_VARIABLE) or asked.run_dir
    if not named:
        return Path("hydra_log", workload.model.name, f"{now:%Y-%m-%d-%H-%M-%S}").absolute()
    if "${" in named:
        raise UsageError(
            f"{named!r} has an interpolation, and none is resolved here",
            where="hydra.run.dir",
            fix="Write the folder's name itself.",
        )
    return Path(named).absolute()


def chosen_loader(workload: Workload) -> tuple[LoaderOptions, tuple[str, ...]]:
    """Torch's own loader where the workload asks for it and torch is here, else ours, and that said."""
    from penstock.cli.training.reading import loader_options
    from penstock.errors import Unavailable
    from penstock.workload.choices import LoaderKind

    asked = workload.reader.data_loader
    if asked is LoaderKind.PYTORCH:
        try:
            return loader_options("pytorch", workload, None), ()
        except Unavailable:
            why = "is not used, because torch is not installed"
    else:
        why = "is not used"
    said = (
        f"reader.data_loader: {asked} {why}; penstock's own loader takes the same batches, read_threads and "
        "prefetch_size"
    )
    return loader_options("native", workload, None), (said,)


def replaced(workload: Workload) -> tuple[str, ...]:
    """What is done by other means than the workload names: said once, and recorded."""
    options = workload.storage.storage_options
    other_means = {
        "storage.storage_options.prefetch_window and prefetch_workers: reader.read_threads says how many "
        "reads a rank keeps in flight": bool(options.prefetch_window or options.prefetch_workers),
        "storage.storage_options.columns: those of dataset.parquet.columns marked `read` are read": bool(
            options.columns
        ),
    }
    return tuple(text for text, is_so in other_means.items() if is_so)


@dataclass(slots=True, kw_only=True)
class _Session:
    """One rank's part of everything that one command line asks for; `log` grows as stages pass."""

    name: str
    workload: Workload
    comm: Comm
    terminal: Terminal
    storage: Storage
    reopen: OpenStorage
    loader: LoaderOptions
    folder: Path
    subfolder: str | None
    words: tuple[str, ...]
    overrides: tuple[str, ...]
    remarks: tuple[str, ...]
    log: list[str] = field(default_factory=list)

    def run(self) -> None:
        """The stages that are switched on, in DLIO's order."""
        stages = self.workload.workflow
        for remark in self.remarks:
            self.terminal.note(remark)
        if stages.generate_data:
            self._generate()
        self._leave_configuration()
        if stages.train:
            self._train()
        elif stages.checkpoint:
            self._take_checkpoints()
        if not self.workload.dataset.keep_files:
            self._remove_data()

    def _generate(self) -> None:
        from penstock.dataset.content import Reduction
        from penstock.dataset.dataset_manifest import Recipe
        from penstock.dataset.generate import generate
        from penstock.workload.choices import DataFormat, StorageKind

        if self.workload.dataset.format is DataFormat.SYNTHETIC:
            self._tell("Synthetic samples need no files: nothing is generated")
            return
        self._tell("Starting data generation")
        recipe = Recipe(dataset=self.workload.dataset, seed=self.workload.train.seed, reduction=Reduction())
        with self.terminal.progress() as progress:
            made = generate(
                recipe, self.storage, comm=self.comm, threads=self._write_threads, progress=progress
            )
        if self.workload.storage.storage_type is StorageKind.S3:
            time.sleep(self.workload.storage.post_generation_settle_s)
        self._tell(f"Generation done: {made.written_files} files written, {made.kept_files} were there")

    def _train(self) -> None:
        from penstock.bench.epoch_order import Division
        from penstock.bench.training.training_request import TrainingRequest
        from penstock.bench.training.training_run import train
        from penstock.cli.dlio_checkpoint import checkpoint_place
        from penstock.cli.training.reading import asks_to_decode, choose_seed
        from penstock.cli.training.saving import checkpoint_wish

        place = checkpoint_place(self.workload, process_environment())
        request = TrainingRequest(
            workload=self.workload,
            results=self.folder.parent,
            run_folder=self.folder,
            seed=choose_seed(self.comm, self.workload, None),
            division=Division.DROP,
            loader=self.loader,
            reopen=self.reopen,
            decodes=asks_to_decode(self.workload),
            checkpoints=checkpoint_wish(
                self.workload,
                place.uri,
                comm=self.comm,
                environment=place.environment,
                options=place.options,
            ),
            command=("penstock-dlio", *self.words),
            overrides=self.overrides,
            remarks=self.remarks,
            hydra_subfolder=self._hydra().subfolder,
            log_before=tuple(self.log),
        )
        with self.terminal.progress() as progress:
            result = train(request, self.storage, comm=self.comm, progress=progress)
        for remark in (*result.stages.remarks, *result.train.notes):
            self.terminal.note(remark)
        self._show_log()

    def _take_checkpoints(self) -> None:
        """Checkpoints alone; wrong bytes are a failure of the run."""
        from penstock.cli.dlio_checkpoint import CheckpointStage

        stage = CheckpointStage(
            name=self.name,
            workload=self.workload,
            folder=self.folder,
            hydra_subfolder=self._hydra().subfolder,
            words=self.words,
            overrides=self.overrides,
            remarks=self.remarks,
            log_before=tuple(self.log),
        )
        result = stage.run(comm=self.comm, terminal=self.terminal, environment=process_environment())
        self._show_log()
        if not result.is_right:
            raise StorageError(
                "What was read back is not what was written",
                uri=result.target,
                fix=f"{result.results_dir}/checkpoints.json has the places.",
            )

    def _show_log(self) -> None:
        """The lines that the run added to the log."""
        if self.terminal.speaks:
            told = (self.folder / self.workload.output.log_file).read_text(encoding="utf-8").splitlines()
            print("\n".join(told[len(self.log) :]))

    def _leave_configuration(self) -> None:
        """What DLIO leaves also where nothing is trained, or training fails."""
        from penstock.results.dlio.folder import write_configuration, write_log

        if self.terminal.speaks:
            write_configuration(self.folder, self.workload, self._hydra())
            write_log(self.folder, self.workload, self.log)

    def _remove_data(self) -> None:
        from penstock.bench.training.training_files import open_files
        from penstock.dataset.data_files import remove

        files = open_files(self.workload.dataset, self.storage, seed=self.workload.train.seed, evaluates=True)
        self.comm.barrier(awaiting="all ranks to know the files to delete")
        num_removed = remove(files.lie, self.storage, comm=self.comm, threads=self._write_threads)
        self.terminal.note(f"dataset.keep_files is false: {num_removed} files were deleted")

    @property
    def _write_threads(self) -> int:
        return self.workload.reader.write_threads or 4

    def _hydra(self) -> HydraFacts:
        from penstock.results.dlio.folder import HYDRA_FOLDER, HydraFacts
        from penstock.results.provenance import redacted

        return HydraFacts(
            subfolder=HYDRA_FOLDER if self.subfolder is None else self.subfolder,
            workload_name=self.workload.full_name,
            overrides=redacted(self.overrides),
            working_folder=str(Path.cwd()),
            run_folder=str(self.folder),
        )

    def _tell(self, text: str) -> None:
        """A line of the log, shown at once."""
        from penstock.results.dlio.folder import log_line

        self.log.append(log_line(datetime.now(UTC), text))
        if self.terminal.speaks:
            print(self.log[-1], flush=True)
