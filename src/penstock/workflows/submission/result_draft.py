"""What all result directories of one command share: reserving one, and publishing a run's outcome in it.

The command line makes a `ResultWriter`; `training_result` and `checkpoint_result` use it. A run writes into
the draft below `.mlps/under-way`, which becomes the result directory only once everything in it is written,
so a failed run leaves nothing in the tree. Methods that take a `comm` are collective; rank 0 alone writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import __file__ as package_file
from penstock import __version__
from penstock.results.provenance import git_state
from penstock.submission.authoring.result_dir import reserve_address
from penstock.submission.authoring.run_metadata import RunFacts
from penstock.submission.authoring.write_result_dir import ProgramImage, probe_fs_separation, write_result_dir
from penstock.submission.code_image import UNKNOWN, Program, capture

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.results.host_facts import HostFacts
    from penstock.submission.authoring.ownership import OwnedTree
    from penstock.submission.authoring.result_dir import ResultDirAddress, Series
    from penstock.submission.tree_layout import SubmissionPhase
    from penstock.workload.spec import Workload

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLogs:
    """What a command prints about one run: the logs in its result directory."""

    stdout: str
    stderr: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultWriter:
    """Adds result directories to one series, for one command.

    `place` is where the data or checkpoints are; `changed` are the workload's values that differ from the
    shipped ones, by dotted key, places included; `command` is the command line.
    """

    series: Series
    image: ProgramImage
    place: str
    changed: Mapping[str, Any]
    command: Sequence[str]
    environment: Environment = field(default_factory=dict)
    clock: Clock = lambda: datetime.now(UTC)

    def reserve(self, phase: SubmissionPhase, comm: Comm) -> ResultDirAddress:
        """Reserve the next result directory; the same on all ranks. Collective."""
        address = reserve_address(self.series, phase, now=self.clock()) if comm.rank == 0 else None
        reserved = comm.broadcast(address, awaiting="rank 0 to reserve the next result directory")
        assert reserved is not None
        return reserved

    def probe_separation(self, uri: str, comm: Comm) -> dict[str, Any] | None:
        """Find out before a run whether data and results share a file system; None on all ranks but 0."""
        if comm.rank != 0:
            return None
        return probe_fs_separation(uri, self.series.claim.root, host=comm.host, now=self.clock())

    def describe_run(
        self,
        address: ResultDirAddress,
        workload: Workload,
        *,
        accelerator: str,
        num_processes: int,
        hosts: Sequence[HostFacts],
        **more: Any,
    ) -> RunFacts:
        """Collect the facts of a run that has just succeeded; `more` are the optional fields."""
        return RunFacts(
            address=address,
            workload=workload,
            accelerator=accelerator,
            changed=self.changed,
            place=self.place,
            num_processes=num_processes,
            hosts=hosts,
            command=self.command,
            ended=self.clock(),
            exit_status=0,
            **more,
        )

    def publish(self, facts: RunFacts, logs: RunLogs, separation: dict[str, Any] | None = None) -> Path:
        """Complete the draft, and give it the name of its result directory. Rank 0 only."""
        return write_result_dir(
            facts,
            image=self.image,
            stdout=logs.stdout,
            stderr=logs.stderr,
            separation=separation,
            now=self.clock(),
        )


def share_folder(folder: Path | None, comm: Comm) -> Path:
    """Tell all ranks the result directory that rank 0 has published. Collective."""
    published = comm.broadcast(folder, awaiting="rank 0 to publish the result directory")
    assert published is not None
    return published


def installed_program() -> Program:
    """The installed package that is running."""
    folder = Path(package_file).parent
    state = git_state(folder)
    return Program(folder=folder, version=__version__, commit=state.commit if state else UNKNOWN)


def capture_image(
    claim: OwnedTree, *, comm: Comm, clock: Clock, program: Program | None = None
) -> ProgramImage:
    """Put the program's image into the tree's pool; the same on all ranks. Collective."""
    image = None
    if comm.rank == 0:
        captured = program or installed_program()
        image = ProgramImage(program=captured, digest=capture(captured, claim.root, now=clock()))
    pooled = comm.broadcast(image, awaiting="rank 0 to capture the image of the program")
    assert pooled is not None
    return pooled
