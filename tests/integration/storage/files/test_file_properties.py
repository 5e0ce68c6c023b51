"""Reads return what was written, for any pieces, addresses, offsets and options."""

import os
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import ObjectNotFound, ShortTransfer
from penstock.storage.aligned import aligned_buffer, copy_bytes
from penstock.storage.files.file_io import COPY_REASON
from penstock.storage.files.file_storage import FileStorage
from penstock.storage.protocol import Sink, read_object, write_object
from penstock.storage.uri import open_storage
from penstock.testing.storage_contract import ReleaseLedger, arbitrary_bytes, assert_same_bytes

CONTENT = arbitrary_bytes(200_000, seed=9)
Scheme = Literal["file", "direct"]

lengths = st.one_of(
    st.integers(0, 20_000), st.sampled_from([0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 16_384])
)
shifts = st.one_of(st.just(0), st.integers(0, 4096))


def opened(root: Path, scheme: Scheme, writes_in_flight: int, alignment: int) -> FileStorage:
    options = {"writes_in_flight": str(writes_in_flight), "fsync": "no"}
    if scheme == "direct":
        options |= {"alignment_bytes": str(alignment), "bounce_bytes": str(2 * alignment)}
    storage = open_storage(f"{scheme}://{root}", {}, options=options)
    assert isinstance(storage, FileStorage)
    return storage


def placed(content: bytes, shift: int) -> memoryview:
    """`content` in memory of its own, `shift` bytes past a page."""
    buffer = aligned_buffer(len(content) + shift)[shift:]
    copy_bytes(buffer, memoryview(content))
    return buffer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scheme=st.sampled_from(["file", "direct"]),
    writes_in_flight=st.sampled_from([1, 3]),
    alignment=st.sampled_from([512, 4096]),
    size_is_told=st.booleans(),
    pieces=st.lists(st.tuples(lengths, shifts), max_size=8),
)
def test_pieces_of_any_size_at_any_address_become_one_object(
    tmp_path: Path,
    scheme: Scheme,
    writes_in_flight: int,
    alignment: int,
    pieces: list[tuple[int, int]],
    *,
    size_is_told: bool,
) -> None:
    storage = opened(tmp_path, scheme, writes_in_flight, alignment)
    total = sum(length for length, _ in pieces)
    sink = storage.create("key", total if size_is_told else None)
    ledger, start = ReleaseLedger(), 0
    for length, shift in pieces:
        mutable = bytearray(length + shift)
        mutable[shift:] = CONTENT[start : start + length]
        sink.submit(memoryview(mutable)[shift:], ledger.issue(mutable))
        start += length
    assert sink.finish().size_bytes == total
    ledger.assert_each_released_once()
    assert (tmp_path / "key").read_bytes() == CONTENT[:total]
    assert storage.counters.written_bytes == total
    assert storage.counters.copied_bytes[COPY_REASON] <= total


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    write_object(open_storage(str(root), {}), "key", [CONTENT[:150_001]])
    return root


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(["file", "direct"]),
    alignment=st.sampled_from([512, 4096]),
    offset=st.integers(0, 160_000),
    room_at=st.tuples(lengths, shifts),
)
def test_any_range_at_any_address_is_read_or_refused(
    written: Path, scheme: Scheme, alignment: int, offset: int, room_at: tuple[int, int]
) -> None:
    storage, (length, shift) = opened(written, scheme, 1, alignment), room_at
    room = placed(b"\xa5" * (length + 64), shift)
    with closing(storage.open("key")) as source:
        if offset + length > 150_001:
            with pytest.raises(ShortTransfer):
                source.read_into(offset, room[:length])
            assert set(room) == {0xA5}
        else:
            source.read_into(offset, room[:length])
            assert_same_bytes(room[:length], CONTENT[offset : offset + length])
            assert set(room[length:]) == {0xA5}


keys = st.sampled_from(["a", "b", "folder/a", "folder/deeper/b", "folder/deeper/c"])


class FilesAgainstADictionary(RuleBasedStateMachine):
    """Any order of creating, finishing, aborting and deleting looks like a dictionary from outside."""

    parent: Path
    sinks = Bundle("sinks")

    @initialize(scheme=st.sampled_from(["file", "direct"]), writes_in_flight=st.sampled_from([1, 2]))
    def begin(self, scheme: Scheme, writes_in_flight: int) -> None:
        self.root = self.parent / os.urandom(8).hex()
        self.root.mkdir()
        self.storage = opened(self.root, scheme, writes_in_flight, 4096)
        self.expected: dict[str, bytes] = {}
        self.unfinished: list[Sink] = []

    @rule(target=sinks, key=keys, length=lengths, start=st.integers(0, 1000))
    def create(self, key: str, length: int, start: int) -> tuple[Sink, str, bytes]:
        sink, content = self.storage.create(key), CONTENT[start : start + length]
        sink.submit(memoryview(content))
        self.unfinished.append(sink)
        return sink, key, content

    @rule(sink=consumes(sinks))
    def finish(self, sink: tuple[Sink, str, bytes]) -> None:
        sink[0].finish()
        self.expected[sink[1]] = sink[2]

    @rule(sink=consumes(sinks))
    def abort(self, sink: tuple[Sink, str, bytes]) -> None:
        sink[0].abort()

    @rule(key=keys)
    def delete(self, key: str) -> None:
        if key in self.expected:
            self.storage.delete(key)
            del self.expected[key]
        else:
            with pytest.raises(ObjectNotFound):
                self.storage.delete(key)

    @invariant()
    def looks_like_the_dictionary(self) -> None:
        if hasattr(self, "expected"):
            listed = {info.key: info.size_bytes for info in self.storage.list()}
            assert listed == {key: len(content) for key, content in self.expected.items()}
            for key, content in self.expected.items():
                assert_same_bytes(read_object(self.storage, key), content)
            below = {key for key in self.expected if key.startswith("folder/deeper/")}
            assert {info.key for info in self.storage.list("folder/deeper")} == below

    def teardown(self) -> None:
        for sink in getattr(self, "unfinished", []):
            sink.abort()
        if hasattr(self, "root"):
            assert list(self.root.rglob(".penstock-*")) == []


def test_files_look_like_a_dictionary_whatever_the_order(tmp_path: Path) -> None:
    class BelowThisTest(FilesAgainstADictionary):
        parent = tmp_path

    run_state_machine_as_test(BelowThisTest, settings=settings(stateful_step_count=20, deadline=None))
