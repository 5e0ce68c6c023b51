"""Two jobs that save steps in one place: one of them is told, by the name of the other."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import penstock.checkpoint as pc
from penstock.checkpoint.commit.protocol import WRITER_LEASE, RunInUse, WriterLease
from penstock.storage.process_id import ProcessId, current_process
from penstock.storage.uri import open_here


def lease_of(folder: Path, owner: ProcessId) -> WriterLease:
    return WriterLease(open_here(folder), owner=lambda: owner)


def test_a_live_process_of_this_machine_keeps_its_lease_until_it_gives_it_back(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = current_process_of(other.pid)
        first, second = lease_of(tmp_path, started), lease_of(tmp_path, current_process())
        first.hold()
        first.hold()
        with pytest.raises(RunInUse, match=f"Process {other.pid} on {started.host} saves steps here, too"):
            second.hold()
        first.release()
        second.hold()
        second.release()
        first.hold()
        other.kill()
    # It is dead, so its lease is nobody's.
    second.hold()


def current_process_of(pid: int) -> ProcessId:
    """Another process of this machine."""
    from penstock.storage import process_id

    started = process_id._read_start_ticks(pid)
    return replace(current_process(), pid=pid, started=started or "")


def test_a_job_that_starts_elsewhere_takes_the_lease_and_the_older_one_learns_of_it(tmp_path: Path) -> None:
    elsewhere = replace(current_process(), kernel="another", host="node-7", pid=12)
    older, newer = lease_of(tmp_path, current_process()), lease_of(tmp_path, elsewhere)
    older.hold()
    newer.hold()
    newer.hold()
    with pytest.raises(RunInUse, match="Process 12 on node-7 saves steps here, too, since this one began"):
        older.hold()
    older.release()
    newer.hold()


def test_a_lease_that_is_not_readable_or_gone_is_taken(tmp_path: Path) -> None:
    lease = lease_of(tmp_path, current_process())
    (tmp_path / WRITER_LEASE).write_text("{}")
    lease.hold()
    (tmp_path / WRITER_LEASE).unlink()
    lease.hold()
    lease.release()
    lease.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("level", ["cache", pytest.param("durable", marks=pytest.mark.slow)])
def test_a_second_job_cannot_replace_the_steps_of_a_live_one(tmp_path: Path, level: str) -> None:
    cache = "" if level == "durable" else f", cache={str(tmp_path / 'cache')!r}, flush=None"
    program = (
        "import penstock.checkpoint as pc\n"
        f"manager = pc.Manager({str(tmp_path / 'run')!r}{cache})\n"
        "manager.save(1, {'step': 1})\nprint('saved', flush=True)\ninput()\n"
    )
    choices = {} if level == "durable" else {"cache": tmp_path / "cache", "flush": None}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "saved\n"
        with pc.Manager(tmp_path / "run", **choices) as manager:  # type: ignore[arg-type]
            state = {"step": 0}
            assert manager.restore(state) == 1
            with pytest.raises(RunInUse, match=f"Process {other.pid} on"):
                manager.save(1, {"step": 2})
            assert manager.restore(state) == 1
            assert state == {"step": 1}
        other.kill()


def test_the_last_manager_of_a_process_gives_the_lease_back(tmp_path: Path) -> None:
    first, second = (lease_of(tmp_path, current_process()) for _ in range(2))
    first.hold()
    second.hold()
    second.release()
    assert (tmp_path / WRITER_LEASE).exists()
    first.release()
    assert not (tmp_path / WRITER_LEASE).exists()


def test_a_job_whose_lease_was_taken_and_given_back_meanwhile_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease = lease_of(tmp_path, current_process())
    lease.hold()
    assert not caplog.text
    (tmp_path / WRITER_LEASE).unlink()
    lease.hold()
    assert f"{WRITER_LEASE} is no longer this job's. Did another job save steps here?" in caplog.text
    assert (tmp_path / WRITER_LEASE).exists()
