"""A rank's process: create its `Comm`, with a supervisor, from what the launcher left in the environment.

Invariant: however the body of `join_job` ends, the job's server learns of it, so that all ranks stop together
or finish together.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from socket import gethostname

from penstock.cluster.comm import DEFAULT_TIMEOUT_S, Comm, SoloComm, format_cause
from penstock.cluster.launcher_env import (
    Launcher,
    LauncherRank,
    detect_rank,
    host_label,
    require_matching_size,
)
from penstock.cluster.supervision.control_protocol import Ending, Failed
from penstock.cluster.supervision.control_server import EVERYWHERE, ControlServer, advertise_address
from penstock.cluster.supervision.supervisor import (
    AnnounceFailure,
    SupervisorChannel,
    SupervisorConfig,
    fork_supervisor,
)
from penstock.environment import CONTROL_ADDRESS, CONTROL_TOKEN, Environment
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    RankFailed,
    Unavailable,
    UsageError,
    WaitTimeout,
    printable,
)

LONGEST_CAUSE = 2_000
LONGEST_DETAIL = 20_000
"""The longest detail, in characters: a message must not exceed `control_protocol.LONGEST_LINE_BYTES`."""


def join_ranks(environment: Environment) -> Comm:
    """Connect to the other ranks. Collective, as is closing the result.

    If no launcher started this process, it is the only rank of its job. Without a supervisor, the other ranks
    notice a dead rank by its connection or by their time limits.
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
    """Run the body as one rank of its job, so that all ranks end together.

    This forks (see `penstock.cluster.supervision`), so enter it before starting threads. An error raised in
    the body ends the whole job and leaves this process as SystemExit, after its message has been reported. An
    exit code set after the body is a verdict: it does not stop other ranks, and rank 0's becomes that of the
    launching process. `ranks` is checked against the launcher; `announce` reports the failure of a job that
    another launcher started.
    """
    ranked = detect_rank(environment)
    if ranked is None:
        require_matching_size(LauncherRank(Launcher.HYDRA, 0, 1), ranks)
        yield SoloComm(host_label(environment, gethostname()))
        return
    require_matching_size(ranked, ranks)
    host = host_label(environment, gethostname())
    if CONTROL_ADDRESS in environment:
        control, server = (environment[CONTROL_ADDRESS], environment[CONTROL_TOKEN]), None
    else:
        control, server = (
            None,
            ControlServer(ranks=ranked.size, bind=EVERYWHERE) if ranked.rank == 0 else None,
        )
    config = SupervisorConfig(
        rank=ranked.rank, host=host, announce=announce or _write_to_stderr, control=control, server=server
    )
    channel = fork_supervisor(config)
    with _report_failures(channel, ranked.rank, host):
        comm = join_ranks(environment)
        comm.timeout_s = timeout_s
        comm.on_late, comm.find_absent = channel.report_long_wait, channel.find_absent
        if control is None:
            own = (advertise_address(server.port), server.token) if server is not None else None
            address, token = comm.broadcast(own, awaiting="rank 0 to announce the control server's address")
            channel.send("server", address=address, token=token)
        yield comm
        comm.close()
    channel.send("finished", rank=ranked.rank)


@contextmanager
def _report_failures(channel: SupervisorChannel, rank: int, host: str) -> Iterator[None]:
    """Report any failure of the body to all ranks, and exit."""
    try:
        try:
            yield
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                channel.send("finished", rank=rank)
            else:
                cause = f"it left with exit code {leaving.code} while others were at work"
                channel.report_failure(Failed(rank=rank, host=host, cause=cause))
            raise
        except Exception as error:  # noqa: BLE001 - gathered: a failure of one rank reaches all
            failure = describe_failure(error, rank, host)
            channel.report_failure(failure)
            sys.exit(failure.error().exit_code)
    except KeyboardInterrupt:
        # This also happens if another rank's failure interrupts this rank while it reports its own.
        channel.report_failure(Failed(rank=rank, host=host, cause="interrupted", ending=Ending.INTERRUPTED))
        sys.exit(130)


def describe_failure(error: Exception, rank: int, host: str) -> Failed:
    """Turn `error` on this rank into a message. The rank in a `RankFailed` is kept."""
    if isinstance(error, RankFailed):
        ending = Ending.NOT_FOUND if error.exit_code == ObjectNotFound.exit_code else Ending.FAILED
        return Failed(rank=error.rank, host=error.host, cause=error.cause, ending=ending)
    endings = {
        WaitTimeout: Ending.TIMED_OUT,
        UsageError: Ending.USAGE,
        ObjectNotFound: Ending.NOT_FOUND,
        Unavailable: Ending.UNAVAILABLE,
    }
    ending = next((end for kind, end in endings.items() if isinstance(error, kind)), Ending.FAILED)
    ours = isinstance(error, PenstockError)
    detail = "" if ours else "".join(traceback.format_exception(error)).rstrip()
    cause = format_cause(error)[:LONGEST_CAUSE]
    return Failed(rank=rank, host=host, cause=cause, ending=ending, detail=detail[-LONGEST_DETAIL:])


def _write_to_stderr(failure: Failed) -> None:
    sys.stderr.write(printable(f"{failure.error()}\n"))
