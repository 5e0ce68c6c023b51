"""Become a rank: from what a launcher left in the environment to a `Comm`, with a guard beside it.

`joined_job` is what a rank's main program runs in. Invariant: however its body ends, the job's server is
told, so that all ranks stop together or finish together.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from socket import gethostname
from typing import TYPE_CHECKING

from penstock.cluster.collectives import format_cause
from penstock.cluster.comm import DEFAULT_TIMEOUT_S
from penstock.cluster.control import EVERYWHERE, ControlServer, advertised
from penstock.cluster.guard import Post, RankLine, fork_guard
from penstock.cluster.ranked import Launcher, Ranked, already_ranked, check_size, host_label
from penstock.cluster.solo import SoloComm
from penstock.cluster.wire import Ending, Failed
from penstock.environment import CONTROL_ADDRESS, CONTROL_TOKEN
from penstock.errors import PenstockError, RankFailed, Unavailable, UsageError, WaitTimeout

if TYPE_CHECKING:
    from penstock.cluster.carried import ByteComm
    from penstock.cluster.comm import Comm
    from penstock.cluster.guard import Announce
    from penstock.environment import Environment

LONGEST_CAUSE = 2_000
LONGEST_DETAIL = 20_000
"""In characters: a message must stay a line that its reader accepts."""


def join(environment: Environment) -> ByteComm:
    """Meet the other ranks; collective, as is `close` of what it returns. Without a launcher: a job of one.

    No guard comes with it: a rank that dies is noticed by the others' time limits only.
    """
    host = host_label(environment, gethostname())
    ranked = already_ranked(environment)
    if ranked is None:
        return SoloComm(host)
    if ranked.launcher is Launcher.TORCHRUN:
        from penstock.cluster.torch import join_torchrun  # noqa: PLC0415 - loads torch

        return join_torchrun(environment, host)
    from penstock.cluster.mpi import join_mpi  # noqa: PLC0415 - loads numpy and MPI

    return join_mpi(host, ranked.size)


@contextmanager
def joined_job(
    environment: Environment,
    *,
    ranks: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    announce: Announce | None = None,
) -> Iterator[Comm]:
    """Run the body as one rank of its job, and all ranks to one end.

    Forks (see `fork_guard`): enter it before starting threads. What the body raises ends the whole job and
    leaves this process as SystemExit, its message already told. An exit after the body is a verdict: it
    stops nobody, and rank 0's becomes the launching process's. `ranks` is checked against the launcher;
    `announce` is for jobs that someone else launched, where no process of ours waits outside.
    """
    ranked = already_ranked(environment)
    if ranked is None:
        check_size(Ranked(Launcher.HYDRA, 0, 1), ranks)
        yield SoloComm(host_label(environment, gethostname()))
        return
    check_size(ranked, ranks)
    host = host_label(environment, gethostname())
    post = _post(ranked, host, environment, announce or _write_to_stderr)
    line = fork_guard(post)
    with _failures_told(line, ranked.rank, host):
        comm = join(environment)
        comm.timeout_s = timeout_s
        comm.on_late = line.late
        if post.control is None:
            _share_server(comm, post, line)
        yield comm
        comm.close()
    line.finished()


def _post(ranked: Ranked, host: str, environment: Environment, announce: Announce) -> Post:
    if CONTROL_ADDRESS in environment:
        control = (environment[CONTROL_ADDRESS], environment[CONTROL_TOKEN])
        return Post(rank=ranked.rank, host=host, announce=announce, control=control)
    server = ControlServer(ranks=ranked.size, bind=EVERYWHERE) if ranked.rank == 0 else None
    return Post(rank=ranked.rank, host=host, announce=announce, server=server)


def _share_server(comm: Comm, post: Post, line: RankLine) -> None:
    meeting = (advertised(post.server.port), post.server.token) if post.server is not None else None
    address, token = comm.broadcast(meeting, awaiting="rank 0 to say where it watches over the job")
    line.meet(address, token)


@contextmanager
def _failures_told(line: RankLine, rank: int, host: str) -> Iterator[None]:
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
            failure = failure_of(error, rank, host)
            line.failed(failure)
            sys.exit(failure.error().exit_code)
    except KeyboardInterrupt:
        # Also when another rank's failure ends this one while it tells of its own.
        line.failed(Failed(rank=rank, host=host, cause="interrupted", ending=Ending.INTERRUPTED))
        sys.exit(130)


def failure_of(error: Exception, rank: int, host: str) -> Failed:
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
