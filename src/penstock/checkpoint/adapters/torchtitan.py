"""torchtitan's checkpoint manager with the engine instead of `dcp.save` and `dcp.load`.

    checkpoint = PenstockCheckpointManager.Config(enable=True, interval=500)

torchtitan decides when to save, under which name, and from where a run resumes. The folders are the same as
those of its own manager, and each manager loads what the other has saved. Invariant: a step is visible once
it is complete on all ranks; the engine removes an old step atomically, and never the only one.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from penstock.checkpoint.api import load
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import Unavailable

try:
    from torchtitan.components.checkpointer.base import MODEL
    from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
except ImportError as error:
    raise Unavailable(
        f"torchtitan is not installed: no module {error.name!r}", fix="Run: pip install torchtitan"
    ) from error


class PenstockCheckpointManager(CheckpointManager):
    """torchtitan's manager, which saves and loads through a `Manager` of the same folder.

    Hugging Face's format is left to torchtitan. Both asynchronous modes copy into memory kept from earlier
    saves; with "async_with_pinned_mem", training waits for the copy only at the next
    `maybe_wait_for_staging`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's options and the engine's."""

        writers: int = 2
        """The number of files that each rank writes in parallel."""
        staging_bytes: int | None = None
        """The memory for pending saves on each rank, in addition to the state; None: the engine's default."""
        trust: bool = False
        """True if loading may run code from the checkpoint's objects."""

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
            # torchtitan's tools treat everything in this folder as a step.
            has_pointer=False,
        )
        self._waiters = ThreadPoolExecutor(2, thread_name_prefix="penstock-wait")
        # Otherwise torchtitan would allocate pinned memory for a copy that the engine makes in its own
        # memory.
        self.stager = _NoStager()

    def __del__(self) -> None:
        """Do nothing: closing is collective, but garbage collection is not."""

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # noqa: FBT001, FBT002 - as torchtitan has it
        to_hf: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save a step; return what the parent's method returns."""
        if to_hf:
            # Blocking in every mode: torchtitan exports only at the end of a run.
            super().dcp_save(state_dict, checkpoint_id, AsyncMode.DISABLED, enable_garbage_collection, to_hf)
            return None
        step = int(checkpoint_id.rpartition("step-")[2])
        if async_mode == AsyncMode.DISABLED:
            self._steps.save(step, state_dict)
            return None
        if async_mode == AsyncMode.ASYNC:
            return self._waiters.submit(self._steps.save_async(step, state_dict).result)
        handle = self._steps.save_async(step, state_dict, staging="background")
        staged: Future[Any] = self._waiters.submit(handle.wait_staged)
        committed: Future[Any] = self._waiters.submit(handle.result)
        return AsyncSaveResponse(staged, committed)

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

    def _find_load_step(self, folder: str = "") -> int:
        if folder:
            return int(super()._find_load_step(folder))
        latest = self._steps.latest()
        return -1 if latest is None else latest

    def _should_purge(self) -> bool:
        """Return False: the engine removes old steps, not torchtitan."""
        return False

    def _close(self) -> None:
        super()._close()
        self._steps.close()
        self._waiters.shutdown()


class _NoStager:
    """A stager that holds nothing: torchtitan finds it, and therefore creates none of its own."""

    def close(self) -> None:
        """Do nothing: this stager holds no memory."""
