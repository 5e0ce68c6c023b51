"""Why a job leaves, and when: by signals, its time, or a marker."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from penstock.checkpoint.manager.policies import (
    MARKER_NAME,
    GracefulStop,
    StopConditions,
    StopRequest,
    cancel_stop_request,
    find_stop_request,
    request_stop,
)
from penstock.errors import DataDamaged, UsageError
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import exists, write_object


@dataclass(slots=True)
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Job:
    settings: StopConditions = field(default_factory=StopConditions)
    rank: int = 0
    clock: Clock = field(default_factory=Clock)
    storage: MemoryStorage = field(default_factory=lambda: MemoryStorage("mem://halting"))
    halting: GracefulStop = field(init=False)

    def __post_init__(self) -> None:
        self.halting = GracefulStop(self.settings, self.storage, self.rank, clock=self.clock)

    def step(self, seconds: float) -> str:
        self.clock.now_s += seconds
        return self.halting.find_reason()


ORDER = StopRequest(asked_by="me@here", asked_at_s=5.0, reason="maintenance")


def test_a_job_without_a_reason_to_stop_continues() -> None:
    job = Job()
    assert [job.step(1e6) for _ in range(3)] == ["", "", ""]


def test_a_job_leaves_in_time_for_a_step_two_slowest_saves_and_the_margin() -> None:
    job = Job(StopConditions(time_limit=1000, margin_s=50))
    assert job.step(100) == ""

    def save() -> str:
        job.clock.now_s += 200
        return "saved"

    assert job.halting.time_save(save) == "saved"
    # 100 + 200 are gone; the longest step, with its save, took 210, the margin and two saves are 450.
    assert job.step(10) == ""
    assert "s are left, and one step" in job.step(100)


def test_rank_0_looks_for_a_request_and_not_at_every_step() -> None:
    job = Job(StopConditions(look_s=10))
    assert job.step(1) == ""
    request_stop(job.storage, ORDER)
    assert job.step(5) == ""
    assert job.step(6) == "requested by me@here (maintenance)"
    assert Job(rank=1, storage=job.storage).step(100) == ""


def test_all_ranks_agree_on_the_first_reason() -> None:
    job = Job()
    job.halting.agree(["", "", "SIGTERM was received"])
    job.halting.agree(["requested by me@here", "", ""])
    assert job.halting.reason == "rank 2: SIGTERM was received"
    assert job.halting.find_reason() == job.halting.reason


def test_only_the_job_that_obeyed_removes_the_request() -> None:
    job = Job()
    request_stop(job.storage, ORDER)
    job.halting.close()
    assert exists(job.storage, MARKER_NAME)
    job.halting.agree([job.step(1)])
    job.halting.close()
    assert not exists(job.storage, MARKER_NAME)


def test_a_stop_request_is_found_and_cancelled() -> None:
    storage = MemoryStorage("mem://orders")
    assert find_stop_request(storage) is None
    assert not cancel_stop_request(storage)
    request_stop(storage, ORDER)
    assert find_stop_request(storage) == ORDER
    assert cancel_stop_request(storage)
    assert find_stop_request(storage) is None


def test_an_unparsable_request_is_an_error_and_stops_a_job() -> None:
    job = Job()
    write_object(job.storage, MARKER_NAME, [b'{"version": 9}'])
    with pytest.raises(DataDamaged, match="The stop request cannot be parsed"):
        find_stop_request(job.storage)
    assert "cannot be read" in job.step(1)


def test_a_signal_is_noted_and_passed_to_the_former_handler() -> None:
    heard: list[int] = []

    def earlier(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    first: Any = signal.signal(signal.SIGUSR2, earlier)
    try:
        job = Job(StopConditions(signals=("SIGUSR2",)))
        assert job.step(1) == ""
        signal.raise_signal(signal.SIGUSR2)
        assert job.step(1) == "SIGUSR2 was received"
        assert heard == [signal.SIGUSR2]
        job.halting.close()
        assert signal.getsignal(signal.SIGUSR2) is earlier
    finally:
        signal.signal(signal.SIGUSR2, first)


def test_a_handler_installed_later_stays() -> None:
    first: Any = signal.getsignal(signal.SIGUSR2)
    try:
        job = Job(StopConditions(signals=("SIGUSR2",)))
        ours: Any = signal.getsignal(signal.SIGUSR2)

        def later(number: int, frame: FrameType | None) -> None:
            ours(number, frame)

        signal.signal(signal.SIGUSR2, later)
        job.halting.close()
        assert signal.getsignal(signal.SIGUSR2) is later
        signal.raise_signal(signal.SIGUSR2)
        assert job.step(1) == "SIGUSR2 was received"
    finally:
        signal.signal(signal.SIGUSR2, first)


def test_signals_are_for_the_main_thread() -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) as threads, pytest.raises(UsageError, match="Only the main thread"):
        threads.submit(Job, StopConditions(signals=("SIGUSR2",))).result()


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"time_limit": 0}, "must be positive"),
        ({"time_limit": "pbs"}, "slurm"),
        ({"signals": ("SIGNONE",)}, "Unknown signal"),
        ({"margin_s": -1}, "must not be negative"),
    ],
)
def test_invalid_stop_conditions_are_refused(choices: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StopConditions(**choices)
