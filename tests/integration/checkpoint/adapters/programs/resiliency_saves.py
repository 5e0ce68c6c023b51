"""Saves through the queues of NVIDIA's resiliency extension, overwrites, and prints what was saved."""

from __future__ import annotations

import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402 - after the filter
import torch.distributed as dist  # noqa: E402
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue  # noqa: E402
from tests.integration.checkpoint.adapters.programs.ranks import on_forked_ranks, without_cuda  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import load  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from penstock.checkpoint.adapters.resiliency import save_request  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def state_of(fill: float | None = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(30.0).reshape(6, 5)
    bias = torch.arange(7, dtype=torch.bfloat16)
    if fill is not None:
        rows, bias = torch.full_like(rows, fill), torch.full_like(bias, fill)
    model = {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "bias": bias}
    return {"model": model, "step": 3 if fill is None else 0}


def is_saved(folder: Path) -> bool:
    """Whether stock torch loads the values of the moment."""
    found, wanted = state_of(0.0), state_of()
    load(found, checkpoint_id=str(folder))
    rows = torch.equal(found["model"]["rows"].to_local(), wanted["model"]["rows"].to_local())
    return rows and torch.equal(found["model"]["bias"], wanted["model"]["bias"]) and found["step"] == 3


def saves(rank: int, root: Path, persistent: bool) -> dict[str, Any]:  # noqa: FBT001 - it travels
    queue = AsyncCallsQueue(persistent=persistent)
    state = state_of()
    queue.schedule_async_request(save_request(state, root / "one"))
    state["model"]["rows"].to_local().fill_(9)
    state["model"]["bias"].fill_(9)
    queue.maybe_finalize_async_calls(blocking=True)
    dist.barrier()
    seen: dict[str, Any] = {"is_of_the_moment": is_saved(root / "one")}
    seen["files"] = sorted(path.name for path in (root / "one").iterdir())
    queue.close()
    return seen


def main(root: Path) -> None:
    without_cuda()
    print(json.dumps(on_forked_ranks(2, saves, root, False)))  # noqa: FBT003, T201 - as above; the test reads it
