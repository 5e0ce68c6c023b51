"""Unions of very many events: one pass over them in order of time, in bounded memory, at the speed of a scan.

Place in the flow: below the questions, where `intervals.measures_sql` (a window function) takes seconds for
ten million. Invariant: the same whole microseconds as the SQL gives, for any order in which batches come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.compiling import compile_loop

if TYPE_CHECKING:
    from penstock.trace.questions.base import Events

_BATCH_ROWS: Final = 1 << 17
_SETS: Final = 3
_BITS: Final = 32
_NEVER: Final = np.iinfo(np.int64).min

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Unions:
    """Microseconds in which a call of the first set, of the second, or of either was under way."""

    first_us: int
    second_us: int
    either_us: int


NOTHING: Final = Unions(0, 0, 0)


def unions(
    events: Events, by: Sequence[str], *, first: str, second: str = "false"
) -> dict[tuple[Any, ...], Unions]:
    """Unions by the values of `by`; `first` and `second` are SQL expressions that tell the two sets."""
    keys = "".join(f"{key}, " for key in by)
    reader = events.read(
        f"""SELECT {keys}(({first})::TINYINT + 2 * ({second})::TINYINT)::BIGINT AS kind, ts_us, end_us
            FROM {{events}} WHERE dur_us > 0 AND (({first}) OR ({second})) ORDER BY ts_us""",
        _BATCH_ROWS,
    )
    groups = _Groups(len(by))
    for batch in reader:
        columns = [batch.column(number) for number in range(batch.num_columns)]
        codes = groups.codes(columns[: len(by)], batch.num_rows)
        # numba's loops are compiled for arrays that may be written; Arrow's may not.
        kinds, starts, ends = (np.array(column.to_numpy()) for column in columns[len(by) :])
        _loop()(codes, kinds, starts, ends, groups.reach, groups.total)
    return {groups.key(code): Unions(*map(int, groups.total[code])) for code in range(len(groups))}


class _Groups:
    """Values of key columns as small numbers, the same in every batch; pairs of columns are numbered anew."""

    def __init__(self, num_columns: int) -> None:
        self._columns = [_Numbers() for _ in range(num_columns)]
        self._pairs = [_Numbers() for _ in range(num_columns)]
        self.reach = np.full((16, _SETS), _NEVER, dtype=np.int64)
        self.total = np.zeros((16, _SETS), dtype=np.int64)

    def codes(self, columns: Sequence[pa.Array], num_rows: int) -> Numbers:
        """The group of each row."""
        codes = np.zeros(num_rows, dtype=np.int64)
        for column, numbers, pairs in zip(columns, self._columns, self._pairs, strict=True):
            codes = pairs.of(pa.array((codes << _BITS) | numbers.of(column)))
        missing = len(self) - len(self.total)
        if missing > 0:
            more = max(missing, len(self.total))
            self.reach = np.concatenate((self.reach, np.full((more, _SETS), _NEVER, dtype=np.int64)))
            self.total = np.concatenate((self.total, np.zeros((more, _SETS), dtype=np.int64)))
        return codes

    def __len__(self) -> int:
        return len(self._pairs[-1].values) if self._pairs else 1

    def key(self, code: int) -> tuple[Any, ...]:
        """The values of a group."""
        values = []
        for numbers, pairs in zip(reversed(self._columns), reversed(self._pairs), strict=True):
            pair = pairs.values[code]
            values.append(numbers.values[pair & ((1 << _BITS) - 1)])
            code = pair >> _BITS
        return tuple(reversed(values))


class _Numbers:
    """The values of one column, numbered as they come."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Any, int] = {}

    def of(self, column: pa.Array) -> Numbers:
        """The number of each row's value; a missing one is a value, too."""
        encoded = column.dictionary_encode(null_encoding="encode")
        places = np.array([self._place(value) for value in encoded.dictionary.to_pylist()], dtype=np.int64)
        return places[encoded.indices.to_numpy()] if len(column) else places

    def _place(self, value: Any) -> int:
        place = self._places.setdefault(value, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


def _sweep(codes: Any, kinds: Any, starts: Any, ends: Any, reach: Any, total: Any) -> None:  # noqa: PLR0917
    """What an event adds to a union is its part behind the furthest end before it, in order of beginnings."""
    for row in range(len(codes)):
        group = codes[row]
        for member in range(3):
            if member == 2 or (kinds[row] >> member) & 1:
                start = max(starts[row], reach[group, member])
                if ends[row] > start:
                    total[group, member] += ends[row] - start
                    reach[group, member] = ends[row]


@cache
def _loop() -> Callable[..., None]:
    return compile_loop(_sweep, "void(i8[:], i8[:], i8[:], i8[:], i8[:,:], i8[:,:])")
