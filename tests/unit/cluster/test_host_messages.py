"""Ranks of one host: messages arrive whole and in order, whatever their size, and who is gone is named."""

from __future__ import annotations

import os
import pickle
import socket
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.comm_contract import check_comm
from tests.support.rank_threads import ThreadBoard, ThreadComm, on_ranks

from penstock.cluster import host_messages, rounds
from penstock.cluster.comm import BaseComm, all_gather_results
from penstock.cluster.host_messages import HostComm, Listener, connect_within_host
from penstock.errors import RankError, RankFailed, WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_RANKS = 3
LARGE = 3 << 20
"""More than a socket holds, in both directions at a time."""


def on_host(program: Callable[[BaseComm], object], size: int = NUM_RANKS) -> list[object]:
    def connected(comm: ThreadComm) -> object:
        own = connect_within_host(comm)
        assert isinstance(own, HostComm)
        try:
            return program(own)
        finally:
            own.close()

    return on_ranks(size, connected)


def test_all_calls_of_a_communicator_give_what_they_promise() -> None:
    def program(comm: BaseComm) -> object:
        check_comm(comm)
        large = bytes([comm.rank]) * LARGE
        gathered = comm.gather((comm.rank, large), awaiting="gather")
        assert gathered == [(rank, bytes([rank]) * LARGE) for rank in range(NUM_RANKS)]
        comm.barrier(awaiting="barrier")
        assert comm.broadcast(f"of {comm.rank}", awaiting="broadcast") == "of 0"
        on_rank0 = comm.gather_on_rank0(comm.rank, awaiting="gather on rank 0")
        assert on_rank0 == ([0, 1, 2] if comm.rank == 0 else [])
        told = rounds.exchange(comm.rank, range(NUM_RANKS), large)
        assert {
            rank: len(text) for rank, text in comm.carry(told, awaiting="large").items()
        } == dict.fromkeys(range(NUM_RANKS), LARGE)
        return comm.reduce(comm.rank, "sum", awaiting="sum")

    assert on_host(program) == [3] * NUM_RANKS


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_message_of_another_call_is_an_error_and_never_an_answer(*, is_interrupted: bool) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    def program(comm: BaseComm) -> str:
        comm.barrier(awaiting="all to begin")
        if comm.rank == 1:
            # It leaves a call by an error of its own, and makes the next one.
            with pytest.raises(KeyboardInterrupt):
                all_gather_results(comm, interrupt, awaiting="what all have")
        if comm.rank == 0 or not is_interrupted:
            with pytest.raises(RankError) as caught:
                comm.gather("another answer" if comm.rank else "an answer", awaiting=f"answers {comm.rank}")
        else:
            with pytest.raises(RankError) as caught:
                comm.barrier(awaiting="the end")
        return str(caught.value)

    told = [str(each) for each in on_host(program, 2)]
    assert any("has left a call in which this rank waits for" in each for each in told), told


def test_own_error_comes_before_that_the_others_cannot_be_told() -> None:
    def fail() -> None:
        raise ValueError("no water")

    def program(comm: BaseComm) -> str:
        if comm.rank == 1:
            comm.close()
            return ""
        with pytest.raises(RankFailed) as caught:
            all_gather_results(comm, fail, awaiting="what all have")
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(RankError, match=r"gave up waiting for what all have \(.*rank 1: it has ended"):
            comm.barrier(awaiting="the end")
        return str(caught.value)

    assert "Rank 0 on thread-0 failed: ValueError: no water" in str(on_host(program, 2)[0])


def test_a_failure_of_one_rank_is_raised_on_all_and_the_next_call_works() -> None:
    def program(comm: BaseComm) -> object:
        def work() -> int:
            return 1 // (comm.rank - 1)

        with pytest.raises(RankFailed, match="ZeroDivisionError") as failed:
            all_gather_results(comm, work, awaiting="division")
        return failed.value.rank, comm.gather(comm.rank, awaiting="next")

    assert on_host(program) == [(1, [0, 1, 2])] * NUM_RANKS


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def program(comm: BaseComm) -> object:
        if comm.rank == 1:
            return ""
        with pytest.raises(RankError, match="waiting for the others: rank") as broken:
            comm.gather("here", awaiting="the others", timeout_s=60)
        return str(broken.value)

    started_s = time.monotonic()
    assert "rank 1: it has ended" in str(on_host(program)[0])
    assert time.monotonic() - started_s < 30


def test_forked_processes_keep_no_connection() -> None:
    ours, other = socket.socketpair()
    (ready, has_forked), (ended, may_end) = os.pipe(), os.pipe()
    comm = HostComm(ThreadComm(ThreadBoard(2), 0), {1: ours})
    pid = os.fork()
    if pid == 0:
        os.close(may_end)
        os.write(has_forked, b"!")
        os.read(ended, 1)
        os._exit(0)
    os.read(ready, 1)
    ours.close()
    other.settimeout(5)
    assert other.recv(1) == b"", "the end of this rank is the end of its socket"
    os.close(may_end)
    os.waitpid(pid, 0)
    assert comm.rank == 0


def test_a_rank_that_never_comes_ends_the_wait_at_its_limit() -> None:
    def program(comm: BaseComm) -> object:
        if comm.rank == 0:
            with pytest.raises(WaitTimeout, match="the late one"):
                comm.gather("here", awaiting="the late one", timeout_s=0.05)
        else:
            time.sleep(0.2)
        return None

    on_host(program, size=2)


def test_ranks_of_several_hosts_keep_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: ThreadComm) -> bool:
        return connect_within_host(comm) is comm

    monkeypatch.setattr(host_messages, "name_host", lambda: pickle.dumps(time.perf_counter_ns()))
    assert on_ranks(NUM_RANKS, program) == [True] * NUM_RANKS
    assert on_ranks(1, program) == [True]


def test_ranks_without_sockets_keep_their_library_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def program(comm: ThreadComm) -> bool:
        return connect_within_host(comm) is comm

    monkeypatch.setattr(Listener, "connect", refused)
    monkeypatch.setattr(host_messages, "_REFUSED", [])
    assert on_ranks(NUM_RANKS, program) == [True] * NUM_RANKS
    # Nor do they try again, which could take its time.
    monkeypatch.setattr(Listener, "open", lambda *_: pytest.fail("tried again"))
    assert on_ranks(NUM_RANKS, program) == [True] * NUM_RANKS


def test_if_one_rank_cannot_connect_all_keep_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Listener.connect

    def break_off(own: Listener, rank: int, addresses: dict[int, str]) -> object:
        found = connect(own, rank, addresses)
        if rank != 2:
            return found
        for greeting in found.values():
            greeting.connection.close()
        raise PermissionError(1, "Operation not permitted")

    def program(comm: ThreadComm) -> bool:
        return connect_within_host(comm) is comm and comm.gather(comm.rank, awaiting="all") == [0, 1, 2]

    monkeypatch.setattr(Listener, "connect", break_off)
    monkeypatch.setattr(host_messages, "_REFUSED", [])
    assert on_ranks(NUM_RANKS, program) == [True] * NUM_RANKS
