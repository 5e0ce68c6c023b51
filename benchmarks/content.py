"""Keyed content beside `np.copyto`: bytes that are computed against bytes that are merely moved, on one core.

The same warm buffers of 32 MiB, each figure the best of several passes. The goal is a ratio of at least 1.4
for filling and for verifying; odd addresses, pieces and content that storage may reduce stand beside them.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from harness import Ratio, best_speed, interleave
from penstock.dataset.content import Content, Reduction
from penstock.storage.aligned import aligned_buffer

SIZE_BYTES = 32 << 20
PIECE_BYTES = 128 << 10
REDUCTION = Reduction(compressible=0.5, dedupable=0.5)

_speed = partial(best_speed, SIZE_BYTES)


def measure(repetitions: int) -> list[Ratio]:
    """Filling and verifying, whole and in pieces, against copying the same sizes."""
    sides = Sides()
    return interleave(sides.ours, sides.theirs, repetitions=repetitions, unit="GB/s")


class Sides:
    """Both sides on the same buffers."""

    def __init__(self) -> None:
        self._target, self._source = aligned_buffer(SIZE_BYTES + 8), aligned_buffer(SIZE_BYTES)
        self._content = Content(1, "benchmark")
        self._reduced = Content(1, "benchmark", REDUCTION)

    def ours(self) -> Mapping[str, float]:
        """Each verification follows a filling, so that it has everything to compare."""
        whole, unaligned = self._target[:SIZE_BYTES], self._target[3 : SIZE_BYTES + 3]
        return {
            "fill": _speed(lambda: self._content.fill(whole)),
            "verify": _speed(lambda: _verify(self._content, whole)),
            "fill, 128 KiB pieces": _speed(lambda: _fill_pieces(self._content, whole)),
            "fill, odd address and offset": _speed(lambda: self._content.fill(unaligned, 5)),
            "verify, odd address and offset": _speed(lambda: _verify(self._content, unaligned, 5)),
            "fill, half compressible and dedupable": _speed(lambda: self._reduced.fill(whole)),
            "verify, half compressible and dedupable": _speed(lambda: _verify(self._reduced, whole)),
        }

    def theirs(self) -> Mapping[str, float]:
        """A copy of 32 MiB for all; in pieces it is the same copy piece by piece."""
        target = np.frombuffer(self._target[:SIZE_BYTES], dtype=np.uint8)
        source = np.frombuffer(self._source, dtype=np.uint8)
        whole = _speed(lambda: np.copyto(target, source))
        return {
            "fill": whole,
            "verify": whole,
            "fill, 128 KiB pieces": _speed(lambda: _copy_pieces(target, source)),
            "fill, odd address and offset": whole,
            "verify, odd address and offset": whole,
            "fill, half compressible and dedupable": whole,
            "verify, half compressible and dedupable": whole,
        }


def _verify(content: Content, buffer: memoryview, offset: int = 0) -> None:
    wrong = content.verify(buffer, offset)
    assert wrong is None, f"byte {wrong} is not what was filled in"


def _fill_pieces(content: Content, whole: memoryview) -> None:
    for start in range(0, SIZE_BYTES, PIECE_BYTES):
        content.fill(whole[start : start + PIECE_BYTES], start)


def _copy_pieces(target: np.ndarray, source: np.ndarray) -> None:
    for start in range(0, SIZE_BYTES, PIECE_BYTES):
        np.copyto(target[start : start + PIECE_BYTES], source[start : start + PIECE_BYTES])


if __name__ == "__main__":
    for ratio in measure(repetitions=9):
        print(ratio.line(None))
