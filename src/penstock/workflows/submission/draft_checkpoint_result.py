"""Result directories of checkpointing: one run that writes and reads checkpoints, or one run of each.

Collective. A run that fails, or reads back other bytes than it wrote, leaves nothing in the tree.
"""

from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest, run_checkpoints
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.cluster.comm import Comm
from penstock.errors import DataDamaged
from penstock.submission.edition import Edition
from penstock.submission.tree_layout import SubmissionPhase
from penstock.workflows.submission.result_draft import ResultWriter, RunObserver


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
    """Run once, and publish the run as a result directory; `DataDamaged` if wrong bytes were read back."""
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
