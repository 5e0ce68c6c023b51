"""Run a study of checkpoint levels: every row that is missing, then the comparison of all rows.

    request -> for each row: train and save, traced -> runs.yaml -> comparison -> report

Collective. Rows that are complete are never run again. All tables come from the rows' traces, so that
`penstock trace compare runs.yaml` repeats the comparison.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from penstock import __version__
from penstock.bench.checkpoint.checkpoint_folder import identify_volume, require_room
from penstock.cluster.comm import Comm, all_gather_results
from penstock.environment import TRACE, TRACE_RANK, Environment
from penstock.errors import Unavailable, UsageError
from penstock.progress import Progress
from penstock.storage import Storage, open_storage
from penstock.storage.rate_limit import RateLimitedStorage
from penstock.trace import span, tracing_to
from penstock.trace.capture.recorder import get_recorder
from penstock.trace.capture.traced_storage import trace_storage
from penstock.units import format_bytes
from penstock.workflows.levels_study import study_records
from penstock.workflows.levels_study.study_plan import (
    DRAIN_EVENT,
    SAVE_EVENT,
    STEP_EVENT,
    StudyLevel,
    StudyRequest,
    StudyRow,
    check_request,
)

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.workflows.levels_study.study_training import EmulatedTrainer, StudySaver


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetting:
    """What all rows share; their folders are named after them."""

    request: StudyRequest
    comm: Comm
    environment: Environment
    place: str
    """The folder of this study on each level."""
    domain: str
    """The failure domain of this rank."""
    progress: Progress

    def root(self, row: StudyRow, level: StudyLevel) -> Path:
        """The folder of a row on a level."""
        levels = {StudyLevel.FAST: self.request.fast, StudyLevel.SLOW: self.request.slow}
        return levels[level] / self.place / row.name

    def open_level(self, row: StudyRow, level: StudyLevel, folder: str) -> Storage:
        """Open a folder of a row. The trace is around the limit, so that it shows what the limit costs."""
        size = self.comm.size
        storage = open_storage(str(self.root(row, level) / folder), self.environment)
        limit = self.request.slow_bytes_per_s
        if level is StudyLevel.SLOW and limit is not None:
            storage = RateLimitedStorage(storage, limit / size)
        traces = study_records.trace_folder(self.request.out, row.name)
        return trace_storage(storage, {TRACE: str(traces), TRACE_RANK: f"{self.comm.rank}/{size}"})


def run_row(row: StudyRow, trainer: "EmulatedTrainer", setting: RowSetting) -> study_records.RowRecord:
    """Train and save as the row says, traced; its files are removed from the levels. Collective."""
    from penstock.workflows.levels_study.study_training import make_saver  # noqa: PLC0415 - loads torch

    comm, request = setting.comm, setting.request
    traces = study_records.trace_folder(request.out, row.name)
    _remove_files(row, setting)
    setting.progress.begin(f"{row.name}: {row.says}", request.num_checkpoints)
    comm.barrier(awaiting=f"all ranks to begin {row.name}")
    try:
        began_s = time.monotonic()
        with tracing_to(traces, rank=comm.rank, size=comm.size):
            saver = make_saver(
                row,
                trainer,
                lambda level, folder: setting.open_level(row, level, folder),
                root=setting.root(row, row.level),
                domain=setting.domain,
                saving=request.saving,
            )
            blocked_s = _train(saver, trainer, setting)
            drain_s = _measure(saver.close, DRAIN_EVENT)
        took_s = time.monotonic() - began_s
    finally:
        get_recorder(str(traces), f"{comm.rank}/{comm.size}").close()
    times = comm.gather((blocked_s, drain_s, took_s), awaiting=f"all ranks to finish {row.name}")
    blocked, drains, durations = zip(*times, strict=True)
    _remove_files(row, setting)
    return study_records.RowRecord(
        name=row.name,
        says=row.says,
        blocked_s=tuple(map(max, zip(*blocked, strict=True))),
        drain_s=max(drains),
        took_s=max(durations),
    )


def _train(saver: "StudySaver", trainer: "EmulatedTrainer", setting: RowSetting) -> list[float]:
    """Save and train in turn, so that flushes overlap training; returns how long each save blocked."""
    blocked_s = []
    for number in range(1, setting.request.num_checkpoints + 1):
        # Training keeps its ranks in step; the wait for slower ranks is not part of the save.
        setting.comm.barrier(awaiting=f"all ranks to come to checkpoint {number}")
        blocked_s.append(_measure(lambda number=number: saver.save(number), SAVE_EVENT, step=number))  # type: ignore[misc]
        for _ in range(setting.request.num_steps):
            with span(STEP_EVENT, cat="compute", step=number):
                trainer.step()
        setting.progress.advance(1)
    return blocked_s


def _measure(work: Callable[[], None], name: str, **args: int) -> float:
    began_s = time.monotonic()
    with span(name, cat="checkpoint", **args):
        work()
    return time.monotonic() - began_s


def _remove_files(row: StudyRow, setting: RowSetting) -> None:
    """Remove the row's files from the levels. Collective: no rank may be writing any more."""
    setting.comm.barrier(awaiting=f"all ranks to finish with the files of {row.name}")
    # On shared levels all ranks remove the same files, and each may find that another was faster.
    for level in StudyLevel:
        shutil.rmtree(setting.root(row, level), ignore_errors=True)
    setting.comm.barrier(awaiting=f"all ranks to remove the files of {row.name}")


COMPARING_TIMEOUT_S: Final = 3600.0
MEETING_FILE: Final = "ranks.meeting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """A finished study, on rank 0; `rows` are in the study's order."""

    record: study_records.StudyIdentity
    rows: tuple[study_records.RowRecord, ...]
    compared: "ComparisonResult"
    report: Sequence[Path]


def run_study(
    request: StudyRequest, *, comm: Comm, environment: Environment, command: Sequence[str], progress: Progress
) -> StudyResult | None:
    """Run the rows that are missing, then compare all rows; None on all ranks but 0. Collective."""
    check_request(request, environment, trace_variable=TRACE)
    require_libraries()
    # Loads torch, so only once the request is known to be good.
    from penstock.workflows.levels_study.study_training import EmulatedTrainer, process_group  # noqa: PLC0415

    hosts = comm.gather(comm.host, awaiting="all ranks to name their hosts")
    _require_room(request, comm)
    require_memory(request, comm, hosts)
    record = _open_study(request, comm, hosts, command)
    # On one machine each rank stands for a host, with a cache of its own.
    domain = f"rank-{comm.rank}" if len(set(hosts)) == 1 else comm.host
    setting = RowSetting(
        request=request,
        comm=comm,
        environment=environment,
        place=record.place,
        domain=domain,
        progress=progress,
    )
    rows: list[study_records.RowRecord] = []
    with process_group(comm, request.out / MEETING_FILE):
        trainer = EmulatedTrainer(request.layout, comm.rank, step_s=request.step_s)
        for row in request.rows:
            done = all_gather_results(
                comm,
                lambda row=row: study_records.read_row(request.out, row.name) if comm.rank == 0 else None,  # type: ignore[misc]
                awaiting=f"rank 0 to look for {row.name}",
            )[0]
            if done is None:
                done = run_row(row, trainer, setting)
                all_gather_results(
                    comm,
                    lambda done=done: study_records.finish_row(request.out, done) if comm.rank == 0 else None,  # type: ignore[misc]
                    awaiting=f"rank 0 to note that {row.name} is done",
                )
            rows.append(done)
    return _compare_on_rank0(request, record, rows, comm=comm, progress=progress)


def require_libraries(find: Callable[[str], object | None] = find_spec) -> None:
    """`Unavailable` without what a study saves with, or without what compares its traces at the end."""
    missing = [library for library in ("torch", "duckdb", "pyarrow", "jinja2") if find(library) is None]
    if missing:
        raise Unavailable(
            f"A study saves tensors of torch and compares traces, and {', '.join(missing)} is not installed",
            fix="Run: pip install 'penstock-io[torch,trace]'",
        )


def _open_study(
    request: StudyRequest, comm: Comm, hosts: Sequence[str], command: Sequence[str]
) -> study_records.StudyIdentity:
    """Read the study in `out`, or begin this one there."""
    begun = all_gather_results(
        comm,
        lambda: study_records.read_study(request.out) if comm.rank == 0 else None,
        awaiting="rank 0 to read the study's folder",
    )[0]
    if begun is not None:
        # On every rank, so that it is reported as wrong usage instead of the failure of a rank.
        study_records.require_same(begun, request.identity(), request.out)
        return begun
    identity = study_records.StudyIdentity(
        place=f"penstock-study-{secrets.token_hex(4)}",
        identity=request.identity(),
        penstock=__version__,
        hosts=tuple(dict.fromkeys(hosts)),
        command=tuple(command),
    )
    all_gather_results(
        comm,
        lambda: study_records.begin_study(request.out, identity) if comm.rank == 0 else None,
        awaiting="rank 0 to create the study's folder",
    )
    return comm.broadcast(identity, awaiting="rank 0 to name the study")


def _require_room(request: StudyRequest, comm: Comm) -> None:
    """Check the free space of both levels; on one file system they need it together."""
    needs = request.room_bytes()
    if identify_volume(request.fast) == identify_volume(request.slow):
        both = [sum(shares) for shares in zip(*needs.values(), strict=True)]
        needs = {request.fast: both}
    for folder, shares in needs.items():
        require_room(folder, shares, comm=comm)


def require_memory(request: StudyRequest, comm: Comm, hosts: Sequence[str]) -> None:
    """`UsageError` unless each host has memory for its ranks' state and a save's copy of it. Collective."""
    shares = request.layout.bytes_of_processes()
    needed = 2 * sum(int(share) for share, host in zip(shares, hosts, strict=True) if host == comm.host)
    memory = comm.gather((needed, psutil.virtual_memory().available), awaiting="all hosts' free memory")
    for host, (need, free) in zip(hosts, memory, strict=True):
        if need > free:
            raise UsageError(
                f"The ranks of {host} need {format_bytes(need)} of memory, twice their state, but "
                f"{format_bytes(free)} are free",
                where="--scale",
                fix="Choose a smaller --scale.",
            )


def _compare_on_rank0(
    request: StudyRequest,
    record: study_records.StudyIdentity,
    rows: list[study_records.RowRecord],
    *,
    comm: Comm,
    progress: Progress,
) -> StudyResult | None:
    """Compare all rows on rank 0, and write the report into `out`; the other ranks wait."""
    result = None
    if comm.rank == 0:
        compared, report = compare_rows(request, progress)
        result = StudyResult(record=record, rows=tuple(rows), compared=compared, report=report)
    comm.barrier(awaiting="rank 0 to compare the rows", timeout_s=COMPARING_TIMEOUT_S)
    return result


def compare_rows(request: StudyRequest, progress: Progress) -> tuple["ComparisonResult", Sequence[Path]]:
    """Compare the traces of all rows, and write the report; returns the report's files too."""
    # These load DuckDB, which only rank 0 needs.
    from penstock.trace.compare.comparison import compare_runs  # noqa: PLC0415
    from penstock.trace.compare.report import write_report  # noqa: PLC0415
    from penstock.trace.compare.trace_study import ComparisonSpec, open_study  # noqa: PLC0415
    from penstock.trace.yaml_documents import load_document  # noqa: PLC0415
    from penstock.workflows.levels_study.study_findings import RULES  # noqa: PLC0415

    path = study_records.write_runs(request.out, describe_comparison(request))
    with open_study(load_document(ComparisonSpec, path), request.out, progress=progress) as opened:
        compared = compare_runs(opened, progress=progress)
        of_levels = [finding for rule in RULES for finding in rule(opened)]
    compared = replace(compared, findings=[*of_levels, *compared.findings])
    return compared, write_report(compared, request.out)


def describe_comparison(request: StudyRequest) -> dict[str, Any]:
    """Build `runs.yaml`, with which `penstock trace compare` repeats the comparison."""
    described: dict[str, Any] = {
        "runs": {row.name: f"{row.name}/{study_records.TRACES}/*.pfw.gz" for row in request.rows},
        "baseline": request.rows[0].name,
        "app_event": SAVE_EVENT,
        "tiers": {"slow": str(request.slow), "fast": str(request.fast)},
    }
    if request.slow_bytes_per_s is not None:
        described["device_rates"] = {"slow": f"{request.slow_bytes_per_s:.0f}B/s"}
    return described
