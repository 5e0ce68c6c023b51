"""How far the clocks of ranks are apart, from questions that all ranks answer at once.

A rank reads its clock after rank 0 has spoken and before rank 0 has heard it: by rank 0's clock, between
those two moments. Invariant: a bound is proven by what was seen, whatever the network did meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cluster.gates.base import Offset

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

NUM_ROUNDS: Final = 5
"""The quickest of several rounds tells most; each is a handful of messages."""

ReadClock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Round:
    """Rank 0's clock before it spoke and after it heard, and every rank's in between."""

    before_s: float
    readings_s: Sequence[float]
    after_s: float


def measure_offsets(comm: Comm, *, wall_s: ReadClock = time.time) -> tuple[Offset, ...]:
    """Of every rank against rank 0; the same on all ranks. Collective."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        before_s = wall_s()
        comm.broadcast(None, awaiting="rank 0 to ask for the time")
        readings_s = comm.gather(wall_s(), awaiting="the time on all ranks")
        rounds.append(Round(before_s, readings_s, wall_s()))
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    return comm.broadcast(bounds(rounds, hosts), awaiting="rank 0 to compare the clocks")


def bounds(rounds: Sequence[Round], hosts: Sequence[str]) -> tuple[Offset, ...]:
    """What all rounds together prove; rank 0 is its own measure. Pure."""
    return tuple(
        Offset(
            rank=rank,
            host=host,
            low_s=max(each.readings_s[rank] - each.after_s for each in rounds) if rank else 0.0,
            high_s=min(each.readings_s[rank] - each.before_s for each in rounds) if rank else 0.0,
        )
        for rank, host in enumerate(hosts)
    )
