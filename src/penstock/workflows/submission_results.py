"""Runs of benchmarks that become result directories of a submission tree: training results, and checkpoints.

    read the tree -> plan what is missing -> add the next result directory -> read the tree again

A training result is planned from the tree before each run, so an interrupted sequence continues where it
stopped, as long as the rules allow it. Each directory begins as a draft below `.mlps/under-way`, and gets its
name once everything in it is written. A run that fails leaves its draft there for inspection, and nothing in
the tree. Whatever takes a `comm` is collective; only rank 0 writes.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock import __file__ as package_file
from penstock import __version__
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest, run_checkpoints
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import Comm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import expected_bytes, generate
from penstock.errors import DataDamaged, ObjectNotFound, StorageError
from penstock.progress import Progress
from penstock.results import provenance, run_record
from penstock.results.dlio_files import log_line, write_log
from penstock.results.published_files import write_json
from penstock.storage import Storage
from penstock.storage.protocol import read_object, write_object
from penstock.submission.authoring import owned_tree, run_sequence, write_result_dir
from penstock.submission.authoring.run_sequence import RunSequence
from penstock.submission.code_image import UNKNOWN, Program, capture
from penstock.submission.edition import Edition
from penstock.submission.tree_layout import DATAGEN_MANIFEST, SubmissionPhase
from penstock.units import format_bytes, format_count, format_seconds
from penstock.workload.spec import Workload

MANIFEST_KEY: Final = ".mlps-datagen-manifest.json"
TRIES_PER_RUN: Final = 2
"""The most tries per run, on average: durations may vary so much that no run may follow another."""

Clock = Callable[[], datetime]
Made = TypeVar("Made")
AnyResult = TypeVar("AnyResult", TrainingResult, CheckpointResult)


def from_rank_0(comm: Comm, make: Callable[[], Made], *, awaiting: str) -> Made:
    """Return on all ranks the value that rank 0 makes. Collective."""
    return comm.broadcast(make() if comm.rank == 0 else None, awaiting=f"rank 0 to {awaiting}")


def capture_image(tree: owned_tree.OwnedTree, *, comm: Comm) -> Program:
    """Put a code image of the running package into the tree's pool; return it on all ranks. Collective."""

    def pooled() -> Program:
        folder = Path(package_file).parent
        state = provenance.git_state(folder)
        program = Program(folder=folder, version=__version__, commit=state.commit if state else UNKNOWN)
        return replace(program, digest=capture(program, tree.root, now=datetime.now(UTC)))

    return from_rank_0(comm, pooled, awaiting="capture the image of the program")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultWriter:
    """Adds result directories to one series, for one command.

    `data_path` is where the data or checkpoints are. `changed` has the workload's values that differ from the
    shipped ones, by dotted key, locations included. `command` is the command line. `rehearsed_at` is the
    scale of a rehearsal, or None for a real result.
    """

    series: owned_tree.RunSeries
    program: Program
    data_path: str
    changed: Mapping[str, Any]
    command: Sequence[str]
    rehearsed_at: Fraction | None = None
    clock: Clock = lambda: datetime.now(UTC)

    @contextmanager
    def attempt(self, phase: SubmissionPhase, comm: Comm) -> Iterator[owned_tree.ResultDirAddress]:
        """Reserve the next result directory, the same one on all ranks, and record a failure. Collective."""
        address = from_rank_0(
            comm,
            lambda: owned_tree.reserve_address(self.series, phase, now=self.clock()),
            awaiting="reserve the next result directory",
        )
        with owned_tree.RecordedAttempt(address) if comm.rank == 0 else nullcontext():
            yield address

    def probe_separation(self, uri: str, comm: Comm) -> dict[str, Any] | None:
        """Find out before a run whether data and results share a file system; None except on rank 0."""
        if comm.rank != 0:
            return None
        root = self.series.tree.root
        return write_result_dir.probe_fs_separation(uri, root, host=comm.host, now=self.clock())

    def publish(
        self,
        address: owned_tree.ResultDirAddress,
        workload: Workload,
        *,
        num_processes: int,
        hosts: Sequence[provenance.HostFacts],
        logs: tuple[str, str] | None = None,
        separation: dict[str, Any] | None = None,
        **optional: Any,
    ) -> Path:
        """Complete the draft of a run that has just succeeded, and give it its name. Rank 0 only.

        `optional` are further fields of `RunFacts`.
        """
        facts = write_result_dir.RunFacts(
            address=address,
            workload=workload,
            changed=self.changed,
            data_path=self.data_path,
            num_processes=num_processes,
            hosts=hosts,
            command=self.command,
            ended_at=self.clock(),
            rehearsed_at=self.rehearsed_at,
            **{"accelerator": workload.accelerator, **optional},
        )
        return write_result_dir.write_result_dir(
            facts, program=self.program, now=self.clock(), logs=logs, separation=separation
        )

    def publish_run(
        self,
        address: owned_tree.ResultDirAddress,
        workload: Workload,
        result: AnyResult,
        format_logs: Callable[[AnyResult], tuple[str, str]],
        *,
        comm: Comm,
        **optional: Any,
    ) -> AnyResult:
        """Publish a finished run; return its result with the final path of its directory. Collective."""

        def publish() -> Path:
            hosts = run_record.read_record(address.draft).hosts
            logs = format_logs(replace(result, results_dir=str(address.folder)))
            return self.publish(
                address, workload, num_processes=comm.size, hosts=hosts, logs=logs, **optional
            )

        folder = from_rank_0(comm, publish, awaiting="publish the result directory")
        return replace(result, results_dir=str(folder))

    def write_manifest(self) -> None:
        """Write the manifest of the submitter's result directories. Rank 0 only."""
        by = f"penstock {self.program.version}"
        write_result_dir.write_manifest(self.series, by=by, now=self.clock())

    def complete(self, edition: Edition) -> None:
        """Write the report, and the manifest, which an interruption may have left outdated. Rank 0 only."""
        self.write_manifest()
        write_result_dir.write_report(self.series, edition)


def add_checkpoints(
    writer: ResultWriter,
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    accelerator: str,
    edition: Edition,
    comm: Comm,
    progress: Progress,
    note: Callable[[str], None],
    format_logs: Callable[[CheckpointResult], tuple[str, str]],
) -> CheckpointResult:
    """Write and read checkpoints, and publish the run as a result directory. Collective.

    Raises `DataDamaged` if wrong bytes were read back. A run that fails leaves nothing in the tree.
    """
    with writer.attempt(SubmissionPhase.RUN, comm) as address:
        separation = writer.probe_separation(reopen().uri, comm)
        drafted = replace(
            request, run_folder=address.draft, results=writer.series.tree.root, hydra_subfolder=""
        )
        result = run_checkpoints(drafted, reopen, comm=comm, progress=progress, tell=note)
        if not result.is_right:
            raise DataDamaged(
                "The checkpoints read back differ from those written, so no result directory is made",
                where=result.target,
                fix=f"{address.draft}/checkpoints.json lists where.",
            )
        published = writer.publish_run(
            address,
            request.model.workload,
            result,
            format_logs,
            comm=comm,
            separation=separation,
            accelerator=accelerator,
        )
    if comm.rank == 0:
        writer.complete(edition)
    return published


def add_run(
    writer: ResultWriter,
    request: TrainingRequest,
    storage: Storage,
    *,
    comm: Comm,
    progress: Progress,
    format_logs: Callable[[TrainingResult], tuple[str, str]],
    require: Callable[[TrainingResult, Path], None] | None = None,
) -> TrainingResult:
    """Train once, and publish the run as a result directory unless `require` raises an error."""
    with writer.attempt(SubmissionPhase.RUN, comm) as address:
        separation = writer.probe_separation(storage.uri, comm)
        drafted = replace(
            request, run_folder=address.draft, results=writer.series.tree.root, hydra_subfolder=""
        )
        result = train(drafted, storage, comm=comm, progress=progress)
        if require is not None:
            require(result, address.draft)
        if comm.rank == 0:
            with suppress(ObjectNotFound):  # the data may have been generated by other means
                manifest = json.loads(bytes(read_object(storage, MANIFEST_KEY)))
                write_json(address.draft, DATAGEN_MANIFEST, manifest)
        return writer.publish_run(
            address, request.workload, result, format_logs, comm=comm, separation=separation
        )


def dataset_recipe(workload: Workload) -> DatasetRecipe:
    """Return the recipe for the bytes of a submitted data set."""
    return DatasetRecipe(dataset=workload.dataset, seed=workload.train.seed, reduction=IRREDUCIBLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """A training result to make: its size, its data set, and one run, repeated as the edition requires.

    With `stops_below_minimum`, a run whose AU is below the workload's minimum ends the sequence. `note`
    receives a sentence before or during each run; `format_logs` makes a run's logs. Methods are collective.
    """

    writer: ResultWriter
    request: TrainingRequest
    storage: Storage
    comm: Comm
    edition: Edition
    num_accelerators: int
    hosts: Sequence[provenance.HostFacts]
    progress: Progress
    note: Callable[[str], None]
    format_logs: Callable[[TrainingResult], tuple[str, str]]
    generator_threads: int = 4
    stops_below_minimum: bool = True

    def make_all(self) -> RunSequence:
        """Add result directories until the result is complete; return the final sequence."""
        num_tries, num_runs = 0, self.edition.num_runs
        while (sequence := self._plan()).phases:
            num_tries += sequence.phases[0] is SubmissionPhase.RUN
            if num_tries > TRIES_PER_RUN * num_runs:
                raise StorageError(
                    f"After {num_tries - 1} runs no {num_runs} follow one another: their durations differ "
                    "too much",
                    uri=str(self.writer.series.folder),
                    fix="See what else uses this storage: `penstock submission status` lists the runs.",
                )
            self._add(sequence.phases[0], sequence)
        if self.comm.rank == 0:
            self.writer.complete(self.edition)
        return sequence

    def make_part(self, phase: SubmissionPhase) -> RunSequence:
        """Add a result directory of this phase if one is missing; before a run, also a missing `datasize`."""
        num_processes = None
        if phase is SubmissionPhase.DATAGEN:  # any number of ranks may generate, whatever the runs use
            read = run_sequence.read_series_state
            state = from_rank_0(self.comm, lambda: read(self.writer.series), awaiting="read the tree")
            num_processes = next((each.num_processes for each in (*state.datasizes, *state.runs)), None)
        sequence = self._plan(num_processes)
        if phase is SubmissionPhase.RUN and SubmissionPhase.DATASIZE in sequence.phases:
            self._add(SubmissionPhase.DATASIZE, sequence)
        if phase in sequence.phases:
            self._add(phase, sequence)
            sequence = self._plan(num_processes)
        else:
            self.note(f"{phase.value}: exists already")
        if not sequence.phases and self.comm.rank == 0:
            self.writer.complete(self.edition)
        return sequence

    def _plan(self, num_processes: int | None = None) -> RunSequence:
        """Plan what remains to be done, the same on all ranks, and set aside what no longer counts."""
        writer, workload = self.writer, self.request.workload

        def plan() -> RunSequence:
            sequence = run_sequence.plan_run_sequence(
                run_sequence.read_series_state(writer.series),
                {
                    "accelerator": workload.accelerator,
                    "num_processes": num_processes or self.num_accelerators,
                    "data_path": writer.data_path,
                    "num_files": workload.dataset.num_files_train,
                },
                self.edition.num_runs,
                self.edition.timed.max_pause_runs,
                now=writer.clock(),
            )
            for run, reason in sequence.excluded:
                target = owned_tree.set_aside(writer.series.tree, run.folder)
                self.note(f"{run.folder.name} was set aside: {reason}. It is in {target}")
            if sequence.excluded:
                writer.write_manifest()
            return sequence

        return from_rank_0(self.comm, plan, awaiting="plan what is left to do")

    def _add(self, phase: SubmissionPhase, sequence: RunSequence) -> None:
        dataset = self.request.workload.dataset
        if phase is SubmissionPhase.RUN:
            self._add_next_run(len(sequence.counted))
            return
        self.note(
            f"{phase.value}: {format_count(dataset.num_files_train, 'file')}, "
            f"{format_bytes(expected_bytes(dataset))}"
        )
        if phase is SubmissionPhase.DATASIZE:
            self.add_datasize()
        else:
            self.add_datagen()

    def _add_next_run(self, num_done: int) -> None:
        """Add the next run of the sequence and note its AU; a run that cannot count is not published."""
        num_runs, workload = self.edition.num_runs, self.request.workload
        name, is_warm_up = f"run {num_done + 1} of {num_runs}", num_done < self.edition.num_warm_ups
        self.note(f"{name}, the warm-up" if is_warm_up else name)
        began_at = self.writer.clock()

        def describe(result: TrainingResult) -> str:
            au, sign = result.train.au_compat_percent.mean, ">=" if result.train.meets_threshold else "<"
            return f"AU {au:.2f} % {sign} {workload.metric.au * 100:g} %, {workload.name}'s minimum"

        def require_utilization(result: TrainingResult, draft: Path) -> None:
            # The warm-up counts in no mean, and may be slow.
            if self.stops_below_minimum and not is_warm_up and not result.train.meets_threshold:
                raise StorageError(
                    f"{name} does not count, and no other was started: {describe(result)}",
                    uri=str(draft),
                    fix=(
                        f"See what limits it with `penstock results show {shlex.quote(str(draft))}`. "
                        "Fewer accelerators need less."
                    ),
                )

        result = add_run(
            self.writer,
            self.request,
            self.storage,
            comm=self.comm,
            progress=self.progress,
            format_logs=self.format_logs,
            require=require_utilization,
        )
        elapsed_s, num_left = (self.writer.clock() - began_at).total_seconds(), num_runs - num_done - 1
        left = f", about {format_seconds(num_left * elapsed_s)} left" if num_left else ""
        self.note(f"{name}: {describe(result)}, {format_seconds(elapsed_s)}{left}")

    def add_datasize(self) -> Path:
        """Record how large the data set has to be."""
        writer = self.writer
        with writer.attempt(SubmissionPhase.DATASIZE, self.comm) as address:
            return from_rank_0(
                self.comm,
                lambda: writer.publish(
                    address,
                    self.request.workload,
                    num_processes=self.num_accelerators,
                    hosts=self.hosts,
                    data_size=self._dataset_size(),
                ),
                awaiting="publish the result directory",
            )

    def add_datagen(self) -> Path:
        """Generate the data set, or find it complete; publish the result directory with the manifest."""
        writer = self.writer
        with writer.attempt(SubmissionPhase.DATAGEN, self.comm) as address:
            stages = replace(self.request.workload.workflow, generate_data=True, train=False)
            workload = replace(self.request.workload, workflow=stages)
            started_at = writer.clock()
            generated = generate(
                dataset_recipe(workload),
                self.storage,
                comm=self.comm,
                threads=self.generator_threads,
                progress=self.progress,
            )

            def publish() -> Path:
                summary = (
                    f"{format_count(generated.num_files, 'file')}: {generated.written_files:,} written "
                    f"({format_bytes(generated.written_bytes)} in {format_seconds(generated.elapsed_s)}), "
                    f"{generated.kept_files:,} existed"
                )
                lines = [log_line(started_at, "Starting data generation"), log_line(writer.clock(), summary)]
                write_log(address.draft, workload, lines)
                manifest = {
                    "schema_version": 1,
                    "model": address.series.model,
                    "num_files_train": workload.dataset.num_files_train,
                    "num_subfolders_train": workload.dataset.num_subfolders_train,
                    "num_samples_per_file": workload.dataset.num_samples_per_file,
                    "record_length_bytes": float(workload.dataset.record_length_bytes),
                    "created_at": f"{writer.clock():%Y-%m-%dT%H:%M:%SZ}",
                    "mlpstorage_version": f"penstock {writer.program.version}",
                    "source_datagen_result_dir": str(address.folder),
                }
                write_object(self.storage, MANIFEST_KEY, [json.dumps(manifest, indent=2).encode()])
                write_json(address.draft, DATAGEN_MANIFEST, manifest)
                return writer.publish(
                    address,
                    workload,
                    num_processes=self.comm.size,
                    hosts=self.hosts,
                    logs=("\n".join(lines) + "\n", ""),
                    data_size=self._dataset_size(),
                )

            return from_rank_0(self.comm, publish, awaiting="publish the result directory")

    def _dataset_size(self) -> dict[str, int]:
        dataset = self.request.workload.dataset
        return {
            "num_files_train": dataset.num_files_train,
            "num_subfolders_train": dataset.num_subfolders_train,
            "total_disk_bytes": expected_bytes(dataset),
        }
