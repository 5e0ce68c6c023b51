"""A program that ends while a save is in flight finishes the save first, and leaves no group of ranks."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint import engine
from penstock.checkpoint.commit.checkpoints import StepCatalog
from penstock.checkpoint.manager.manager import Manager
from penstock.errors import WaitTimeout
from penstock.storage.uri import open_here

PROGRAM = """
import sys, torch
import penstock.checkpoint as pc
manager = pc.Manager(sys.argv[1])
manager.save_async(1, {f"w{number}": torch.ones(1 << 20) for number in range(8)})
manager.save_async(2, {"w": torch.ones(5)})
{rest}
"""


FAILING = """
import logging, sys, torch
import penstock.checkpoint as pc
from penstock.errors import PenstockError
logging.disable()
manager = pc.Manager(sys.argv[1])
handle = manager.save_async(1, {"w": torch.ones(1 << 20)}, staging="background")
{rest}
"""


def _run(folder: Path, rest: str = "", program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    program = program.replace("{rest}", rest)
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=240, check=False
    )


def test_saves_without_wait_are_committed_before_the_program_ends(tmp_path: Path) -> None:
    ended = _run(tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    assert StepCatalog(open_here(tmp_path / "run")).committed() == [1, 2]


def test_a_failure_that_nobody_asked_for_is_told_wherever_the_log_goes(tmp_path: Path) -> None:
    (tmp_path / "run/step-1").mkdir(parents=True)
    (tmp_path / "run/step-1/notes.txt").touch()
    ended = _run(tmp_path / "run", program=FAILING)
    told = [line for line in ended.stderr.splitlines() if line.startswith("penstock: ")]
    assert len(told) == 1, ended.stderr
    assert "step 1 was not saved" in told[0]
    assert "notes.txt" in told[0]
    for call in ("manager.close()", "handle.result()", "handle.wait_staged(); handle.result()"):
        asked = _run(tmp_path / "run", f"try: {call}\nexcept PenstockError as error: print(error)", FAILING)
        assert "notes.txt" in asked.stdout, call
        assert "penstock: " not in asked.stderr, call


@pytest.mark.slow
def test_saves_are_committed_when_the_program_ends_with_an_error(tmp_path: Path) -> None:
    ended = _run(tmp_path / "run", "raise ValueError('of the trainer')")
    assert "of the trainer" in ended.stderr
    assert StepCatalog(open_here(tmp_path / "run")).committed() == [1, 2]


WITHIN = """
import sys, torch
import penstock.checkpoint as pc
with pc.Manager(sys.argv[1]) as manager:
    manager.save(1, {"w": torch.ones(5)})
    manager.save_async(2, {f"w{number}": torch.ones(1 << 20) for number in range(8)})
    {rest}
"""


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise ValueError"])
def test_a_block_that_is_left_by_an_exit_or_an_error_finishes_its_saves(tmp_path: Path, end: str) -> None:
    _run(tmp_path / "run", end, WITHIN)
    assert StepCatalog(open_here(tmp_path / "run")).committed() == [1, 2]


def leave_a_manager_open(_rank: int, folder: Path) -> None:
    manager = Manager(folder)
    manager.save_async(1, {"w": 1})
    manager._worker.shutdown()
    groups = [weakref.ref(vars(comm)["_group"]) for comm in (manager._front, manager._back)]
    assert all(find() is not None for find in groups)
    engine._close_all()
    # Its end is the end of its threads.
    assert all(find() is None for find in groups)
    manager.__exit__(KeyboardInterrupt, None, None)


def test_groups_that_nobody_closed_end_before_the_interpreter(tmp_path: Path) -> None:
    on_gloo_ranks(2, leave_a_manager_open, tmp_path / "run")


def give_up_on_the_other(rank: int) -> None:
    comm = engine.make_comm(engine.list_ranks(None))
    if rank == 0:
        with pytest.raises(WaitTimeout):
            comm.gather(rank, awaiting="the other rank", timeout_s=0.1)
        comm.close()
    dist.barrier()


def test_a_group_is_left_without_waiting_for_ranks_that_do_not_come() -> None:
    on_gloo_ranks(2, give_up_on_the_other)
