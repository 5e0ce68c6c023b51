"""A scan puts every byte to its check, in any blocks, and goes on where storage fails."""

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.description import checksum_of
from penstock.checkpoint.tools.verify import (
    Segment,
    Stretch,
    check_crc,
    check_sum,
    check_zeros,
    cut_into_stretches,
    scan,
)
from penstock.progress import Progress
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import write_object
from penstock.testing.faults import FailAtCall


def key_of(file: str) -> str:
    return f"run/{file}"


def held(**files: bytes) -> MemoryStorage:
    storage = MemoryStorage("mem://scan")
    for name, content in files.items():
        write_object(storage, key_of(name), [content])
    return storage


def alone(segment: Segment) -> Stretch:
    """A stretch of one segment."""

    def segments(_: object) -> Sequence[Segment]:
        return [segment]

    return "f", segment[0], segment[1] - segment[0], segments


def segments_of(content: bytes, cuts: list[int]) -> list[Segment]:
    """All of `content`, cut anywhere, by three kinds of checks."""
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    found: list[Segment] = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        part = content[begin:end]
        check = partial(check_sum, checksum_of(part)) if number % 2 else partial(check_crc, zlib.crc32(part))
        found.append((begin, end, str(number), check))
    return found


@given(
    content=st.binary(min_size=1, max_size=9000),
    cuts=st.lists(st.integers(0, 9000), max_size=8),
    streams=st.integers(1, 3),
)
def test_a_flipped_byte_is_damage_of_its_segment_alone(content: bytes, cuts: list[int], streams: int) -> None:
    segments = segments_of(content, cuts)
    work = [alone(one) for one in segments]
    assert scan(held(f=content), key_of, work, Progress(), streams=streams) == []
    spot = sum(content) % len(content)
    flipped = content[:spot] + bytes([content[spot] ^ 1]) + content[spot + 1 :]
    (damage,) = scan(held(f=flipped), key_of, work, Progress(), streams=streams)
    assert damage.begin <= spot < damage.end


def test_gaps_must_be_zeros_and_known_damage_stays_damage() -> None:
    segments = [(0, 10, "", check_zeros), (10, 20, "x", lambda _: "no archive")]
    work = list(cut_into_stretches("f", segments))
    assert [damage.what for damage in scan(held(f=bytes(20)), key_of, work, Progress())] == ["no archive"]
    found = scan(held(f=bytes(9) + b"!" + bytes(10)), key_of, work, Progress())
    assert [damage.what for damage in found] == ["something was written between items", "no archive"]


def test_bytes_past_the_end_of_a_file_are_damage() -> None:
    work = list(cut_into_stretches("f", [(0, 5, "a", check_zeros), (5, 50, "b", check_zeros)]))
    (damage,) = scan(held(f=bytes(20)), key_of, work, Progress())
    assert (damage.item, damage.what) == ("b", "the file ends before it")


def test_a_failed_read_is_damage_of_its_segment_and_the_scan_continues() -> None:
    pages = bytes(64 << 10)
    segments = [(begin, begin + 4096, str(begin), check_zeros) for begin in (0, 40960)]
    work = [alone(one) for one in segments]
    storage = FailAtCall(held(f=pages), "read_into", 1)
    (damage,) = scan(storage, key_of, work, Progress(), streams=1)
    assert damage.item == "0"
    assert damage.what.startswith("cannot be read: Injected fault")


def test_a_file_that_cannot_be_opened_is_damage_of_each_stretch() -> None:
    work = list(cut_into_stretches("gone", [(0, 5, "a", check_zeros)]))
    (damage,) = scan(held(), key_of, work, Progress())
    assert (damage.file, damage.begin, damage.end) == ("gone", 0, 5)


def test_nothing_to_check_is_no_damage() -> None:
    assert scan(held(), key_of, [], Progress()) == []


def test_stretches_are_runs_that_threads_can_share() -> None:
    size = 40 << 20
    segments = [(number * size, (number + 1) * size, "", check_zeros) for number in range(5)]
    found = list(cut_into_stretches("f", segments))
    assert [(begin // size, size_bytes // size) for _, begin, size_bytes, _ in found] == [
        (0, 2),
        (2, 2),
        (4, 1),
    ]
