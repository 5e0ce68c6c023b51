import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.formats.file_objects import RangesFile
from penstock.dataset.formats.format_protocol import Extent, GatheredRanges

TEXT = bytes(range(200))
pieces = st.lists(st.tuples(st.integers(0, 199), st.integers(0, 60)), max_size=8)


def _extents(cuts: list[tuple[int, int]]) -> list[Extent]:
    return [Extent(start, TEXT[start : start + length]) for start, length in cuts]


@given(cuts=pieces, offset=st.integers(0, 199), length=st.integers(1, 40))
def test_a_file_of_pieces_reads_what_they_hold_and_refuses_the_rest(
    cuts: list[tuple[int, int]], offset: int, length: int
) -> None:
    held = {at for start, size in cuts for at in range(start, min(200, start + size))}
    wanted = range(offset, min(200, offset + length))
    file = RangesFile(200, GatheredRanges(_extents(cuts)).read_into)
    file.seek(offset)
    if held.issuperset(wanted):
        assert file.read(length) == TEXT[offset : offset + length]
        assert file.tell() == wanted.stop
    else:
        with pytest.raises(OSError, match="was not read"):
            file.read(length)


@given(cuts=pieces, offset=st.integers(0, 199), length=st.integers(1, 40))
def test_ranges_are_gathered_from_pieces_or_refused(
    cuts: list[tuple[int, int]], offset: int, length: int
) -> None:
    held = {at for start, size in cuts for at in range(start, min(200, start + size))}
    gathered = GatheredRanges(_extents(cuts))
    if held.issuperset(range(offset, offset + length)):
        assert bytes(gathered.read(offset, length)) == TEXT[offset : offset + length]
    else:
        with pytest.raises(OSError, match="was not read"):
            gathered.read(offset, length)


def test_a_file_of_pieces_seeks_as_files_do() -> None:
    file = RangesFile(200, GatheredRanges([Extent(0, TEXT)]).read_into)
    assert file.readable()
    assert file.seekable()
    assert file.seek(-5, io.SEEK_END) == 195
    assert file.read() == TEXT[195:]
    assert file.read(5) == b""
    assert file.seek(10) == 10
    assert file.seek(7, io.SEEK_CUR) == 17
    assert file.read(1) == TEXT[17:18]
