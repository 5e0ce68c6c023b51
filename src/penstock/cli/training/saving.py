"""Checkpoints on the way of a training run, from a workload's words: what is saved, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.environment import Environment

if TYPE_CHECKING:
    from penstock.bench.training.training_checkpoints import CheckpointWish
    from penstock.cluster.comm import Comm
    from penstock.workload.spec import Workload


def checkpoint_wish(
    workload: Workload,
    uri: str | None,
    *,
    comm: Comm,
    environment: Environment,
    options: Mapping[str, str] | None = None,
) -> CheckpointWish | None:
    """What the workload wants saved, to `uri` or its own folder; None if it takes no checkpoints."""
    from functools import partial

    from penstock.bench.model_state import LayoutRequest, plan_layout
    from penstock.bench.training.training_checkpoints import CheckpointWish
    from penstock.cli.checkpoint.run import durability
    from penstock.storage import open_storage
    from penstock.workload.checkpoint_model import model_of_workload

    if not workload.workflow.checkpoint:
        return None
    model = model_of_workload(workload.model.name, workload)
    asked = workload.checkpoint
    place = uri or asked.checkpoint_folder
    told = {**durability(place, fsync=asked.fsync), **(options or {})}
    return CheckpointWish(
        layout=plan_layout(LayoutRequest(model=model, num_processes=comm.size, mode=asked.mode)),
        when=asked,
        reopen=partial(open_storage, place, environment, options=told, rank=comm.rank),
        seed=workload.train.seed,
    )
