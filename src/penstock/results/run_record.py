"""`run.json`: everything needed to understand or repeat a run, and how it ended.

This module has the record, its format and its reader; `active_run` writes it. A run whose process has ended
is never read as running. The workload is recorded under DLIO's keys, without unset values.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.gates.gate_model import Preflight
from penstock.environment import Environment
from penstock.errors import StorageError
from penstock.results import provenance, run_folder
from penstock.results.counter_files import IoReconciliation
from penstock.results.phase_figures import PhaseFigures
from penstock.results.published_files import read_json
from penstock.units import format_seconds
from penstock.workload.settings import dotted
from penstock.workload.spec import Workload, read_workload

FORMAT_VERSION: Final = 3
"""Incremented whenever a key is added, renamed or changes its meaning."""
_READABLE: Final = (2, FORMAT_VERSION)
"""The formats that can be read. The older ones only lack keys that have defaults."""

LONGEST_SILENCE_S: Final = 900.0
"""A run on another host counts as interrupted once it has sent no heartbeat for this long."""


class RunOutcome(StrEnum):
    """The outcome of a run. It is `RUNNING` until the run ends."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The facts that are known before a run starts.

    `plan` has the values derived from the workload, as plain data with units in the keys. The user's own
    settings in `environment` are recorded without secrets. `cluster` is written to a separate file.
    """

    workload: Workload
    ranks: int
    hosts: Sequence[provenance.HostFacts]
    command: Sequence[str]
    environment: Environment = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    preflight: Preflight | None = None
    cluster: ClusterFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of `run.json`. Dates are ISO 8601 in UTC; `why` is the reason why a run did not finish.

    `workload` is the spec as requested, under DLIO's keys, without secrets and unset keys. `preflight` is
    None if no gates were checked; `deliveries` compare the bytes of devices with the application's.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: int
    id: str
    name: str
    accelerator: str
    outcome: RunOutcome
    why: str
    started_at: str
    ended_at: str | None
    ranks: int
    command: tuple[str, ...]
    settings: Mapping[str, str]
    penstock_version: str
    python_version: str
    package_versions: Mapping[str, str]
    git: provenance.GitState | None
    process: provenance.ProcessMark
    hosts: tuple[provenance.HostFacts, ...]
    seeds: Mapping[str, int]
    remarks: tuple[str, ...]
    workload: Mapping[str, Any]
    plan: Mapping[str, Any]
    preflight: Preflight | None = None
    train: PhaseFigures | None = None
    evaluation: PhaseFigures | None = None
    deliveries: tuple[IoReconciliation, ...] = ()


def read_recorded_workload(record: RunRecord, folder: Path) -> Workload:
    """Return the recorded workload. If this version cannot read it, the error names the run's `folder`."""
    workload, problems = read_workload(record.workload, name=record.name, accelerator=record.accelerator)
    if workload is None:
        path, why = problems[0]
        raise StorageError(
            f"Cannot read the recorded workload: {dotted(path)} {why}".rstrip(),
            uri=str(folder / run_folder.RUN_FILE),
        )
    return workload


def format_record(record: RunRecord) -> bytes:
    return _adapter().dump_json(record, indent=2) + b"\n"


def read_record(folder: Path) -> RunRecord:
    """Read the record in a run's folder, with its current outcome: a dead run counts as interrupted."""
    path = folder / run_folder.RUN_FILE
    document = read_json(path, formats=_READABLE)
    silence_s = time.time() - path.stat().st_mtime
    try:
        record = _adapter().validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StorageError(
            f"run.json is not as Penstock writes it: {place} {first['msg']}", uri=str(path)
        ) from error
    return as_of_now(record, silence_s)


def as_of_now(record: RunRecord, silence_s: float) -> RunRecord:
    """Return the record with its current outcome, as seen from this host.

    A run counts as interrupted if its process is gone or, where this host cannot tell, if `silence_s`, the
    time since its last heartbeat, is too long.
    """
    if record.outcome is not RunOutcome.RUNNING:
        return record
    alive = provenance.is_alive(record.process)
    if alive or (alive is None and silence_s < LONGEST_SILENCE_S):
        return record
    why = (
        "Its process is gone."
        if alive is False
        else f"No heartbeat from its host for {format_seconds(silence_s)}."
    )
    return replace(record, outcome=RunOutcome.INTERRUPTED, why=why)


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)
