"""Parity and copies over ranks that are threads: what is lost comes back, in files, bit for bit."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.engine import RankSaveStats, WrittenShare
from penstock.checkpoint.formats.description import WrittenFile, checksum_of
from penstock.checkpoint.levels.options import DoubleParity, Partner, Scheme, Xor
from penstock.checkpoint.levels.protection import (
    FirstFailure,
    MemberReader,
    MemberWriter,
    Protector,
)
from penstock.checkpoint.levels.redundancy import (
    GroupMember,
    GroupRecord,
    Layout,
    RecordedFile,
    build_layout,
    multiply,
)
from penstock.errors import OutOfSpace, StorageError
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Sink, WrappedStorage, read_object, write_object

BLOCK_BYTES = 4096
Sizes = list[list[int]]
"""The bytes of each file of each member."""

sizes_of_files = st.lists(st.lists(st.integers(0, 20_000), max_size=3), min_size=3, max_size=5)
SCHEMES: list[Scheme] = [Partner(), Xor(), DoubleParity()]
"""By how many parities they have; copies have none."""
NOTHING = np.zeros(0, np.int64)


def _old(name: str) -> str:
    return f"old/{name}"


def _new(name: str) -> str:
    return f"new/{name}"


@dataclass
class Staged:
    """A `StagedSave` that writes its files at the same time, in pieces of random lengths."""

    rank: int
    sizes: list[int]
    content: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.content = [np.random.default_rng([self.rank, size]).bytes(size) for size in self.sizes]

    def name(self, number: int) -> str:
        return f"file-{self.rank}-{number}"

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """It is."""

    def cancel(self) -> None:
        """Nothing is in flight."""

    def count_bytes(self, _storage: Storage, _key_of: Callable[[str], str]) -> int:
        return sum(self.sizes)

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        random = np.random.default_rng(self.rank)
        sinks = [storage.create(key_of(self.name(number)), size) for number, size in enumerate(self.sizes)]
        left = [memoryview(content) for content in self.content]
        while any(left):
            number = int(random.choice([number for number, rest in enumerate(left) if rest]))
            length = int(random.integers(1, 9000))
            sinks[number].submit(left[number][:length])
            left[number] = left[number][length:]
        for sink in sinks:
            sink.finish()
        files = tuple(
            WrittenFile(
                name=self.name(number),
                size_bytes=size,
                item_offset=NOTHING,
                item_bytes=NOTHING,
                payload_offset=NOTHING,
                sums=b"",
            )
            for number, size in enumerate(self.sizes)
        )
        stats = RankSaveStats(rank=self.rank, payload_bytes=0, file_bytes=0)
        return WrittenShare(files=files, stats=stats)


def _layout(sizes: Sizes, parities: int) -> Layout:
    largest = max(sum(each) for each in sizes)
    return build_layout(len(sizes), parities, largest, block_bytes=BLOCK_BYTES)


def _write(
    comm: ThreadComm, staged: "Staged", storage: Storage, sizes: Sizes, parities: int
) -> tuple[Any, ...]:
    totals = [sum(each) for each in sizes]
    layout = _layout(sizes, parities)
    ranks = range(len(sizes))
    return Protector(storage, comm).write(staged, storage, _old, ranks=ranks, sizes=totals, layout=layout)


def _protected(sizes: Sizes, parities: int) -> tuple[GroupRecord, list[dict[str, bytes]]]:
    """The record of a group that has saved, and the files of each member."""
    layout = _layout(sizes, parities)
    storages = [MemoryStorage(f"mem://member-{rank}") for rank in range(len(sizes))]

    def save(comm: ThreadComm) -> tuple[GroupMember, RecordedFile]:
        staged, storage = Staged(comm.rank, sizes[comm.rank]), storages[comm.rank]
        share, order, (kept,) = _write(comm, staged, storage, sizes, parities)
        files = tuple(
            RecordedFile(name=file.name, size_bytes=file.size_bytes, sum="") for file in share.files
        )
        return GroupMember(rank=comm.rank, domain="", files=files, order=order), kept

    saved = on_ranks(len(sizes), save)
    record = GroupRecord(
        step="step-1",
        save_id="a",
        domains=("",) * len(sizes),
        scheme=SCHEMES[parities].name,
        losses=max(parities, 1),
        chunk_bytes=layout.chunk_bytes if parities else 0,
        block_bytes=layout.block_bytes,
        members=tuple(member for member, _ in saved),
        kept=tuple(kept for _, kept in saved),
    )
    return record, [_files_below("old", storage) for storage in storages]


def _files_below(folder: str, storage: MemoryStorage) -> dict[str, bytes]:
    return {
        info.key.removeprefix(f"{folder}/"): bytes(read_object(storage, info.key))
        for info in storage.list(folder)
    }


def _rebuild(
    record: GroupRecord, files: Sequence[Mapping[str, bytes]], lost: tuple[int, ...], actors: int
) -> None:
    """Let `actors` ranks, each for several members, restore what some members have lost."""
    storages = [MemoryStorage(f"mem://actor-{rank}") for rank in range(actors)]
    for member, held in enumerate(files):
        for name, content in held.items():
            if member not in lost:
                write_object(storages[member % actors], _old(name), [content])

    def rebuild(comm: ThreadComm) -> None:
        holders = {member: member % actors for member in range(len(files))}
        _restore(Protector(storages[comm.rank], comm), record, lost, holders)

    on_ranks(actors, rebuild)
    found = {name: content for storage in storages for name, content in _files_below("new", storage).items()}
    assert found == {name: content for member in lost for name, content in files[member].items()}


def _restore(protector: Protector, record: GroupRecord, lost: Sequence[int], holders: dict[int, int]) -> None:
    failure = FirstFailure()
    targets = {member: holders[member] for member in lost}
    protector.restore(
        record, lost, holders=holders, targets=targets, from_key=_old, to_key=_new, failure=failure
    )
    failure.raise_noted()


def _lose_and_rebuild(sizes: Sizes, parities: int, lost: tuple[int, ...], actors: int | None = None) -> None:
    """`parities` 0 stands for copies; fewer actors than members each act for several at the rebuild."""
    record, files = _protected(sizes, parities)
    for member, held in enumerate(files):
        staged = Staged(member, sizes[member])
        assert [held[staged.name(number)] for number in range(len(sizes[member]))] == staged.content
        assert record.kept[member].sum == checksum_of(held[f"parity-{member}.bin"]).hex()
    _rebuild(record, files, lost, actors or len(sizes))


def _sequence(member: GroupMember, files: Mapping[str, bytes]) -> bytes:
    left = [files[file.name] for file in member.files]
    parts = []
    for number, length in member.order or [(number, len(file)) for number, file in enumerate(left)]:
        parts.append(left[number][:length])
        left[number] = left[number][length:]
    return b"".join(parts)


def _summed(layout: Layout, sequences: Sequence[bytes], place: int) -> bytes:
    """The parity that a member keeps, from the arithmetic of single elements."""
    whole = [np.frombuffer(each.ljust(1 << 20, b"\0"), np.uint8) for each in sequences]
    kept = b""
    for start, length in layout.blocks():
        for number, stripe in enumerate(layout.kept_stripes(place)):
            total = np.zeros(length, np.uint8)
            for chunk in range(layout.num_chunks):
                (member,) = (
                    each for each in range(layout.members) if layout.stripe_of(each, chunk) == stripe
                )
                factor = 2 ** (layout.num_chunks - 1 - chunk) if number else 1
                table = np.array([multiply(factor, element) for element in range(256)], np.uint8)
                begin = start * layout.num_chunks + chunk * length
                total ^= table[whole[member][begin : begin + length]]
            kept += total.tobytes()
    return kept


@pytest.mark.parametrize("parities", [1, 2])
def test_parity_is_the_weighted_sum_of_what_members_wrote(parities: int) -> None:
    record, files = _protected([[50_000, 3000], [7000, 12, 9000], [1], [60_001]], parities)
    assert record.members[0].order, "both files were written at the same time"
    sequences = [_sequence(member, held) for member, held in zip(record.members, files, strict=True)]
    for place, held in enumerate(files):
        assert held[f"parity-{place}.bin"] == _summed(record.layout, sequences, place)


class FullStorage(WrappedStorage):
    """A storage without room for one of its files."""

    def __init__(self, inside: MemoryStorage, full: str) -> None:
        super().__init__(inside)
        self._full = full

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin any other file."""
        if key.endswith(self._full):
            raise OutOfSpace(f"No space for {key}", uri="")
        return super().create(key, size_bytes)


@pytest.mark.parametrize("full", ["file-1-0", "parity-1.bin"])
def test_a_rank_without_room_fails_alone_and_no_rank_waits_for_it(full: str) -> None:
    sizes = [[90_000], [60_000], [80_000]]

    def save(comm: ThreadComm) -> str:
        comm.timeout_s = 10
        storage = FullStorage(MemoryStorage(f"mem://member-{comm.rank}"), full)
        try:
            _write(comm, Staged(comm.rank, sizes[comm.rank]), storage, sizes, 1)
        except OutOfSpace as error:
            return str(error)
        return "written"

    assert on_ranks(3, save) == ["written", f"No space for old/{full}", "written"]


def test_a_rank_that_cannot_restore_its_files_fails_alone_and_no_rank_waits_for_it() -> None:
    record, files = _protected([[90_000], [60_000], [80_000]], 1)

    def rebuild(comm: ThreadComm) -> str:
        comm.timeout_s = 10
        storage = MemoryStorage(f"mem://member-{comm.rank}")
        for name, content in files[comm.rank].items() if comm.rank != 1 else ():
            write_object(storage, _old(name), [content])
        protector = Protector(FullStorage(storage, "file-1-0"), comm)
        try:
            _restore(protector, record, [1], {0: 0, 1: 1, 2: 2})
        except OutOfSpace as error:
            return str(error)
        return "helped"

    assert on_ranks(3, rebuild) == ["helped", "No space for new/file-1-0", "helped"]


def test_a_file_that_parity_has_not_seen_whole_is_an_error() -> None:
    class Forgetful(Staged):
        def count_bytes(self, _storage: Storage, _key_of: Callable[[str], str]) -> int:
            return 10

        def write_to(
            self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
        ) -> WrittenShare:
            return super().write_to(getattr(storage, "inside"), key_of, progress)  # noqa: B009 - past the feed

    def save(comm: ThreadComm) -> None:
        storage = MemoryStorage(f"mem://member-{comm.rank}")
        _write(comm, Forgetful(comm.rank, [10]), storage, [[10], [10]], 1)

    with pytest.raises(StorageError, match="Parity has not seen the 10 bytes of file-"):
        on_ranks(2, save)


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


def _stored(sizes: list[int]) -> tuple[MemoryStorage, tuple[RecordedFile, ...]]:
    storage = MemoryStorage("mem://stored")
    staged = Staged(1, sizes)
    for number, content in enumerate(staged.content):
        write_object(storage, staged.name(number), [content])
    names = enumerate(sizes)
    return storage, tuple(
        RecordedFile(name=staged.name(number), size_bytes=size, sum="") for number, size in names
    )


def test_concatenated_files_are_followed_by_zeros() -> None:
    storage, files = _stored([10, 0, 6])
    whole = b"".join(bytes(read_object(storage, file.name)) for file in files)
    with closing(MemberReader(files, storage, str)) as run:
        buffer = memoryview(bytearray(b"x" * 32))
        run.read_into(0, buffer)
        assert bytes(buffer) == whole + bytes(16)
        run.read_into(100, buffer)
        assert bytes(buffer) == bytes(32)


def test_a_failed_write_leaves_no_file() -> None:
    storage = MemoryStorage("mem://half")
    with closing(MemberWriter([("a", 4), ("b", 4)], storage, str)) as out:
        out.write(memoryview(b"12345"))
    assert [info.key for info in storage.list()] == ["a"]


def test_a_share_moves_to_another_rank_bit_for_bit() -> None:
    record, files = _protected([[5000, 12], [7000], [9000]], 2)
    storages = [MemoryStorage(f"mem://actor-{rank}") for rank in range(3)]
    for member, held in enumerate(files):
        for name, content in held.items():
            write_object(storages[member], _old(name), [content])

    def move(comm: ThreadComm) -> None:
        failure, holders = FirstFailure(), {0: 0, 1: 1, 2: 2}
        Protector(storages[comm.rank], comm).restore(
            record, (), holders=holders, targets={0: 2, 1: 1}, from_key=_old, to_key=_new, failure=failure
        )
        failure.raise_noted()

    on_ranks(3, move)
    assert _files_below("new", storages[2]) == files[0]
    assert _files_below("new", storages[1]) == files[1]
    assert _files_below("new", storages[0]) == {}
