"""Plans which rank reads which bytes of a checkpoint, and to which ranks it sends them.

In `agree_on_load`, rank 0 plans for all ranks with `plan_load` and divides the plan with `divide_plan`; each
rank finds in its part, with `plan_rank_load`, what it does. These three are pure. Bytes that several ranks
want are read by one of them and sent to the others. Invariant: every wanted element has exactly one reader,
which can open the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from penstock.checkpoint.state.regions import (
    Bools,
    Ints,
    RankSets,
    Regions,
    StoredRegions,
    TensorFacts,
    distinct,
    divide_among_ranks,
    expand_ranges,
    find_overlaps,
    find_rank_sets,
    group_equal_rows,
    region_table,
    split_large,
)
from penstock.cluster.comm import Comm, divide_on_rank0
from penstock.errors import DataDamaged, PenstockError


class UnreadableFile(PenstockError):
    """No rank can open a wanted file; `file` is its number in the checkpoint."""

    file: int


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The intersections of wanted regions with units; sorted by unit."""

    want: Ints
    unit: Ints
    regions: Regions


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The ranks that want each of the distinct wanted regions, and the row of each rank; sorted by region."""

    want: Ints
    rank: Ints
    row: Ints


@dataclass(frozen=True, slots=True, eq=False)
class SharedLoadPlan:
    """The plan of all ranks. A unit is a contiguous part of one item's payload; a rank reads a share of it.

    Shares are in the order of files and of positions in them.
    """

    share_unit: Ints
    share_row: Ints
    """The row of the stored regions that a share is of."""
    share_regions: Regions
    share_rank: Ints
    share_round: Ints
    pieces: Pieces
    requests: Requests

    @property
    def may_exchange(self) -> bool:
        """True if several ranks may want the same bytes."""
        want, unit = self.requests.want, self.pieces.unit
        return bool((want[1:] == want[:-1]).any() or (unit[1:] == unit[:-1]).any())


def missing_elements(stored: Regions, wanted: Regions) -> Ints:
    """Count the elements of each wanted region that are not stored; negative if some are stored twice."""
    overlaps = find_overlaps(wanted, stored)
    stored_elements = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(stored_elements, overlaps.left, overlaps.regions.num_elements)
    return wanted.num_elements - stored_elements


def uncovered(facts: TensorFacts, regions: Regions, row: int, missing: int, where: str) -> DataDamaged:
    """The error for a wanted region whose elements are not all stored exactly once."""
    offsets, sizes = regions.region(row, len(facts.shape))
    return DataDamaged(
        f"{abs(missing)} elements of {facts.name!r} at {list(offsets)} of {list(sizes)} are"
        f" {'in no piece' if missing > 0 else 'in several pieces'} of the checkpoint",
        where=where,
        fix="Load an older checkpoint; this one was saved incompletely.",
    )


def plan_load(
    stored: StoredRegions,
    element_bytes: Ints,
    wanted: Sequence[Regions],
    options: LoadOptions,
    *,
    readable: Bools | None = None,
) -> SharedLoadPlan:
    """Decide which rank reads which bytes; `wanted` is by rank, in the checkpoint's tensor numbers.

    `element_bytes` is by tensor number. `readable` says which rank (row) can open which file (column);
    without it, all can open all. Elements that are not stored are ignored here, see `missing_elements`.
    """
    all_wanted = Regions.concatenated(wanted)
    ranks = np.repeat(np.arange(len(wanted)), [len(regions) for regions in wanted])
    rows = np.concatenate([np.arange(len(regions)) for regions in wanted])
    groups = group_equal_rows(region_table(all_wanted))
    order = np.argsort(groups.number, kind="stable")
    requests = Requests(groups.number[order], ranks[order], rows[order])

    overlaps = find_overlaps(all_wanted.take(groups.first), stored.regions)
    source, regions = _without_wide_gaps(
        overlaps.regions, stored.regions.take(overlaps.right), element_bytes, options.min_gap_bytes
    )
    want, row = overlaps.left[source], overlaps.right[source]
    # A region that is not contiguous in its item is read as the one range around it, small gaps included.
    hulls = _hulls(regions, stored.regions.take(row))
    units = group_equal_rows(np.concatenate([row[:, None], region_table(hulls)], axis=1))
    by_unit = np.argsort(units.number, kind="stable")
    pieces = Pieces(want[by_unit], units.number[by_unit], regions.take(by_unit))
    unit_row, unit_regions = row[units.first], hulls.take(units.first)

    sets = _reader_sets(pieces, requests, stored.file[unit_row], readable, len(units))
    total = int(unit_regions.num_bytes(element_bytes).sum())
    shares = divide_among_ranks(
        unit_regions,
        element_bytes,
        sets,
        len(wanted),
        min_cut_bytes=_min_cut_bytes(total, len(wanted), options),
    )
    round_bytes = _round_bytes(sets, options)
    # No read is larger than a round, or the ranks that want it could not bound what they receive in it.
    part, parts = split_large(shares.regions, element_bytes, round_bytes)
    share_unit = shares.source[part]
    share_row = unit_row[share_unit]
    start = payload_starts(parts, stored.regions.take(share_row))
    # Front to back through each file: neighbouring reads are joined, and rounds follow the order of reading.
    in_file = np.lexsort((start, stored.item_offset[share_row], stored.file[share_row]))
    share_rank, share_regions = shares.rank[part][in_file], parts.take(in_file)
    return SharedLoadPlan(
        share_unit=share_unit[in_file],
        share_row=share_row[in_file],
        share_regions=share_regions,
        share_rank=share_rank,
        share_round=_rounds(share_rank, share_regions.num_bytes(element_bytes), round_bytes),
        pieces=pieces,
        requests=requests,
    )


def divide_plan(shared: SharedLoadPlan, num_ranks: int) -> list[SharedLoadPlan]:
    """Divide the plan by rank: each gets the units that it reads or wants a piece of.

    Numbers and orders stay. Ranks that take part in the same units get the same object.
    """
    pieces, requests = shared.pieces, shared.requests
    by_want = np.argsort(pieces.want, kind="stable")
    begin, count = _ranges(pieces.want[by_want], requests.want)
    request, place = expand_ranges(begin, count)
    # One number for each pair of rank and unit: sorting pairs takes three times as long.
    num_units = int(pieces.unit.max(initial=0)) + 1
    reading = shared.share_rank * num_units + shared.share_unit
    wanting = requests.rank[request] * num_units + pieces.unit[by_want[place]]
    pairs = distinct(np.concatenate([reading, wanting]))
    ends = np.searchsorted(pairs, np.arange(num_ranks + 1) * num_units)
    by_unit = np.argsort(shared.share_unit, kind="stable")
    sorted_unit = shared.share_unit[by_unit]
    known: dict[bytes, SharedLoadPlan] = {}
    parts = []
    for rank in range(num_ranks):
        units = pairs[ends[rank] : ends[rank + 1]] - rank * num_units
        key = units.tobytes()
        if key not in known:
            shares = np.sort(by_unit[expand_ranges(*_ranges(sorted_unit, units))[1]])
            rows = expand_ranges(*_ranges(pieces.unit, units))[1]
            wants = expand_ranges(*_ranges(requests.want, distinct(pieces.want[rows])))[1]
            known[key] = SharedLoadPlan(
                share_unit=shared.share_unit[shares],
                share_row=shared.share_row[shares],
                share_regions=shared.share_regions.take(shares),
                share_rank=shared.share_rank[shares],
                share_round=shared.share_round[shares],
                pieces=Pieces(pieces.want[rows], pieces.unit[rows], pieces.regions.take(rows)),
                requests=Requests(requests.want[wants], requests.rank[wants], requests.row[wants]),
            )
        parts.append(known[key])
    return parts


def _ranges(column: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Find where each value begins in an ascending column, and how often it occurs."""
    begin = np.searchsorted(column, values)
    return begin, np.searchsorted(column, values, side="right") - begin


def _min_cut_bytes(total: int, num_ranks: int, options: LoadOptions) -> int:
    """Items smaller than this are not cut, because a rank that reads a whole item verifies it at no cost.

    A sixteenth of a rank's fair share keeps the loads of ranks within about six percent of each other.
    """
    return max(options.min_cut_bytes, total // (16 * num_ranks))


def _round_bytes(sets: RankSets, options: LoadOptions) -> int:
    """The bytes that each rank reads for one round, so that what a rank receives in it fits its memory."""
    most = int(sets.size.max(initial=1))
    return min(max(options.exchange_bytes // most, options.message_bytes), options.exchange_bytes // 4)


def _rounds(rank: Ints, num_bytes: Ints, round_bytes: int) -> Ints:
    """The round of each share: how many times its rank has read `round_bytes` before it."""
    order = np.argsort(rank, kind="stable")
    begin = np.cumsum(num_bytes[order]) - num_bytes[order]
    is_first = np.ones(len(rank), dtype=np.bool_)
    is_first[1:] = rank[order][1:] != rank[order][:-1]
    own_begin = begin - begin[_run_starts(is_first)]
    rounds = np.empty(len(rank), dtype=np.int64)
    rounds[order] = own_begin // round_bytes
    return rounds


def _run_starts(is_first: Bools) -> Ints:
    """For each row, the row at which its run begins."""
    return np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))


def payload_starts(inner: Regions, outer: Regions) -> Ints:
    """Find where, in elements, each inner region begins in the row-major payload of its outer region."""
    width = max(inner.num_dims, outer.num_dims)
    inner, outer = inner.widened(width), outer.widened(width)
    strides = np.ones((len(outer), width), dtype=np.int64)
    for dim in range(width - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * outer.sizes[:, dim + 1]
    return np.asarray(((inner.offsets - outer.offsets) * strides).sum(axis=1))


def _hulls(regions: Regions, outer: Regions) -> Regions:
    """The smallest regions around `regions` that are contiguous in the payload of `outer`."""
    width = outer.num_dims
    regions = regions.widened(width)
    offsets, sizes = regions.offsets.copy(), regions.sizes.copy()
    varies = np.zeros(len(regions), dtype=np.bool_)
    for dim in range(width):
        # After the first dimension with more than one element, contiguous means complete.
        offsets[varies, dim] = outer.offsets[varies, dim]
        sizes[varies, dim] = outer.sizes[varies, dim]
        varies |= regions.sizes[:, dim] > 1
    return Regions(regions.tensor, offsets, sizes)


def _without_wide_gaps(
    regions: Regions, outer: Regions, element_bytes: Ints, min_gap_bytes: int
) -> tuple[Ints, Regions]:
    """Cut regions that skip large parts of each row of `outer` into rows, so that the gaps are not read.

    Also returns which of `regions` each part comes from.
    """
    source = np.arange(len(regions))
    outer = outer.widened(max(regions.num_dims, outer.num_dims))
    regions = regions.widened(outer.num_dims)
    for dim in range(regions.num_dims - 1):
        hulls = _hulls(regions, outer.take(source))
        varies_here = (regions.sizes[:, :dim] == 1).all(axis=1) & (regions.sizes[:, dim] > 1)
        gap_bytes = (
            (hulls.num_elements - regions.num_elements)
            // regions.sizes[:, dim]
            * element_bytes[regions.tensor]
        )
        cut = varies_here & (gap_bytes >= min_gap_bytes)
        if not cut.any():
            continue
        count = np.where(cut, regions.sizes[:, dim], 1)
        owner, number = expand_ranges(np.zeros(len(count), dtype=np.int64), count)
        offsets, sizes = regions.offsets[owner], regions.sizes[owner]
        offsets[:, dim] += number
        sizes[cut[owner], dim] = 1
        source, regions = source[owner], Regions(regions.tensor[owner], offsets, sizes)
    return source, regions


def _reader_sets(
    pieces: Pieces, requests: Requests, file: Ints, readable: Bools | None, num_units: int
) -> RankSets:
    """Find the ranks that may read each unit: all that want it and can open it, or else all that can open it.

    Works on sets of ranks, never on pairs of units and ranks: there are a billion of them when a thousand
    ranks all want a million units.
    """
    by_want = find_rank_sets(
        requests.want, requests.rank, int(requests.want[-1]) + 1 if len(requests.want) else 0
    )
    unions = find_rank_sets(pieces.unit, by_want.of_group[pieces.want], num_units)
    number = np.repeat(np.arange(len(unions)), unions.size)
    owner, place = expand_ranges(by_want.start[unions.members], by_want.size[unions.members])
    wanting = find_rank_sets(number[owner], by_want.members[place], len(unions))
    of_unit = wanting.of_group[unions.of_group]
    if readable is None:
        return RankSets(of_unit, wanting.start, wanting.size, wanting.members)
    kinds = group_equal_rows(np.stack([of_unit, file], axis=1))
    able = _able_sets(wanting, of_unit[kinds.first], file[kinds.first], readable)
    return RankSets(able.of_group[kinds.number], able.start, able.size, able.members)


def _able_sets(wanting: RankSets, number: Ints, file: Ints, readable: Bools) -> RankSets:
    """For each pair of a wanting set and a file, the ranks of the set that can open it, else all that can."""
    pair, place = expand_ranges(wanting.start[number], wanting.size[number])
    rank = wanting.members[place]
    able = readable[rank, file[pair]]
    orphans = np.flatnonzero(np.bincount(pair[able], minlength=len(file)) == 0)
    helper, helped = np.nonzero(readable[:, file[orphans]])
    lost = np.setdiff1d(np.arange(len(orphans)), helped)
    if len(lost):
        missing = int(file[orphans[lost[0]]])
        raise UnreadableFile(f"No rank can open file number {missing}", file=missing)
    pairs = np.concatenate([pair[able], orphans[helped]])
    return find_rank_sets(pairs, np.concatenate([rank[able], helper]), len(file))


def plan_rank_load(
    shared: SharedLoadPlan, element_bytes: Ints, rank: int, options: LoadOptions, *, near: Ints | None = None
) -> LoadPlan:
    """Find what one rank reads, where that goes, and what the rank receives from others.

    `near` are the ranks of this one's host, which see what any of them reads, without messages.
    """

    def is_near(ranks: Ints) -> Bools:
        return np.asarray(ranks == rank if near is None else (ranks == rank) | np.isin(ranks, near))

    own = np.flatnonzero(shared.share_rank == rank)
    out = _deliveries_of_shares(shared, own)
    to = shared.requests.rank[out.request]
    incoming = _deliveries_to_requests(shared, np.flatnonzero(shared.requests.rank == rank))
    source = shared.share_rank[incoming.share]
    is_seen = is_near(source)
    reads = np.concatenate([own, distinct(incoming.share[is_seen & (source != rank)])])
    number = np.zeros(len(shared.share_rank), dtype=np.int64)
    number[reads] = np.arange(len(reads))

    def transfers(deliveries: _Deliveries, rows: Bools, peer: Ints) -> Transfers:
        if not rows.any():
            return Transfers.none(deliveries.regions.num_dims)
        regions = deliveries.regions.take(rows)
        num_bytes, in_round = regions.num_bytes(element_bytes), shared.share_round[deliveries.share[rows]]
        return Transfers(
            read=number[deliveries.share[rows]],
            peer=peer[rows],
            want=shared.requests.row[deliveries.request[rows]],
            regions=regions,
            in_round=in_round,
            message=_messages(peer[rows], in_round, num_bytes, options.message_bytes),
        )

    shown = is_near(to) & (to != rank)
    pairs = distinct(np.stack([number[out.share[shown]], to[shown]], axis=1))
    return LoadPlan(
        rank=rank,
        row=shared.share_row[reads],
        regions=shared.share_regions.take(reads),
        reader=shared.share_rank[reads],
        shown_read=pairs[:, 0],
        shown_to=pairs[:, 1],
        local=transfers(incoming, is_seen, np.full(len(source), rank)),
        sends=transfers(out, ~is_near(to), to),
        receives=transfers(incoming, ~is_seen, source),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Deliveries:
    """The part of a share that goes to each request, sorted by share, piece and request on every rank."""

    share: Ints
    request: Ints
    regions: Regions


def _deliveries_of_shares(shared: SharedLoadPlan, shares: Ints) -> _Deliveries:
    """All deliveries of some shares."""
    unit = shared.share_unit[shares]
    begin = np.searchsorted(shared.pieces.unit, unit)
    count = np.searchsorted(shared.pieces.unit, unit, side="right") - begin
    owner, piece = expand_ranges(begin, count)
    share, piece, regions = _common(shared, shares[owner], piece)
    want = shared.pieces.want[piece]
    begin = np.searchsorted(shared.requests.want, want)
    count = np.searchsorted(shared.requests.want, want, side="right") - begin
    row, request = expand_ranges(begin, count)
    return _ordered(share[row], piece[row], request, regions.take(row))


def _deliveries_to_requests(shared: SharedLoadPlan, requests: Ints) -> _Deliveries:
    """All deliveries to some requests."""
    by_want = np.argsort(shared.pieces.want, kind="stable")
    sorted_want = shared.pieces.want[by_want]
    want = shared.requests.want[requests]
    begin = np.searchsorted(sorted_want, want)
    owner, place = expand_ranges(begin, np.searchsorted(sorted_want, want, side="right") - begin)
    request, piece = requests[owner], by_want[place]
    by_unit = np.argsort(shared.share_unit, kind="stable")
    sorted_unit = shared.share_unit[by_unit]
    unit = shared.pieces.unit[piece]
    begin = np.searchsorted(sorted_unit, unit)
    row, place = expand_ranges(begin, np.searchsorted(sorted_unit, unit, side="right") - begin)
    tagged = np.arange(len(row))
    share, tagged, regions = _common(shared, by_unit[place], piece[row], tagged)
    return _ordered(share, piece[row][tagged], request[row][tagged], regions)


def _common(
    shared: SharedLoadPlan, share: Ints, piece: Ints, tag: Ints | None = None
) -> tuple[Ints, Ints, Regions]:
    """The pairs of shares and pieces that intersect, with `tag` or else `piece`, and the intersections."""
    share_regions, piece_regions = shared.share_regions.take(share), shared.pieces.regions.take(piece)
    begin = np.maximum(share_regions.offsets, piece_regions.offsets)
    end = np.minimum(share_regions.offsets + share_regions.sizes, piece_regions.offsets + piece_regions.sizes)
    real = (end > begin).all(axis=1)
    tags = piece if tag is None else tag
    return share[real], tags[real], Regions(share_regions.tensor[real], begin[real], (end - begin)[real])


def _ordered(share: Ints, piece: Ints, request: Ints, regions: Regions) -> _Deliveries:
    order = np.lexsort((request, piece, share))
    return _Deliveries(share[order], request[order], regions.take(order))


def _messages(peer: Ints, in_round: Ints, num_bytes: Ints, message_bytes: int) -> Ints:
    """Number the messages to or from each peer: consecutive small transfers share one, large ones do not.

    Sender and receiver see the same transfers in the same order, so they give them the same numbers without
    talking to each other. No message has transfers of two rounds.
    """
    order = np.argsort(peer, kind="stable")
    peer, in_round, size = peer[order], in_round[order], num_bytes[order]
    is_first = np.ones(len(peer), dtype=np.bool_)
    is_first[1:] = peer[1:] != peer[:-1]
    begin = np.cumsum(size) - size
    window = (begin - begin[_run_starts(is_first)]) // message_bytes
    is_large = size >= message_bytes
    opens = is_first | is_large
    opens[1:] |= (window[1:] != window[:-1]) | (in_round[1:] != in_round[:-1]) | is_large[:-1]
    number = np.cumsum(opens)
    numbered = np.empty(len(peer), dtype=np.int64)
    numbered[order] = number - number[_run_starts(is_first)]
    return numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for planning loads. All ranks must use the same ones."""

    min_cut_bytes: int = 64 * 1024
    """Bytes that several ranks want are not cut into smaller parts than this."""
    min_gap_bytes: int = 256 * 1024
    """Gaps of at least this size between wanted bytes are skipped; smaller ones are read as well."""
    exchange_bytes: int = 256 << 20
    """The most that a rank receives in one round; the next round is read meanwhile."""
    message_bytes: int = 1 << 20
    """Transfers of fewer bytes between two ranks share a message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Parts of what is read and where they go, row by row, in the order of reading."""

    read: Ints
    """The number of the plan's read; without meaning for receives."""
    peer: Ints
    """The rank at the other end."""
    want: Ints
    """The row of the destination rank's wanted regions."""
    regions: Regions
    in_round: Ints
    """The round of the exchange; a rank finishes one before the next. Without meaning for local transfers."""
    message: Ints
    """Transfers with the same peer and number travel together, in this order."""

    @classmethod
    def none(cls, num_dims: int = 0) -> Self:
        """No transfers."""
        nothing, regions = np.zeros(0, dtype=np.int64), Regions.from_rows(()).widened(num_dims)
        return cls(
            read=nothing, peer=nothing, want=nothing, regions=regions, in_round=nothing, message=nothing
        )

    def __len__(self) -> int:
        return len(self.regions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """The reads of one rank, what it passes on, and what it sees of the reads of other ranks of its host.

    Its own reads come first; both parts are in the order of files and positions. `row` is the stored row of
    each read region, which is contiguous in the row's payload.
    """

    rank: int
    row: Ints
    regions: Regions
    reader: Ints
    """The rank that reads each of them."""
    shown_read: Ints
    """The own reads that other ranks of the host want, one row for each of those ranks."""
    shown_to: Ints
    local: Transfers
    """From own and seen reads to this rank's memory."""
    sends: Transfers
    receives: Transfers

    @property
    def num_own(self) -> int:
        """The number of reads that are this rank's own."""
        return int(np.count_nonzero(self.reader == self.rank))

    @property
    def shares_on_host(self) -> bool:
        """True if this rank and others of its host want what one of them reads."""
        return len(self.shown_read) > 0 or self.num_own < len(self.row)


class LoadWish(NamedTuple):
    """The part of a checkpoint that one rank wants."""

    regions: Regions
    readable: Bools | None
    """By file of the checkpoint, whether this rank can open it; None: all ranks can open all of them."""
    host: str
    """Equal for ranks that can share memory; empty if that is unknown."""


class LoadShare(NamedTuple):
    """The part of a load's plan that one rank gets."""

    part: SharedLoadPlan | None
    """None if no rank wants anything that it has to read from storage."""
    near: Ints
    """The ranks of this one's host."""
    may_share_on_host: bool
    """True if ranks of one host may want the same bytes; equal on all ranks."""


def agree_on_load(
    comm: Comm, wish: Callable[[], LoadWish], stored: StoredRegions, element_bytes: Ints, options: LoadOptions
) -> LoadShare | UnreadableFile:
    """Plan a load on rank 0; return this rank's part, or the same error on all ranks. Collective."""

    def divide(wanted: list[LoadWish]) -> Sequence[LoadShare | UnreadableFile]:
        hosts = np.array([each.host for each in wanted])
        parts: Sequence[SharedLoadPlan | None] = [None] * len(wanted)
        may_share = False
        if any(len(each.regions) for each in wanted):
            readable = [each.readable for each in wanted if each.readable is not None]
            try:
                shared = plan_load(
                    stored,
                    element_bytes,
                    [each.regions for each in wanted],
                    options,
                    readable=np.stack(readable) if readable else None,
                )
            except UnreadableFile as error:
                return [error] * len(wanted)
            parts = divide_plan(shared, len(wanted))
            may_share = len(set(hosts.tolist())) < len(wanted) and (bool(readable) or shared.may_exchange)
        near = {host: np.flatnonzero(hosts == host) for host in set(hosts.tolist()) if host}
        nobody = np.zeros(0, dtype=np.int64)
        known: dict[tuple[int, str], LoadShare] = {}
        return [
            known.setdefault((id(part), host), LoadShare(part, near.get(host, nobody), may_share))
            for part, host in zip(parts, hosts.tolist(), strict=True)
        ]

    return divide_on_rank0(comm, wish, divide, awaiting="what all ranks want of the checkpoint")
