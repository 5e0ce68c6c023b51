"""The waist between the manager, which has states, and where steps are kept: on one level, or on several.

The manager calls `save` on a thread of its own, where saves follow each other on all ranks alike, and
everything else from its caller's. Invariant: what `finds` hands out was committed; whether it can be loaded,
loading tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.checkpoint.commit.place import on_lead
from penstock.checkpoint.completing import Target, complete
from penstock.checkpoint.restoring import wanted_of
from penstock.checkpoint.steps import Steps, name_of
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.checkpoint.staging.base import PreparedSave, ShareStats, StagedSave
    from penstock.checkpoint.stored import Stored
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """One level's copy of a step, ready to be loaded."""

    level: str
    find: Callable[[], Stored]
    """Raises on the ranks that do not see it, where loading raises, too."""


class Keeper(Protocol):
    """Where the steps of a run are kept. All but `steps` and `untold_failures` is collective."""

    uri: str

    def steps(self) -> list[int]:
        """The committed steps that this rank can see, ascending."""

    def save(
        self, step: int, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write what is staged and commit it as `step`; where it lies, and what each rank spent."""

    def candidates(self, wanted: int | None) -> list[int]:
        """The steps to try, newest first, or the one wanted; `ObjectNotFound` where that is nowhere."""

    def finds(self, step: int) -> Iterator[Find | str]:
        """The copies of a step, the fastest first; a text where a level cannot give it."""

    def untold_failures(self) -> Mapping[int, BaseException]:
        """What failed after `save` had returned, by step; each is told once."""

    def close(self) -> None:
        """Finish what is under way, and let go of it."""


class DurableKeeper:
    """Steps on one durable level, of which the newest `keep` stay."""

    def __init__(self, steps: Steps, comm: Comm, *, keep: int | None, timeout_s: float) -> None:
        self.uri = steps.storage.uri
        self.on_storage = steps
        self.comm = comm
        self.keep = keep
        self.timeout_s = timeout_s

    def steps(self) -> list[int]:
        """All committed steps."""
        return self.on_storage.committed()

    def save(
        self, step: int, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write and commit."""
        target = Target(storage=self.on_storage.storage, name=name_of(step), facts={"step": step})
        committed, stats = complete(
            prepared, staged, target, self.comm, timeout_s=self.timeout_s, progress=progress
        )
        if self.comm.rank == 0:
            retire(self.on_storage, step, self.keep)
        return f"{self.uri}/{committed.name}", stats

    def candidates(self, wanted: int | None) -> list[int]:
        """What rank 0 sees."""
        return on_lead(
            self.comm,
            lambda: wanted_of(self.on_storage.committed(), wanted, self.uri),
            awaiting="rank 0 to list the steps",
        )

    def finds(self, step: int) -> Iterator[Find | str]:
        """The one copy."""
        yield Find(level="durable", find=lambda: self.on_storage.find(step))

    def untold_failures(self) -> Mapping[int, BaseException]:
        """None: a save ends with its commit."""
        return {}

    def close(self) -> None:
        """Nothing is under way."""


def retire(steps: Steps, step: int, keep: int | None) -> None:
    """Point to the newest step and remove the surplus. The step is committed, whatever fails here."""
    try:
        if step == max(steps.committed(), default=None):
            steps.point_to(step)
        for removed in steps.surplus(keep):
            logger.info("Removing step %d: the newest %s are kept", removed, keep)
            steps.remove(removed)
    except StorageError as error:
        logger.warning("Step %d is committed, but old steps could not all be removed: %s", step, error)
