"""A step that each rank takes alone and all must survive: everyone gets its own result, or all the failure.

Over `cluster.collect`, which gives everyone all results. Invariant: a process that is alone gets its own
error, and not that of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from penstock.cluster.collect import collect

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

Result = TypeVar("Result")


def together(comm: Comm, work: Callable[[], Result], *, awaiting: str) -> Result:
    """What `work` gives on this rank; where it raises on any, all raise. Collective."""
    if comm.size == 1:
        return work()
    done: list[Result] = []
    collect(comm, lambda: done.append(work()), awaiting=awaiting)
    return done[0]
