"""Groups of ranks that protect each other, the places of parity, and how to recompute what a step has lost.

Ranks form groups in which no two members share a failure domain. Each member's bytes are dealt out in blocks
to chunks, one chunk for each stripe in which the member has no parity, so that all members do the same work
and keep equal shares:

    4 members, 1 parity     member 0   1   2   3        P: plain parity of the stripe
               stripe 0            P   a   b   c
               stripe 1            c   P   a   b        with 2 parities, the next member has
               stripe 2            b   c   P   a        the weighted one
               stripe 3            a   b   c   P

Each member has exactly one piece of each stripe, so a piece is named by its member. Arithmetic is in GF(2^8),
the field of RAID 6: bytes are polynomials modulo x^8 + x^4 + x^3 + x^2 + 1, addition is XOR, and the powers
of 2 are all elements but zero.

The record of a group is in the cache of every member, so it survives whatever the group survives. Rank 0
assesses a step from what each node lists. The job that restores may have a different number of ranks from the
job that saved: each rank that saved has a share (its files, and what it keeps for its group) on some node.
Everything is pure, except that `add`, `double_and_add` and `add_scaled` change their first buffer.
Invariants: every piece can be recovered unless its group lost more members than it has parities; a record has
the names, sizes and checksums of all files that a rebuild must produce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.commit.protocol import StoredRecord
from penstock.checkpoint.levels.options import Scheme
from penstock.errors import UsageError, name_some

MODULUS: Final = 0x11D
CACHED_BYTES: Final = 64 << 10
"""The block size for doubling, which takes several passes: smaller blocks cost calls, larger ones leave the
L1 cache.
"""


@cache
def _powers() -> tuple[list[int], list[int]]:
    """Return the powers of 2 from 0 to 509, which repeat after 255, and each element's logarithm."""
    powers, logarithms, element = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = element
        logarithms[element] = exponent
        element = element << 1 ^ (MODULUS if element & 0x80 else 0)
    return powers, logarithms


def multiply(left: int, right: int) -> int:
    """Return the product of two elements of the field."""
    powers, logarithms = _powers()
    return powers[logarithms[left] + logarithms[right]] if left and right else 0


def inverse(element: int) -> int:
    """Return the element whose product with `element`, which must not be 0, is 1."""
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
    """Add `factor` times `piece` to `total`, with a table that multiplies two bytes at a time."""
    if factor == 1:
        add(total, piece)
        return
    sums = np.frombuffer(total, np.uint16)
    np.bitwise_xor(sums, _multiples(factor)[np.frombuffer(piece, np.uint16)], out=sums)


@cache
def _multiples(factor: int) -> NDArray[np.uint16]:
    """Return a table of the products of `factor` with every pair of bytes; its 128 KiB fit the L2 cache."""
    single = np.array([multiply(factor, element) for element in range(256)], np.uint16)
    return np.asarray(single[np.newaxis, :] | single[:, np.newaxis] << 8).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The positions of a group's pieces. Without `parities`, each member keeps the previous member's bytes.

    With parity, there are as many stripes as members: each member has the plain parity of one. A member's
    bytes form `num_chunks` chunks of `chunk_bytes`. Blocks of `block_bytes` go to the chunks round-robin, so
    that parity can be computed while they are written.
    """

    members: int
    parities: int
    chunk_bytes: int
    block_bytes: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks into which the bytes of one member are divided."""
        return self.members - self.parities if self.parities else 1

    def blocks(self, total_bytes: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield the start and length of each block of a chunk, or of `total_bytes`."""
        total_bytes = self.chunk_bytes if total_bytes is None else total_bytes
        for start in range(0, total_bytes, self.block_bytes):
            yield start, min(self.block_bytes, total_bytes - start)

    def stripe_of(self, member: int, chunk: int) -> int:
        """Return the stripe to which a chunk of a member belongs."""
        return (member - self.parities - chunk) % self.members

    def kept_stripes(self, member: int) -> list[int]:
        """Return the stripes whose parity a member keeps: first the plain, then the weighted one."""
        return [member, (member - 1) % self.members][: self.parities]

    def locate(self, member: int, stripe: int, start: int, length: int) -> tuple[bool, int]:
        """Return whether a member keeps its piece of a stripe for others, and the offset of a block of it.

        The offset is in what the member keeps for others or, if the piece is its own, in its own bytes.
        """
        offset = (member - stripe) % self.members
        if offset < self.parities:
            return True, self.parities * start + offset * length
        return False, start * self.num_chunks + (offset - self.parities) * length

    def equations(self, stripe: int) -> list[list[int]]:
        """Return a stripe's equations, one for each parity: factors with which the pieces add up to zero.

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
        """Return each surviving member's factor in the sum that gives the piece of the lost `member`.

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
    """Return the layout for members of up to `largest_bytes`; blocks have about `block_bytes` at most."""
    chunk_bytes = -(-largest_bytes // (members - parities if parities else 1))
    rows = -(-chunk_bytes // block_bytes)
    block = -(-chunk_bytes // max(rows, 1) // ALIGN_BYTES) * ALIGN_BYTES if rows else ALIGN_BYTES
    return Layout(members=members, parities=parities, chunk_bytes=rows * block, block_bytes=block)


Group = tuple[int, ...]
"""The ranks of a group, in the order of its members."""


def choose_groups(domains: Sequence[str], members: int, *, smallest: int = 2) -> tuple[Group, ...]:
    """Return groups of about `members` ranks. Ranks with equal `domains` fail together.

    Groups have nearly equal sizes, never larger than requested. They are smaller if a domain has many ranks,
    because each of its ranks needs a different group. Raises `UsageError` if a group would have fewer than
    `smallest` members, unless `members` is 1.
    """
    if members == 1:
        return tuple((rank,) for rank in range(len(domains)))
    crowds = Counter(domains)
    num_groups = max(-(-len(domains) // members), max(crowds.values(), default=0))
    by_domain = sorted(range(len(domains)), key=lambda rank: (-crowds[domains[rank]], domains[rank], rank))
    # Sorting by domain puts the ranks of a domain next to each other, and dealing them out puts adjacent
    # ranks into different groups. With the domains a a b c and two groups, ranks 0 and 2 form one, and 1 and
    # 3 the other.
    groups = tuple(tuple(sorted(by_domain[first::num_groups])) for first in range(num_groups))
    if min((len(group) for group in groups), default=smallest) < smallest:
        crowd, num_ranks = crowds.most_common(1)[0]
        raise UsageError(
            f"{len(domains)} ranks in {len(crowds)} failure domains ({num_ranks} of them in {crowd!r}) "
            f"cannot form groups of {smallest} or more without two members in one domain",
            fix="Use more hosts, a smaller group, or smaller failure domains (failure_domain=).",
        )
    return groups


def fit_scheme(wanted: Scheme, domains: Sequence[str]) -> tuple[Scheme, tuple[Group, ...], str]:
    """Return the chosen scheme if it fits the ranks' failure domains; otherwise the best substitute.

    Also returns the scheme's groups and, for a substitute, the reason and which losses it survives. If
    nothing fits, raises `UsageError` with the reason why the chosen scheme does not.
    """
    misfit: UsageError | None = None
    for scheme in (wanted, *wanted.substitutes()):
        try:
            groups = choose_groups(domains, scheme.group, smallest=min(scheme.losses + 1, scheme.group))
        except UsageError as error:
            misfit = misfit or error
            continue
        if scheme is wanted:
            return scheme, groups, ""
        instead = "a single copy, which survives the loss of no host"
        if scheme.losses:
            sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
            instead = f"{scheme.name} in groups of {sizes}, each of which survives {scheme.losses} lost"
        names = sorted(set(domains))
        shortfall = (
            f"{wanted} does not fit the failure domains of this job, {len(names)} with {len(domains)} ranks "
            f"({name_some(names)}): new checkpoints are protected by {instead}; older ones as they were "
            "saved. Use more hosts, or name smaller domains (failure_domain=); strict=True refuses to start "
            "instead"
        )
        return scheme, groups, shortfall
    assert misfit is not None, "a scheme that was tried and did not fit has said why"
    raise UsageError(misfit.what, where=f"{wanted}, strict=True", fix=misfit.fix) from misfit


class RecordedFile(StoredRecord):
    """A file: its name within the step's folder, its size, and the XXH3-128 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sum: str


Order = tuple[tuple[int, int], ...]
"""The order in which parity sees the bytes of a member's files, several of which are written at a time.

Each pair is the number of a file and how many of its next bytes follow: ((0, 4), (1, 4), (0, 2)) is four
bytes of the first file, four of the second, and two more of the first. If empty, the files follow each other.
"""


class GroupMember(StoredRecord):
    """One rank and the files that it wrote."""

    rank: int
    domain: str
    files: tuple[RecordedFile, ...]
    order: Order = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class GroupRecord(StoredRecord):
    """The protection of one group in one step. Stored as JSON."""

    format: Literal[3] = 3
    step: str
    save_id: str
    """The save that wrote this record: a step may be saved twice, and a node may miss the second save."""
    domains: tuple[str, ...]
    """The failure domains of all ranks of the job that saved, in rank order."""
    scheme: str
    losses: int
    chunk_bytes: int
    block_bytes: int
    members: tuple[GroupMember, ...]
    kept: tuple[RecordedFile, ...]
    """What each member keeps for the others: parity, or a copy of the previous member's files."""

    @property
    def layout(self) -> Layout:
        """The positions of the pieces of parity, or of the copies."""
        is_copied = self.scheme == "partner"
        return Layout(
            members=len(self.members),
            parities=0 if is_copied else self.losses,
            chunk_bytes=max(member.size_bytes for member in self.members) if is_copied else self.chunk_bytes,
            block_bytes=self.block_bytes,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)

    def stored_files(self, place: int) -> tuple[RecordedFile, ...]:
        """Return the files that a member wrote, and then what it keeps for the others."""
        return (*self.members[place].files, *self.kept[place : place + 1])


def list_members(
    records: Mapping[int, GroupRecord], ranks: Collection[int] | None = None
) -> Iterator[tuple[GroupRecord, int]]:
    """Yield, for each of `ranks` (None: all), its group's record and place there; same order on all ranks."""
    for _, record in sorted(records.items()):
        for place, rank in enumerate(record.ranks):
            if ranks is None or rank in ranks:
                yield record, place


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShares:
    """The part of a step that one node's cache has; `sizes` is empty if it has not committed a share.

    `records` come without their `domains`, which are long and the same in all of them: they are here once.
    """

    ranks: tuple[int, ...]
    """The ranks of this job that use the cache; the lowest acts for it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """The records by the number of their group."""
    domains: tuple[str, ...] = ()
    room_bytes: int = 0
    """The number of bytes that still fit into the cache."""
    unread: str = ""
    """The reason why the cache could not be read; empty if it could."""

    @property
    def save_id(self) -> str:
        """The save of the step that this node has; empty if it has none."""
        return next((record.save_id for record in self.records.values()), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The state of a step in all caches. `lost` has the ranks that saved and whose shares no node has."""

    records: Mapping[int, GroupRecord] = field(default_factory=dict)
    """The records by the number of their group, without `domains`."""
    domains: tuple[str, ...] = ()
    save_id: str = ""
    shares: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The ranks whose saved shares are on each node, by the lowest rank that uses the node now."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """For each rank that saved, the rank that has its share now, or will receive it if it is lost."""
    homes: Mapping[int, int] = field(default_factory=dict)
    """For each rank that saved, the rank that needs its share now, and on whose node it should be."""
    lost: tuple[int, ...] = ()
    moved: Mapping[int, int] = field(default_factory=dict)
    """For each lost rank whose cache is too full for its share, the rank of another node that receives it."""
    reason: str = ""
    """The reason why the step cannot be restored from caches; empty if it can."""
    unread: str = ""
    """The storage failure of a cache, if that is the reason: the step may then be intact. Otherwise empty."""

    @property
    def is_rebuildable(self) -> bool:
        """True if shares are lost, and all of them can be computed from the rest."""
        return bool(self.lost) and not self.reason

    def files_of(self, rank: int) -> tuple[RecordedFile, ...]:
        """Return the files that a rank wrote, and what it keeps for its group."""
        return next((record.stored_files(place) for record, place in list_members(self.records, [rank])), ())


def assess(nodes: Sequence[NodeShares], *, damaged: Collection[int] = ()) -> Assessment:
    """Assess one step from what all nodes have; the files of `damaged` ranks count as lost.

    If nodes have different saves of the step, one that can be restored is preferred, then the one with the
    fewest lost shares.
    """
    save_ids = sorted({node.save_id for node in nodes} - {""})
    found = [_assess_save(save_id, nodes, damaged) for save_id in save_ids]
    found = found or [Assessment(reason="no cache has it")]
    best = min(found, key=lambda result: (bool(result.reason), len(result.lost), -len(result.records)))
    unread = next((node.unread for node in nodes if node.unread), "") if best.reason else ""
    return replace(best, reason=best.reason + (f"; {unread}" if unread else ""), unread=unread)


def find_complete_shares(node: NodeShares, records: Mapping[int, GroupRecord]) -> frozenset[int]:
    """Return the ranks whose files and parity are all in this cache, judging by names and sizes."""
    return frozenset(
        record.ranks[place]
        for record, place in list_members(records)
        if all(node.sizes.get(file.name) == file.size_bytes for file in record.stored_files(place))
    )


def choose_home_rank(rank: int, num_saved: int, num_present: int) -> int:
    """Return the rank that now needs what `rank` saved.

    It is the same rank or, if the number of ranks has changed, the one at the proportional position.
    """
    return rank if num_saved == num_present else rank * num_present // num_saved


def _assess_save(save_id: str, nodes: Sequence[NodeShares], damaged: Collection[int]) -> Assessment:
    having = [node for node in nodes if node.save_id == save_id]
    records = {number: record for node in having for number, record in node.records.items()}
    domains = having[0].domains
    complete = {node.ranks: find_complete_shares(node, records) for node in having}
    num_present = sum(len(node.ranks) for node in nodes)
    homes = {rank: choose_home_rank(rank, len(domains), num_present) for rank in range(len(domains))}
    holders, lost = dict(homes), []
    for rank, home in homes.items():
        here = [ranks for ranks, found in complete.items() if rank in found]
        if here:
            # A damaged share is rebuilt where it was read; otherwise its node would continue to read the
            # damaged one.
            at = next((ranks for ranks in here if home in ranks), here[0])
            holders[rank] = home if home in at else at[rank % len(at)]
        if not here or rank in damaged:
            lost.append(rank)
    found = Assessment(
        records=records,
        domains=domains,
        save_id=save_id,
        shares={ranks[0]: shares - set(damaged) for ranks, shares in complete.items()},
        holders=holders,
        homes=homes,
        lost=tuple(lost),
        reason=_explain_loss(records, domains, lost),
    )
    moved = _find_room(found, nodes)
    return replace(found, holders=holders | moved, moved=moved)


def _find_room(found: Assessment, nodes: Sequence[NodeShares]) -> dict[int, int]:
    """Return, for each lost share that its own cache cannot hold, the rank of the node with the most room."""
    node_of = {rank: node.ranks for node in nodes for rank in node.ranks}
    left = {node.ranks: node.room_bytes for node in nodes}
    moved = {}
    for rank in found.lost:
        size_bytes = sum(file.size_bytes for file in found.files_of(rank))
        home, widest = node_of[found.holders[rank]], max(left, key=left.__getitem__)
        if left[home] < size_bytes <= left[widest]:
            moved[rank] = widest[rank % len(widest)]
            home = widest
        left[home] -= size_bytes
    return moved


def _explain_loss(records: Mapping[int, GroupRecord], domains: Sequence[str], lost: Collection[int]) -> str:
    known = {rank for record in records.values() for rank in record.ranks}
    if unknown := [rank for rank in lost if rank not in known]:
        return (
            f"no record of the share of rank {unknown[0]} is left; the cache of {domains[unknown[0]]} is lost"
        )
    for record in records.values():
        missing = [place for place, rank in enumerate(record.ranks) if rank in lost]
        # Each member keeps a copy of the previous one, so copies survive any loss except that of two adjacent
        # members.
        neighbours = any((place + 1) % len(record.members) in missing for place in missing)
        if len(missing) > record.losses and (record.scheme != "partner" or neighbours):
            members = [record.members[place] for place in missing]
            domains = list(dict.fromkeys(member.domain for member in members))
            files = [file.name for member in members for file in member.files]
            return (
                f"ranks {name_some([str(member.rank) for member in members])} of one group lost their files "
                f"({name_some(files)}; saved on {name_some(domains)}), and {record.scheme} survives "
                f"{record.losses or 'no'} {'loss' if record.losses < 2 else 'losses'}"
            )
    return ""
