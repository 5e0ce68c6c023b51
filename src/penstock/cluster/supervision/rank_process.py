"""Become a rank: from what a launcher left in the environment to a `Comm`, with a guard beside it.

`join_job` is what a rank's main program runs in. Invariant: however its body ends, the job's server is
told, so that all ranks stop together or finish together.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from socket import gethostname
from typing import TYPE_CHECKING

from penstock.cluster.comm import DEFAULT_TIMEOUT_S, SoloComm, format_cause
from penstock.cluster.launcher_env import (
    Launcher,
    LauncherRank,
    detect_rank,
    host_label,
    require_matching_size,
)
from penstock.cluster.supervision.control_protocol import Ending, Failed
from penstock.cluster.supervision.control_server import EVERYWHERE, ControlServer, advertise_address
from penstock.cluster.supervision.supervisor import SupervisorChannel, SupervisorConfig, fork_supervisor
from penstock.environment import CONTROL_ADDRESS, CONTROL_TOKEN
from penstock.errors import PenstockError, RankFailed, Unavailable, UsageError, WaitTimeout

if TYPE_CHECKING:
    from penstock.cluster.comm import BaseComm, Comm
    from penstock.cluster.supervision.supervisor import AnnounceFailure
    from penstock.environment import Environment

LONGEST_CAUSE = 2_000
LONGEST_DETAIL = 20_000
"""In characters: a message must stay a line that its reader accepts."""


def join_ranks(environment: Environment) -> BaseComm:
    """Meet the other ranks; collective, as is `close` of what it returns. Without a launcher: a job of one.

    No guard comes with it: a rank that dies is noticed by the others' time limits only.
    """
    host = host_label(environment, gethostname())
    ranked = detect_rank(environment)
    if ranked is None:
        return SoloComm(host)
    if ranked.launcher is Launcher.TORCHRUN:
        from penstock.cluster.torch_comm import join_torchrun  # noqa: PLC0415 - loads torch

        return join_torchrun(environment, host)
    from penstock.cluster.mpi_comm import join_mpi  # noqa: PLC0415 - loads numpy and MPI

    return join_mpi(host, ranked.size)


@contextmanager
def join_job(
    environment: Environment,
    *,
    ranks: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    announce: AnnounceFailure | None = None,
) -> Iterator[Comm]:
    """Run the body as one rank of its job, and all ranks to one end.

    Forks (see `fork_supervisor`): enter it before starting threads. What the body raises ends the whole job
    and leaves this process as SystemExit, its message already reported. An exit code after the body is a
    verdict: it stops no other rank, and rank 0's becomes the launching process's. `ranks` is checked against
    the launcher; `announce` is for jobs started by another launcher, where no process of ours waits outside.
    """
    ranked = detect_rank(environment)
    if ranked is None:
        require_matching_size(LauncherRank(Launcher.HYDRA, 0, 1), ranks)
        yield SoloComm(host_label(environment, gethostname()))
        return
    require_matching_size(ranked, ranks)
    host = host_label(environment, gethostname())
    post = _post(ranked, host, environment, announce or _write_to_stderr)
    line = fork_supervisor(post)
    with _failures_told(line, ranked.rank, host):
        comm = join_ranks(environment)
        comm.timeout_s = timeout_s
        comm.on_late = line.late
        if post.control is None:
            _share_server(comm, post, line)
        yield comm
        comm.close()
    line.finished()


def _post(
    ranked: LauncherRank, host: str, environment: Environment, announce: AnnounceFailure
) -> SupervisorConfig:
    if CONTROL_ADDRESS in environment:
        control = (environment[CONTROL_ADDRESS], environment[CONTROL_TOKEN])
        return SupervisorConfig(rank=ranked.rank, host=host, announce=announce, control=control)
    server = ControlServer(ranks=ranked.size, bind=EVERYWHERE) if ranked.rank == 0 else None
    return SupervisorConfig(rank=ranked.rank, host=host, announce=announce, server=server)


def _share_server(comm: Comm, post: SupervisorConfig, line: SupervisorChannel) -> None:
    meeting = (advertise_address(post.server.port), post.server.token) if post.server is not None else None
    address, token = comm.broadcast(meeting, awaiting="rank 0 to say where it watches over the job")
    line.meet(address, token)


@contextmanager
def _failures_told(line: SupervisorChannel, rank: int, host: str) -> Iterator[None]:
    """Turn however the body fails into a message for all ranks and an exit of this one."""
    try:
        try:
            yield
        except SystemExit as wish:
            if wish.code not in (None, 0):
                cause = f"it left with exit code {wish.code} while others were at work"
                line.failed(Failed(rank=rank, host=host, cause=cause))
                raise
            line.finished()
            raise
        except Exception as error:  # noqa: BLE001 - gathered: a failure of one rank reaches all
            failure = describe_failure(error, rank, host)
            line.failed(failure)
            sys.exit(failure.error().exit_code)
    except KeyboardInterrupt:
        # Also when another rank's failure ends this one while it tells of its own.
        line.failed(Failed(rank=rank, host=host, cause="interrupted", ending=Ending.INTERRUPTED))
        sys.exit(130)


def describe_failure(error: Exception, rank: int, host: str) -> Failed:
    """What the job is told about `error` on this rank; a `RankFailed` keeps blaming the rank it names."""
    if isinstance(error, RankFailed):
        return Failed(rank=error.rank, host=error.host, cause=error.cause)
    endings = {WaitTimeout: Ending.TIMED_OUT, UsageError: Ending.USAGE, Unavailable: Ending.UNAVAILABLE}
    ending = next((end for kind, end in endings.items() if isinstance(error, kind)), Ending.FAILED)
    ours = isinstance(error, PenstockError)
    detail = "" if ours else "".join(traceback.format_exception(error)).rstrip()
    cause = format_cause(error)[:LONGEST_CAUSE]
    return Failed(rank=rank, host=host, cause=cause, ending=ending, detail=detail[-LONGEST_DETAIL:])


def _write_to_stderr(failure: Failed) -> None:
    sys.stderr.write(f"{failure.error()}\n")
