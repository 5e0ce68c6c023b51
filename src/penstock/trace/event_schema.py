"""The event schema: the columns of an event, one name for each operation, and the account of each file.

    trace files -> reading -> events (this schema) -> table -> questions -> comparison, findings

Readers make rows of this schema, questions ask them; neither knows the other. Invariants: times are whole
microseconds with `end_us = ts_us + dur_us`, and every line of a file is counted exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

import pyarrow as pa

from penstock.errors import TraceDamaged


@dataclass(frozen=True, slots=True)
class EventColumn:
    """One column: its Arrow type, what it means, and whether a value may be missing."""

    name: str
    type: pa.DataType
    meaning: str
    may_be_missing: bool = False

    @property
    def type_sql(self) -> str:
        """Its type in SQL."""
        return {pa.int64(): "BIGINT", pa.int32(): "INTEGER"}.get(self.type, "VARCHAR")


COLUMNS: Final = (
    EventColumn("ts_us", pa.int64(), "start: microseconds since 1970 by the clock of its host"),
    EventColumn("dur_us", pa.int64(), "duration"),
    EventColumn("end_us", pa.int64(), "end: ts_us + dur_us"),
    EventColumn("op", pa.string(), "operation, by one name for all spellings: open, stat, write"),
    EventColumn("name", pa.string(), "operation as traced: open64, __xstat, write"),
    EventColumn("cat", pa.string(), "the layer that traced it: POSIX, STDIO, OBJECT, checkpoint"),
    EventColumn("pid", pa.int64(), "process, as traced (a rank in traces of DLIO)"),
    EventColumn("tid", pa.int64(), "thread, as traced"),
    EventColumn("rank", pa.int32(), "rank of the process in its job", may_be_missing=True),
    EventColumn("host", pa.string(), "machine", may_be_missing=True),
    EventColumn("path", pa.string(), "file", may_be_missing=True),
    EventColumn("size_bytes", pa.int64(), "bytes moved by a read or a write", may_be_missing=True),
    EventColumn("offset", pa.int64(), "offset in the file", may_be_missing=True),
    EventColumn("ret", pa.int64(), "what the call returned", may_be_missing=True),
    EventColumn("epoch", pa.int32(), "epoch of the training", may_be_missing=True),
    EventColumn("step", pa.int32(), "step of the training", may_be_missing=True),
    EventColumn("args", pa.string(), "everything else that was traced, as JSON text"),
    EventColumn("run", pa.string(), "the run that the file belongs to"),
    EventColumn("file", pa.string(), "the trace file that it was read from"),
)

SCHEMA: Final = pa.schema([pa.field(column.name, column.type, column.may_be_missing) for column in COLUMNS])

ALL_COLUMNS: Final = frozenset(SCHEMA.names)

ALL_RANKS: Final = -1
"""The process of what a tracer has as sums of all ranks only: Darshan, of files that they share."""
SAMPLES_KEPT: Final = 5
"""Damaged lines that a file's account shows; all are counted."""


def name_process(pid: int) -> str:
    """What figures call a process that has no rank."""
    return "all ranks" if pid == ALL_RANKS else f"pid {pid}"


def refuse_damaged(accounts: Sequence[FileAccount]) -> None:
    """Raise TraceDamaged if anything of these files was lost or guessed."""
    damaged = [account for account in accounts if not account.is_whole]
    if damaged:
        raise TraceDamaged(
            f"Of {len(accounts)} files, {len(damaged)} lost something: {damaged[0].losses()[0]}",
            fix="Read them without --strict to query the rest.",
        )


def refuse_lost(accounts: Sequence[FileAccount]) -> None:
    """Raise TraceDamaged if there is no event in any of these files: an answer of zeros is none."""
    if accounts and all(account.is_without_events for account in accounts):
        raise TraceDamaged(
            f"There is not one event in {accounts[0].file}"
            + (f" and the other {len(accounts) - 1} files" if len(accounts) > 1 else ""),
            fix="Name traces of DFTracer, strace, Darshan, Chrome or PyTorch's profiler.",
        )


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A damaged line: its number, what is wrong with it, how it begins."""

    line: int
    reason: str
    text: str


@dataclass(slots=True, kw_only=True)
class FileAccount:
    """The fate of every line: `lines = events + salvaged + metadata + blank + dropped + skipped`.

    `events` were whole, `salvaged` are events of damaged lines; both are rows of the table. `metadata`
    explains other lines, `blank` lines are empty or a bracket; no reader skips lines today.
    `unwanted` events were read and left out of the table. `announced_events` is the number that the file's
    writer counted, in the file's last event or beside it, None without such a count; `missing` of them are
    not in the file. `faults` concern the file as a whole, as a torn end does; `notes` say what a reader of
    answers must know of a whole file. Events begin from `first_us` to `last_us`.
    """

    file: str
    dialect: str = ""
    lines: int = 0
    events: int = 0
    salvaged: int = 0
    metadata: int = 0
    blank: int = 0
    dropped: int = 0
    skipped: int = 0
    unwanted: int = 0
    salvaged_reasons: Counter[str] = field(default_factory=Counter)
    dropped_reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[DamagedLine] = field(default_factory=list)
    announced_events: int | None = None
    missing: int = 0
    first_us: int | None = None
    last_us: int | None = None
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    size_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Nothing was lost and nothing had to be guessed."""
        return not (self.dropped or self.salvaged or self.faults)

    @property
    def is_without_events(self) -> bool:
        """Not one event was read, wanted or not."""
        return not (self.events or self.salvaged or self.skipped or self.unwanted)

    def count_damage(self, line: int, reason: str, text: str, *, salvaged: bool) -> None:
        """Count a damaged line, and keep the first few as samples."""
        if salvaged:
            self.salvaged += 1
            self.salvaged_reasons[reason] += 1
        else:
            self.dropped += 1
            self.dropped_reasons[reason] += 1
        if len(self.samples) < SAMPLES_KEPT:
            self.samples.append(DamagedLine(line, reason, text[:200]))

    def document(self) -> Mapping[str, Any]:
        """The account as JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "faults": list(self.faults),
            "notes": list(self.notes),
            "samples": list(map(asdict, self.samples)),
            "salvaged_reasons": dict(self.salvaged_reasons),
            "dropped_reasons": dict(self.dropped_reasons),
            "hosts": sorted(self.hosts),
            "ranks": sorted(self.ranks),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read an account from its JSON document."""
        parsed = {
            "salvaged_reasons": Counter(document["salvaged_reasons"]),
            "dropped_reasons": Counter(document["dropped_reasons"]),
            "samples": [DamagedLine(**line) for line in document["samples"]],
            "hosts": set(document["hosts"]),
            "ranks": set(document["ranks"]),
        }
        return cls(**{**document, **parsed})

    def losses(self) -> list[str]:
        """What was lost or guessed, for people, one line each."""
        losses = [f"{self.file}: {what}" for what in (*self.faults, *self.notes)]
        if self.dropped or self.salvaged:
            counts = {f"{reason}, dropped": count for reason, count in self.dropped_reasons.items()}
            counts |= {f"{reason}, salvaged": count for reason, count in self.salvaged_reasons.items()}
            kinds = "; ".join(f"{count:,} {reason}" for reason, count in counts.items())
            losses.append(
                f"{self.file}: {self.dropped + self.salvaged:,} of {self.lines:,} lines damaged: {kinds}"
            )
            losses.extend(f"  line {one.line}: {one.reason}: {one.text!r}" for one in self.samples)
        return losses


# Without one name, the same program would count `__xstat` on one system, `stat` on a newer one and `statx`
# under strace.
_SPELLINGS: Final = {
    "access": "faccessat faccessat2",
    "chmod": "fchmodat fchmodat2",
    "chown": "fchownat",
    "fadvise": "fadvise64 posix_fadvise posix_fadvise64",
    "fallocate": "fallocate64 posix_fallocate posix_fallocate64",
    "fcntl": "fcntl64",
    "fopen": "fopen64",
    "freopen": "freopen64",
    "fseek": "fseeko fseeko64",
    "fstat": "fstat64 fstatat fstatat64 newfstatat __fxstat __fxstat64 __fxstatat __fxstatat64",
    "fstatfs": "fstatfs64",
    "ftell": "ftello ftello64",
    "ftruncate": "ftruncate64",
    "getdents": "getdents64",
    "link": "linkat",
    "lseek": "lseek64 _llseek",
    "lstat": "lstat64 __lxstat __lxstat64",
    "mkdir": "mkdirat",
    "mknod": "mknodat",
    "mmap": "mmap64 mmap2",
    "open": "open64 openat openat64 openat2 creat creat64 __open __open64 __open_2 __open64_2",
    "pread": "pread64",
    "preadv": "preadv64 preadv2 preadv64v2",
    "pwrite": "pwrite64",
    "pwritev": "pwritev64 pwritev2 pwritev64v2",
    "readdir": "readdir64",
    "readlink": "readlinkat",
    "rename": "renameat renameat2",
    "sendfile": "sendfile64",
    "stat": "stat64 statx __xstat __xstat64",
    "statfs": "statfs64",
    "symlink": "symlinkat",
    "truncate": "truncate64",
    "unlink": "unlinkat",
    "utime": "utimes utimensat futimens futimesat",
}

_CANONICAL: Final = {
    spelling: canonical for canonical, spellings in _SPELLINGS.items() for spelling in spellings.split()
}


def canonical(name: str) -> str:
    """The operation that `name` is a spelling of; an unknown name is its own operation."""
    return _CANONICAL.get(name, name)


def spellings_of(operations: Iterable[str]) -> list[str]:
    """The names of these operations, and all their other spellings."""
    return [name for one in sorted(operations) for name in (one, *_SPELLINGS.get(one, "").split())]
