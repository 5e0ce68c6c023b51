"""Events that Python reads one by one, for dialects that are no JSON lines: gathered into batches.

Place in the flow: under the readers of strace, Darshan and Chrome documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from penstock.trace.reading.columns import Clock, Origin, batch_of
from penstock.trace.reading.odd import Fate, OddLine

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.event import FileAccount
    from penstock.trace.reading.pages import Page

_ROWS: Final = 1 << 15


class LineDialect(Protocol):
    """What a dialect of text lines knows. `read` is called once a line in order, `finish` once at the end."""

    def read(self, line: str) -> OddLine:
        """What the line is."""

    def finish(self) -> Iterable[OddLine]:
        """Lines that were counted as metadata because they began something that never ended."""

    def faults(self) -> Iterable[str]:
        """What is wrong with the file as a whole."""


def read_lines(
    pages: Iterator[Page], dialect: LineDialect, origin: Origin, account: FileAccount
) -> Iterator[pa.RecordBatch]:
    """The events of text lines, batch by batch."""
    rows: list[Mapping[str, Any]] = []
    for page in pages:
        for line in page.content[page.start : page.stop].split(b"\n")[:-1]:
            odd = dialect.read(line.decode(errors="backslashreplace"))
            account.lines += 1
            count(odd, line, account)
            if odd.row is not None:
                rows.append(odd.row)
        if len(rows) >= _ROWS:
            yield batch_of(rows, origin, Clock())
            rows = []
    for odd in dialect.finish():
        account.metadata -= 1
        count(odd, b"", account)
        if odd.row is not None:
            rows.append(odd.row)
    account.faults.extend(dialect.faults())
    if rows:
        yield batch_of(rows, origin, Clock())


def count(odd: OddLine, line: bytes, account: FileAccount) -> None:
    """Count what became of a line."""
    match odd.fate:
        case Fate.BLANK:
            account.blank += 1
        case Fate.METADATA:
            account.metadata += 1
        case Fate.EVENT:
            account.events += 1
        case Fate.SALVAGED | Fate.DROPPED:
            text = line.rstrip(b"\r\n")[:400].decode(errors="backslashreplace")
            account.count_damage(account.lines, odd.reason, text, salvaged=odd.fate is Fate.SALVAGED)
