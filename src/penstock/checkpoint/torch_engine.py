"""The `Engine` of a manager for nested states of tensors and other values: a saver and a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.loader import CheckpointLoader, LoadReport
from penstock.checkpoint.saver import DEFAULT_STAGING_BYTES, PreparedTensors, Saver

if TYPE_CHECKING:
    from penstock.checkpoint.commit.catalog import CheckpointRef
    from penstock.checkpoint.engine import LoadChoice, Replicas, SaveChoice, State
    from penstock.checkpoint.plan.save_plan import SaveOptions
    from penstock.checkpoint.state.process_group import RankGroup
    from penstock.progress import Progress


class TorchEngine:
    """Saves and loads; `staging_bytes` limits the memory of a rank's copies."""

    def __init__(
        self,
        options: SaveOptions | None = None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        replicas: Replicas = "share",
    ) -> None:
        self._saver = Saver(options, staging_bytes=staging_bytes, replicas=replicas)
        self._loader = CheckpointLoader()

    def prepare(self, state: State, group: RankGroup, choice: SaveChoice) -> PreparedTensors:
        """Let all ranks agree who writes what; collective."""
        return self._saver.prepare(state, group, choice)

    def load(
        self,
        state: State,
        stored: CheckpointRef,
        group: RankGroup,
        choice: LoadChoice,
        progress: Progress | None,
    ) -> LoadReport:
        """Fill `state` in place; collective."""
        return self._loader.load(state, stored, group, choice, progress)

    def close(self) -> None:
        """Free the memory of both directions. May be called twice."""
        self._saver.close()
        self._loader.close()
