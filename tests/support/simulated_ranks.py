"""Very many ranks in one process: operations of `penstock.cluster.rounds`, with every message counted.

Each rank runs its real code; only the carrying of messages is simulated. Invariant: a rank waits for all
messages of its round, and what two ranks send each other arrives in order.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.cluster.rounds import Round, Rounds

Result = TypeVar("Result")

LEAST_SPOOLED_BYTES = 256


@dataclass(slots=True)
class RankCosts:
    """What an operation cost one rank."""

    received_bytes: int = 0
    num_received: int = 0
    fan_in: int = 0
    """The most messages that it took in one round."""
    cpu_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedRanks(Generic[Result]):
    """Ranks that all begin the operation which `begin(rank)` makes."""

    size: int
    costs: list[RankCosts] = field(init=False)
    inbox: dict[int, list[list[bytes]]] = field(default_factory=dict)
    """What ranks received in each round; kept for the ranks that are in it."""
    spool: int | None = None
    """The descriptor of a file for messages under way, where memory is short."""
    _spooled_bytes: int = 0

    def __post_init__(self) -> None:
        self.costs = [RankCosts() for _ in range(self.size)]

    def run(self, begin: Callable[[int], Rounds[Result]]) -> Iterator[tuple[int, Result]]:
        """The result of each rank as soon as it has one; an error of a rank is raised."""
        mail: dict[tuple[int, int], list[bytes | tuple[int, int]]] = {}
        waiting: dict[int, Round] = {}
        operations = {rank: begin(rank) for rank in range(self.size)}
        ready: deque[tuple[int, list[bytes] | None]] = deque((rank, None) for rank in range(self.size))
        while ready:
            rank, received = ready.popleft()
            start_s = time.process_time()
            try:
                current = next(operations[rank]) if received is None else operations[rank].send(received)
            except StopIteration as stop:
                del operations[rank]
                yield rank, stop.value
                continue
            finally:
                self.costs[rank].cpu_s += time.process_time() - start_s
            for to, content in current.sends:
                assert current.size_bytes in (None, len(content)), "a message has another size than announced"
                mail.setdefault((rank, to), []).append(self._put_away(content))
            received, touched = None, {rank, *(to for to, _ in current.sends)}
            waiting[rank] = Round((), current.sources, current.size_bytes)
            del current
            for candidate in touched:
                expected = waiting.get(candidate)
                if expected and all(mail.get((source, candidate)) for source in expected.sources):
                    del waiting[candidate]
                    ready.append((candidate, self._take(candidate, expected, mail)))
        assert not operations, f"{len(operations)} ranks wait for messages that nobody sends"

    def _put_away(self, content: bytes) -> bytes | tuple[int, int]:
        if self.spool is None or len(content) < LEAST_SPOOLED_BYTES:
            return content
        place = self._spooled_bytes, len(content)
        self._spooled_bytes += os.pwrite(self.spool, content, self._spooled_bytes)
        return place

    def _take(
        self, rank: int, expected: Round, mail: dict[tuple[int, int], list[bytes | tuple[int, int]]]
    ) -> list[bytes]:
        received = []
        for source in expected.sources:
            content = mail[source, rank].pop(0)
            if isinstance(content, tuple):
                assert self.spool is not None, "that is where it is"
                content = os.pread(self.spool, content[1], content[0])
            received.append(content)
            if not mail[source, rank]:
                del mail[source, rank]
        costs = self.costs[rank]
        costs.received_bytes += sum(map(len, received))
        costs.num_received += len(received)
        costs.fan_in = max(costs.fan_in, len(received))
        if rank in self.inbox:
            self.inbox[rank].append(received)
        return received


def simulate(size: int, begin: Callable[[int], Rounds[Result]]) -> list[Result]:
    """The results of all ranks."""
    results = dict(SimulatedRanks[Result](size).run(begin))
    return [results[rank] for rank in range(size)]
