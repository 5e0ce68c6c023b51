"""Blocks of the probe: aligned, warm, incompressible, and never the same 4 KiB twice."""

import zlib

import numpy as np

from penstock.bench.probe.timed_streams import Blocks


def _pages(content: bytes) -> list[bytes]:
    return [content[start : start + 4096] for start in range(0, len(content), 4096)]


def test_no_page_is_ever_written_twice_by_any_stream() -> None:
    seen: list[bytes] = []
    for stream_id in (0, 1, 4096):
        blocks = Blocks(2, 64 << 10, stream_id=stream_id)
        for turn in range(6):
            seen.extend(_pages(bytes(blocks.renew(turn % 2))))
    assert len(set(seen)) == len(seen) == 3 * 6 * 16


def test_content_does_not_compress() -> None:
    content = bytes(Blocks(1, 1 << 20, stream_id=7).renew(0))
    assert len(zlib.compress(content, 1)) > 0.99 * len(content)


def test_blocks_start_on_pages_and_have_exactly_their_size() -> None:
    blocks = Blocks(3, 10_000, stream_id=0)
    assert len(blocks.views) == 3
    for view in blocks.views:
        assert view.nbytes == 10_000
        assert np.frombuffer(view, dtype=np.uint8).ctypes.data % 4096 == 0


def test_renewing_changes_the_stamps_and_nothing_else() -> None:
    blocks = Blocks(1, 8192, stream_id=3)
    before = np.frombuffer(bytes(blocks.renew(0)), dtype=np.uint64)
    after = np.frombuffer(bytes(blocks.renew(0)), dtype=np.uint64)
    assert np.flatnonzero(before != after).tolist() == [0, 512]
