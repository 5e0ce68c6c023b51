"""Sums of items and of whole files, from bytes that pass in blocks of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.formats.manifest import ManifestFile, checksum_of
from penstock.checkpoint.levels.flush.file_copy import StreamChecksums
from penstock.errors import DataDamaged


def file_of(content: bytes, items: list[tuple[int, int]]) -> ManifestFile:
    offsets = np.array([begin for begin, _ in items], dtype=np.int64)
    return ManifestFile(
        name="f",
        size_bytes=len(content),
        item_name=np.zeros(len(items), dtype=np.int64),
        item_offset=offsets,
        item_bytes=np.array([end - begin for begin, end in items], dtype=np.int64),
        payload_offset=offsets,
        sums=b"".join(checksum_of(content[begin:end]) for begin, end in items),
    )


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8), st.data())
def test_a_flipped_byte_of_an_item_is_found_in_blocks_of_any_size(
    content: bytes, edges: list[int], data: st.DataObject
) -> None:
    inside = sorted(min(edge, len(content)) for edge in edges)
    items = list(zip(inside[::2], inside[1::2], strict=False))
    flipped = data.draw(st.none() | st.integers(0, max(len(content) - 1, 0)))
    passing = bytearray(content)
    if flipped is not None and content:
        passing[flipped] ^= 1
    is_hit = flipped is not None and any(begin <= flipped < end for begin, end in items)
    size = data.draw(st.integers(1, 70))
    sums = StreamChecksums(file_of(content, items))
    for start in range(0, len(passing), size):
        sums.see(memoryview(passing)[start : start + size])
    assert sums.sum() == checksum_of(passing).hex()
    if is_hit:
        with pytest.raises(DataDamaged, match="f is damaged in the cache"):
            sums.require_right("cache/step-1")
    else:
        sums.require_right("cache/step-1")
