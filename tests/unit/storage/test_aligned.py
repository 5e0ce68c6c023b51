import gc
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.aligned import (
    PAGE_BYTES,
    BufferPool,
    address_of,
    aligned_buffer,
    copy_bytes,
    flat,
    round_up,
)
from penstock.storage.files.file_io import aligned_range


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 2**20 + 5])
def test_a_buffer_begins_at_a_page_and_has_the_requested_size(size: int) -> None:
    buffer = aligned_buffer(size)
    assert buffer.nbytes == len(buffer) == size
    assert address_of(buffer) % PAGE_BYTES == 0
    assert not buffer.readonly
    assert bytes(buffer) == bytes(size)


def test_a_buffer_is_in_memory_before_it_is_used() -> None:
    buffer = aligned_buffer(8 * 2**20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    np.frombuffer(buffer, dtype=np.uint8)[::PAGE_BYTES] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 8 * 2**20 // PAGE_BYTES // 10


def test_an_address_moves_with_its_view() -> None:
    buffer = aligned_buffer(100)
    assert address_of(buffer[7:]) - address_of(buffer) == 7
    assert address_of(buffer[:0]) == 0


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_rounding_up_gives_the_least_multiple_not_below(number: int, step: int) -> None:
    rounded = round_up(number, step)
    assert rounded % step == 0
    assert rounded - step < number <= rounded


def test_flat_shows_the_same_bytes_whatever_the_items() -> None:
    numbers = np.arange(12, dtype=np.float64).reshape(3, 4)
    assert bytes(flat(memoryview(numbers.data))) == numbers.tobytes()
    assert flat(memoryview(numbers.data)).nbytes == 96
    assert len(flat(memoryview(np.empty((0, 3)).data))) == 0


def test_flat_leaves_plain_bytes_alone() -> None:
    plain = memoryview(b"abc")
    assert flat(plain) is plain


def test_copying_moves_bytes_between_any_addresses() -> None:
    target = bytearray(10)
    copy_bytes(memoryview(target)[3:6], memoryview(b"xabcx")[1:4])
    assert target == b"\0\0\0abc\0\0\0\0"
    copy_bytes(memoryview(target)[:0], memoryview(b""))
    assert target[3:6] == b"abc"


def test_a_pool_hands_out_the_buffer_that_came_back() -> None:
    pool = BufferPool(8192, num_kept=2)
    first = pool.take()
    second = pool.take()
    assert address_of(first) != address_of(second)
    pool.give_back(first)
    assert pool.take() is first


def test_a_pool_keeps_at_most_num_kept_buffers() -> None:
    pool = BufferPool(4096, num_kept=2)
    taken = [pool.take() for _ in range(5)]
    for buffer in taken:
        pool.give_back(buffer)
    gc.collect()
    again = [pool.take() for _ in range(3)]
    assert sum(any(buffer is old for old in taken) for buffer in again) == 2


@given(
    st.integers(0, 40_000), st.integers(0, 20_000), st.integers(0, 4096), st.sampled_from([512, 1024, 4096])
)
def test_what_goes_straight_is_aligned_in_memory_and_in_the_file(
    offset: int, length: int, shift: int, alignment: int
) -> None:
    buffer = aligned_buffer(24_192)[shift : shift + length]
    straight = aligned_range(buffer, offset, alignment)
    assert 0 <= straight.start <= straight.stop <= length
    if straight:
        assert (offset + straight.start) % alignment == 0
        assert (address_of(buffer) + straight.start) % alignment == 0
        assert len(straight) % alignment == 0
        assert straight.start < alignment
        assert length - straight.stop < alignment
    elif (offset - shift) % alignment == 0:
        assert length < 2 * alignment
