"""The end of a run on rank 0: all figures in `checkpoints.json`, and every file that DLIO would leave.

Place in the flow: the last act of `run`. Invariant: DLIO's figures come from the spans as they lie in the
folder, so that whoever reads it later computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.results.counters import gather_counters
from penstock.results.dlio.folder import HydraFacts, write_dlio_files
from penstock.results.dlio.run import DlioRun
from penstock.results.durable import write_json
from penstock.results.layout import CHECKPOINTS_FILE
from penstock.results.provenance import redacted
from penstock.results.tables import gather, read_events

if TYPE_CHECKING:
    from penstock.bench.checkpoint.outcome import CheckpointResult
    from penstock.bench.checkpoint.request import CheckpointRequest
    from penstock.results.host import HostFacts
    from penstock.results.record import OpenRun


def finish(
    run: OpenRun, result: CheckpointResult, *, request: CheckpointRequest, hosts: Sequence[HostFacts]
) -> None:
    """Close the run, whose ranks have all written their last span."""
    gather(run.folder, run.record.ranks)
    gather_counters(run.folder)
    write_json(run.folder, CHECKPOINTS_FILE, result.document())
    write_dlio_files(
        run.folder,
        DlioRun(
            workload=request.model.workload,
            ranks=read_events(run.folder),
            hosts=hosts,
            started=datetime.fromisoformat(run.record.started_at),
            ended=datetime.now(UTC),
            train=None,
            evaluation=None,
        ),
        HydraFacts(
            workload_name=request.model.name,
            overrides=redacted(request.overrides),
            subfolder=request.hydra_subfolder,
            working_folder=str(Path.cwd()),
            run_folder=str(run.folder),
        ),
        log_before=request.log_before,
    )
    run.finish(deliveries=result.deliveries)
