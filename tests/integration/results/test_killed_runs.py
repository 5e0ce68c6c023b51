"""Runs that are killed at any moment, and runs that begin at once, all have their entries."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.results.history import HistoryFile, read_catalog

RUN = """
import os, signal, sys
from pathlib import Path
from penstock.results import published_files, run_folder
from penstock.results.history import HistoryFile
from penstock.results.active_run import ActiveRun
from penstock.results.run_record import RunRequest
from penstock.workload.load_workload import load

parent, moment = Path(sys.argv[1]), sys.argv[2]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "after its entry":
    run_folder.make_run_folder = die
request = RunRequest(workload=load("unet3d_h100").workload, ranks=1, hosts=[], command=["penstock", "x"])
if moment == "before its record":
    published_files.write_file = die
for _ in range(int(sys.argv[3])):
    with ActiveRun.start(parent, request) as run:
        if moment == "while it runs":
            die()
        if moment == "before its end is entered":
            HistoryFile.end = die
        run.finish()
"""


def started(parent: Path, moment: str, *, times: int = 1) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(parent), moment, str(times)])


@pytest.mark.parametrize(
    ("moment", "outcome", "where"),
    [
        ("after its entry", "interrupted", "gone"),
        ("before its record", "interrupted", "here"),
        ("while it runs", "interrupted", "here"),
        ("before its end is entered", "finished", "here"),
    ],
)
def test_a_run_that_is_killed_at_any_moment_is_told_as_what_it_is(
    tmp_path: Path, moment: str, outcome: str, where: str
) -> None:
    assert started(tmp_path, moment).wait(timeout=120) == -signal.SIGKILL
    (run,), _ = read_catalog(tmp_path)
    assert (run.outcome, run.where) == (outcome, where)
    assert run.began is not None
    assert run.began["command"] == ["penstock", "x"]
    assert run.folder.endswith(run.id)


def test_runs_that_begin_and_end_at_once_all_have_their_entries(tmp_path: Path) -> None:
    programs = [started(tmp_path, "", times=8) for _ in range(3)]
    assert [program.wait(timeout=240) for program in programs] == [0, 0, 0]
    runs, complaints = read_catalog(tmp_path)
    assert len({run.id for run in runs}) == 24
    assert {(run.outcome, run.where) for run in runs} == {("finished", "here")}
    assert complaints == []
    assert len(HistoryFile(tmp_path).read()[0]) == 48
