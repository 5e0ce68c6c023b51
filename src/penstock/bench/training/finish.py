"""The end of a run on rank 0: all ranks' events in one table, figures, verdict, and every file of the folder.

Place in the flow: the last act of `run`. Invariant: figures come from the events as they lie in the folder,
so that whoever reads it later computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.training.outcome import STAGES_FILE, Stages, TrainingResult
from penstock.errors import StorageError
from penstock.results.counters import gather_counters
from penstock.results.dlio.folder import HydraFacts, write_dlio_files
from penstock.results.dlio.run import DlioRun
from penstock.results.durable import write_json
from penstock.results.events import Phase
from penstock.results.figures import phase_figures
from penstock.results.provenance import redacted
from penstock.results.tables import gather, read_events

if TYPE_CHECKING:
    from penstock.bench.training.request import TrainingRequest
    from penstock.results.host import HostFacts
    from penstock.results.record import OpenRun


def finish(
    run: OpenRun, stages: Stages, *, request: TrainingRequest, hosts: Sequence[HostFacts]
) -> TrainingResult:
    """Close the run, whose ranks have all written their last event."""
    workload = request.workload
    num_ranks = run.record.ranks
    gather(run.folder, num_ranks)
    gather_counters(run.folder)
    events = read_events(run.folder)
    # Without computation every ceiling is near 0, and says nothing about this client.
    is_computing = not workload.train.computation_time.is_zero
    share = stages.ceiling.compute_share if stages.ceiling and is_computing else None
    train = phase_figures(events, workload, ceiling=share)
    if train is None:
        raise StorageError("The run left no completed epoch", uri=str(run.folder))
    evaluation = phase_figures(events, workload, phase=Phase.EVAL)
    write_json(run.folder, STAGES_FILE, stages.document())
    write_dlio_files(
        run.folder,
        DlioRun(
            workload=workload,
            ranks=events,
            hosts=hosts,
            started=datetime.fromisoformat(run.record.started_at),
            ended=datetime.now(UTC),
            train=train,
            evaluation=evaluation,
        ),
        HydraFacts(
            workload_name=workload.full_name,
            overrides=redacted(request.overrides),
            subfolder=request.hydra_subfolder,
            working_folder=str(Path.cwd()),
            run_folder=str(run.folder),
        ),
        log_before=request.log_before,
    )
    run.finish(train=train, evaluation=evaluation, deliveries=stages.deliveries)
    return TrainingResult(
        workload=workload.full_name,
        ranks=num_ranks,
        results_dir=str(run.folder),
        train=train,
        evaluation=evaluation,
        stages=stages,
    )
