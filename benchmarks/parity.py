"""The kernels of parity beside numpy's in-place XOR and a copy, on one core and the same warm buffers.

Figures count the bytes of the piece that is added. Goals: adding 0.8 of numpy's XOR, and both the weighted
parity and the scaled sums of a rebuild 0.4 of it. What a save with parity costs: checkpoint_levels.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from harness import Ratio, interleave
from penstock.checkpoint.levels.redundancy import gf256
from penstock.storage.aligned import aligned_buffer

SIZE_BYTES = 32 << 20
PASSES = 5
FACTOR = 0x8E
"""The inverse of two: a factor with half of its bits set, as a rebuild needs."""


def measure(repetitions: int) -> list[Ratio]:
    """Each kernel against numpy's XOR of the same buffers."""
    sides = Sides()
    return interleave(sides.ours, sides.theirs, repetitions=repetitions, unit="GB/s")


class Sides:
    """Both sides on the same buffers."""

    def __init__(self) -> None:
        self._plain, self._weighted, self._piece = (_random(seed) for seed in range(3))

    def ours(self) -> Mapping[str, float]:
        """What encoding and rebuilding do with each piece."""
        return {
            "add": _speed(lambda: gf256.add(self._plain, self._piece)),
            "double and add": _speed(lambda: gf256.double_and_add(self._weighted, self._piece)),
            "add scaled (rebuild)": _speed(lambda: gf256.add_scaled(self._plain, self._piece, FACTOR)),
            "add (beside a copy)": _speed(lambda: gf256.add(self._plain, self._piece)),
        }

    def theirs(self) -> Mapping[str, float]:
        """Numpy's XOR for all but the last, which stands beside a copy."""
        total = np.frombuffer(self._plain, dtype=np.uint64)
        piece = np.frombuffer(self._piece, dtype=np.uint64)
        added = _speed(lambda: np.bitwise_xor(total, piece, out=total))
        return {
            "add": added,
            "double and add": added,
            "add scaled (rebuild)": added,
            "add (beside a copy)": _speed(lambda: np.copyto(total, piece)),
        }


def _random(seed: int) -> memoryview:
    buffer = aligned_buffer(SIZE_BYTES)
    buffer[:] = np.random.default_rng(seed).bytes(SIZE_BYTES)
    return buffer


def _speed(once: Callable[[], object]) -> float:
    """GB/s of the best pass, after one that does not count."""
    once()
    best_s = float("inf")
    for _ in range(PASSES):
        start = time.perf_counter()
        once()
        best_s = min(best_s, time.perf_counter() - start)
    return SIZE_BYTES / best_s / 1e9


if __name__ == "__main__":
    for ratio in measure(repetitions=9):
        print(ratio.line(None))
