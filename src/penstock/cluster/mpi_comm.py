"""Ranks under MPI. Non-blocking collectives are polled, so that waits have a limit and leave the core free.

This module is imported only by programs that a launcher started as ranks. Invariant: the buffers of an
abandoned wait stay alive until the process ends, because MPI may still write into them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np

from penstock.cluster.comm import Comm, PollingWait
from penstock.environment import settings_refused
from penstock.errors import RankError, Unavailable, WaitTimeout
from penstock.optional_libraries import install_command

if TYPE_CHECKING:
    from mpi4py import MPI


_GIVEN_UP: list[MPI.Request] = []


def _finish(request: MPI.Request, wait: PollingWait) -> None:
    try:
        wait.until(request.Test)
    except (WaitTimeout, KeyboardInterrupt):
        _GIVEN_UP.append(request)
        raise


class MpiComm(Comm):
    """All ranks of `communicator`, in a private duplicate of it. Construction is collective.

    `at_close` runs after the duplicate is freed; `join_mpi` uses it to end MPI.
    """

    def __init__(
        self, communicator: MPI.Intracomm, host: str, *, at_close: Callable[[], None] | None = None
    ) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size(), host)
        self._mpi = communicator.Dup()
        self._at_close = at_close

    def close(self) -> None:
        """Free the duplicate, and end MPI if it was initialized for this communicator. Collective."""
        self._mpi.Free()
        if self._at_close is not None:
            self._at_close()

    def transfer(self) -> MpiPointToPoint:
        """Open transfers between the same ranks, in a separate duplicate."""
        return MpiPointToPoint(self._mpi.Dup())

    def _move_nothing(self, wait: PollingWait) -> None:
        _finish(self._mpi.Ibarrier(), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        size_bytes = np.array([0 if payload is None else len(payload)], dtype=np.int64)
        _finish(self._mpi.Ibcast(size_bytes), wait)
        received = np.empty(int(size_bytes[0]), dtype=np.uint8)
        if payload is not None:
            received[:] = np.frombuffer(payload, dtype=np.uint8)
        _finish(self._mpi.Ibcast(received), wait)
        return received.tobytes()

    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        gather_sizes = self._mpi.Igather if only_on_rank0 else self._mpi.Iallgather
        gather_payloads = self._mpi.Igatherv if only_on_rank0 else self._mpi.Iallgatherv
        # On ranks that receive nothing, the sizes stay zero, and MPI ignores the receive buffer.
        sizes_bytes = np.zeros(self.size, dtype=np.int64)
        _finish(gather_sizes(np.array([len(payload)], dtype=np.int64), sizes_bytes), wait)
        ends = np.cumsum(sizes_bytes)
        received = np.empty(int(ends[-1]), dtype=np.uint8)
        layout = (sizes_bytes.tolist(), (ends - sizes_bytes).tolist())
        _finish(gather_payloads(np.frombuffer(payload, dtype=np.uint8), [received, layout]), wait)
        return [part.tobytes() for part in np.split(received, ends[:-1])]

    def _scatter_bytes(
        self, payloads: Sequence[bytes] | None, sizes: Sequence[int], wait: PollingWait
    ) -> bytes:
        received, sent = np.empty(sizes[self.rank], dtype=np.uint8), None
        if payloads is not None:
            layout = (sizes, [sum(sizes[:rank]) for rank in range(self.size)])
            sent = [np.frombuffer(b"".join(payloads), dtype=np.uint8), layout]
        _finish(self._mpi.Iscatterv(sent, received), wait)
        return received.tobytes()


class MpiPointToPoint:
    """Point-to-point transfers through MPI, by polling.

    Any thread may call these methods, because MPI is initialized with THREAD_MULTIPLE.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._mpi = communicator

    def send(self, to: int, buffer: memoryview, *, tag: int = 0) -> MpiPendingTransfer:
        """Begin to send all of `buffer`."""
        return MpiPendingTransfer(self._mpi.Isend(np.frombuffer(buffer, dtype=np.uint8), to, tag))

    def receive(self, source: int, buffer: memoryview, *, tag: int = 0) -> MpiPendingTransfer:
        """Begin to fill all of `buffer`."""
        return MpiPendingTransfer(self._mpi.Irecv(np.frombuffer(buffer, dtype=np.uint8), source, tag))

    def close(self) -> None:
        """Free the duplicate."""
        self._mpi.Free()


class MpiPendingTransfer:
    """One send or receive of MPI."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def wait(self, *, awaiting: str, timeout_s: float) -> None:
        """Wait until the bytes have been sent or received."""
        _finish(self._request, PollingWait(awaiting, timeout_s))


def join_mpi(host: str, expected_size: int) -> MpiComm:
    """Initialize MPI, once per process, and join the launcher's world of `expected_size` ranks."""
    # UCX is the transport of many MPI libraries.
    with nullcontext() if "mpi4py.MPI" in sys.modules else settings_refused("ucx.conf", "UCX"):
        try:
            import mpi4py  # noqa: PLC0415 - optional, and configured before it imports MPI

            # If MPI were initialized on import, every import would be collective. If it ended at exit, a
            # failed rank would wait for ranks that wait for it.
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
            from mpi4py import MPI  # noqa: PLC0415
        except (ImportError, RuntimeError) as error:
            raise Unavailable(
                f"Ranks under MPI need mpi4py and an MPI library: {error}",
                fix=f"Install them with: {install_command('mpi')}",
            ) from error
        begins_here = not MPI.Is_initialized()
        if begins_here:
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    comm = MpiComm(MPI.COMM_WORLD, host, at_close=MPI.Finalize if begins_here else None)
    comm.carrier = " ".join(MPI.Get_library_version().splitlines()[0].split())
    if comm.size != expected_size:
        raise RankError(
            f"The launcher started {expected_size} ranks, but MPI sees {comm.size}",
            where=comm.carrier,
            fix="Launcher and library belong to different MPIs: use the mpiexec that belongs to this MPI, "
            "or tell srun which one to serve (--mpi=pmi2, --mpi=pmix).",
        )
    return comm
