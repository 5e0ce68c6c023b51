"""A whole study: rows that are not done yet, one after the other, then the comparison of all that are.

Collective. Invariant: a row that is done is never played again, and the comparison is made from traces alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from penstock import __version__
from penstock.bench.checkpoint.checkpoint_folder import identify_volume, require_room
from penstock.cluster.collectives import all_gather_results
from penstock.environment import TRACE
from penstock.errors import Unavailable, UsageError
from penstock.units import format_bytes
from penstock.workflows.study.records import (
    RowRecord,
    StudyRecord,
    begin_study,
    begun_study,
    done_row,
    finish_row,
    require_same,
)
from penstock.workflows.study.request import check
from penstock.workflows.study.row import Stage, perform

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.progress import Progress
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.workflows.study.request import StudyRequest

COMPARING_TIMEOUT_S: Final = 3600.0
MEETING: Final = "ranks.meeting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What came of a study, on rank 0; `rows` in the study's order."""

    record: StudyRecord
    rows: tuple[RowRecord, ...]
    compared: ComparisonResult
    report: Sequence[Path]


def study(
    request: StudyRequest,
    *,
    comm: Comm,
    environment: Environment,
    command: Sequence[str],
    progress: Progress,
) -> StudyResult | None:
    """Play the rows that are missing, and compare all that are there; None on all ranks but 0. Collective."""
    check(request, environment, trace_variable=TRACE)
    require_torch()
    from penstock.workflows.study.trainer import Trainer, process_group  # noqa: PLC0415 - loads torch

    hosts = comm.gather(comm.host, awaiting="all ranks to name their hosts")
    _require_room(request, comm)
    require_memory(request, comm, hosts)
    record = _open(request, comm, hosts, command)
    # Ranks of one machine play a host each, with a cache of their own.
    domain = f"rank-{comm.rank}" if len(set(hosts)) == 1 else comm.host
    stage = Stage(
        request=request,
        comm=comm,
        environment=environment,
        place=record.place,
        domain=domain,
        progress=progress,
    )
    rows: list[RowRecord] = []
    with process_group(comm, request.out / MEETING):
        trainer = Trainer(request.layout, comm.rank, step_s=request.step_s)
        for row in request.rows:
            done = all_gather_results(
                comm,
                lambda row=row: done_row(request.out, row.name) if comm.rank == 0 else None,  # type: ignore[misc]
                awaiting=f"rank 0 to look for {row.name}",
            )[0]
            if done is None:
                done = perform(row, trainer, stage)
                all_gather_results(
                    comm,
                    lambda done=done: finish_row(request.out, done) if comm.rank == 0 else None,  # type: ignore[misc]
                    awaiting=f"rank 0 to note that {row.name} is done",
                )
            rows.append(done)
    return _compared(request, record, rows, comm=comm, progress=progress)


def require_torch(find: Callable[[str], object | None] = find_spec) -> None:
    """`Unavailable` where torch is missing: the engine saves its tensors, over its process group."""
    if find("torch") is None:
        raise Unavailable(
            "A study saves tensors of torch, which is not installed", fix="pip install 'penstock[torch]'"
        )


def _open(request: StudyRequest, comm: Comm, hosts: Sequence[str], command: Sequence[str]) -> StudyRecord:
    """The record of the study that `out` holds, or of this one, which it then holds."""
    begun = all_gather_results(
        comm,
        lambda: begun_study(request.out) if comm.rank == 0 else None,
        awaiting="rank 0 to look into the study's folder",
    )[0]
    if begun is not None:
        # Every rank refuses for itself, so that it is wrong usage and no failure of a rank.
        require_same(begun, request.identity(), request.out)
        return begun
    wanted = StudyRecord(
        place=f"penstock-study-{secrets.token_hex(4)}",
        identity=request.identity(),
        penstock=__version__,
        hosts=tuple(dict.fromkeys(hosts)),
        command=tuple(command),
    )
    all_gather_results(
        comm,
        lambda: begin_study(request.out, wanted) if comm.rank == 0 else None,
        awaiting="rank 0 to make the study's folder",
    )
    return comm.broadcast(wanted, awaiting="rank 0 to name the study")


def _require_room(request: StudyRequest, comm: Comm) -> None:
    """Both levels, together where they are one file system."""
    needs = request.room_bytes()
    if identify_volume(str(request.fast)) == identify_volume(str(request.slow)):
        both = [sum(shares) for shares in zip(*needs.values(), strict=True)]
        needs = {request.fast: both}
    for folder, shares in needs.items():
        require_room(str(folder), shares, comm=comm)


def require_memory(request: StudyRequest, comm: Comm, hosts: Sequence[str]) -> None:
    """`UsageError` unless each host holds the state of its ranks, and a save's copy of it. Collective."""
    shares = request.layout.bytes_of_processes()
    needed = 2 * sum(int(share) for share, host in zip(shares, hosts, strict=True) if host == comm.host)
    seen = comm.gather((needed, psutil.virtual_memory().available), awaiting="all hosts' free memory")
    for host, (need, free) in zip(hosts, seen, strict=True):
        if need > free:
            raise UsageError(
                f"The ranks of {host} hold their state in memory twice, {format_bytes(need)}, and "
                f"{format_bytes(free)} are free",
                where="--scale",
                fix="Choose a smaller --scale.",
            )


def _compared(
    request: StudyRequest, record: StudyRecord, rows: list[RowRecord], *, comm: Comm, progress: Progress
) -> StudyResult | None:
    """On rank 0: the comparison of all rows, and its report in `out`."""
    result = None
    if comm.rank == 0:
        from penstock.workflows.study.comparing import compare_rows  # noqa: PLC0415 - loads what asks traces

        compared, report = compare_rows(request, progress)
        result = StudyResult(record=record, rows=tuple(rows), compared=compared, report=report)
    comm.barrier(awaiting="rank 0 to compare the rows", timeout_s=COMPARING_TIMEOUT_S)
    return result
