"""torchtitan's checkpoint manager with the engine in the place of `dcp.save` and `dcp.load`.

    checkpoint = PenstockCheckpointManager.Config(enable=True, interval=500)

What is saved when, under which name, and where a run goes on is torchtitan's; folders are those of its own
manager, and each loads what the other has saved. Invariant: a step is visible when it is whole on all ranks,
and is removed by the engine, in one step, and never while it is the only one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from penstock.checkpoint.api import load
from penstock.checkpoint.manager.manager import Manager, SaveHandle
from penstock.errors import Unavailable

try:
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
except ImportError as error:
    raise Unavailable(
        f"torchtitan is not installed: no module {error.name!r}", fix="Run: pip install torchtitan"
    ) from error


class PenstockCheckpointManager(CheckpointManager):
    """torchtitan's manager, saving and loading through a `Manager` of its folder.

    Hugging Face's format stays torchtitan's own. Both kinds of asynchronous saves copy into warm memory;
    with "async_with_pinned_mem" training waits for the copy only at the next `maybe_wait_for_staging`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options, and the engine's."""

        writers: int = 2
        """Files of each rank, written side by side."""
        staging_bytes: int | None = None
        """What saves under way may take beside the state, on each rank; None is the engine's default."""
        trust: bool = False
        """Whether objects of a checkpoint may run code when they are loaded."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        self._trust = config.trust
        self._steps = Manager(
            self.folder,
            keep=config.keep_latest_k or None,
            writers=config.writers,
            staging_bytes=config.staging_bytes,
        )
        self._waiters = ThreadPoolExecutor(2, thread_name_prefix="penstock-wait")
        # torchtitan would make pinned memory for a copy that the engine makes in its own.
        self.stager = _NoStager()

    def __del__(self) -> None:
        """Nothing: closing is collective, and a garbage collector is not."""

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # noqa: FBT001, FBT002 - as torchtitan has it
        to_hf: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save a step; what the parent's returns."""
        if to_hf:
            # Blocking, whatever the mode: torchtitan exports at the end of a run alone.
            super().dcp_save(state_dict, checkpoint_id, AsyncMode.DISABLED, enable_garbage_collection, to_hf)
            return None
        step = int(checkpoint_id.rpartition("step-")[2])
        if async_mode == AsyncMode.DISABLED:
            self._steps.save(step, state_dict)
            return None
        if async_mode == AsyncMode.ASYNC:
            return self._committed(self._steps.save_async(step, state_dict))
        handle = self._steps.save_async(step, state_dict, staging="background")
        return AsyncSaveResponse(self._waiters.submit(handle.wait_staged), self._committed(handle))

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,  # noqa: FBT001 - as torchtitan has it
        from_quantized: bool,  # noqa: FBT001 - likewise
    ) -> None:
        """Load a step into the state and the model."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id, trust=self._trust)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _committed(self, handle: SaveHandle) -> Future[Any]:
        return self._waiters.submit(handle.result)

    def _find_load_step(self, folder: str = "") -> int:
        if folder and folder != self.folder:
            return int(super()._find_load_step(folder))
        latest = self._steps.latest()
        return -1 if latest is None else latest

    def _should_purge(self) -> bool:
        """Whether torchtitan is to remove old steps: the engine does."""
        return False

    def _close(self) -> None:
        super()._close()
        self._steps.close()
        self._waiters.shutdown()


class _NoStager:
    """Stands where torchtitan looks for a stager, so that it makes none."""

    def close(self) -> None:
        """Nothing to let go of."""
