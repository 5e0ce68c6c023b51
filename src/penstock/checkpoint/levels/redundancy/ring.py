"""What is lost comes back from parity or copies, while sums travel along what is left of a group.

Sums travel along the survivors, each of which adds its term, to the member that lost its files, so no rank
ever collects the data of a group. One rank may act for several members, as ranks may have moved. Memory is a
few blocks, whatever the size. Invariant: results go to the files that were passed in and nowhere else, and a
rank whose part fails goes on until the others are through, so a failure leaves nothing and hangs no one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout, PieceRole, StripePiece, recover
from penstock.checkpoint.levels.redundancy.redundancy_record import ConcatenatedReader, ConcatenatedWriter
from penstock.cluster.comm import PendingTransfer, PointToPoint
from penstock.errors import WaitTimeout
from penstock.storage.aligned import aligned_buffer

BLOCK_BYTES: Final = 2 << 20
TAGS: Final = 4
"""How many tags one exchange uses: two parities in two steps that follow each other."""


class FirstFailure:
    """The first error of a rank's part in an exchange with others.

    The rank goes on, with whatever bytes it has, so that the others are not left waiting for it.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an error of the block; nothing is waited for longer than for a rank that does not answer."""
        try:
            yield
        except WaitTimeout:
            raise
        except Exception as error:  # noqa: BLE001 - raised once the others have what they wait for
            self._error = self._error or error

    def attempt(self, work: Callable[[], object]) -> None:
        """Do this, unless something has failed before."""
        if self._error is None:
            with self.noted():
                work()

    def raise_noted(self) -> None:
        """Raise the error, if there is one."""
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The members of a group, which rank acts for each, and the connections between these ranks.

    While encoding, each rank acts for one member; in a rebuild, one rank may act for several, as ranks may
    have moved. `transfer` may be None if one rank acts for all. Broken connections are noted in `failure`.
    """

    ranks: tuple[int, ...]
    own_rank: int
    transfer: PointToPoint | None
    block_bytes: int = BLOCK_BYTES
    timeout_s: float = 300.0
    failure: FirstFailure = field(default_factory=FirstFailure)
    first_tag: int = 0
    """Of `TAGS` that no other exchange uses soon."""

    def is_here(self, member: int) -> bool:
        """Whether this rank acts for a member."""
        return self.ranks[member] == self.own_rank

    def blocks(self, total_bytes: int) -> Iterator[tuple[int, int]]:
        """Start and length of each block of `total_bytes`."""
        for start in range(0, total_bytes, self.block_bytes):
            yield start, min(self.block_bytes, total_bytes - start)

    def begin_send(self, member: int, block: memoryview, *, tag: int = 0) -> PendingTransfer | None:
        """Begin to send to the rank of a member; None if that is this rank, or cannot be reached."""
        with self.failure.noted():
            if not self.is_here(member):
                return self._connections().send(self.ranks[member], block, tag=self.first_tag + tag)
        return None

    def begin_receive(self, member: int, block: memoryview, *, tag: int = 0) -> PendingTransfer | None:
        """Begin to receive from the rank of a member; None if that is this rank, or cannot be reached."""
        with self.failure.noted():
            if not self.is_here(member):
                return self._connections().receive(self.ranks[member], block, tag=self.first_tag + tag)
        return None

    def finish(self, pending: PendingTransfer | None, *, awaiting: str) -> None:
        """Wait until the bytes have left, or arrived."""
        if pending is not None:
            with self.failure.noted():
                pending.wait(awaiting=awaiting, timeout_s=self.timeout_s)

    def receive_from(self, member: int, block: memoryview) -> None:
        """Receive from the rank of a member; does nothing if that is this rank."""
        rank = self.ranks[member]
        self.finish(self.begin_receive(member, block), awaiting=f"lost bytes from rank {rank}")

    def send_to(self, member: int, block: memoryview) -> None:
        """Send to the rank of a member; does nothing if that is this rank."""
        rank = self.ranks[member]
        self.finish(self.begin_send(member, block), awaiting=f"rank {rank} to take lost bytes")

    def _connections(self) -> PointToPoint:
        assert self.transfer is not None, "several ranks have connections"
        return self.transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """What a surviving member can contribute: its own bytes, and the parity or copy that it keeps."""

    own: ConcatenatedReader
    kept: ConcatenatedReader

    def read(self, layout: ParityLayout, piece: StripePiece, start: int, block: memoryview) -> None:
        """Fill `block` from position `start` of one of this member's pieces."""
        if piece.role is PieceRole.DATA:
            self.own.read_into(layout.position(piece.chunk, start, block.nbytes), block)
        else:
            behind = block.nbytes if piece.role is PieceRole.WEIGHTED else 0
            self.kept.read_into(layout.parities * start + behind, block)


def rebuild(
    ring: Ring,
    layout: ParityLayout,
    lost: Sequence[int],
    survivors: Mapping[int, Survivor],
    restored: Mapping[int, RestoredMember],
) -> None:
    """Restore what the `lost` members had, one after another: their data, then their parity.

    The rank that acts for a lost member passes where its bytes go (`restored`), others what they have.
    """
    block, total = aligned_buffer(ring.block_bytes), aligned_buffer(ring.block_bytes)
    for lost_member in lost:
        for stripe, piece, start, length in _list_lost_blocks(ring, layout, lost_member):
            terms = list(recover(layout, stripe, lost)[piece].items())
            # The sum travels along the survivors, each of which adds its term, and ends at the lost member.
            path = [*(summand.member for summand, _ in terms), lost_member]
            sums, part = total[:length], block[:length]
            for place, member in enumerate(path):
                if not ring.is_here(member):
                    continue
                if place:
                    ring.receive_from(path[place - 1], sums)
                else:
                    np.frombuffer(sums, np.uint8)[:] = 0
                if place == len(terms):
                    ring.failure.attempt(partial(_write, restored, member, piece, sums))
                    continue
                summand, factor = terms[place]
                ring.failure.attempt(partial(survivors[member].read, layout, summand, start, part))
                gf256.add_scaled(sums, part, factor)
                ring.send_to(path[place + 1], sums)


def restore_copies(
    ring: Ring,
    sizes: Sequence[int],
    lost: Sequence[int],
    survivors: Mapping[int, Survivor],
    restored: Mapping[int, RestoredMember],
) -> None:
    """`rebuild` for members that keep copies of each other; `sizes` are the bytes of all members."""
    block = aligned_buffer(ring.block_bytes)
    for member in lost:
        before, after = (member - 1) % len(sizes), (member + 1) % len(sizes)
        # The next member has a copy of its bytes; what it kept is a copy of the bytes of the member before.
        for giver, owner, role in ((after, member, PieceRole.DATA), (before, before, PieceRole.PLAIN)):
            for start, length in ring.blocks(sizes[owner]):
                part = block[:length]
                if ring.is_here(giver):
                    source = survivors[giver].kept if role is PieceRole.DATA else survivors[giver].own
                    ring.failure.attempt(partial(source.read_into, start, part))
                    ring.send_to(member, part)
                if ring.is_here(member):
                    ring.receive_from(giver, part)
                    ring.failure.attempt(partial(_write, restored, member, StripePiece(member, role), part))


def _write(
    restored: Mapping[int, RestoredMember], member: int, piece: StripePiece, block: memoryview
) -> None:
    restored[member].write(piece, block)


@dataclass(frozen=True, slots=True)
class RestoredMember:
    """Where the bytes of a lost member go."""

    own: ConcatenatedWriter
    kept: ConcatenatedWriter

    def write(self, piece: StripePiece, block: memoryview) -> None:
        """Write the next block of its data, or of what it kept."""
        (self.own if piece.role is PieceRole.DATA else self.kept).write(block)


def _list_lost_blocks(
    ring: Ring, layout: ParityLayout, member: int
) -> Iterator[tuple[int, StripePiece, int, int]]:
    """Stripe, piece, start and length of each block that a member lost, in the order of its files."""
    data = [
        (layout.stripe_of(member, chunk), StripePiece(member, PieceRole.DATA, chunk), start, length)
        for start, length in ring.blocks(layout.chunk_bytes)
        for chunk in range(layout.num_chunks)
    ]
    yield from sorted(data, key=lambda block: layout.position(block[1].chunk, block[2], block[3]))
    parity = [
        (member, StripePiece(member, PieceRole.PLAIN)),
        ((member - 1) % layout.members, StripePiece(member, PieceRole.WEIGHTED)),
    ]
    for start, length in ring.blocks(layout.chunk_bytes):
        for stripe, piece in parity[: layout.parities]:
            yield stripe, piece, start, length
