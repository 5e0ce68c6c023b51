"""A run followed from within: rates, waits and the time left, and followers that fail or hang."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cluster.comm import RankWait
from penstock.errors import StorageError
from penstock.progress import RunName
from penstock.results import run_status
from penstock.results.run_status import (
    STATUS_FILE,
    Follower,
    Meter,
    RunStatus,
    StatusFile,
    figure_lines,
    phase_sentence,
    read_status,
    state_sentence,
    status_line,
)


class Clock:
    """A clock that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Seen(Follower):
    """A follower that keeps what it was shown."""

    interval_s = 0.01

    def __init__(self) -> None:
        self.statuses: list[RunStatus] = []
        self.is_closed = False

    def show(self, status: RunStatus) -> None:
        self.statuses.append(status)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(meter: Meter, clock: Clock, steps: int, *, step_s: float = 1.0) -> None:
    for _ in range(steps):
        clock.now_s += step_s
        meter.advance(1)
        meter.count(
            steps=1, samples=10, read_bytes=2**30, computing_s=0.9 * step_s, sample_wait_s=0.1 * step_s
        )
        meter.status()  # the thread looks every second


def test_rates_and_the_time_left_follow_from_what_was_counted(clock: Clock) -> None:
    meter = Meter(clock=clock)
    meter.expect(200, "steps")
    meter.begin("epoch 1 of 2, steps", 100)
    train(meter, clock, 50)
    train(meter, clock, 20, step_s=2.0)
    status = meter.status()
    assert status.totals["samples"] == 700
    assert status.rates["samples"] == pytest.approx(700 / 90)
    assert status.rates_now["samples"] == pytest.approx(5.0)
    assert status.share_done == pytest.approx(0.35)
    # At the speed of the last minute: 20 steps of 2 s and 20 of 1 s.
    assert status.left_s == pytest.approx(130 * 60 / 40)
    assert phase_sentence(status) == "epoch 1 of 2: 70 of 100 steps (70%)"
    assert status_line(status) == (
        "epoch 1 of 2: 70 of 100 steps (70%); samples 5.0/s now; read 512 MiB/s now; 35% of the run, "
        "about 3 min 15 s left"
    )
    ended = dict(figure_lines(replace(status, outcome="finished")))
    assert ended["samples"] == "7.8/s, 700 in all"


def test_pauses_between_phases_slow_no_mean(clock: Clock) -> None:
    meter = Meter(clock=clock)
    for _ in range(2):
        meter.begin("writing, all ranks", 100)
        meter.enter("moving", unit="written_bytes", times=4)
        clock.now_s += 2
        meter.advance(100)
        meter.enter("working")
        clock.now_s += 50
    status = meter.status()
    assert status.totals == {"written_bytes": 800}
    assert status.rates["written_bytes"] == pytest.approx(200)


def test_the_time_left_has_the_pauses_that_are_still_to_come(clock: Clock) -> None:
    meter = Meter(clock=clock)
    assert state_sentence(meter.status()) == ""  # a clock does not begin at 0
    meter.expect(400, "written_bytes", pauses_s=30)
    meter.begin("writing checkpoint 1 of 4, all ranks", 100)
    clock.now_s += 10
    meter.count(done=100, written_bytes=100)
    assert meter.status().left_s == pytest.approx(30 + 22.5)
    meter.begin("waiting 10 s before the next checkpoint", 0)
    meter.enter("computing")
    clock.now_s += 12
    assert status_line(meter.status()) == (
        "waiting 10 s before the next checkpoint; written 0 B/s now; 25% of the run, about 52 s left"
    )


def test_a_new_phase_has_rates_of_its_own_time(clock: Clock) -> None:
    meter = Meter(clock=clock)
    meter.begin("epoch 1, steps", 10)
    train(meter, clock, 10)
    clock.now_s += 300
    meter.begin("epoch 2, steps", 10)
    train(meter, clock, 2)
    assert meter.status().rates_now["samples"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("activity", "wait", "sentence"),
    [
        ("reading", None, "waiting for samples for 42 s"),
        ("moving", None, "waiting for storage for 42 s"),
        ("computing", None, ""),
        ("working", None, "no progress for 42 s"),
        (
            "computing",
            RankWait(awaiting="all ranks to finish step 7", waited_s=42, absent=(3,)),
            "waiting for rank 3 for 42 s (all ranks to finish step 7)",
        ),
        (
            "computing",
            RankWait(awaiting="all ranks to finish step 7", waited_s=42, absent=tuple(range(1, 8))),
            "waiting for ranks 1, 2, 3, 4 ... for 42 s (all ranks to finish step 7)",
        ),
        (
            "computing",
            RankWait(awaiting="the folder", waited_s=42, absent=()),
            "waiting for other ranks for 42 s (the folder)",
        ),
        ("computing", RankWait(awaiting="the folder", waited_s=1.5, absent=()), ""),
    ],
    ids=["batch", "moving", "computing", "idle", "rank", "ranks", "unknown", "short"],
)
def test_waiting_is_shown_as_waiting(
    clock: Clock, activity: str, wait: RankWait | None, sentence: str
) -> None:
    meter = Meter(clock=clock, find_wait=lambda: wait)
    meter.begin("epoch 1 of 2, steps", 100)
    meter.enter(activity)  # type: ignore[arg-type]  # one of the four words
    clock.now_s += 42
    assert state_sentence(meter.status()) == sentence


def test_a_phase_without_a_total_and_one_of_bytes_have_sentences(clock: Clock) -> None:
    meter = Meter(clock=clock)
    meter.begin("flush", 0)
    assert phase_sentence(meter.status()) == "flush"
    meter.begin("writing checkpoint 1 of 2, all ranks", 2**40)
    meter.advance(2**38)
    assert phase_sentence(meter.status()) == "writing checkpoint 1 of 2, all ranks: 25%"


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert is_so()


def test_the_status_of_a_run_is_in_its_folder_and_stays_there_with_its_end(tmp_path: Path) -> None:
    seen = Seen()
    with Meter([seen]) as meter:
        meter.attach(RunName(folder=tmp_path, kind="training", workload="unet3d_h100", ranks=4))
        meter.begin("epoch 1 of 1, steps", 3)
        wait_for(lambda: read_status(tmp_path) is not None)
        running = read_status(tmp_path)
        assert running is not None
        assert (running.run, running.ranks, running.outcome) == (tmp_path.name, 4, "running")
        meter.settle("failed", "StorageError: gone", 1)
    ended = read_status(tmp_path)
    assert ended is not None
    assert (ended.outcome, ended.why, ended.exit_code) == ("failed", "StorageError: gone", 1)
    assert seen.statuses[-1].outcome == "failed"
    assert seen.is_closed
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_each_run_of_one_command_has_totals_and_a_file_of_its_own(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with Meter() as meter:
        for folder in folders:
            folder.mkdir()
            meter.attach(RunName(folder=folder, kind="training", workload="w", ranks=1))
            meter.begin("x", 1)
            meter.count(steps=3)
            meter.settle("finished", "", 0)
            (folder / STATUS_FILE).rename(folder / "kept")
    for folder in folders:
        assert [path.name for path in folder.iterdir()] == ["kept"]
        (folder / "kept").rename(folder / STATUS_FILE)
        status = read_status(folder)
        assert status is not None
        assert (status.run, status.totals) == (folder.name, {"steps": 3.0})


def test_a_run_that_begins_while_followers_are_chosen_is_followed(tmp_path: Path) -> None:
    class Beginning(Seen):
        """Asked for its interval while followers are chosen for a new phase, it begins a run."""

        @property
        def interval_s(self) -> float:  # type: ignore[override]
            if begins.is_set():
                begins.clear()
                meter.attach(RunName(folder=tmp_path, kind="training", workload="w", ranks=1))
            return 0.9

    begins, beginning = threading.Event(), Beginning()
    with Meter([beginning]) as meter:
        wait_for(lambda: bool(beginning.statuses))
        begins.set()
        meter.begin("x", 1)
        wait_for(lambda: read_status(tmp_path) is not None)


def test_a_run_that_has_ended_wakes_nobody_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusFile, "interval_s", 0.01)
    asked: list[float] = []

    def clock() -> float:
        asked.append(time.monotonic())
        return asked[-1]

    with Meter(clock=clock) as meter:
        meter.attach(RunName(folder=tmp_path, kind="training", workload="w", ranks=1))
        wait_for(lambda: read_status(tmp_path) is not None)
        meter.settle("finished", "", 0)
        time.sleep(0.3)
        num_asked = len(asked)
    assert num_asked < 200


def test_a_folder_that_takes_no_files_costs_the_run_nothing(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    with Meter() as meter:
        meter.attach(RunName(folder=gone, kind="training", workload="w", ranks=1))
        meter.begin("x", 1)
        meter.advance(1)
        meter.settle("finished", "", 0)
    assert not gone.exists()
    (tmp_path / STATUS_FILE).mkdir()  # cannot be replaced by a file
    with Meter() as meter:
        meter.attach(RunName(folder=tmp_path, kind="training", workload="w", ranks=1))
        meter.settle("finished", "", 0)


def test_a_follower_that_hangs_does_not_hold_up_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "LONGEST_GOODBYE_S", 0.05)
    let_go = threading.Event()

    class Hanging(Seen):
        def show(self, status: RunStatus) -> None:
            super().show(status)
            let_go.wait(60)

    hanging = Hanging()
    began_s = time.monotonic()
    with Meter([hanging]) as meter:
        while not hanging.statuses:
            time.sleep(0.005)
        meter.settle("finished", "", 0)
    assert time.monotonic() - began_s < 30
    let_go.set()


def test_a_status_of_another_version_or_half_of_one_is_none(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"format": 99}', '{"format": 1, "run": "x"}'):
        (tmp_path / STATUS_FILE).write_text(text)
        assert read_status(tmp_path) is None


def test_a_follower_that_fails_is_asked_again() -> None:
    class Failing(Seen):
        def show(self, status: RunStatus) -> None:
            super().show(status)
            raise StorageError("full")

    failing = Failing()
    with Meter([failing]):
        wait_for(lambda: len(failing.statuses) >= 2)
