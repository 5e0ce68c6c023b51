"""Names of very many files as few bytes: those of a checkpoint differ in the numbers in them.

`__0_0.distcp`, `__0_1.distcp`, `__1_0.distcp`... are one pattern and two columns of numbers. Invariant:
`unpack_names(pack_names(names)) == names` for any names.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence

_NUMBERS = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")
_MARK = "\0"


def pack_names(names: Sequence[str]) -> bytes:
    """The names, compressed: about a byte for each name of a checkpoint's files."""
    patterns: dict[tuple[str, int], int] = {}
    rows: list[list[int]] = []
    before: dict[int, list[int]] = {}
    for name in names:
        numbers = [int(number) for number in _NUMBERS.findall(name)] if _MARK not in name else []
        pattern = _NUMBERS.sub(_MARK, name) if numbers else name
        kind = patterns.setdefault((pattern, len(numbers)), len(patterns))
        # Numbers of neighbours differ by little, mostly by the same.
        last = before.get(kind, [0] * len(numbers))
        rows.append([kind, *(number - other for number, other in zip(numbers, last, strict=True))])
        before[kind] = numbers
    return zlib.compress(
        json.dumps([[pattern for pattern, _ in patterns], rows], separators=(",", ":")).encode()
    )


def unpack_names(packed: bytes) -> tuple[str, ...]:
    """The names again."""
    patterns, rows = json.loads(zlib.decompress(packed))
    last: dict[int, list[int]] = {}
    names = []
    for kind, *steps in rows:
        before = last.get(kind, [0] * len(steps))
        last[kind] = numbers = [number + step for number, step in zip(before, steps, strict=True)]
        first, *rest = patterns[kind].split(_MARK) if steps else [patterns[kind]]
        names.append(first + "".join(f"{number}{part}" for number, part in zip(numbers, rest, strict=True)))
    return tuple(names)
