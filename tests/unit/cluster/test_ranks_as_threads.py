"""The part of a communicator that does not depend on its library, tested on ranks that are threads."""

import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.comm_contract import check_absence, check_comm
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.cluster.comm import all_gather_results
from penstock.errors import RankError, RankFailed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def errors_of(size: int, program: Callable[[ThreadComm], object]) -> list[str]:
    """What each rank's error says; a rank without one says nothing."""

    def told(comm: ThreadComm) -> str:
        try:
            program(comm)
        except RankError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return on_ranks(size, told)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_that_are_threads_keep_every_promise(size: int) -> None:
    on_ranks(size, check_comm)


def test_a_missing_thread_is_noticed_by_all_others() -> None:
    on_ranks(4, lambda comm: check_absence(comm, limit_s=0.2))


@settings(deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_gather_brings_everyone_everything_in_rank_order(values: list[object]) -> None:
    gathered = on_ranks(len(values), lambda comm: comm.gather(values[comm.rank], awaiting="values"))
    assert gathered == [values] * len(values)


@settings(deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=5))
def test_broadcast_brings_everyone_rank_0s_value(values: list[object]) -> None:
    received = on_ranks(len(values), lambda comm: comm.broadcast(values[comm.rank], awaiting="a value"))
    assert received == [values[0]] * len(values)


@settings(deadline=None)
@given(numbers=st.lists(st.integers(), min_size=1, max_size=5))
def test_reductions_say_the_same_everywhere(numbers: list[int]) -> None:
    def reduce_all(comm: ThreadComm) -> tuple[int, int, int]:
        mine = numbers[comm.rank]
        return (
            comm.reduce(mine, "sum", awaiting="a sum"),
            comm.reduce(mine, "min", awaiting="a minimum"),
            comm.reduce(mine, "max", awaiting="a maximum"),
        )

    assert on_ranks(len(numbers), reduce_all) == [(sum(numbers), min(numbers), max(numbers))] * len(numbers)


@settings(max_examples=20, deadline=None)
@given(fractions=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=2, max_size=5))
def test_sums_that_round_have_the_same_bits_on_every_rank(fractions: list[float]) -> None:
    sums = on_ranks(len(fractions), lambda comm: comm.reduce(fractions[comm.rank], "sum", awaiting="a sum"))
    assert len({value.hex() for value in sums}) == 1
    assert math.isclose(sums[0], math.fsum(fractions), rel_tol=1e-6, abs_tol=1e-6 * max(map(abs, fractions)))


@settings(max_examples=20, deadline=None)
@given(sick=st.sets(st.integers(0, 3), min_size=1))
def test_a_step_that_fails_somewhere_fails_everywhere_for_the_lowest_rank(sick: set[int]) -> None:
    def step(comm: ThreadComm) -> None:
        def work() -> None:
            if comm.rank in sick:
                raise OSError(f"disk of {comm.rank}")

        all_gather_results(comm, work, awaiting="all disks")

    lowest = min(sick)
    told = f"RankFailed: Rank {lowest} on thread-{lowest} failed: OSError: disk of {lowest}"
    assert errors_of(4, step) == [told] * 4


def test_after_a_failed_step_the_ranks_are_still_in_step() -> None:
    def stumble(comm: ThreadComm) -> list[int]:
        with pytest.raises(RankFailed):
            comm.gather(threading.Lock() if comm.rank == 1 else None, awaiting="locks")
        with pytest.raises(RankFailed):
            comm.broadcast(threading.Lock(), awaiting="a lock")
        return comm.gather(comm.rank, awaiting="numbers")

    assert on_ranks(3, stumble) == [[0, 1, 2]] * 3


def test_only_rank_0_must_have_something_to_broadcast() -> None:
    def speak(comm: ThreadComm) -> str:
        # Another rank's value is ignored, even one that could not travel.
        return comm.broadcast("word" if comm.rank == 0 else None, awaiting="the word")

    assert on_ranks(3, speak) == ["word"] * 3


def test_waiting_ranks_report_a_late_rank_once() -> None:
    told: list[tuple[int, int, str]] = []
    both_told = threading.Event()

    def tell(rank: int, call: int, awaiting: str) -> None:
        told.append((rank, call, awaiting))
        if len(told) == 2:
            both_told.set()

    def come_late(comm: ThreadComm) -> None:
        comm.on_late = lambda call, awaiting: tell(comm.rank, call, awaiting)
        if comm.rank == 2:
            assert both_told.wait(timeout=20)
        comm.barrier(awaiting="the slow one", timeout_s=1.0)

    on_ranks(3, come_late)
    assert sorted(told) == [(0, 1, "the slow one"), (1, 1, "the slow one")]


def test_a_rank_that_fails_alone_leaves_the_others_a_named_wait() -> None:
    def fail_alone(comm: ThreadComm) -> None:
        if comm.rank == 0:
            raise RankFailed(0, comm.host, "no water")
        comm.barrier(awaiting="rank 0 to drink", timeout_s=0.1)

    first, *others = errors_of(3, fail_alone)
    assert first.startswith("RankFailed: Rank 0 on thread-0 failed: no water")
    assert all(
        other.startswith("WaitTimeout: Timed out after 0.1 s waiting for rank 0 to drink") for other in others
    )
