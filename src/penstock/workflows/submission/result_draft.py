"""Reserve a result directory and publish a run's outcome in it; for checkpoints, that is the whole result.

The command line makes a `ResultWriter`; `draft_training_result` and `add_checkpoints` use it. A run writes
into the draft below `.mlps/under-way`, which becomes the result directory only once everything in it is
written, so a failed run leaves nothing in the tree. Methods that take a `comm` are collective; rank 0 alone
writes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

from penstock import __file__ as package_file
from penstock import __version__
from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest, run_checkpoints
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest
from penstock.cluster.comm import Comm
from penstock.errors import DataDamaged
from penstock.progress import Progress
from penstock.results import provenance, run_record
from penstock.submission.authoring import result_dir, write_result_dir
from penstock.submission.authoring.tree_owner import OwnedTree
from penstock.submission.authoring.write_result_dir import RunFacts
from penstock.submission.code_image import UNKNOWN, Program, capture
from penstock.submission.edition import Edition
from penstock.submission.tree_layout import SubmissionPhase
from penstock.workload.spec import Workload

Clock = Callable[[], datetime]
AnyRequest = TypeVar("AnyRequest", TrainingRequest, CheckpointRequest)
AnyResult = TypeVar("AnyResult", TrainingResult, CheckpointResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObserver(Generic[AnyResult]):
    """Follows runs: `note` gets a sentence before or during each, `format_logs` makes a result's logs."""

    progress: Progress
    note: Callable[[str], None]
    format_logs: Callable[[AnyResult], tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultWriter:
    """Adds result directories to one series, for one command.

    `data_path` is where the data or checkpoints are; `changed` are the workload's values that differ from the
    shipped ones, by dotted key, locations included; `command` is the command line; `rehearsed_at` is the
    scale of a rehearsal, None in earnest.
    """

    series: result_dir.RunSeries
    program: Program
    data_path: str
    changed: Mapping[str, Any]
    command: Sequence[str]
    rehearsed_at: Fraction | None = None
    clock: Clock = lambda: datetime.now(UTC)

    @contextmanager
    def attempt(self, phase: SubmissionPhase, comm: Comm) -> Iterator[result_dir.ResultDirAddress]:
        """Reserve the next result directory, the same on all ranks, and record a failure. Collective."""
        address = result_dir.reserve_address(self.series, phase, now=self.clock()) if comm.rank == 0 else None
        with result_dir.RecordedAttempt(address) if address else nullcontext():
            reserved = comm.broadcast(address, awaiting="rank 0 to reserve the next result directory")
            assert reserved is not None
            yield reserved

    def probe_separation(self, uri: str, comm: Comm) -> dict[str, Any] | None:
        """Find out before a run whether data and results share a file system; None on all ranks but 0."""
        if comm.rank != 0:
            return None
        return write_result_dir.probe_fs_separation(
            uri, self.series.tree.root, host=comm.host, now=self.clock()
        )

    def redirect(self, request: AnyRequest, address: result_dir.ResultDirAddress) -> AnyRequest:
        """The same run, writing into the draft instead of a folder of its own."""
        return replace(request, run_folder=address.draft, results=self.series.tree.root, hydra_subfolder="")

    def publish(
        self,
        address: result_dir.ResultDirAddress,
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
        facts = RunFacts(
            address=address,
            workload=workload,
            changed=self.changed,
            data_path=self.data_path,
            num_processes=num_processes,
            hosts=hosts,
            command=self.command,
            ended_at=self.clock(),
            exit_status=0,
            rehearsed_at=self.rehearsed_at,
            **{"accelerator": workload.accelerator, **optional},
        )
        return write_result_dir.write_result_dir(
            facts, program=self.program, now=self.clock(), logs=logs, separation=separation
        )

    def publish_run(
        self,
        address: result_dir.ResultDirAddress,
        workload: Workload,
        result: AnyResult,
        format_logs: Callable[[AnyResult], tuple[str, str]],
        *,
        comm: Comm,
        separation: dict[str, Any] | None,
        **optional: Any,
    ) -> AnyResult:
        """Publish a finished run; returns its result with the final path of its directory. Collective."""
        folder = None
        if comm.rank == 0:
            folder = self.publish(
                address,
                workload,
                num_processes=comm.size,
                hosts=run_record.read_record(address.draft).hosts,
                logs=format_logs(replace(result, results_dir=str(address.folder))),
                separation=separation,
                **optional,
            )
        return replace(result, results_dir=str(share_folder(folder, comm)))

    def complete(self, edition: Edition) -> None:
        """Write the manifest, which an interruption may have left behind, and the report. Rank 0 only."""
        by = f"penstock {self.program.version}"
        write_result_dir.write_manifest(self.series, by=by, now=self.clock())
        write_result_dir.write_report(self.series, edition)


def share_folder(folder: Path | None, comm: Comm) -> Path:
    """Send all ranks the result directory that rank 0 has published. Collective."""
    published = comm.broadcast(folder, awaiting="rank 0 to publish the result directory")
    assert published is not None
    return published


def capture_image(tree: OwnedTree, *, comm: Comm, clock: Clock) -> Program:
    """Put the image of the running package into the tree's pool; the same on all ranks. Collective."""
    captured = None
    if comm.rank == 0:
        folder = Path(package_file).parent
        state = provenance.git_state(folder)
        program = Program(folder=folder, version=__version__, commit=state.commit if state else UNKNOWN)
        captured = replace(program, digest=capture(program, tree.root, now=clock()))
    pooled = comm.broadcast(captured, awaiting="rank 0 to capture the image of the program")
    assert pooled is not None
    return pooled


def add_checkpoints(
    writer: ResultWriter,
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    accelerator: str,
    edition: Edition,
    comm: Comm,
    observer: RunObserver[CheckpointResult],
) -> CheckpointResult:
    """Run once, and publish the run as a result directory; `DataDamaged` if wrong bytes were read back.

    Collective. A run that fails leaves nothing in the tree.
    """
    with writer.attempt(SubmissionPhase.RUN, comm) as address:
        separation = writer.probe_separation(reopen().uri, comm)
        drafted = writer.redirect(request, address)
        result = run_checkpoints(drafted, reopen, comm=comm, progress=observer.progress, tell=observer.note)
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
            observer.format_logs,
            comm=comm,
            separation=separation,
            accelerator=accelerator,
        )
    if comm.rank == 0:
        writer.complete(edition)
    return published
