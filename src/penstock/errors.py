"""Every error that Penstock raises on purpose. A message says what happened, where, and what to do about it.

    PenstockError
    ├── UsageError (ValueError)                 the request is invalid                          exit 2
    ├── Unavailable                             something is missing on this machine            exit 3
    ├── StorageError (OSError)                  storage refused, failed or returned wrong data  exit 1
    │   ├── ObjectNotFound (FileNotFoundError)                                                  exit 2
    │   ├── AccessRefused (PermissionError)
    │   ├── AlreadyThere (FileExistsError)      the name is taken, or another writer came first
    │   ├── OutOfSpace
    │   ├── ShortTransfer                       fewer bytes than requested, or a wrong size
    │   ├── DataDamaged                         stored bytes differ from what was written
    │   └── StorageTimeout (TimeoutError)
    ├── TraceDamaged                            a trace is incomplete, which is refused         exit 1
    └── RankError                               one of many processes failed                    exit 1
        ├── RankFailed (RuntimeError)           which rank, on which host, and why
        ├── HostsAbsent                         which hosts did not report, and why
        └── WaitTimeout (TimeoutError)          what was awaited, and for how long

All errors survive pickling with their fields, because ranks send them to each other.
"""

import copyreg
import re
from collections.abc import Sequence
from typing import Any, Final


class PenstockError(Exception):
    """The base of all errors: `what` happened, `where`, and the `fix`. Commands exit with `exit_code`."""

    exit_code: int = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "", **fields: Any) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        self.__dict__.update(fields)

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f" {self.fix}" if self.fix else ""
        stop = "." if advice and (place or not self.what.endswith((".", "!", "?"))) else ""
        return f"{self.what}{place}{stop}{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle by attributes, because constructors differ. `OSError` keeps `errno` outside `__dict__`.
        state = {**self.__dict__, "args": self.args}
        if isinstance(self, OSError):
            state["errno"] = self.errno
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]  # not in its stubs


class UsageError(PenstockError, ValueError):
    """The request is invalid: an unknown unit, a malformed URI, mutually exclusive options."""

    exit_code = 2


class Unavailable(PenstockError):
    """Something the request needs is missing here: a package, a program, a permission, a limit."""

    exit_code = 3


class StorageError(PenstockError, OSError):
    """Storage refused a request, failed, or returned wrong data. `errno` is the system's code, or None."""

    def __init__(
        self, what: str, *, uri: str = "", where: str = "", fix: str = "", errno: int | None = None
    ) -> None:
        super().__init__(what, where=where or uri, fix=fix, uri=uri)
        self.uri = uri
        self.errno = errno


class ObjectNotFound(StorageError, FileNotFoundError):
    """No object has this key, or no file has this name. The path is usually mistyped, hence exit code 2."""

    exit_code = 2


class AccessRefused(StorageError, PermissionError):
    """The key leads out of its root, or this user is denied access."""


class AlreadyThere(StorageError, FileExistsError):
    """The name is already in use, or another writer changed the object since it was read."""


class OutOfSpace(StorageError):
    """The device, the quota or the bucket is full."""


class ShortTransfer(StorageError):
    """Fewer bytes were transferred than requested, or a finished object's size differs from what was sent."""

    def __init__(
        self, what: str, *, uri: str, expected_bytes: int, actual_bytes: int, where: str = "", fix: str = ""
    ) -> None:
        super().__init__(what, uri=uri, where=where, fix=fix)
        self.expected_bytes = expected_bytes
        self.actual_bytes = actual_bytes


class DataDamaged(StorageError):
    """Stored bytes differ from those that were written, or violate their format."""


def proves_damage(error: BaseException) -> bool:
    """Return True if `error` proves that stored data is damaged or missing; otherwise, it may be intact."""
    return isinstance(error, DataDamaged | ObjectNotFound)


class StorageTimeout(StorageError, TimeoutError):
    """Storage did not respond within its time limit, retries included."""


class TraceDamaged(PenstockError):
    """Part of a trace was lost or guessed, and the caller does not accept this."""


class RankError(PenstockError):
    """An error between the processes of one job."""


class RankFailed(RankError, RuntimeError):
    """One rank failed, so all ranks stop. Has the failed `rank`, its `host` and a one-line `cause`.

    `exit_code` is 2 if a single process would exit with 2, as for a path that does not exist.
    """

    def __init__(self, rank: int, host: str, cause: str, *, exit_code: int = 1) -> None:
        super().__init__(f"Rank {rank} on {host} failed: {cause}")
        self.exit_code = exit_code
        self.rank = rank
        self.host = host
        self.cause = cause


class HostsAbsent(RankError):
    """Some hosts did not report. `reported` names those that did, `absent` the others with their reasons."""

    def __init__(self, reported: tuple[str, ...], absent: dict[str, str]) -> None:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in absent.items())
        super().__init__(
            f"{len(absent)} of {len(absent) + len(reported)} hosts did not report: {reasons}",
            where=f"reported: {', '.join(reported) or 'none'}",
            fix="Repair these hosts, use others, or accept a partial result with --allow-partial."
            if reported
            else "Check that the hosts can be reached and have the same Python and Penstock.",
        )
        self.reported = reported
        self.absent = absent


class WaitTimeout(RankError, TimeoutError):
    """A wait between ranks exceeded its time limit. Says what was `awaited`, and for how long."""

    def __init__(self, awaited: str, timeout_s: float, *, where: str = "") -> None:
        super().__init__(
            f"Timed out after {timeout_s:g} s waiting for {awaited}",
            where=where,
            fix="Look at the ranks that did not arrive; if they are just slow, raise --timeout or timeout_s.",
        )
        self.awaited = awaited
        self.timeout_s = timeout_s


def name_some(names: Sequence[object], limit: int = 3, *, separator: str = ", ") -> str:
    """Return the first names of a list that may be too long for a message: `a, b, c and 4 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(map(str, names[:limit])) + more


def printable(text: str, *, keep: str = "\n\t") -> str:
    """Escape control characters, which file names may contain, so that the text is safe to print.

    A terminal would execute them. Undecodable bytes are escaped, too, because they cannot be printed at all.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )


_FORMULA: Final = re.compile(r"[=@\t\n\uff0b\uff0d\uff1d\uff20]|[+-](?![\d.]*(?:[eE][+-]?\d+)?\Z)")


def csv_cell(value: object) -> object:
    """Return `value` for a CSV cell; in a string, escape control characters other than line breaks.

    Strings may come from other people's files. Spreadsheets run one that begins like a formula, unless a
    quote precedes it.
    """
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if _FORMULA.match(value) else printable(value)
