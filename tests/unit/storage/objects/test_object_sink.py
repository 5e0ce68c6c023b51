import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.objects.client_settings import MIN_PART_BYTES
from penstock.storage.objects.object_sink import (
    MAX_PART_BYTES,
    MAX_PARTS,
    PartCutter,
    SharedRelease,
    choose_part_bytes,
)
from penstock.storage.protocol import Counters, Release

MIB = 1024 * 1024
sizes = st.integers(0, 64 * 1024**4)
buffers = st.integers(1, 4 * 1024**3)
targets = st.integers(MIN_PART_BYTES, 1024 * MIB)


@given(target=targets, first=buffers, size=sizes)
def test_an_object_of_known_size_fits_into_ten_thousand_allowed_parts(
    target: int, first: int, size: int
) -> None:
    size = min(size, MAX_PARTS * MAX_PART_BYTES)
    part_bytes = choose_part_bytes(target, first, size)
    assert MIN_PART_BYTES <= part_bytes <= MAX_PART_BYTES
    assert -(-size // part_bytes) <= MAX_PARTS


@given(target=targets, first=buffers)
def test_a_part_is_near_its_target_and_either_it_or_the_buffer(target: int, first: int) -> None:
    part_bytes = choose_part_bytes(target, first, None)
    assert part_bytes in (target, first)
    assert target / 2 <= part_bytes <= 2 * target


@given(pieces=st.integers(1, 200), target=st.sampled_from([8 * MIB, 16 * MIB]))
def test_buffers_of_whole_targets_are_cut_at_the_target(pieces: int, target: int) -> None:
    assert choose_part_bytes(target, pieces * target, None) == target


def test_a_buffer_that_is_a_neighbouring_size_becomes_the_part() -> None:
    assert choose_part_bytes(8 * MIB, 5 * MIB, None) == 5 * MIB
    assert choose_part_bytes(8 * MIB, 12 * MIB, None) == 12 * MIB


def test_an_object_in_one_buffer_needs_no_even_cut() -> None:
    assert choose_part_bytes(8 * MIB, 100 * MIB + 1, 100 * MIB + 1) == 8 * MIB


def test_parts_grow_when_the_size_needs_it() -> None:
    assert choose_part_bytes(8 * MIB, 1, 1024**4) == -(-(1024**4) // MAX_PARTS)


def _cut_all(
    content: bytes, cuts: list[int], part_bytes: int, *, is_declared: bool
) -> tuple[list[bytes], int, int]:
    """The parts of `content` submitted in pieces, how often buffers came back, and how much was copied."""
    counters, released = Counters(), []
    cutter = PartCutter(part_bytes, counters)
    parts, held, submitted = [], [], 0
    edges = [0, *cuts, len(content)]
    for start, end in itertools.pairwise(edges):
        shared = SharedRelease(lambda: released.append(1))
        submitted += end - start
        ends_object = is_declared and submitted == len(content)
        for part in cutter.cut(memoryview(content)[start:end], shared, ends_object=ends_object):
            parts.append(bytes(part[0]))
            held.append(part)
        shared.drop()
    for part in cutter.rest():
        parts.append(bytes(part[0]))
        held.append(part)
    assert list(cutter.rest()) == []
    for part in held:
        part[1]()
    return parts, len(released), counters.copied_bytes["objects-gather"]


@given(
    content=st.binary(max_size=200),
    raw_cuts=st.lists(st.integers(0, 200), max_size=8),
    part_bytes=st.integers(1, 40),
    is_declared=st.booleans(),
)
def test_every_byte_is_in_one_part_and_every_buffer_comes_back(
    content: bytes, raw_cuts: list[int], part_bytes: int, *, is_declared: bool
) -> None:
    cuts = sorted(min(cut, len(content)) for cut in raw_cuts)
    parts, num_released, _ = _cut_all(content, cuts, part_bytes, is_declared=is_declared)
    assert b"".join(parts) == content
    assert num_released == len(cuts) + 1
    assert all(len(part) == part_bytes for part in parts[:-1])


@given(num_parts=st.integers(1, 6), part_bytes=st.integers(1, 40), tail=st.integers(0, 40))
def test_buffers_of_whole_parts_are_not_copied(num_parts: int, part_bytes: int, tail: int) -> None:
    content = bytes(range(256))[: num_parts * part_bytes] * 2
    content += bytes(min(tail, part_bytes))
    _, _, copied = _cut_all(content, [], part_bytes, is_declared=True)
    assert copied == 0


def test_gathered_parts_that_came_back_are_filled_again() -> None:
    cutter = PartCutter(16, Counters())

    def gathered() -> tuple[memoryview, Release]:
        halves = [cutter.cut(memoryview(bytes(8)), SharedRelease(None), ends_object=False) for _ in range(2)]
        return next(part for half in halves for part in half)

    first, give_back = gathered()
    give_back()
    again, _ = gathered()
    other, _ = gathered()
    assert first.obj is again.obj
    assert first.obj is not other.obj


def test_a_forced_release_happens_once() -> None:
    calls: list[int] = []
    shared = SharedRelease(lambda: calls.append(1))
    drop = shared.hold()
    shared.force()
    shared.force()
    drop()
    shared.drop()
    assert calls == [1]


def test_a_buffer_without_a_release_needs_none() -> None:
    shared = SharedRelease(None)
    shared.drop()
    shared.force()
