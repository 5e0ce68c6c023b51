"""Leaves of checkpointing: one invocation that writes and reads, or one of each.

Place in the flow: session -> the benchmark itself, with the draft as its folder -> leaf. Collective.
Invariant: a run that fails, or reads other bytes than it wrote, leaves nothing in the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.bench.checkpoint.checkpoint_run import run_checkpoints
from penstock.errors import DataDamaged
from penstock.results.record import read_record
from penstock.submission.authoring.run_metadata import RunFacts
from penstock.submission.authoring.write_result_dir import probe_fs_separation, write_report, write_result_dir
from penstock.submission.tree_layout import SubmissionPhase

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest, OpenStorage
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.submission.edition import Edition
    from penstock.workflows.submission.session import Said, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOnlooker:
    """Who is told: `note` on the way, `tell` makes the leaf's logs of the result."""

    progress: Progress
    note: Callable[[str], None]
    tell: Callable[[CheckpointResult], Said]


def add_checkpoints(
    session: Session,
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    accelerator: str,
    edition: Edition,
    comm: Comm,
    onlooker: CheckpointOnlooker,
) -> CheckpointResult:
    """One invocation, whose folder is its leaf when this returns; `DataDamaged` where bytes were wrong."""
    address = session.reserve(SubmissionPhase.RUN, comm)
    separation = None
    if comm.rank == 0:
        separation = probe_fs_separation(
            reopen().uri, session.series.claim.root, host=comm.host, now=session.clock()
        )
    tree = session.series.claim.root
    of_leaf = replace(request, run_folder=address.draft, results=tree, hydra_subfolder="")
    result = run_checkpoints(of_leaf, reopen, comm=comm, progress=onlooker.progress, tell=onlooker.note)
    if not result.is_right:
        raise DataDamaged(
            "What was read back is not what was written: no leaf is made of it",
            where=result.target,
            fix=f"{address.draft}/checkpoints.json has the places.",
        )
    folder = None
    if comm.rank == 0:
        said = onlooker.tell(replace(result, results_dir=str(address.folder)))
        facts = RunFacts(
            address=address,
            workload=request.model.workload,
            accelerator=accelerator,
            changed=session.changed,
            place=session.place,
            num_processes=comm.size,
            hosts=read_record(address.draft).hosts,
            command=session.command,
            ended=session.clock(),
            exit_status=0,
        )
        folder = write_result_dir(
            facts,
            image=session.image,
            stdout=said.stdout,
            stderr=said.stderr,
            separation=separation,
            now=session.clock(),
        )
        write_report(session.series, edition)
    found = comm.broadcast(folder, awaiting="rank 0 to publish the leaf")
    return replace(result, results_dir=str(found))
