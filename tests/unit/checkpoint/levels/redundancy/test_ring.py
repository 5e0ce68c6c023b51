"""Parity and copies over ranks that are threads: what is lost comes back, in files, bit for bit."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.formats.manifest import checksum_of
from penstock.checkpoint.levels.redundancy.parity_layout import ParityLayout, build_layout
from penstock.checkpoint.levels.redundancy.redundancy_record import (
    ConcatenatedReader,
    ConcatenatedWriter,
    RecordedFile,
)
from penstock.checkpoint.levels.redundancy.ring import (
    RestoredMember,
    Ring,
    Survivor,
    encode,
    mirror,
    rebuild,
    restore_copies,
)
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import read_object, write_object
from penstock.testing.rank_threads import ThreadComm, on_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_BYTES = 4096
Sizes = list[list[int]]
"""The bytes of each file of each member."""

sizes_of_files = st.lists(st.lists(st.integers(0, 20_000), max_size=3), min_size=3, max_size=5)


def _stored(rank: int, sizes: list[int]) -> tuple[MemoryStorage, tuple[RecordedFile, ...]]:
    storage = MemoryStorage(f"mem://member-{rank}")
    random = np.random.default_rng(rank)
    files = []
    for number, size in enumerate(sizes):
        content = random.bytes(size)
        write_object(storage, f"file-{number}", [content])
        files.append(RecordedFile(name=f"file-{number}", size_bytes=size, sum=checksum_of(content).hex()))
    return storage, tuple(files)


def _ring(comm: ThreadComm, num_members: int) -> Ring:
    return Ring(
        ranks=tuple(member % comm.size for member in range(num_members)),
        own_rank=comm.rank,
        transfer=comm.transfer(),
        block_bytes=BLOCK_BYTES,
        timeout_s=30,
    )


def _all_of(storage: MemoryStorage) -> Mapping[str, bytes]:
    return {seen.key: bytes(read_object(storage, seen.key)) for seen in storage.list()}


def _lose_and_rebuild(sizes: Sizes, parities: int, lost: tuple[int, ...], actors: int | None = None) -> None:
    """`parities` 0 stands for copies; fewer actors than members each act for several at the rebuild."""
    members = [_stored(rank, each) for rank, each in enumerate(sizes)]
    totals = [sum(each) for each in sizes]
    layout = build_layout(len(sizes), max(parities, 1), max(totals), align_bytes=64)

    def protect(comm: ThreadComm) -> None:
        storage, files = members[comm.rank]
        kept_bytes = totals[comm.rank - 1] if parities == 0 else parities * layout.chunk_bytes
        with (
            ConcatenatedReader(files, storage.open) as own,
            ConcatenatedWriter([("kept", kept_bytes)], storage.create) as kept,
        ):
            if parities == 0:
                mirror(_ring(comm, comm.size), totals, own, kept)
            else:
                encode(_ring(comm, comm.size), layout, own, kept)
            assert [file.name for file in kept.written] == ["kept"]

    on_ranks(len(sizes), protect)
    before = [_all_of(storage) for storage, _ in members]
    empty = {member: MemoryStorage(f"mem://replaced-{member}") for member in lost}

    def rebuild_into(comm: ThreadComm) -> None:
        ring = _ring(comm, len(sizes))
        survivors, restored = {}, {}
        with ExitStack() as opened:
            for place, (storage, files) in enumerate(members):
                if not ring.is_here(place):
                    continue
                kept_bytes = len(before[place]["kept"])
                if place in lost:
                    wanted = [(file.name, file.size_bytes) for file in files]
                    restored[place] = RestoredMember(
                        opened.enter_context(ConcatenatedWriter(wanted, empty[place].create)),
                        opened.enter_context(ConcatenatedWriter([("kept", kept_bytes)], empty[place].create)),
                    )
                else:
                    kept_file = RecordedFile(name="kept", size_bytes=kept_bytes, sum="")
                    survivors[place] = Survivor(
                        own=opened.enter_context(ConcatenatedReader(files, storage.open)),
                        kept=opened.enter_context(ConcatenatedReader([kept_file], storage.open)),
                    )
            if parities == 0:
                restore_copies(ring, totals, lost, survivors, restored)
            else:
                rebuild(ring, layout, lost, survivors, restored)
        for place, outlet in restored.items():
            assert tuple(outlet.own.written) == members[place][1], "sums are those of the lost files"

    on_ranks(actors or len(sizes), rebuild_into)
    for member in lost:
        assert _all_of(empty[member]) == before[member]


@given(sizes_of_files, st.integers(0, 1), st.data())
def test_any_one_member_comes_back_from_parity_or_copies(
    sizes: Sizes, parities: int, data: st.DataObject
) -> None:
    _lose_and_rebuild(sizes, parities, (data.draw(st.integers(0, len(sizes) - 1)),))


@given(sizes_of_files)
@settings(max_examples=5)
def test_any_two_members_come_back_from_two_parities(sizes: Sizes) -> None:
    for lost in combinations(range(len(sizes)), 2):
        _lose_and_rebuild(sizes, 2, lost)


def test_two_members_that_are_not_neighbours_come_back_from_copies() -> None:
    _lose_and_rebuild([[5000], [7000], [1], [9000]], 0, (0, 2))


@pytest.mark.parametrize("actors", [1, 2, 3])
@pytest.mark.parametrize(("parities", "lost"), [(0, (3,)), (1, (0,)), (2, (1, 2))])
def test_fewer_ranks_than_members_rebuild_what_is_lost(
    actors: int, parities: int, lost: tuple[int, ...]
) -> None:
    _lose_and_rebuild([[5000], [7000, 12], [1], [9000]], parities, lost, actors)


def test_members_without_any_bytes_have_parity_of_nothing() -> None:
    _lose_and_rebuild([[], [0], []], 1, (1,))


def test_concatenated_files_are_followed_by_zeros() -> None:
    storage, files = _stored(1, [10, 0, 6])
    whole = b"".join(bytes(read_object(storage, file.name)) for file in files)
    with ConcatenatedReader(files, storage.open) as run:
        buffer = memoryview(bytearray(b"x" * 32))
        run.read_into(0, buffer)
        assert bytes(buffer) == whole + bytes(16)
        run.read_into(100, buffer)
        assert bytes(buffer) == bytes(32)


def test_a_failed_write_leaves_no_file() -> None:
    storage = MemoryStorage("mem://half")
    with ConcatenatedWriter([("a", 4), ("b", 4)], storage.create) as out:
        out.write(memoryview(b"12345"))
    assert list(_all_of(storage)) == ["a"]


def test_the_chunks_of_a_layout_hold_the_largest_member() -> None:
    assert build_layout(4, 1, 10) == ParityLayout(members=4, parities=1, chunk_bytes=4096)
