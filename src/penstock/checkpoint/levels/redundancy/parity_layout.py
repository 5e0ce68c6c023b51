"""Which piece of parity lies where in a group, what it is the sum of, and what gives a lost piece back.

Each member's bytes are cut into chunks, one for each stripe in which it holds no parity; so every member does
the same work and keeps the same share. All is linear: a piece is a weighted sum of others, by `kernels.py`.
Invariant: a piece is recoverable whenever no more members are lost than the group has parities.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from penstock.checkpoint.levels.redundancy.gf256 import inverse, multiply, power_of_two
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Role(Enum):
    """What a member has in a stripe."""

    DATA = "data"
    PLAIN = "plain parity"
    WEIGHTED = "weighted parity"


@dataclass(frozen=True, slots=True)
class Piece:
    """A member's part of a stripe: for data, `chunk` tells which of its chunks."""

    member: int
    role: Role
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """One summand: `factor` times a piece."""

    piece: Piece
    factor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A group of `members` with `parities` (1 or 2) pieces of parity in each of its stripes."""

    members: int
    parities: int
    chunk_bytes: int

    @property
    def num_stripes(self) -> int:
        """Each member begins one stripe's parity."""
        return self.members

    @property
    def num_chunks(self) -> int:
        """The chunks of one member's bytes."""
        return self.members - self.parities

    def data(self, stripe: int) -> tuple[Piece, ...]:
        """The stripe's data, heaviest weight first: the order in which a ring sums it up."""
        return tuple(
            Piece((stripe + self.parities + chunk) % self.members, Role.DATA, chunk)
            for chunk in range(self.num_chunks)
        )

    def parity(self, stripe: int) -> tuple[Piece, ...]:
        """Who keeps the stripe's parity."""
        kept = (Piece(stripe, Role.PLAIN), Piece((stripe + 1) % self.members, Role.WEIGHTED))
        return kept[: self.parities]

    def stripe_of(self, member: int, chunk: int) -> int:
        """The stripe that a chunk of a member belongs to."""
        return (member - self.parities - chunk) % self.members

    def weight(self, piece: Piece) -> int:
        """What a piece of data is multiplied with in the weighted parity."""
        return power_of_two(self.num_chunks - 1 - piece.chunk)


def layout_for(members: int, parities: int, largest_bytes: int, *, align_bytes: int = 4096) -> Layout:
    """The layout of a group whose largest member has so many bytes; chunks are multiples of `align_bytes`."""
    chunks = -(-largest_bytes // (members - parities))
    return Layout(members=members, parities=parities, chunk_bytes=-(-chunks // align_bytes) * align_bytes)


def recover(layout: Layout, stripe: int, lost: Collection[int]) -> dict[Piece, tuple[Term, ...]]:
    """For each piece of the stripe that went with the `lost` members, the sum that gives it back.

    Sums speak of surviving pieces only. Raises `ValueError` if more members are lost than there are parities.
    """
    if len(set(lost)) > layout.parities:
        raise ValueError(f"{len(set(lost))} members are lost, and the group survives {layout.parities}")
    data = layout.data(stripe)
    sums = _recover_data(layout, stripe, lost)
    for parity in layout.parity(stripe):
        if parity.member in lost:
            sums[parity] = _substituted(_encoding(layout, data, parity), sums)
    return sums


def _encoding(layout: Layout, data: tuple[Piece, ...], parity: Piece) -> tuple[Term, ...]:
    if parity.role is Role.PLAIN:
        return tuple(Term(piece, 1) for piece in data)
    return tuple(Term(piece, layout.weight(piece)) for piece in data)


def _recover_data(layout: Layout, stripe: int, lost: Collection[int]) -> dict[Piece, tuple[Term, ...]]:
    """Lost data as sums of what is left, by whichever parities are left."""
    data, parities = layout.data(stripe), layout.parity(stripe)
    missing = [piece for piece in data if piece.member in lost]
    if not missing:
        return {}
    present = [piece for piece in data if piece.member not in lost]
    plain = (Term(parities[0], 1), *(Term(piece, 1) for piece in present))
    if len(missing) == 1 and parities[0].member not in lost:
        return {missing[0]: plain}
    weighted = (Term(parities[1], 1), *(Term(piece, layout.weight(piece)) for piece in present))
    first, last = missing[0], missing[-1]
    if len(missing) == 1:
        return {first: _scaled(weighted, inverse(layout.weight(first)))}
    shared = inverse(layout.weight(first) ^ layout.weight(last))
    first_sum = _added(_scaled(weighted, shared), _scaled(plain, multiply(shared, layout.weight(last))))
    return {first: first_sum, last: _added(plain, first_sum)}


def _scaled(terms: tuple[Term, ...], factor: int) -> tuple[Term, ...]:
    return tuple(Term(term.piece, multiply(term.factor, factor)) for term in terms)


def _added(left: tuple[Term, ...], right: tuple[Term, ...]) -> tuple[Term, ...]:
    factors: dict[Piece, int] = {}
    for term in (*left, *right):
        factors[term.piece] = factors.get(term.piece, 0) ^ term.factor
    return tuple(Term(piece, factor) for piece, factor in factors.items() if factor)


def _substituted(terms: tuple[Term, ...], sums: dict[Piece, tuple[Term, ...]]) -> tuple[Term, ...]:
    """The same sum, with every lost piece replaced by what gives it back."""
    result: tuple[Term, ...] = ()
    for term in terms:
        result = _added(result, _scaled(sums.get(term.piece, (Term(term.piece, 1),)), term.factor))
    return result


Group = tuple[int, ...]
"""Ranks, in the order in which the group's pieces are laid out."""


def choose_groups(domains: Sequence[str], members: int, *, smallest: int = 2) -> tuple[Group, ...]:
    """Groups of about `members` ranks; `domains[rank]` is what fails together with that rank.

    Groups are as equal as they can be and never larger than asked for; where a domain holds many ranks they
    are smaller, because each of its ranks needs a group of its own. `UsageError` if one would fall below
    `smallest`.
    """
    if members == 1:
        return tuple((rank,) for rank in range(len(domains)))
    crowds = Counter(domains)
    num_groups = max(-(-len(domains) // members), max(crowds.values(), default=0))
    by_domain = sorted(range(len(domains)), key=lambda rank: (-crowds[domains[rank]], domains[rank], rank))
    # Dealt out in order of domains, the ranks of one domain are neighbours and so fall into different groups.
    groups = tuple(tuple(sorted(by_domain[first::num_groups])) for first in range(num_groups))
    if min((len(group) for group in groups), default=smallest) < smallest:
        crowd, num_ranks = crowds.most_common(1)[0]
        raise UsageError(
            f"{len(domains)} ranks in {len(crowds)} failure domains ({num_ranks} of them in {crowd!r}) "
            f"cannot make groups of {smallest} or more without two members in one domain",
            fix="Use more hosts, a smaller group, or name finer failure domains (failure_domain=).",
        )
    return groups
