"""The waist between the manager, which has states, and where steps are kept: on one level, or on several.

The manager calls `open`, and slots, on a thread of its own, where saves follow each other on all ranks
alike, and everything else from its caller's. Invariant: what `finds` hands out was committed; whether it can
be loaded, loading tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.checkpoint.commit.place import begin
from penstock.checkpoint.completing import finish
from penstock.checkpoint.own_files import local_path
from penstock.checkpoint.restoring import wanted_of
from penstock.checkpoint.steps import Steps, step_of
from penstock.cluster.collectives import run_on_rank0
from penstock.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.checkpoint.commit.place import Place
    from penstock.checkpoint.staging.base import PreparedSave, ShareStats, StagedSave
    from penstock.checkpoint.stored import Stored
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """One level's copy of a step, ready to be loaded. Both calls are collective."""

    level: str
    find: Callable[[], Stored]
    """Raises on the ranks that do not see it, where loading raises, too."""
    settle: Callable[[], Stored]
    """The same, once each rank can open the files that it wrote by a path of its node."""


class Slot(Protocol):
    """Room for one step on all ranks, which nobody sees until it is completed."""

    def path(self, file_name: str) -> Path:
        """Where whoever writes files of their own puts the one of that name. Not collective."""

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write what is staged and commit all; where it lies, and what each rank spent. Collective."""

    def abandon(self) -> None:
        """Leave nothing of it. Not collective: once no rank writes any more. Safe after `complete`."""


class Keeper(Protocol):
    """Where the steps of a run are kept. All but `steps` and `untold_failures` is collective."""

    uri: str

    def steps(self) -> list[int]:
        """The committed steps that this rank can see, ascending."""

    def open(self, name: str, *, is_last: bool = False) -> Slot:
        """Make room for a step, or for results of another name. The last one of a job is always flushed."""

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

    def open(self, name: str, *, is_last: bool = False) -> DurableSlot:  # noqa: ARG002 - all are durable
        """A draft on the one level."""
        return DurableSlot(self, begin(self.on_storage.storage, name, self.comm))

    def candidates(self, wanted: int | None) -> list[int]:
        """What rank 0 sees."""
        return run_on_rank0(
            self.comm,
            lambda: wanted_of(self.on_storage.committed(), wanted, self.uri),
            awaiting="rank 0 to list the steps",
        )

    def finds(self, step: int) -> Iterator[Find | str]:
        """The one copy."""
        yield Find(
            level="durable", find=partial(self.on_storage.find, step), settle=partial(self.in_place, step)
        )

    def in_place(self, step: int) -> Stored:
        """A step whose files have paths where they lie; `Unavailable` where the storage has none."""
        stored = self.on_storage.find(step)
        local_path(stored.storage, stored.committed.folder)
        return stored

    def untold_failures(self) -> Mapping[int, BaseException]:
        """None: a save ends with its commit."""
        return {}

    def close(self) -> None:
        """Nothing is under way."""


class DurableSlot:
    """A `Slot` of one level that all ranks reach."""

    def __init__(self, keeper: DurableKeeper, place: Place) -> None:
        self._keeper = keeper
        self._place = place

    def path(self, file_name: str) -> Path:
        """In the draft itself."""
        return local_path(self._place.storage, self._place.key(file_name))

    def complete(
        self, prepared: PreparedSave, staged: StagedSave, progress: Progress
    ) -> tuple[str, tuple[ShareStats, ...]]:
        """Write and commit; then the steps beyond those that are to be kept go."""
        keeper, step = self._keeper, step_of(self._place.draft.name)
        facts = {} if step is None else {"step": step}
        committed, stats = finish(
            self._place,
            prepared,
            staged,
            keeper.comm,
            facts=facts,
            timeout_s=keeper.timeout_s,
            progress=progress,
        )
        if step is not None and keeper.comm.rank == 0:
            retire(keeper.on_storage, step, keeper.keep)
        return f"{keeper.uri}/{committed.name}", stats

    def abandon(self) -> None:
        """Remove the draft."""
        self._place.abandon()


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
