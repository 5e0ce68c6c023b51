"""Columns of the tables of a run, from and to numpy's arrays, without pandas.

`pa.array` and `to_numpy` import pandas wherever it is installed: a fifth of the CPU time of a short run.
Invariant: what is made here has no missing values; a column of another writer that has some reads as Arrow
reads it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def make_numbers(values: npt.ArrayLike, kind: npt.DTypeLike) -> pa.Array:
    """A column of numbers of this kind."""
    numbers = np.ascontiguousarray(values, kind)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)]
    )


def make_words(places: npt.ArrayLike, words: Sequence[str]) -> pa.DictionaryArray:
    """A column of words by their places in `words`."""
    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    dictionary = pa.Array.from_buffers(pa.string(), len(encoded), buffers)
    return pa.DictionaryArray.from_arrays(make_numbers(places, np.int32), dictionary)


def encode_words(words: Sequence[str]) -> pa.DictionaryArray:
    """A column of words, each kept once, in the order in which they come."""
    places: dict[str, int] = {}
    return make_words([places.setdefault(word, len(places)) for word in words], list(places))


def read_numbers(column: pa.ChunkedArray | pa.Array) -> Any:
    """The values of a column."""
    chunks = [column] if isinstance(column, pa.Array) else column.chunks
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return pa.chunked_array(chunks, column.type).to_numpy()
    kind = column.type.to_pandas_dtype()
    parts = [np.frombuffer(chunk.buffers()[1] or b"", kind)[chunk.offset :][: len(chunk)] for chunk in chunks]
    return np.concatenate([np.empty(0, kind), *parts])
