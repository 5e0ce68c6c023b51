"""From a save that is being staged to a committed checkpoint: the part that needs no tensor any more.

Runs in the caller's thread or in a manager's own, on all ranks. Invariant: it ends on all ranks in the same
way, and where it fails, the memory of the stage is let go of and nothing visible has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.place import begin
from penstock.cluster.collectives import all_gather_results, run_on_all_ranks
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint.commit.base import Committed
    from penstock.checkpoint.commit.place import Place
    from penstock.checkpoint.staging.base import PreparedSave, RankShare, ShareStats, StagedSave, Urgency
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes and what its manifest is to say of it."""

    storage: Storage
    name: str
    facts: Mapping[str, object]


def complete(
    prepared: PreparedSave,
    staged: StagedSave,
    target: Target,
    comm: Comm,
    *,
    timeout_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Committed, tuple[ShareStats, ...]]:
    """Write what is staged and commit it; what each rank spent, in rank order. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        place = begin(target.storage, target.name, comm)
        undo.pop_all()
    return finish(
        place,
        prepared,
        staged,
        comm,
        facts=target.facts,
        timeout_s=timeout_s,
        progress=progress,
        clock=clock,
    )


def finish(
    place: Place,
    prepared: PreparedSave,
    staged: StagedSave,
    comm: Comm,
    *,
    facts: Mapping[str, object],
    timeout_s: float,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Committed, tuple[ShareStats, ...]]:
    """The same in a place that is there already; where this fails, the place is abandoned. Collective."""
    with ExitStack() as undo:
        undo.callback(staged.cancel)
        undo.callback(place.abandon)
        written: list[RankShare] = []

        def write() -> ShareStats:
            written.append(staged.write_to(place.for_data, place.key, progress))
            return written[0].stats

        awaiting = f"all ranks to write their files of {place.draft.name}"
        # A process without other ranks raises its own error, and no `RankFailed`.
        stats = (
            [write()]
            if comm.size == 1
            else all_gather_results(comm, write, awaiting=awaiting, timeout_s=timeout_s)
        )
        begun_s = clock()
        # Places and sums of all items are for who seals; every rank needs what the others spent.
        shares = comm.gather_on_lead(written[0], awaiting="where all ranks wrote what")
        all_facts = {**facts, "save_id": place.draft.save_id}
        committed = place.commit(lambda: prepared.seal(shares, all_facts))
        undo.pop_all()
    return committed, tuple(replace(each, commit_s=clock() - begun_s) for each in stats)


def stage_together(prepared: PreparedSave, urgent: Urgency, comm: Comm) -> StagedSave:
    """Begin to copy on all ranks, or fail on all: what is begun elsewhere is then cancelled. Collective."""
    begun: list[StagedSave] = []
    try:
        run_on_all_ranks(
            comm, lambda: begun.append(prepared.stage(urgent)), awaiting="all ranks to begin to copy"
        )
    except PenstockError:
        for staged in begun:
            staged.cancel()
        raise
    return begun[0]
