"""The waist of gates: what is asked about, what ranks tell, what is found, and what a record keeps of it.

Place in the flow: `measure`, `probe` and `clocks` tell, `judge` finds, `inspect` does both in order.
Invariant: a gate that nobody could look at is "not checked", and closes like one that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from penstock.errors import UsageError
from penstock.suggest import did_you_mean

if TYPE_CHECKING:
    from penstock.environment import Environment
    from penstock.storage import Storage


class Gate(StrEnum):
    """The gates, in the order in which they are looked at: what is cheap and tells most comes first."""

    CLUSTER = "cluster"
    VERSIONS = "versions"
    CLOCK = "clock"
    LIMITS = "limits"
    IPC = "ipc"
    APART = "apart"
    SPACE = "space"
    STORAGE = "storage"


MEANINGS: Final[Mapping[Gate, str]] = {
    Gate.CLUSTER: "all hosts told what they are, and they are alike",
    Gate.VERSIONS: "MPI, Python and packages are the same on all ranks",
    Gate.CLOCK: "no host's clock is off by more than 1 s",
    Gate.LIMITS: "processes may open, start and write enough",
    Gate.IPC: "there is shared memory, and nothing deletes it under way",
    Gate.APART: "data and results lie on different file systems",
    Gate.SPACE: "what will be written has room",
    Gate.STORAGE: "all ranks see the same bytes at the same place",
}


class GateVerdict(StrEnum):
    """What became of a gate."""

    PASS = "pass"  # noqa: S105 - no secret
    WARNING = "warning"
    FAIL = "fail"
    NOT_CHECKED = "not checked"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


CLOSED: Final = frozenset({GateVerdict.FAIL, GateVerdict.NOT_CHECKED})
"""What stops a run whose result is to be submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFinding:
    """One gate: the verdict, what was found in a sentence, and what to do about it."""

    gate: Gate
    verdict: GateVerdict
    found: str
    fix: str = ""

    @property
    def is_closed(self) -> bool:
        """Whether nothing may pass here that is to be submitted."""
        return self.verdict in CLOSED


ClusterState = Literal["whole", "partial", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a run's record keeps: every gate's finding, and whether closed ones would have stopped it.

    `cluster` says of how many of the run's hosts there are facts beside the record: all, some, or none.
    """

    is_strict: bool
    cluster: ClusterState
    findings: tuple[GateFinding, ...]

    @property
    def closed(self) -> tuple[GateFinding, ...]:
        """The gates that nothing may pass."""
        return tuple(each for each in self.findings if each.is_closed)

    @property
    def skipped(self) -> tuple[Gate, ...]:
        """The gates that were not looked at, because somebody asked for that."""
        return tuple(each.gate for each in self.findings if each.verdict is GateVerdict.SKIPPED)

    @property
    def is_stopped(self) -> bool:
        """Whether the run must not begin."""
        return self.is_strict and bool(self.closed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """What one rank is about to do, as far as gates ask about it.

    `reopen` opens the storage at `uri` once more, for a probe of a few bytes. `written_bytes` is what this
    rank will write there. None: it uses no such thing. Tests replace `root`, below which the machine lies.
    """

    environment: Environment
    uri: str | None = None
    reopen: Callable[[], Storage] | None = None
    results: Path | None = None
    written_bytes: int = 0
    root: Path = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The file system of `folder`. `identity` is the same on all hosts if it is shared; `device` is not."""

    identity: str
    device: int
    folder: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginSettings:
    """What decides whether shared memory outlives its user's last login. None: could not be read."""

    user_id: int
    has_logind: bool
    removes_ipc: bool | None
    lingers: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank tells. A limit of None is no limit; of the volumes, None is no file system of this host.

    `target` is where data lies or checkpoints go; `shared_segments` are the kernel's limits of System V.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    limits: Mapping[str, int | None]
    shared_memory: Volume | None
    shared_segments: Mapping[str, int]
    login: LoginSettings
    target: Volume | None
    results: Volume | None
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingReport:
    """A rank that could not tell something, and why."""

    rank: int
    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """By how much a rank's wall clock is ahead of rank 0's: proven to lie between these bounds."""

    rank: int
    host: str
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeView:
    """What a rank saw at the place of a probe: the digest of its bytes, or why it saw none."""

    rank: int
    host: str
    digest: str | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageProbe:
    """One probe of shared storage. `is_fresh`: its bytes were written for it, so no copy can have them."""

    where: str
    digest: str
    is_fresh: bool
    sights: Sequence[ProbeView]


def parse_gate(text: str) -> Gate:
    """The gate of this name; `UsageError` that tells the nearest."""
    if text in set(Gate):
        return Gate(text)
    meant = did_you_mean(text, Gate)
    raise UsageError(f"No gate is named {text!r}", fix=f"{meant}Gates are: {', '.join(Gate)}.")
