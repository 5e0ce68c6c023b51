"""Who protects whom, where each piece of parity is, and which sum of other pieces restores a lost one.

Ranks form groups of which no two members share a failure domain. Each member's bytes are dealt in blocks to
chunks, one for each stripe in which it has no parity, so that all members do the same work and keep the same
share:

    4 members, 1 parity     member 0   1   2   3        P: plain parity of the stripe
               stripe 0            P   a   b   c
               stripe 1            c   P   a   b        with 2 parities, the next member has
               stripe 2            b   c   P   a        the weighted one
               stripe 3            a   b   c   P

Each member has exactly one piece of each stripe, so a piece is named by its member. Arithmetic is in GF(2^8),
the field of RAID 6: bytes are polynomials modulo x^8 + x^4 + x^3 + x^2 + 1, adding is XOR, and 2 generates
all elements but zero. Everything is pure, but `add`, `double_and_add` and `add_scaled`, which change their
first buffer. Invariant: every piece can be recovered unless its group lost more members than it has parities.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.levels.options import Scheme
from penstock.errors import UsageError, name_some

MODULUS: Final = 0x11D
CACHED_BYTES: Final = 64 << 10
"""Doubling takes several passes over a block: smaller ones cost calls, larger ones leave the L1 cache."""


@cache
def _powers() -> tuple[list[int], list[int]]:
    """2 to the powers 0 to 509, which repeat after 255, and the logarithm of each element to the base 2."""
    powers, logarithms, element = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = element
        logarithms[element] = exponent
        element = element << 1 ^ (MODULUS if element & 0x80 else 0)
    return powers, logarithms


def multiply(left: int, right: int) -> int:
    """The product of two elements."""
    powers, logarithms = _powers()
    return powers[logarithms[left] + logarithms[right]] if left and right else 0


def inverse(element: int) -> int:
    """The element whose product with `element` is 1."""
    if element == 0:
        raise ZeroDivisionError("zero has no inverse in a field")
    powers, logarithms = _powers()
    return powers[255 - logarithms[element]]


def add(total: memoryview, piece: memoryview) -> None:
    """Add `piece` to `total`."""
    sums = np.frombuffer(total, np.uint8)
    np.bitwise_xor(sums, np.frombuffer(piece, np.uint8), out=sums)


def double_and_add(weighted: memoryview, piece: memoryview) -> None:
    """Double `weighted`, then add `piece`: one step of Horner's rule, several times as fast as a table."""
    sums, added = np.frombuffer(weighted, np.uint8), np.frombuffer(piece, np.uint8)
    for start in range(0, sums.size, CACHED_BYTES):
        block = sums[start : start + CACHED_BYTES]
        # The top bit, which doubling shifts out, is the sign of the same byte as int8.
        carries = (block.view(np.int8) < 0).view(np.uint8) * np.uint8(MODULUS & 0xFF)
        np.add(block, block, out=block)
        np.bitwise_xor(block, carries, out=block)
        np.bitwise_xor(block, added[start : start + CACHED_BYTES], out=block)


def add_scaled(total: memoryview, piece: memoryview, factor: int) -> None:
    """Add `factor` times `piece` to `total`, by a table that multiplies two bytes at a time."""
    if factor == 1:
        add(total, piece)
        return
    sums = np.frombuffer(total, np.uint16)
    np.bitwise_xor(sums, _multiples(factor)[np.frombuffer(piece, np.uint16)], out=sums)


@cache
def _multiples(factor: int) -> NDArray[np.uint16]:
    """The product with `factor` of every pair of bytes: 128 KiB, which stay in the L2 cache."""
    single = np.array([multiply(factor, element) for element in range(256)], np.uint16)
    return np.asarray(single[np.newaxis, :] | single[:, np.newaxis] << 8).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the pieces of a group are; without `parities`, each member keeps a copy of the one before.

    With parity there are as many stripes as members: each member has the plain parity of one. A member's
    bytes are `num_chunks` chunks of `chunk_bytes`, of which blocks of `block_bytes` take turns, so that they
    can be summed as they are written. Penstock 0.1 had contiguous chunks: not `interleaved`.
    """

    members: int
    parities: int
    chunk_bytes: int
    block_bytes: int
    interleaved: bool = True

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the bytes of one member are cut."""
        return self.members - self.parities if self.parities else 1

    def blocks(self, total_bytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Start and length of each block of a chunk, or of `total_bytes`."""
        total_bytes = self.chunk_bytes if total_bytes is None else total_bytes
        for start in range(0, total_bytes, self.block_bytes):
            yield start, min(self.block_bytes, total_bytes - start)

    def position(self, chunk: int, start: int, length: int) -> int:
        """The place, among the bytes of its member, of the block of `length` bytes at `start` of a chunk."""
        return (
            start * self.num_chunks + chunk * length if self.interleaved else chunk * self.chunk_bytes + start
        )

    def stripe_of(self, member: int, chunk: int) -> int:
        """The stripe that a chunk of a member belongs to."""
        return (member - self.parities - chunk) % self.members

    def kept_stripes(self, member: int) -> list[int]:
        """The stripes whose parity a member keeps: the plain one, then the weighted one."""
        return [member, (member - 1) % self.members][: self.parities]

    def locate(self, member: int, stripe: int, start: int, length: int) -> tuple[bool, int]:
        """Whether a member keeps its piece of a stripe for others, and the place of a block there."""
        offset = (member - stripe) % self.members
        if offset < self.parities:
            return True, self.parities * start + offset * length
        return False, self.position(offset - self.parities, start, length)

    def equations(self, stripe: int) -> list[list[int]]:
        """Factors of the members' pieces whose weighted sum is zero: one equation for each parity.

        Plain parity: P + a + b + c = 0. Weighted parity: Q + 4a + 2b + c = 0.
        """
        plain, weighted = [1] * self.members, [0] * self.members
        for chunk in range(self.num_chunks):
            weighted[(stripe + self.parities + chunk) % self.members] = _powers()[0][
                self.num_chunks - 1 - chunk
            ]
        if self.parities == 2:
            plain[(stripe + 1) % self.members], weighted[(stripe + 1) % self.members] = 0, 1
        return [plain, weighted][: self.parities]

    def recover(self, stripe: int, lost: Collection[int], member: int) -> dict[int, int]:
        """The factors of surviving members' pieces whose sum is the piece that the lost `member` had.

        Raises `ValueError` if more members are lost than there are parities.
        """
        equations = self.equations(stripe)
        others = [each for each in set(lost) if each != member]
        if len(others) >= self.parities:
            raise ValueError(f"{len(others) + 1} members are lost, but the group survives {self.parities}")
        if others:
            # Two unknowns x and y: vx + wy = A and Vx + Wy = B, so that (vW + wV)x = WA + wB.
            (plain, weighted), other = equations, others[0]
            combined = [
                multiply(weighted[other], a) ^ multiply(plain[other], b)
                for a, b in zip(plain, weighted, strict=True)
            ]
        else:
            combined = next(equation for equation in equations if equation[member])
        scale = inverse(combined[member])
        return {
            each: multiply(scale, factor)
            for each, factor in enumerate(combined)
            if factor and each != member and each not in lost
        }


BLOCK_BYTES: Final = 2 << 20
ALIGN_BYTES: Final = 4096


def build_layout(
    members: int, parities: int, largest_bytes: int, *, block_bytes: int = BLOCK_BYTES
) -> Layout:
    """The layout for a largest member of `largest_bytes`, in equal blocks of at most about `block_bytes`."""
    chunk_bytes = -(-largest_bytes // (members - parities if parities else 1))
    rows = -(-chunk_bytes // block_bytes)
    block = -(-chunk_bytes // max(rows, 1) // ALIGN_BYTES) * ALIGN_BYTES if rows else ALIGN_BYTES
    return Layout(members=members, parities=parities, chunk_bytes=rows * block, block_bytes=block)


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
    # groups: of a a b c, with two groups, 0 and 2 get together, 1 and 3.
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
    """Why another scheme than the chosen one is used, and what it survives; empty if it is the chosen one."""


def fit_scheme(wanted: Scheme, domains: Sequence[str]) -> FittedScheme:
    """The chosen scheme if it fits the ranks' failure domains, else the best of its substitutes.

    Raises `UsageError` if nothing fits, for the chosen one.
    """
    misfit: UsageError | None = None
    for scheme in (wanted, *wanted.substitutes()):
        try:
            groups = choose_groups(domains, scheme.members, smallest=min(scheme.losses + 1, scheme.members))
        except UsageError as error:
            misfit = misfit or error
            continue
        if scheme is wanted:
            return FittedScheme(scheme=scheme, groups=groups)
        instead = "a single copy, which survives the loss of no host"
        if scheme.losses:
            sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
            instead = f"{scheme.name} in groups of {sizes}, of which each survives {scheme.losses} lost"
        names = sorted(set(domains))
        shortfall = (
            f"{wanted} does not fit the failure domains of this job, {len(names)} with {len(domains)} ranks "
            f"({name_some(names)}): new checkpoints are protected by {instead}; older ones as they were "
            "saved. Use more hosts, or name smaller domains (failure_domain=); strict=True refuses to start "
            "instead"
        )
        return FittedScheme(scheme=scheme, groups=groups, shortfall=shortfall)
    assert misfit is not None, "a scheme that was tried and did not fit has said why"
    raise UsageError(misfit.what, where=f"{wanted}, strict=True", fix=misfit.fix) from misfit
