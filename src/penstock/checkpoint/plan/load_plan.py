"""Plans which rank reads which bytes of a checkpoint, and to which ranks it sends them.

Each rank turns the regions and objects that it needs into requests. Objects, and items that can only be read
whole, are requested as tensors of bytes, so one plan serves all of them. In `agree_on_load`, rank 0 plans for
all ranks with `plan_load` and divides the plan with `divide_plan`; `plan_rank_load` then tells each rank from
its part what to do. Everything but `agree_on_load` is pure. Bytes that several ranks need are read by one of
them and sent to the others. Invariants: every requested element exists in the checkpoint; every wanted
element has exactly one reader, which can open the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.checkpoint.state.regions import (
    Bools,
    CheckpointIndex,
    Ints,
    RankSets,
    Region,
    Regions,
    StoredRegions,
    TensorFacts,
    distinct,
    divide_among_ranks,
    element_sizes,
    expand_ranges,
    find_overlaps,
    find_ranges,
    find_rank_sets,
    group_equal_rows,
    region_table,
    split_large,
)
from penstock.cluster.comm import Comm, divide_on_rank0
from penstock.errors import DataDamaged, PenstockError


@dataclass(frozen=True, slots=True, eq=False)
class ByteItemIndex:
    """A checkpoint's index in which items that must be read whole are tensors of bytes.

    These tensors come after the checkpoint's own. The rows of `stored` are first those that can be read in
    part, then one for each packed row, then one for each object; `source_row` has the row in the checkpoint's
    index, or -1 - k for the k-th object.
    """

    tensors: tuple[TensorFacts, ...]
    stored: StoredRegions
    source_row: Ints
    packed_rows: Ints
    element_bytes: Ints
    """The size of an element, by tensor number."""


def index_byte_items(index: CheckpointIndex) -> ByteItemIndex:
    """Index packed regions and objects as tensors of bytes, so that one plan serves all of them."""
    stored, objects = index.stored, index.objects
    packed_rows, plain_rows = np.flatnonzero(stored.packed), np.flatnonzero(~stored.packed)
    packed, plain = stored.take(packed_rows), stored.take(plain_rows)
    columns = [(each.size_bytes, each.offset, each.file) for each in objects]
    object_sizes, object_offsets, object_files = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    sizes = np.concatenate([packed.item_bytes, object_sizes])
    offsets = np.concatenate([packed.item_offset, object_offsets])
    names = [index.tensors[number].name for number in packed.regions.tensor.tolist()]
    names += [each.name for each in objects]
    whole = _whole_items(np.arange(len(names)) + len(index.tensors), sizes)
    byte_tensors = [
        TensorFacts(name, "uint8", (size,), 1) for name, size in zip(names, sizes.tolist(), strict=True)
    ]
    tensors = (*index.tensors, *byte_tensors)
    return ByteItemIndex(
        tensors=tensors,
        stored=StoredRegions(
            Regions.concatenated([plain.regions, whole]),
            np.concatenate([plain.file, packed.file, object_files]),
            np.concatenate([plain.item_offset, offsets]),
            np.concatenate([plain.item_bytes, sizes]),
            np.concatenate([plain.payload_offset, offsets]),
            np.zeros(len(plain) + len(whole), dtype=np.bool_),
        ),
        source_row=np.concatenate([plain_rows, packed_rows, -1 - np.arange(len(objects))]),
        packed_rows=packed_rows,
        element_bytes=element_sizes(tensors),
    )


def _whole_items(numbers: Ints, sizes: Ints) -> Regions:
    return Regions(numbers, np.zeros((len(numbers), 1), dtype=np.int64), sizes[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequests:
    """One rank's requests.

    `regions`, with the tensor numbers of `ByteItemIndex`, has the wanted regions, then whole items.
    """

    regions: Regions
    items: tuple[int, ...]
    """The tensor numbers of the whole items, in the order of their regions."""
    unpacking: tuple[tuple[int, int, int, Region], ...]
    """The parts to cut out of items once these are loaded: the item's place in `items`, its row in the index
    of the checkpoint, the row of the wanted region, and the part of that region that is in the item.
    """
    objects: Mapping[str, tuple[int, int]]
    """For each leaf's name, the number of its object in the checkpoint's index and its place in `items`."""


def request_items(
    wanted: Regions, objects: Mapping[str, int], index: CheckpointIndex, item_index: ByteItemIndex
) -> LoadRequests:
    """Return the requests for these regions, and for these objects by leaf name."""
    wants, rows, common = find_overlaps(wanted, index.stored.regions.take(item_index.packed_rows))
    first_object = len(index.tensors) + len(item_index.packed_rows)
    packed = [len(index.tensors) + row for row in rows.tolist()]
    places: dict[int, int] = {}
    for number in (*packed, *(first_object + number for number in objects.values())):
        places.setdefault(number, len(places))
    unpacking = [
        (
            places[number],
            int(item_index.packed_rows[rows[part]]),
            want,
            common.region(part, len(index.tensors[int(common.tensor[part])].shape)),
        )
        for part, (number, want) in enumerate(zip(packed, wants.tolist(), strict=True))
    ]
    numbers = np.array(list(places), dtype=np.int64)
    sizes = np.array([item_index.tensors[number].shape[0] for number in places], dtype=np.int64)
    return LoadRequests(
        regions=Regions.concatenated([wanted, _whole_items(numbers, sizes)]),
        items=tuple(places),
        unpacking=tuple(unpacking),
        objects={name: (number, places[first_object + number]) for name, number in objects.items()},
    )


def require_covered(index: CheckpointIndex, wanted: Regions, where: str) -> None:
    """Raise `DataDamaged` for the first wanted region whose elements are not all stored exactly once."""
    missing = missing_elements(index.stored.regions, wanted)
    for row in np.flatnonzero(missing)[:1].tolist():
        facts = index.tensors[int(wanted.tensor[row])]
        offsets, sizes = wanted.region(row, len(facts.shape))
        raise DataDamaged(
            f"{abs(missing[row])} elements of {facts.name!r} at {list(offsets)} of {list(sizes)} are"
            f" {'in no piece' if missing[row] > 0 else 'in several pieces'} of the checkpoint",
            where=where,
            fix="Load an older checkpoint; this one was saved incompletely.",
        )


class UnreadableFile(PenstockError):
    """No rank can open a file that is needed; `file` is its number in the checkpoint."""

    file: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedLoadPlan:
    """The plan of all ranks: three tables. The name of each column begins with its table's.

    A *unit* is a contiguous part of one item's payload, a *want* one of the distinct wanted regions. A rank
    reads a *share* of a unit; shares are sorted by file and offset. A *piece* is the intersection of a want
    with a unit; pieces are sorted by unit. A *request* is the row of a want among one rank's wanted regions;
    requests are sorted by want.
    """

    share_unit: Ints
    share_row: Ints
    """The row of the stored region to which a share belongs."""
    share_regions: Regions
    share_rank: Ints
    share_round: Ints
    piece_unit: Ints
    piece_want: Ints
    piece_regions: Regions
    request_want: Ints
    request_rank: Ints
    request_row: Ints

    @property
    def may_exchange(self) -> bool:
        """True if several ranks may want the same bytes."""
        want, unit = self.request_want, self.piece_unit
        return bool((want[1:] == want[:-1]).any() or (unit[1:] == unit[:-1]).any())

    def take(self, shares: Ints, pieces: Ints, requests: Ints) -> SharedLoadPlan:
        """Return the plan with only these rows of each table."""
        return SharedLoadPlan(
            share_unit=self.share_unit[shares],
            share_row=self.share_row[shares],
            share_regions=self.share_regions.take(shares),
            share_rank=self.share_rank[shares],
            share_round=self.share_round[shares],
            piece_unit=self.piece_unit[pieces],
            piece_want=self.piece_want[pieces],
            piece_regions=self.piece_regions.take(pieces),
            request_want=self.request_want[requests],
            request_rank=self.request_rank[requests],
            request_row=self.request_row[requests],
        )


def missing_elements(stored: Regions, wanted: Regions) -> Ints:
    """Return how many elements of each wanted region are not stored; negative if some are stored twice."""
    rows, _, common = find_overlaps(wanted, stored)
    stored_elements = np.zeros(len(wanted), dtype=np.int64)
    np.add.at(stored_elements, rows, common.num_elements)
    return wanted.num_elements - stored_elements


def plan_load(
    stored: StoredRegions,
    element_bytes: Ints,
    wanted: Sequence[Regions],
    options: LoadOptions,
    *,
    readable: Bools | None = None,
) -> SharedLoadPlan:
    """Decide which rank reads which bytes. `wanted` is by rank, with the checkpoint's tensor numbers.

    `element_bytes` is by tensor number. `readable` tells which rank (row) can open which file (column); None
    means that all ranks can open all files. Elements that are not stored are ignored here; see
    `missing_elements`.
    """
    all_wanted = Regions.concatenated(wanted)
    ranks = np.repeat(np.arange(len(wanted)), [len(regions) for regions in wanted])
    rows = np.concatenate([np.arange(len(regions)) for regions in wanted])
    first_wanted, want_of_row = group_equal_rows(region_table(all_wanted))
    by_want = np.argsort(want_of_row, kind="stable")
    request_want, request_rank = want_of_row[by_want], ranks[by_want]

    want, row, common = find_overlaps(all_wanted.take(first_wanted), stored.regions)
    source, regions = _without_wide_gaps(
        common, stored.regions.take(row), element_bytes, options.min_gap_bytes
    )
    want, row = want[source], row[source]
    # A region that is not contiguous in its item is read as the smallest range around it, including small
    # gaps.
    hulls = _hulls(regions, stored.regions.take(row))
    first_of_unit, unit = group_equal_rows(np.concatenate([row[:, None], region_table(hulls)], axis=1))
    by_unit = np.argsort(unit, kind="stable")
    piece_unit, piece_want = unit[by_unit], want[by_unit]
    unit_row, unit_regions = row[first_of_unit], hulls.take(first_of_unit)

    sets = _reader_sets(
        request_want, request_rank, piece_unit, piece_want, file=stored.file[unit_row], readable=readable
    )
    total_bytes = int(unit_regions.num_bytes(element_bytes).sum())
    source, shares, rank = divide_among_ranks(
        unit_regions,
        element_bytes,
        sets,
        len(wanted),
        # A rank that reads a whole item verifies it at no cost, so small items are not cut. A sixteenth of a
        # rank's fair share keeps the loads of ranks within about six percent of each other.
        min_cut_bytes=max(options.min_cut_bytes, total_bytes // (16 * len(wanted))),
    )
    # What a rank receives in one round must fit into its memory, and may come from all ranks of a set.
    round_bytes = max(options.exchange_bytes // int(sets.size.max(initial=1)), options.message_bytes)
    round_bytes = min(round_bytes, options.exchange_bytes // 4)
    # No read is larger than a round; otherwise, the ranks that need it could not bound what they receive in a
    # round.
    part, shares = split_large(shares, element_bytes, round_bytes)
    share_unit = source[part]
    share_row = unit_row[share_unit]
    start = payload_starts(shares, stored.regions.take(share_row))
    # Front to back through each file: adjacent reads are joined, and rounds follow the order of reading.
    in_file = np.lexsort((start, stored.item_offset[share_row], stored.file[share_row]))
    share_rank, share_regions = rank[part][in_file], shares.take(in_file)
    by_rank, bytes_before, _ = _running_bytes(share_rank, share_regions.num_bytes(element_bytes))
    share_round = np.empty_like(share_rank)
    share_round[by_rank] = bytes_before // round_bytes
    return SharedLoadPlan(
        share_unit=share_unit[in_file],
        share_row=share_row[in_file],
        share_regions=share_regions,
        share_rank=share_rank,
        share_round=share_round,
        piece_unit=piece_unit,
        piece_want=piece_want,
        piece_regions=regions.take(by_unit),
        request_want=request_want,
        request_rank=request_rank,
        request_row=rows[by_want],
    )


def divide_plan(shared: SharedLoadPlan, num_ranks: int) -> list[SharedLoadPlan]:
    """Divide the plan by rank: each rank gets the units that it reads or of which it needs a piece.

    Numbers and orders stay the same. Ranks that take part in the same units get the same object.
    """
    by_want = np.argsort(shared.piece_want, kind="stable")
    request, place = expand_ranges(*find_ranges(shared.piece_want[by_want], shared.request_want))
    # One number for each pair of rank and unit: sorting actual pairs takes three times as long.
    num_units = int(shared.piece_unit.max(initial=0)) + 1
    reading = shared.share_rank * num_units + shared.share_unit
    wanting = shared.request_rank[request] * num_units + shared.piece_unit[by_want[place]]
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
            shares = np.sort(by_unit[expand_ranges(*find_ranges(sorted_unit, units))[1]])
            pieces = expand_ranges(*find_ranges(shared.piece_unit, units))[1]
            wants = distinct(shared.piece_want[pieces])
            requests = expand_ranges(*find_ranges(shared.request_want, wants))[1]
            known[key] = shared.take(shares, pieces, requests)
        parts.append(known[key])
    return parts


def _running_bytes(group: Ints, num_bytes: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the rows by group and, for each, the bytes before it in its group, and where the group begins.

    group 1 0 1 0, bytes 5 6 7 8 -> rows 1 3 0 2, bytes before 0 6 0 5, begins 0 0 2 2
    """
    order = np.argsort(group, kind="stable")
    begin = np.cumsum(num_bytes[order]) - num_bytes[order]
    first = np.searchsorted(group[order], group[order])
    return order, begin - begin[first], first


def payload_starts(inner: Regions, outer: Regions) -> Ints:
    """Return the offset, in elements, of each inner region in the row-major payload of its outer region."""
    width = max(inner.num_dims, outer.num_dims)
    inner, outer = inner.widened(width), outer.widened(width)
    strides = np.ones((len(outer), width), dtype=np.int64)
    for dim in range(width - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * outer.sizes[:, dim + 1]
    return np.asarray(((inner.offsets - outer.offsets) * strides).sum(axis=1))


def _hulls(regions: Regions, outer: Regions) -> Regions:
    """Return the smallest regions around `regions` that are contiguous in the payload of `outer`."""
    width = outer.num_dims
    regions = regions.widened(width)
    offsets, sizes = regions.offsets.copy(), regions.sizes.copy()
    varies = np.zeros(len(regions), dtype=np.bool_)
    for dim in range(width):
        # Beyond the first dimension with more than one element, a contiguous region is complete.
        offsets[varies, dim] = outer.offsets[varies, dim]
        sizes[varies, dim] = outer.sizes[varies, dim]
        varies |= regions.sizes[:, dim] > 1
    return Regions(regions.tensor, offsets, sizes)


def _without_wide_gaps(
    regions: Regions, outer: Regions, element_bytes: Ints, min_gap_bytes: int
) -> tuple[Ints, Regions]:
    """Cut regions that skip large parts of each row of `outer` into rows, so that the gaps are not read.

    Also returns the row in `regions` from which each part was cut.
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
    request_want: Ints,
    request_rank: Ints,
    piece_unit: Ints,
    piece_want: Ints,
    *,
    file: Ints,
    readable: Bools | None,
) -> RankSets:
    """Find the ranks that may read each unit.

    These are the ranks that need it and can open its file or, if there are none, all ranks that can open it.
    Works on sets of ranks, never on pairs of units and ranks: if a thousand ranks all need a million units,
    there are a billion pairs.
    """
    of_want = find_rank_sets(request_want, request_rank, int(request_want.max(initial=-1)) + 1)
    # First the set of sets for each unit, then the ranks in it.
    unions = find_rank_sets(piece_unit, of_want.of_group[piece_want], len(file))
    union = np.repeat(np.arange(len(unions)), unions.size)
    row, place = expand_ranges(of_want.start[unions.members], of_want.size[unions.members])
    wanting = find_rank_sets(union[row], of_want.members[place], len(unions))
    of_unit = wanting.of_group[unions.of_group]
    if readable is None:
        return replace(wanting, of_group=of_unit)

    first, kind = group_equal_rows(np.stack([of_unit, file], axis=1))
    number, file = of_unit[first], file[first]
    row, place = expand_ranges(wanting.start[number], wanting.size[number])
    rank = wanting.members[place]
    can_open = readable[rank, file[row]]
    orphans = np.flatnonzero(np.bincount(row[can_open], minlength=len(file)) == 0)
    helper, helped = np.nonzero(readable[:, file[orphans]])
    lost = np.setdiff1d(np.arange(len(orphans)), helped)
    if len(lost):
        missing = int(file[orphans[lost[0]]])
        raise UnreadableFile(f"No rank can open file number {missing}", file=missing)
    kinds = np.concatenate([row[can_open], orphans[helped]])
    able = find_rank_sets(kinds, np.concatenate([rank[can_open], helper]), len(file))
    return replace(able, of_group=able.of_group[kind])


def plan_rank_load(
    shared: SharedLoadPlan, element_bytes: Ints, rank: int, options: LoadOptions, *, near: Ints | None = None
) -> LoadPlan:
    """Plan what one rank reads, where its bytes go, and what the rank receives from others.

    `near` are the ranks of the same host, which see each other's reads without messages.
    """
    host = np.array([rank]) if near is None else np.append(near, rank)
    own = np.flatnonzero(shared.share_rank == rank)
    out_share, out_request, out_regions = _deliveries(shared, own, np.arange(len(shared.request_rank)))
    to = shared.request_rank[out_request]
    mine = np.flatnonzero(shared.request_rank == rank)
    in_share, in_request, in_regions = _deliveries(shared, np.arange(len(shared.share_rank)), mine)
    source = shared.share_rank[in_share]
    is_seen, is_near = np.isin(source, host), np.isin(to, host)
    reads = np.concatenate([own, distinct(in_share[is_seen & (source != rank)])])
    read = np.zeros(len(shared.share_rank), dtype=np.int64)
    read[reads] = np.arange(len(reads))

    def transfers(share: Ints, request: Ints, regions: Regions, peer: Ints) -> Transfers:
        in_round = shared.share_round[share]
        num_bytes = regions.num_bytes(element_bytes)
        return Transfers(
            read=read[share],
            peer=peer,
            want=shared.request_row[request],
            regions=regions,
            in_round=in_round,
            message=_messages(peer, in_round, num_bytes, options.message_bytes),
        )

    shown = is_near & (to != rank)
    shown_read, shown_to = np.unique(np.stack([read[out_share[shown]], to[shown]]), axis=1)
    local, far, away = np.flatnonzero(is_seen), np.flatnonzero(~is_seen), np.flatnonzero(~is_near)
    return LoadPlan(
        rank=rank,
        row=shared.share_row[reads],
        regions=shared.share_regions.take(reads),
        reader=shared.share_rank[reads],
        shown_read=shown_read,
        shown_to=shown_to,
        local=transfers(
            in_share[local], in_request[local], in_regions.take(local), np.full(len(local), rank)
        ),
        sends=transfers(out_share[away], out_request[away], out_regions.take(away), to[away]),
        receives=transfers(in_share[far], in_request[far], in_regions.take(far), source[far]),
    )


def _deliveries(shared: SharedLoadPlan, shares: Ints, requests: Ints) -> tuple[Ints, Ints, Regions]:
    """Return the parts of these shares that go to these requests: the rows of share and request, the region.

    Sorted by share, piece and request on every rank; `shares` and `requests` must ascend.
    """
    pieces = np.flatnonzero(np.isin(shared.piece_want, shared.request_want[requests]))
    row, place = expand_ranges(*find_ranges(shared.piece_unit[pieces], shared.share_unit[shares]))
    share, piece = shares[row], pieces[place]
    read, wanted = shared.share_regions.take(share), shared.piece_regions.take(piece)
    begin = np.maximum(read.offsets, wanted.offsets)
    sizes = np.minimum(read.offsets + read.sizes, wanted.offsets + wanted.sizes) - begin
    real = np.flatnonzero((sizes > 0).all(axis=1))
    want = shared.piece_want[piece[real]]
    row, place = expand_ranges(*find_ranges(shared.request_want[requests], want))
    real = real[row]
    return share[real], requests[place], Regions(read.tensor[real], begin[real], sizes[real])


def _messages(peer: Ints, in_round: Ints, num_bytes: Ints, message_bytes: int) -> Ints:
    """Number the messages to or from each peer: consecutive small transfers share one, large ones do not.

    Sender and receiver see the same transfers in the same order, so they assign the same numbers without
    communicating. No message contains transfers of two rounds.
    """
    order, bytes_before, first = _running_bytes(peer, num_bytes)
    in_round, is_large = in_round[order], num_bytes[order] >= message_bytes
    window = bytes_before // message_bytes
    opens = is_large | (first == np.arange(len(first)))
    opens[1:] |= (window[1:] != window[:-1]) | (in_round[1:] != in_round[:-1]) | is_large[:-1]
    number = np.cumsum(opens)
    numbered = np.empty(len(peer), dtype=np.int64)
    numbered[order] = number - number[first]
    return numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for planning loads. They must be the same on all ranks."""

    min_cut_bytes: int = 64 * 1024
    """Bytes that several ranks need are not cut into parts smaller than this."""
    min_gap_bytes: int = 256 * 1024
    """Gaps of at least this size between wanted bytes are skipped; smaller ones are read as well."""
    exchange_bytes: int = 256 << 20
    """The most that a rank receives in one round; the next round is read at the same time."""
    message_bytes: int = 1 << 20
    """Transfers of fewer bytes between two ranks share a message."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Parts of reads and their destinations, row by row, in the order of reading."""

    read: Ints
    """The number of the plan's read; meaningless for receives."""
    peer: Ints
    """The rank at the other end."""
    want: Ints
    """The row of the destination rank's wanted regions."""
    regions: Regions
    in_round: Ints
    """The round of the exchange; a rank finishes one before the next. Meaningless for local transfers."""
    message: Ints
    """Transfers with the same peer and number travel together, in this order."""

    def __len__(self) -> int:
        return len(self.regions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """One rank's reads, what it passes on, and the reads of other ranks of its host that it sees.

    The rank's own reads come first; both parts are sorted by file and offset. `row` is the stored row of each
    read region, which is contiguous in the row's payload.
    """

    rank: int
    row: Ints
    regions: Regions
    reader: Ints
    """The rank that performs each read."""
    shown_read: Ints
    """Own reads that other ranks of the host need, one row for each of those ranks."""
    shown_to: Ints
    local: Transfers
    """Transfers from own and seen reads to this rank's memory."""
    sends: Transfers
    receives: Transfers

    @property
    def num_own(self) -> int:
        """The number of this rank's own reads."""
        return int(np.count_nonzero(self.reader == self.rank))


Wish = tuple[Regions, Bools | None, str]
"""What one rank needs of a checkpoint: the regions; whether it can open each file, or None if all ranks can
open all files; and its host, equal for ranks that can share memory, "" if unknown.
"""
LoadShare = tuple[SharedLoadPlan | None, Ints, bool]
"""One rank's part of the plan, None if no rank needs anything from storage; the ranks of its host; and
whether ranks of one host may need the same bytes, which is equal on all ranks.
"""


def agree_on_load(
    comm: Comm, wish: Callable[[], Wish], stored: StoredRegions, element_bytes: Ints, options: LoadOptions
) -> LoadShare:
    """Plan a load on rank 0, and return this rank's part. Collective.

    Raises `UnreadableFile` on all ranks if no rank can open a file that is needed.
    """

    def divide(wanted_by_rank: list[Wish]) -> Sequence[LoadShare | UnreadableFile]:
        wanted = [regions for regions, _, _ in wanted_by_rank]
        readable = [files for _, files, _ in wanted_by_rank if files is not None]
        hosts = [host for _, _, host in wanted_by_rank]
        parts: Sequence[SharedLoadPlan | None] = [None] * len(wanted_by_rank)
        may_share = False
        if any(map(len, wanted)):
            can_open = np.stack(readable) if readable else None
            try:
                shared = plan_load(stored, element_bytes, wanted, options, readable=can_open)
            except UnreadableFile as error:
                return [error] * len(wanted_by_rank)
            parts = divide_plan(shared, len(wanted_by_rank))
            may_share = len(set(hosts)) < len(hosts) and (bool(readable) or shared.may_exchange)
        near = {host: np.flatnonzero(np.array(hosts) == host) for host in set(hosts)}
        near[""] = np.zeros(0, dtype=np.int64)
        # Equal parts are one object, which is packed once.
        known: dict[tuple[int, str], LoadShare] = {}
        return [
            known.setdefault((id(part), host), (part, near[host], may_share))
            for part, host in zip(parts, hosts, strict=True)
        ]

    share = divide_on_rank0(comm, wish, divide, awaiting="what all ranks need from the checkpoint")
    if isinstance(share, UnreadableFile):
        raise share
    return share
