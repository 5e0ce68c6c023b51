"""Everything before the first step: the files, whether they are there, and all ranks' plan.

Place in the flow: called by `run` alone, outside the score. Collective. Invariant: all ranks come out with
the same plan, or all with the same error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bench.training.files import TrainingFiles, open_files
from penstock.bench.training.plan import (
    Deal,
    EpochPlan,
    RankEpoch,
    TrainingPlan,
    eval_epochs,
    evaluation_deal,
    left_out_by_division,
    require_steps,
    share_of,
    step_counts,
    training_deal,
)
from penstock.bench.training.validate import Validation, validate
from penstock.cluster.collectives import all_gather_results
from penstock.dataset.foreign import list_foreign
from penstock.dataset.formats import open_format
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bench.order import Division
    from penstock.bench.training.files import OpenFormat
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the loop needs, and how long its preparation took."""

    files: TrainingFiles
    plan: TrainingPlan
    validation: Validation
    opening_s: float
    planning_s: float


def prepare(
    workload: Workload,
    storage: Storage,
    *,
    seed: int,
    division: Division,
    comm: Comm,
    progress: Progress,
    reader: OpenFormat | None = None,
) -> Prepared:
    """Open, validate and plan."""
    began_s = time.monotonic()
    after = eval_epochs(workload, workload.train.epochs)
    files = all_gather_results(
        comm,
        lambda: open_files(
            workload.dataset,
            storage,
            seed=workload.train.seed,
            evaluates=bool(after),
            reader=reader or open_format,
        ),
        awaiting="all ranks to open the data set",
    )[comm.rank]
    if files.are_to_be_listed:
        found = list_foreign(workload.dataset, storage, evaluates=bool(after), comm=comm, progress=progress)
        files = files.listed(found)
    opened_s = time.monotonic()
    validation = validate(files, storage, comm=comm, progress=progress)
    validated_s = time.monotonic()
    plan = plan_training(
        workload, block_samples=files.block_samples(), seed=seed, division=division, comm=comm
    )
    return Prepared(
        files=files,
        plan=plan,
        validation=validation,
        opening_s=opened_s - began_s,
        planning_s=time.monotonic() - validated_s,
    )


def plan_training(
    workload: Workload, *, block_samples: int, seed: int, division: Division, comm: Comm
) -> TrainingPlan:
    """The plan of all ranks; each counts and digests its own share."""
    deal = training_deal(
        workload, block_samples=block_samples, num_ranks=comm.size, division=division, seed=seed
    )
    require_steps(deal, what="training")
    orders = [RankEpoch(deal, rank=comm.rank, epoch=epoch + 1) for epoch in range(workload.train.epochs)]
    full_steps = [_steps_of_all(order, comm, what="training") for order in orders]
    counts = step_counts(full_steps, workload.train.total_training_steps)
    epochs = tuple(
        _plan_epoch(order, comm, epoch=epoch, num_steps=num_steps, full_steps=full)
        for epoch, (order, full, num_steps) in enumerate(
            zip(orders[: len(counts)], full_steps, counts, strict=False), start=1
        )
    )
    after = eval_epochs(workload, len(epochs))
    evaluation = _evaluation_deal(workload, block_samples, seed, comm) if after else None
    return TrainingPlan(
        deal=deal,
        epochs=epochs,
        evaluation=evaluation,
        eval_steps=_eval_steps(evaluation, comm),
        eval_epochs=after,
    )


def _plan_epoch(order: RankEpoch, comm: Comm, *, epoch: int, num_steps: int, full_steps: int) -> EpochPlan:
    mine = share_of(order, num_steps=num_steps, full_steps=full_steps)
    shares = comm.gather(mine, awaiting="all ranks to plan an epoch")
    left_out = left_out_by_division(order.deal, epoch)
    for share in shares:
        left_out += share.left_out
    return EpochPlan(
        epoch=epoch,
        num_steps=num_steps,
        full_steps=full_steps,
        shares=tuple(share.taken for share in shares),
        left_out=left_out,
    )


def _evaluation_deal(workload: Workload, block_samples: int, seed: int, comm: Comm) -> Deal:
    deal = evaluation_deal(workload, block_samples=block_samples, num_ranks=comm.size, seed=seed)
    require_steps(deal, what="evaluation")
    return deal


def _eval_steps(deal: Deal | None, comm: Comm) -> int:
    return _steps_of_all(RankEpoch(deal, rank=comm.rank, epoch=1), comm, what="evaluation") if deal else 0


def _steps_of_all(order: RankEpoch, comm: Comm, *, what: str) -> int:
    """The steps that every rank can take with full batches."""
    own = order.count_samples() // order.deal.batch_size
    steps = comm.reduce(own, "min", awaiting=f"all ranks to count their {what} samples")
    if steps < 1:
        raise UsageError(
            f"Some rank has fewer samples than a batch of {order.deal.batch_size}: {what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    return steps
