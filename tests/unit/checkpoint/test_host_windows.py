"""Ranks of one host: all or none are connected, blocks come whole, and one that died is named."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint import host_windows
from penstock.checkpoint.host_windows import (
    HostLinks,
    HostSharing,
    Window,
    connect_host,
    settings_for_sharing,
)
from penstock.checkpoint.plan.load_plan import LoadPlan, Transfers
from penstock.checkpoint.state.regions import Regions
from penstock.errors import RankError, StorageError
from penstock.progress import Progress
from penstock.storage.aligned import address_of
from penstock.transfer.reader import (
    BlockReader,
    Part,
    ReadBuffers,
    ReadSettings,
    Span,
    SpanSink,
    plan_blocks,
)

PAGE = 4096
SETTINGS = ReadSettings(streams=2, block_bytes=PAGE)
NUM_RANKS = 3
SHARE_BYTES = 10 * PAGE + 100
"""Read by each rank for all; neighbours meet within a block."""
CONTENT = np.random.default_rng(5).bytes(NUM_RANKS * SHARE_BYTES)


def connected(comm: ThreadComm) -> HostLinks:
    links = connect_host(comm, range(NUM_RANKS), settings=SETTINGS, read_bytes=SHARE_BYTES)
    assert links is not None
    return links


class File:
    """The content, as a source; the n-th read may do something else first."""

    size_bytes = len(CONTENT)

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before = before
        self._lock = threading.Lock()
        self.num_reads = 0
        self.addresses = set[int]()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.num_reads += 1
            self.addresses.add(address_of(buffer))
            number = self.num_reads
        self._before(number)
        buffer[:] = CONTENT[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class Memory(SpanSink):
    """Where everything arrives."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self.content = bytearray(len(CONTENT))
        self.num_arrived = 0
        self._lock = threading.Lock()

    def place(self, span: int, begin: int, end: int) -> None:
        del span, begin, end

    def take(self, span: int, begin: int, content: memoryview) -> None:
        assert self._spans[span].begin <= begin
        self.content[begin : begin + len(content)] = content

    def arrived(self, part: Part) -> None:
        with self._lock:
            self.num_arrived += part.end - part.begin


def planned(rank: int) -> tuple[LoadPlan, list[Span]]:
    """Each rank reads its part of the file, and all want all of it."""
    order = [rank, *(other for other in range(NUM_RANKS) if other != rank)]
    none = np.zeros(0, dtype=np.int64)
    nothing = Transfers(
        read=none, peer=none, want=none, regions=Regions.from_rows([]), in_round=none, message=none
    )
    plan = LoadPlan(
        rank=rank,
        row=np.zeros(NUM_RANKS, dtype=np.int64),
        regions=Regions.from_rows([(0, (at * SHARE_BYTES,), (SHARE_BYTES,)) for at in order]),
        reader=np.array(order),
        shown_read=np.zeros(NUM_RANKS - 1, dtype=np.int64),
        shown_to=np.array(order[1:]),
        local=nothing,
        sends=nothing,
        receives=nothing,
    )
    return plan, [Span(0, at * SHARE_BYTES, (at + 1) * SHARE_BYTES) for at in order]


def load(links: HostLinks, rank: int, before: Callable[[int], None] = lambda _: None) -> bytes:
    """One rank's load, as `execute` does it."""
    plan, spans = planned(rank)
    memory, source = Memory(spans), File(before)
    blocks = plan_blocks(spans[:1], block_bytes=links.block_bytes, alignment_bytes=PAGE)
    sharing = HostSharing(links, plan, spans, memory, timeout_s=30)
    reader = BlockReader(
        blocks,
        spans,
        open_file=lambda _: source,
        sink=memory,
        items={},
        progress=Progress(),
        wait_for_room=lambda: None,
        viewers=sharing,
    )
    with closing(links), ThreadPoolExecutor(8) as threads:
        buffers = ReadBuffers(settings_for_sharing(links, SETTINGS))
        futures = [*reader.start(buffers, threads), *sharing.start(threads)]

        def stop() -> None:
            reader.stop()
            sharing.stop()

        for future in futures:
            future.add_done_callback(lambda done: stop() if done.exception() is not None else None)
    for future in futures:
        future.result()
    assert memory.num_arrived == len(CONTENT)
    assert sharing.seen_bytes == (NUM_RANKS - 1) * SHARE_BYTES
    assert source.num_reads == len(blocks), "the rest comes from the others"
    places = {address_of(place) for place in links.places()}
    assert source.addresses <= places if links.window.is_huge else not source.addresses & places
    return bytes(memory.content)


def refuse_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Window.make

    def refuse(size_bytes: int, *, is_huge: bool) -> Window:
        if is_huge:
            raise OSError(22, "Invalid argument")
        return make(size_bytes, is_huge=False)

    monkeypatch.setattr(host_windows.Window, "make", refuse)


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_all_ranks_get_what_each_reads_once_through_few_small_windows(
    monkeypatch: pytest.MonkeyPatch, *, has_huge_pages: bool
) -> None:
    if not has_huge_pages:
        refuse_huge_pages(monkeypatch)

    def program(comm: ThreadComm) -> bytes:
        links = connected(comm)
        assert len(links.window.view) <= 4 * PAGE, "the windows hold a part of it at a time"
        return load(links, comm.rank)

    assert on_ranks(NUM_RANKS, program) == [CONTENT] * NUM_RANKS


def test_a_rank_that_dies_is_named_by_the_others() -> None:
    def program(comm: ThreadComm) -> str:
        links = connected(comm)

        def die(number: int) -> None:
            if comm.rank == 2 and number == 4:
                # As the kernel does it for a process that was killed.
                for link in links.links.values():
                    link.connection.shutdown(2)
                raise StorageError("this rank is no more", uri="file:///gone")

        with pytest.raises((RankError, StorageError)) as caught:
            load(links, comm.rank, die)
        return str(caught.value)

    first, second, _ = on_ranks(NUM_RANKS, program)
    assert "Rank 2 ended while" in first
    assert "Rank 2 ended while" in second


def test_a_rank_that_fails_alone_raises_and_the_others_wait_to_be_told() -> None:
    def program(comm: ThreadComm) -> str:
        links = connected(comm)
        plan, spans = planned(comm.rank)
        sharing = HostSharing(links, plan, spans, Memory(spans), timeout_s=30)
        with ThreadPoolExecutor(2) as threads:
            futures = sharing.start(threads)
            if comm.rank == 2:
                sharing.stop()
            comm.barrier(awaiting="rank 2 to give up")
            sharing.stop()
            for future in futures:
                future.result()
        links.close()
        return "told by the heartbeat"

    assert on_ranks(NUM_RANKS, program) == ["told by the heartbeat"] * NUM_RANKS


def test_without_memory_for_one_rank_none_shares_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, failing = Window.make, threading.Lock()

    def no_room(size_bytes: int, *, is_huge: bool) -> Window:
        if is_huge or failing.acquire(blocking=False):
            raise OSError(12, "Cannot allocate memory")
        return make(size_bytes, is_huge=False)

    monkeypatch.setattr(host_windows.Window, "make", no_room)

    def program(comm: ThreadComm) -> HostLinks | None:
        return connect_host(comm, range(NUM_RANKS), settings=SETTINGS, read_bytes=SHARE_BYTES)

    with caplog.at_level(logging.WARNING):
        assert on_ranks(NUM_RANKS, program) == [None] * NUM_RANKS
    (record,) = caplog.records
    assert "cannot share memory" in record.message
    assert "Cannot allocate memory" in record.message


def test_a_rank_that_is_alone_on_its_host_is_not_connected() -> None:
    def program(comm: ThreadComm) -> HostLinks | None:
        return connect_host(comm, [comm.rank], settings=SETTINGS, read_bytes=0)

    assert on_ranks(NUM_RANKS, program) == [None] * NUM_RANKS
