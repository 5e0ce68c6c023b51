"""Saves through NVIDIA's resiliency extension: its queue and worker processes with the engine's writer.

    queue = AsyncCallsQueue()
    queue.schedule_async_request(save_request(state, "/pfs/run/step-100"))

Invariant: the checkpoint holds the tensors as they were when the save was scheduled.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.checkpoint.adapters.async_writer import DEFAULT_STAGING_BYTES, AsyncWriter
from penstock.checkpoint.commit.checkpoints import AnyPath
from penstock.checkpoint.engine import State
from penstock.checkpoint.state.walk import is_stateful, require_dict
from penstock.checkpoint.torch_dcp import SavePlanner
from penstock.errors import Unavailable

try:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )
except ImportError as error:
    raise Unavailable(
        f"NVIDIA's resiliency extension is not installed: no module {error.name!r}",
        fix="Run: pip install nvidia-resiliency-ext",
    ) from error


def save_request(
    state: State,
    path: AnyPath,
    *,
    process_group: Any = None,
    planner: Any = None,
    writers: int = 2,
    separation_hint: str | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    transforms: Sequence[str] = (),
) -> Any:
    """Plan a save, and return the request that writes and commits the checkpoint. Collective.

    If writing failed on any rank, the queue's `maybe_finalize_async_calls` raises on the coordinator, and the
    folder is not a checkpoint. `planner` replaces the engine's own.
    """
    writer = AsyncWriter(
        path,
        writers=writers,
        separation_hint=separation_hint,
        staging_bytes=staging_bytes,
        transforms=transforms,
    )
    require_dict(state)
    expanded = {key: part.state_dict() if is_stateful(part) else part for key, part in state.items()}
    planned = save_state_dict_async_plan(expanded, writer, process_group, planner=planner or SavePlanner())
    function, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *planned)
    return AsyncRequest(function, arguments, [finish], preload_fn=preload)
