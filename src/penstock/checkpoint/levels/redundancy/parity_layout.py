"""Who protects whom, and which piece of parity is where, the sum of what, and what restores a lost piece.

Ranks form groups of which no two members share a failure domain. Each member's bytes are dealt in blocks to
chunks, one for each stripe in which it has no parity, so that all members do the same work and keep the same
share:

    4 members, 1 parity     member 0   1   2   3        P: plain parity of the stripe
               stripe 0            P   a   b   c
               stripe 1            c   P   a   b        with 2 parities, the next member has
               stripe 2            b   c   P   a        the weighted one
               stripe 3            a   b   c   P

All is pure and linear: a piece is a weighted sum of others (`gf256`), so a lost one is, too. Invariant: every
piece can be recovered unless a stripe's group lost more members than it has parities.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.checkpoint.levels.options import Scheme
from penstock.checkpoint.levels.redundancy.gf256 import inverse, multiply, power_of_two
from penstock.errors import UsageError, name_some


class PieceRole(Enum):
    """What a member has in a stripe."""

    DATA = "data"
    PLAIN = "plain parity"
    WEIGHTED = "weighted parity"


@dataclass(frozen=True, slots=True)
class StripePiece:
    """A member's part of a stripe; for data, `chunk` is the number of its chunk."""

    member: int
    role: PieceRole
    chunk: int = 0


Sum = dict[StripePiece, int]
"""A weighted sum: the factor of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityLayout:
    """A group of `members` with `parities` (1 or 2) pieces of parity in each of its stripes.

    There are as many stripes as members: each member has the plain parity of one.
    """

    members: int
    parities: int
    chunk_bytes: int
    interleaved: bool = True
    """Whether the blocks of a member's chunks take turns, so that they can be summed as they are written."""

    def position(self, chunk: int, start: int, length: int) -> int:
        """Where the block of `length` bytes from `start` of a chunk is among the bytes of its member."""
        if self.interleaved:
            return start * self.num_chunks + chunk * length
        return chunk * self.chunk_bytes + start

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the bytes of one member are cut."""
        return self.members - self.parities

    def data(self, stripe: int) -> tuple[StripePiece, ...]:
        """The data of a stripe, the largest weight first: the order in which the ring sums it."""
        return tuple(
            StripePiece((stripe + self.parities + chunk) % self.members, PieceRole.DATA, chunk)
            for chunk in range(self.num_chunks)
        )

    def parity(self, stripe: int) -> tuple[StripePiece, ...]:
        """The parity of a stripe and who keeps it."""
        kept = (
            StripePiece(stripe, PieceRole.PLAIN),
            StripePiece((stripe + 1) % self.members, PieceRole.WEIGHTED),
        )
        return kept[: self.parities]

    def stripe_of(self, member: int, chunk: int) -> int:
        """The stripe that a chunk of a member belongs to."""
        return (member - self.parities - chunk) % self.members

    def weight(self, piece: StripePiece) -> int:
        """The factor of a piece of data in the weighted parity."""
        return power_of_two(self.num_chunks - 1 - piece.chunk)


def build_layout(members: int, parities: int, largest_bytes: int, *, align_bytes: int = 4096) -> ParityLayout:
    """The layout for a largest member of `largest_bytes`; chunks are multiples of `align_bytes`."""
    chunks = -(-largest_bytes // (members - parities))
    return ParityLayout(
        members=members, parities=parities, chunk_bytes=-(-chunks // align_bytes) * align_bytes
    )


def recover(layout: ParityLayout, stripe: int, lost: Collection[int]) -> dict[StripePiece, Sum]:
    """For each piece of the stripe that `lost` members had, the sum of surviving pieces that it equals.

    Raises `ValueError` if more members are lost than there are parities.
    """
    if len(set(lost)) > layout.parities:
        raise ValueError(f"{len(set(lost))} members are lost, but the group survives {layout.parities}")
    sums = _recover_data(layout, stripe, lost)
    for parity in layout.parity(stripe):
        if parity.member in lost:
            total: Sum = {}
            for piece in layout.data(stripe):
                factor = 1 if parity.role is PieceRole.PLAIN else layout.weight(piece)
                total = _add(total, sums.get(piece, {piece: 1}), factor)
            sums[parity] = total
    return sums


def _recover_data(layout: ParityLayout, stripe: int, lost: Collection[int]) -> dict[StripePiece, Sum]:
    """Lost data as sums of surviving pieces, by whichever parities survive.

    With both parities and two lost pieces x and y of weights v and w, the plain parity gives x + y, the
    weighted one vx + wy; adding w times the first to the second leaves (v + w)x.
    """
    data, parities = layout.data(stripe), layout.parity(stripe)
    missing = [piece for piece in data if piece.member in lost]
    if not missing:
        return {}
    present = [piece for piece in data if piece.member not in lost]
    plain = {parities[0]: 1, **dict.fromkeys(present, 1)}
    if len(missing) == 1 and parities[0].member not in lost:
        return {missing[0]: plain}
    weighted = {parities[1]: 1, **{piece: layout.weight(piece) for piece in present}}
    first, last = missing[0], missing[-1]
    if len(missing) == 1:
        return {first: _add({}, weighted, inverse(layout.weight(first)))}
    shared = inverse(layout.weight(first) ^ layout.weight(last))
    first_sum = _add(_add({}, weighted, shared), plain, multiply(shared, layout.weight(last)))
    return {first: first_sum, last: _add(plain, first_sum)}


def _add(left: Sum, right: Sum, factor: int = 1) -> Sum:
    """`left` plus `factor` times `right`, without pieces that cancel out."""
    factors = dict(left)
    for piece, own_factor in right.items():
        factors[piece] = factors.get(piece, 0) ^ multiply(own_factor, factor)
    return {piece: total for piece, total in factors.items() if total}


Group = tuple[int, ...]
"""Ranks, in the order of the group's members."""


def choose_groups(domains: Sequence[str], members: int, *, smallest: int = 2) -> tuple[Group, ...]:
    """Groups of about `members` ranks; `domains[rank]` is what fails together with that rank.

    Groups are as equal as possible and never larger than requested. If a domain has many ranks they are
    smaller, because each of its ranks needs a group of its own. Raises `UsageError` if one would have fewer
    members than `smallest`.
    """
    if members == 1:
        return tuple((rank,) for rank in range(len(domains)))
    crowds = Counter(domains)
    num_groups = max(-(-len(domains) // members), max(crowds.values(), default=0))
    by_domain = sorted(range(len(domains)), key=lambda rank: (-crowds[domains[rank]], domains[rank], rank))
    # Sorted by domain, the ranks of one domain are neighbours, and dealing out puts neighbours into different
    # groups.
    groups = tuple(tuple(sorted(by_domain[first::num_groups])) for first in range(num_groups))
    if min((len(group) for group in groups), default=smallest) < smallest:
        crowd, num_ranks = crowds.most_common(1)[0]
        raise UsageError(
            f"{len(domains)} ranks in {len(crowds)} failure domains ({num_ranks} of them in {crowd!r}) "
            f"cannot form groups of {smallest} or more without two members in one domain",
            fix="Use more hosts, a smaller group, or smaller failure domains (failure_domain=).",
        )
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedScheme:
    """The scheme that protects a job's checkpoints, and its groups."""

    scheme: Scheme
    groups: tuple[Group, ...]
    shortfall: str = ""
    """Why it is not the one that was chosen, and what it survives; empty if it is."""


def fit_scheme(wanted: Scheme, domains: Sequence[str]) -> FittedScheme:
    """The scheme that was chosen if it fits the ranks' domains, else the best of its substitutes.

    Raises `UsageError` if nothing fits: without substitutes, the chosen one.
    """
    misfit: UsageError | None = None
    for scheme in (wanted, *wanted.substitutes()):
        try:
            groups = choose_groups(domains, scheme.members, smallest=min(scheme.losses + 1, scheme.members))
        except UsageError as error:
            misfit = misfit or error
            continue
        shortfall = "" if scheme is wanted else _explain_shortfall(wanted, scheme, domains, groups)
        return FittedScheme(scheme=scheme, groups=groups, shortfall=shortfall)
    assert misfit is not None, "a scheme that was tried and did not fit has said why"
    raise UsageError(misfit.what, where=f"{wanted}, strict=True", fix=misfit.fix) from misfit


def _explain_shortfall(wanted: Scheme, used: Scheme, domains: Sequence[str], groups: Sequence[Group]) -> str:
    names = sorted(set(domains))
    instead = "a single copy, which survives the loss of no host"
    if used.losses:
        sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
        instead = f"{used.name} in groups of {sizes}, of which each survives {used.losses} lost"
    return (
        f"{wanted} does not fit the failure domains of this job, {len(names)} with {len(domains)} ranks "
        f"({name_some(names)}): new checkpoints are protected by {instead}; older ones as they were saved. "
        "Use more hosts, or name smaller domains (failure_domain=); strict=True refuses to start instead"
    )
