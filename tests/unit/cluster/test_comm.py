from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.rank_threads import ThreadComm, on_ranks

from penstock.cluster.comm import Comm, SoloComm, all_gather_results, decide_on_rank0, format_cause
from penstock.cluster.supervision.control_protocol import Ending
from penstock.cluster.supervision.rank_process import describe_failure, join_job, join_ranks
from penstock.errors import (
    ObjectNotFound,
    PenstockError,
    RankError,
    RankFailed,
    Unavailable,
    UsageError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from penstock.cluster.comm import PollingWait


class LonelyComm(Comm):
    """Rank 0 of 2 whose other rank never comes, or whose carrier breaks."""

    def __init__(self, breaks: Exception | None = None) -> None:
        super().__init__(0, 2, "here")
        self.breaks = breaks

    def close(self) -> None:
        """Nothing to leave."""

    def _move_nothing(self, wait: PollingWait) -> None:
        if self.breaks is not None:
            raise self.breaks
        wait.until(lambda: False)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        assert payload is not None
        return payload

    def _gather_bytes(self, payload: bytes, wait: PollingWait, *, only_on_rank0: bool) -> list[bytes]:
        return [payload, payload]


def test_a_rank_that_gave_up_is_not_let_back_in() -> None:
    comm = LonelyComm()
    with pytest.raises(WaitTimeout):
        comm.barrier(awaiting="the other one", timeout_s=0.01)
    with pytest.raises(RankError, match="gave up waiting for the other one") as caught:
        comm.gather(1, awaiting="numbers")
    assert caught.value.where == "now at numbers"


def test_an_interrupted_rank_is_not_let_back_in() -> None:
    comm = LonelyComm()
    with pytest.raises(KeyboardInterrupt), comm._collective("a call", 1.0):
        raise KeyboardInterrupt
    with pytest.raises(RankError, match="gave up waiting for a call"):
        comm.barrier(awaiting="another call")


def test_a_carriers_own_error_becomes_an_error_of_ranks() -> None:
    with pytest.raises(RankError, match="broke while waiting for the other one: closed by peer") as caught:
        LonelyComm(RuntimeError("closed by peer")).barrier(awaiting="the other one")
    assert caught.value.where == "rank 0 on here"


def test_a_long_wait_is_reported_with_the_number_of_its_call() -> None:
    comm, told = LonelyComm(), list[tuple[int, str]]()
    comm.on_late = lambda call, awaiting: told.append((call, awaiting))
    comm.gather(1, awaiting="the first call")
    with pytest.raises(WaitTimeout):
        comm.barrier(awaiting="the second call", timeout_s=1.0)
    assert told == [(2, "the second call")]


def test_on_late_is_optional() -> None:
    with pytest.raises(WaitTimeout):
        LonelyComm().barrier(awaiting="the other one", timeout_s=0.02)


@pytest.mark.parametrize("value", [threading.Lock(), lambda: None])
def test_what_cannot_be_packed_blames_its_rank(value: object) -> None:
    with pytest.raises(RankFailed, match="cannot send a") as caught:
        SoloComm("here").gather(value, awaiting="a value")
    assert (caught.value.rank, caught.value.host) == (0, "here")


def test_collect_returns_every_ranks_result() -> None:
    assert all_gather_results(SoloComm(), lambda: 7, awaiting="sevens") == [7]


def test_collect_names_the_failed_rank_and_keeps_the_original_as_cause() -> None:
    original = ValueError("no water")

    def work() -> None:
        raise original

    with pytest.raises(RankFailed, match="Rank 0 on here failed: ValueError: no water") as caught:
        all_gather_results(SoloComm("here"), work, awaiting="water")
    assert caught.value.__cause__ is original


@pytest.mark.parametrize("failing", [0, 1, None])
def test_a_conclusion_is_that_of_rank_0_or_the_failure_of_whoever_failed(failing: int | None) -> None:
    def work(rank: int) -> int:
        if rank == failing:
            raise ValueError("no water")
        return rank

    def program(comm: ThreadComm) -> tuple[str, bool]:
        def conclude(results: list[int]) -> int:
            assert failing is None, "some work failed"
            assert results == [0, 1, 2]
            raise KeyError("no bucket")

        with pytest.raises(RankFailed) as caught:
            decide_on_rank0(comm, lambda: work(comm.rank), conclude, awaiting="x", timeout_s=60)
        return str(caught.value), isinstance(caught.value.__cause__, ValueError | KeyError)

    blamed = failing or 0
    cause = "KeyError: 'no bucket'" if failing is None else "ValueError: no water"
    expected = f"Rank {blamed} on thread-{blamed} failed: {cause}"
    assert [told[: len(expected)] for told, _ in on_ranks(3, program)] == [expected] * 3
    assert [has_cause for _, has_cause in on_ranks(3, program)] == [rank == blamed for rank in range(3)]


def test_collect_lets_an_interrupt_through() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        all_gather_results(SoloComm(), work, awaiting="water")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no water"), "ValueError: no water"),
        (ValueError(), "ValueError"),
        (UsageError("No such unit"), "No such unit"),
    ],
)
def test_a_cause_names_the_kind_of_foreign_errors_only(error: Exception, cause: str) -> None:
    assert format_cause(error) == cause


@pytest.mark.parametrize(
    ("error", "ending", "kind"),
    [
        (ObjectNotFound("gone"), Ending.NOT_FOUND, RankFailed),
        (UsageError("what?"), Ending.USAGE, UsageError),
        (Unavailable("not here"), Ending.UNAVAILABLE, Unavailable),
        (WaitTimeout("all", 1.0), Ending.TIMED_OUT, RankFailed),
        (OSError("disk"), Ending.FAILED, RankFailed),
    ],
)
def test_an_error_keeps_its_exit_code_on_its_way(
    error: Exception, ending: Ending, kind: type[PenstockError]
) -> None:
    failure = describe_failure(error, 3, "here")
    assert (failure.rank, failure.host, failure.ending) == (3, "here", ending)
    assert type(failure.error()) is kind
    assert failure.error().exit_code == (error.exit_code if isinstance(error, PenstockError) else 1)


def test_a_blamed_rank_stays_the_blamed_one() -> None:
    failure = describe_failure(RankFailed(5, "there", "no water"), 3, "here")
    assert (failure.rank, failure.host, failure.cause) == (5, "there", "no water")


def test_a_foreign_error_takes_its_traceback_along_as_a_note() -> None:
    with pytest.raises(OSError, match="disk") as caught:
        Path("/no/such/disk: disk").read_bytes()
    notes = describe_failure(caught.value, 0, "here").error().__notes__
    assert "Traceback" in notes[0]
    assert "in read_bytes" in notes[0]


def test_a_library_that_one_host_lacks_is_named_with_its_extra() -> None:
    error = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert "Run: pip install 'penstock-io[bench]'" in describe_failure(error, 1, "here").cause


def test_a_cause_of_any_length_stays_a_line_that_is_accepted() -> None:
    failure = describe_failure(ValueError("x" * 10**6), 0, "here")
    assert len(failure.cause) + len(failure.detail) < 30_000


def test_without_a_launcher_a_job_has_one_rank() -> None:
    comm: Comm = join_ranks({"PENSTOCK_HOST": "rack7"})
    assert (comm.rank, comm.size, comm.host) == (0, 1, "rack7")
    with join_job({}, ranks=1) as joined:
        assert (joined.rank, joined.size) == (0, 1)


def test_ranks_without_a_launcher_are_refused() -> None:
    with pytest.raises(UsageError, match="--ranks is 4"), join_job({}, ranks=4):
        raise AssertionError("the body must not run")


def test_an_error_in_a_job_of_one_is_simply_raised() -> None:
    with pytest.raises(ValueError, match="no water"), join_job({}):
        raise ValueError("no water")
