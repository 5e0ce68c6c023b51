"""Result directories of checkpointing: one run that writes and reads checkpoints, or one run of each.

Collective. A run that fails, or reads back other bytes than it wrote, leaves nothing in the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.bench.checkpoint.checkpoint_run import run_checkpoints
from penstock.errors import DataDamaged
from penstock.results.run_record import read_record
from penstock.submission.authoring.write_result_dir import write_report
from penstock.submission.tree_layout import SubmissionPhase
from penstock.workflows.submission.result_draft import share_folder

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest, OpenStorage
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.submission.edition import Edition
    from penstock.workflows.submission.result_draft import ResultWriter, RunLogs


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointObserver:
    """Follows a run: `note` gets remarks on the way, `format_logs` makes the logs from its result."""

    progress: Progress
    note: Callable[[str], None]
    format_logs: Callable[[CheckpointResult], RunLogs]


def add_checkpoints(
    writer: ResultWriter,
    request: CheckpointRequest,
    reopen: OpenStorage,
    *,
    accelerator: str,
    edition: Edition,
    comm: Comm,
    observer: CheckpointObserver,
) -> CheckpointResult:
    """Run once, and publish the run as a result directory; `DataDamaged` if wrong bytes were read back."""
    address = writer.reserve(SubmissionPhase.RUN, comm)
    separation = writer.probe_separation(reopen().uri, comm)
    drafted = replace(request, run_folder=address.draft, results=writer.series.claim.root, hydra_subfolder="")
    result = run_checkpoints(drafted, reopen, comm=comm, progress=observer.progress, tell=observer.note)
    if not result.is_right:
        raise DataDamaged(
            "The checkpoints read back differ from those written, so no result directory is made",
            where=result.target,
            fix=f"{address.draft}/checkpoints.json lists the places.",
        )
    folder = None
    if comm.rank == 0:
        facts = writer.describe_run(
            address,
            request.model.workload,
            accelerator=accelerator,
            num_processes=comm.size,
            hosts=read_record(address.draft).hosts,
        )
        logs = observer.format_logs(replace(result, results_dir=str(address.folder)))
        folder = writer.publish(facts, logs, separation)
        write_report(writer.series, edition)
    return replace(result, results_dir=str(share_folder(folder, comm)))
