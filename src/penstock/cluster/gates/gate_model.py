"""The records of gates: the request, the reports of ranks, the findings, and what a run's record keeps.

Invariant: a gate that could not be evaluated is "not checked", and is closed, like a gate that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from penstock.environment import Environment
    from penstock.storage import Storage


class Gate(StrEnum):
    """The gates in the order of their checks: quick and informative ones come first."""

    CLUSTER = "cluster"
    VERSIONS = "versions"
    CLOCK = "clock"
    LIMITS = "limits"
    IPC = "ipc"
    APART = "apart"
    SPACE = "space"
    STORAGE = "storage"


class GateVerdict(StrEnum):
    """The result of a gate."""

    PASS = "pass"  # noqa: S105 - no secret
    WARNING = "warning"
    FAIL = "fail"
    NOT_CHECKED = "not checked"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class GateFinding:
    """The finding of one gate: the verdict, a sentence about what was found, and a fix."""

    gate: Gate
    verdict: GateVerdict
    found: str
    fix: str = ""

    @property
    def is_closed(self) -> bool:
        """True if the verdict stops a run whose result you would submit."""
        return self.verdict in (GateVerdict.FAIL, GateVerdict.NOT_CHECKED)


ClusterState = Literal["whole", "partial", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The findings of all gates, for a run's record. With `is_strict`, closed gates stop the run.

    `cluster` says whether the record contains the facts of all, some or none of the run's hosts.
    """

    is_strict: bool
    cluster: ClusterState
    findings: tuple[GateFinding, ...]

    @property
    def closed(self) -> tuple[GateFinding, ...]:
        """The findings of closed gates."""
        return tuple(finding for finding in self.findings if finding.is_closed)

    @property
    def skipped(self) -> tuple[Gate, ...]:
        """The gates that were skipped on request."""
        return tuple(finding.gate for finding in self.findings if finding.verdict is GateVerdict.SKIPPED)

    @property
    def is_stopped(self) -> bool:
        """True if the run must not start."""
        return self.is_strict and bool(self.closed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """The facts about a run that gates need: what one rank is about to do.

    `reopen` opens the storage at `uri` again, to probe it with a few bytes. `written_bytes` is the number
    of bytes that this rank will write there; `results_option` is the name of the option for `results` in
    messages. A field is None if it does not apply to the run. Tests replace `root`.
    """

    environment: Environment
    uri: str | None = None
    reopen: Callable[[], Storage] | None = None
    results: Path | None = None
    results_option: str = "--results"
    written_bytes: int = 0
    root: Path = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """The file system of `folder`.

    If it is shared, `identity` is the same on all hosts, but `device` may differ.
    """

    identity: str
    device: int
    folder: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank. `target` is the storage of data or checkpoints.

    A limit of None means no limit; a volume of None means that it is not a file system of this host.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    limits: Mapping[str, int | None]
    shared_memory: Volume | None
    target: Volume | None
    results: Volume | None
    results_option: str = "--results"
    written_bytes: int = 0
