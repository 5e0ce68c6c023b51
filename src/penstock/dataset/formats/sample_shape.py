"""How big the samples of a file are: drawn by (seed, file index) alone, exactly to the byte. Pure.

The draw, so that others can repeat it: u = (h + 1/2) / 2**64, where h is the little-endian BLAKE2b digest of
8 bytes of "penstock sample size SEED INDEX"; the size is mean + stdev x the normal quantile of u, rounded to
whole elements, and never below one element or what the format needs at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset

_SEARCHED_ROWS: Final = 1 << 16
"""How many row counts `near_square` tries at most: a few hundred microseconds, once a size."""


@dataclass(frozen=True, slots=True)
class SampleShape:
    """One sample: `dims` elements of the numpy type `dtype`."""

    dims: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.dims) * np.dtype(self.dtype).itemsize


def element_type(dataset: Dataset) -> np.dtype[np.generic]:
    """The type of a sample's elements, little-endian; only numbers, for which any bytes are valid."""
    kind = np.dtype(dataset.record_element_type).newbyteorder("<")
    if kind.kind not in "iufc":
        raise UsageError(
            f"Samples of {dataset.record_element_type} cannot be filled with arbitrary bytes",
            where="dataset.record_element_type",
            fix="Choose a number type: uint8, int32, float32, ...",
        )
    return kind


def draw_bytes(dataset: Dataset, seed: int, index: int) -> int:
    """The size of the samples of file `index`; not yet rounded to elements, and possibly below 1."""
    mean, stdev = dataset.record_length_bytes, dataset.record_length_bytes_stdev
    if not stdev:
        return round(mean)
    digest = blake2b(f"penstock sample size {seed} {index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    # The largest digests round to 1.0, where the quantile is infinite.
    return round(NormalDist(float(mean), float(stdev)).inv_cdf(min(uniform, 1 - 2**-53)))


def draw_shape(dataset: Dataset, seed: int, index: int, *, elements_multiple: int = 1) -> SampleShape:
    """The shape of file `index`: the dimensions asked for, or two nearly equal ones of the size drawn.

    Their product is the size exactly, where DLIO squares the whole root and loses up to two rows.
    """
    kind = element_type(dataset)
    if dataset.record_dims:
        return SampleShape(dataset.record_dims, kind.str)
    step_bytes = kind.itemsize * elements_multiple
    num_steps = max(1, round(draw_bytes(dataset, seed, index) / step_bytes))
    rows, columns = near_square(num_steps)
    return SampleShape((rows * elements_multiple, columns), kind.str)


@lru_cache(maxsize=4096)
def near_square(number: int) -> tuple[int, int]:
    """Two factors of `number`, the first at most the second and as close to it as a search finds."""
    top = math.isqrt(number)
    candidates = np.arange(max(1, top - _SEARCHED_ROWS + 1), top + 1, dtype=np.int64)
    divisors = candidates[number % candidates == 0]
    rows = int(divisors[-1]) if divisors.size else 1
    return rows, number // rows
