"""Ranks as threads that work in parallel: all end when one fails, and none before its own work has ended."""

import threading
from concurrent.futures import Future

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.checkpoint.loader import run_with_heartbeat
from penstock.cluster.comm import SoloComm
from penstock.errors import RankFailed


def test_each_rank_gets_its_own_result_once_all_are_done() -> None:
    done = [threading.Event() for _ in range(3)]

    def program(comm: ThreadComm) -> int:
        def work(_: Future[None]) -> int:
            done[comm.rank].set()
            return comm.rank * 10

        result = run_with_heartbeat(comm, work, awaiting="work")
        assert all(each.is_set() for each in done)
        return result

    assert on_ranks(3, program) == [0, 10, 20]


def test_a_failure_cancels_all_ranks_with_the_same_error() -> None:
    def program(comm: ThreadComm) -> str:
        def work(cancelled: Future[None]) -> None:
            if comm.rank == 1:
                raise ValueError("the disk is on fire")
            stopped = threading.Event()
            cancelled.add_done_callback(lambda _: stopped.set())
            assert stopped.wait(60)

        with pytest.raises(RankFailed) as caught:
            run_with_heartbeat(comm, work, awaiting="work")
        assert isinstance(caught.value.__cause__, ValueError) == (comm.rank == 1)
        return str(caught.value)

    (told,) = set(on_ranks(3, program))
    assert "Rank 1" in told
    assert "the disk is on fire" in told


def test_waiting_for_a_rank_that_never_ends_times_out() -> None:
    def program(comm: ThreadComm) -> str:
        def work(cancelled: Future[None]) -> None:
            stopped = threading.Event()
            cancelled.add_done_callback(lambda _: stopped.set())
            assert comm.rank == 0 or stopped.wait(60)

        with pytest.raises(RankFailed) as caught:
            run_with_heartbeat(comm, work, awaiting="everybody", limit_s=0.0)
        return str(caught.value)

    (told,) = set(on_ranks(2, program))
    assert "everybody" in told


def test_a_single_rank_raises_its_own_error_and_cancels() -> None:
    seen: list[str] = []

    def work(cancelled: Future[None]) -> None:
        cancelled.add_done_callback(lambda _: seen.append("stopped"))
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        run_with_heartbeat(SoloComm("here"), work, awaiting="nobody")
    assert seen == ["stopped"]
