"""How trace files are damaged: what writers without escapes, killed processes and full disks leave behind.

Place in the flow: between lines and bytes. Pure. One invariant: a damage touches only what it names.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.trace.synthesize.description import Damage

_PATH: Final = re.compile(rb'"(fname|fhash)":("[^"]*"|\d+)')


def damage_lines(lines: Sequence[bytes], damages: Sequence[Damage]) -> list[bytes]:
    """Event lines with those damages that befall a line."""
    damaged = list(lines)
    for damage in damages:
        if damage.kind in _ON_A_LINE and damaged:
            damaged[damage.line] = _ON_A_LINE[damage.kind](damaged[damage.line])
    return damaged


def pack(lines: Sequence[bytes], damages: Sequence[Damage]) -> bytes:
    """The whole file: brackets, lines, compression, and the damages of those."""
    kinds = {damage.kind for damage in damages}
    if "empty_file" in kinds:
        return b""
    opening = [] if "no_opening" in kinds else [b"["]
    closing = [] if "no_closing" in kinds else [b"]"]
    rows = [*opening, *lines, *closing]
    if "plain_text" in kinds:
        return b"\n".join(rows) + b"\n"
    middle = len(rows) // 2 if "two_members" in kinds else len(rows)
    packed = b"".join(
        gzip.compress(b"\n".join(part) + b"\n", compresslevel=1, mtime=0)
        for part in (rows[:middle], rows[middle:])
        if part
    )
    return packed[: -max(16, len(packed) // 10)] if "truncated_gzip" in kinds else packed


def _with_path(raw: bytes) -> Callable[[bytes], bytes]:
    def spoil(line: bytes) -> bytes:
        spoilt = _PATH.sub(lambda _: b'"fname":"' + raw + b'"', line, count=1)
        return spoilt if spoilt != line else line.replace(b'"args":{', b'"args":{"fname":"' + raw + b'",', 1)

    return spoil


_ON_A_LINE: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "control_characters": _with_path(b"\x01\x02\x07\x1b\x0b"),
    "bad_utf8": _with_path(b"/data/\xff\xfe\xc3"),
    "cut_line": lambda line: line[: len(line) // 2],
    "garbage_line": lambda _: b"@@ not a line of a trace @@",
}
