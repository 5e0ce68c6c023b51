"""Reading threads: checksums are in order, bytes are passed on once, and no thread is left waiting."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.description import checksum_of
from penstock.errors import DataDamaged, ObjectNotFound, StorageError
from penstock.progress import Progress
from penstock.storage.protocol import Source
from penstock.transfer.reader import (
    BlockReader,
    ChecksummedItem,
    OpenFiles,
    Part,
    ReadBuffers,
    ReadSettings,
    Span,
    SpanSink,
    plan_blocks,
)

PAGE = 4096
SETTINGS = ReadSettings(streams=3, block_bytes=PAGE)


class UnevenSource:
    """A file whose reads take turns in no order, or fail from some offset on."""

    def __init__(self, content: bytes, seed: int = 0, *, fails_at: int | None = None) -> None:
        self.content = content
        self.size_bytes = len(content)
        self.is_open = True
        self._fails_at = fails_at
        self._random = random.Random(seed)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert self.is_open
        if self._fails_at is not None and offset + len(buffer) > self._fails_at:
            raise StorageError("The disk is gone", uri="file:///gone")
        time.sleep(self._random.random() * 1e-3)
        buffer[:] = self.content[offset : offset + len(buffer)]

    def close(self) -> None:
        self.is_open = False


class Collected(SpanSink):
    """A landing that remembers what came; `straight` spans are read to their place."""

    def __init__(self, spans: list[Span], straight: set[int]) -> None:
        self.memory = [bytearray(span.end - span.begin) for span in spans]
        self.num_arrived = [0] * len(spans)
        self._spans = spans
        self._straight = straight
        self._lock = threading.Lock()

    def place(self, span: int, begin: int, end: int) -> memoryview | None:
        first = self._spans[span].begin
        return memoryview(self.memory[span])[begin - first : end - first] if span in self._straight else None

    def take(self, span: int, begin: int, content: memoryview) -> None:
        first = begin - self._spans[span].begin
        self.memory[span][first : first + len(content)] = content

    def arrived(self, part: Part) -> None:
        with self._lock:
            self.num_arrived[part.span] += part.end - part.begin


def read(
    source: UnevenSource, spans: list[Span], items: dict[int, ChecksummedItem], straight: set[int]
) -> Collected:
    blocks = plan_blocks(spans, block_bytes=SETTINGS.block_bytes, alignment_bytes=PAGE)
    landing = Collected(spans, straight)
    reading = BlockReader(
        blocks,
        spans,
        open_file=lambda _: source,
        sink=landing,
        items=items,
        progress=Progress(),
        wait_for_room=lambda: None,
    )
    with ThreadPoolExecutor(SETTINGS.streams) as threads:
        futures = reading.start(ReadBuffers(SETTINGS), threads)
    reading.close()
    for future in futures:
        future.result()
    return landing


CONTENT = np.random.default_rng(3).bytes(40 * PAGE)


def item(content: bytes, begin: int, end: int) -> ChecksummedItem:
    return ChecksummedItem(name="w", file="f", begin=begin, end=end, expected=checksum_of(content[begin:end]))


@given(st.lists(st.integers(1, 8 * PAGE), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_checksums_are_in_order_whichever_thread_reads(
    lengths: list[int], seed: int, data: st.DataObject
) -> None:
    spans, items, at = [], {}, 0
    for number, length in enumerate(lengths):
        end = min(at + length, len(CONTENT))
        if end == at:
            break
        spans.append(Span(0, at, end, number))
        items[number] = item(CONTENT, at, end)
        at = end
    straight = data.draw(st.sets(st.integers(0, len(spans) - 1)))
    source = UnevenSource(CONTENT, seed)
    landing = read(source, spans, items, straight)
    assert b"".join(landing.memory) == CONTENT[:at]
    assert landing.num_arrived == [span.end - span.begin for span in spans]
    assert not source.is_open


def test_an_item_of_several_spans_has_one_checksum() -> None:
    spans = [Span(0, 100, 9000, 7), Span(0, 9000, 30000, 7)]
    read(UnevenSource(CONTENT), spans, {7: item(CONTENT, 100, 30000)}, set())


@pytest.mark.parametrize("at", [5000, 5001, 29999])
def test_a_flipped_bit_is_named_with_its_item_and_range(at: int) -> None:
    spoiled = bytearray(CONTENT)
    spoiled[at] ^= 4
    with pytest.raises(DataDamaged, match=r"w is not as it was written.*\(f, bytes 5000 to 30000\)"):
        read(UnevenSource(bytes(spoiled)), [Span(0, 5000, 30000, 1)], {1: item(CONTENT, 5000, 30000)}, set())


def test_a_failure_of_one_thread_ends_all() -> None:
    source = UnevenSource(CONTENT, fails_at=20 * PAGE)
    with pytest.raises(StorageError, match="The disk is gone"):
        read(source, [Span(0, 0, len(CONTENT), 1)], {1: item(CONTENT, 0, len(CONTENT))}, set())
    assert not source.is_open


def test_warm_memory_is_kept_from_load_to_load() -> None:
    buffers = ReadBuffers(SETTINGS)
    first, second = buffers.blocks(100), buffers.blocks(2)
    assert len(first) == 2 * SETTINGS.streams
    assert len(second) == 2
    assert second[0].obj is first[0].obj


def test_a_file_that_is_slow_to_open_holds_up_only_who_wants_it() -> None:
    is_asked, may_open = threading.Event(), threading.Event()
    closed: list[str] = []

    def open_file(file: int) -> Source:
        if file == 0:
            is_asked.set()
            may_open.wait(10)
        return cast(
            "Source", SimpleNamespace(name=f"file {file}", close=lambda: closed.append(f"file {file}"))
        )

    files = OpenFiles([0, 0, 1])
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(files.open, 0, open_file) for _ in range(2)]
        is_asked.wait(10)
        files.open(1, open_file)
        files.done(1)
        assert closed == ["file 1"]
        may_open.set()
        assert slow[0].result() is slow[1].result()
    files.close()
    assert closed == ["file 1", "file 0"]


def test_all_who_want_a_file_that_cannot_be_opened_learn_why() -> None:
    def refuse(_file: int) -> Source:
        raise ObjectNotFound("gone", uri="x", fix="y")

    files = OpenFiles([0])
    for _ in range(2):
        with pytest.raises(ObjectNotFound, match="gone"):
            files.open(0, refuse)
    files.close()
