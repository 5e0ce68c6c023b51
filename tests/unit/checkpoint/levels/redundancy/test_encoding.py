"""Sums are written several at once, each byte once and in its place."""

import threading
from typing import Any

import pytest

from penstock.checkpoint.levels.redundancy.encoding import SumWriter
from penstock.checkpoint.levels.redundancy.redundancy_record import ConcatenatedWriter
from penstock.checkpoint.levels.redundancy.ring import FirstFailure
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import Release, Sink, WrappedSink, read_object

BLOCK_BYTES, NUM_SUMS, NUM_KEPT = 4096, 8, 2


class HeldSink(WrappedSink):
    """Waits with its first write, and remembers the lengths of all."""

    def __init__(self, inside: Sink, go_on: threading.Event, lengths: list[int]) -> None:
        super().__init__(inside)
        self._go_on = go_on
        self._lengths = lengths

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        assert self._go_on.wait(60)
        self._lengths.append(buffer.nbytes)
        self.inside.submit(buffer, release)


def test_sums_that_have_come_meanwhile_are_written_at_once() -> None:
    memory = memoryview(bytearray(NUM_SUMS * NUM_KEPT * BLOCK_BYTES))
    blocks = [memory[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(NUM_SUMS * NUM_KEPT)]
    sums = [blocks[at : at + NUM_KEPT] for at in range(0, len(blocks), NUM_KEPT)]
    storage, go_on, lengths, expected = MemoryStorage(), threading.Event(), list[int](), b""
    num_stripes, last_bytes = 11, 512

    def create() -> ConcatenatedWriter:
        size = NUM_KEPT * ((num_stripes - 1) * BLOCK_BYTES + last_bytes)
        return ConcatenatedWriter(
            [("parity", size)], lambda name, size: HeldSink(storage.create(name, size), go_on, lengths)
        )

    with SumWriter(create, FirstFailure(), sums, memory) as out:
        for stripe in range(num_stripes):
            if stripe == NUM_SUMS:
                go_on.set()
            taken: Any = out.take()
            length = last_bytes if stripe == num_stripes - 1 else BLOCK_BYTES
            for parity, block in enumerate(taken):
                content = bytes([NUM_KEPT * stripe + parity]) * BLOCK_BYTES
                block[:] = content
                expected += content[:length]
            out.put(taken, length)
        assert out.finish() is not None
    assert bytes(read_object(storage, "parity")) == expected
    assert max(lengths) >= (NUM_SUMS - 1) * NUM_KEPT * BLOCK_BYTES


@pytest.mark.parametrize("fails_at", ["create", "write"])
def test_whatever_the_file_fails_with_sums_are_taken_and_the_error_is_kept(
    fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memoryview(bytearray(BLOCK_BYTES))
    storage, failure = MemoryStorage(), FirstFailure()

    def fail(*_: object) -> None:
        raise ValueError("injected")

    def create() -> ConcatenatedWriter:
        if fails_at == "create":
            fail()
        return ConcatenatedWriter([("parity", 3 * BLOCK_BYTES)], storage.create)

    monkeypatch.setattr(ConcatenatedWriter, "write", fail)

    with SumWriter(create, failure, [[memory]], memory) as out:
        for _ in range(3):
            out.put(out.take(), BLOCK_BYTES)
        out.finish()
    with pytest.raises(ValueError, match="injected"):
        failure.raise_noted()
