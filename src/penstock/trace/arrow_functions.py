"""The few of Arrow's functions that traces need, and columns of texts as numbers.

Methods of arrays, as `take`, import `pyarrow.compute`, which makes a wrapper of each of Arrow's functions:
that takes as long as reading a small trace, and all of them can be called without, as long as Arrow lets us.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

try:
    from pyarrow._compute import CastOptions, call_function
except ImportError:  # where Arrow keeps them for itself is its own affair
    from pyarrow.compute import CastOptions, call_function

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def take(values: Any, places: npt.NDArray[Any]) -> Any:
    """The values of an array, a column or a table at these places."""
    return call_function("take", [values, pa.array(places)])


def cast(values: Any, type_: pa.DataType) -> Any:
    """The values as another type."""
    return values if values.type == type_ else call_function("cast", [values], CastOptions(type_))


def find_valid(values: Any) -> Flags:
    """Which values are not missing."""
    if not values.null_count:
        return np.ones(len(values), dtype=bool)
    flags: Flags = call_function("is_valid", [values]).to_numpy(zero_copy_only=False)
    return flags


def find_unique(values: Any) -> list[Any]:
    """Each value once; one that is missing is None."""
    distinct: list[Any] = call_function("unique", [values]).to_pylist()
    return distinct


def encode(column: Any) -> pa.DictionaryArray:
    """A column of texts, each text once."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    is_encoded = isinstance(array, pa.DictionaryArray)
    return array if is_encoded else call_function("dictionary_encode", [array])


def number_texts(column: pa.DictionaryArray) -> npt.NDArray[np.int32]:
    """The place of each value in the dictionary; of a missing one, the place behind its last."""
    numbers: npt.NDArray[np.int32] = fill_missing(column.indices, len(column.dictionary)).to_numpy()
    return numbers


def fill_missing(values: Any, value: int) -> Any:
    """Integers, with this value in place of those that are missing."""
    return call_function("coalesce", [values, pa.scalar(value, values.type)]) if values.null_count else values


def decode(numbers: npt.NDArray[Any], values: Sequence[str | None]) -> pa.DictionaryArray:
    """Texts by their numbers; None, which may only be the last one, is a missing text."""
    indices = pa.array(numbers, pa.int32())
    if values and values[-1] is None:
        values = values[:-1]
        indices = pa.array(numbers, pa.int32(), mask=numbers == len(values))
    return pa.DictionaryArray.from_arrays(indices, pa.array(values, pa.string()))


def find_distinct(codes: Numbers, num_codes: int | None = None) -> tuple[Numbers, Numbers]:
    """The distinct codes, in order, and each code's place among them; codes are below `num_codes`, if any."""
    if num_codes is None or num_codes > len(codes):
        return _sort_distinct(codes)
    known = np.flatnonzero(np.bincount(codes, minlength=num_codes))
    place_of = np.zeros(num_codes, dtype=np.int64)
    place_of[known] = np.arange(len(known))
    return known, place_of[codes]


def _sort_distinct(numbers: Numbers) -> tuple[Numbers, Numbers]:
    # As np.unique does, which imports numpy.ma first: that takes as long as reading a small trace.
    if not len(numbers):
        return numbers, np.zeros(0, dtype=np.int64)
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    is_first = np.append(True, in_order[1:] != in_order[:-1])
    places = np.empty(len(numbers), dtype=np.int64)
    places[order] = np.cumsum(is_first) - 1
    return in_order[is_first], places
