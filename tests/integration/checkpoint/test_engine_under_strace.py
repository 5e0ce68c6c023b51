"""An independent check of the crash sweeps: strace kills saves at real system calls, in any thread."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.known_states import restored, save_state

SAVE = """
import sys
from pathlib import Path
import torch
from tests.support.known_states import save_state
torch.set_num_threads(1)
save_state(Path(sys.argv[1]), int(sys.argv[2]), 1)
"""
CALLS = ("fsync", "pwrite64", "rename", "renameat2", "mkdir", "unlink", "rmdir", "fallocate", "ftruncate")
MOST = 40
FRESH, OVER = 2, 1


def killed_by_strace(root: Path, step: int, call: str, number: int) -> bool:
    """Whether a save was killed at the `number`-th such call of one of its threads."""
    inject = f"inject={call}:signal=KILL:when={number}"
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
    program = [sys.executable, "-c", SAVE, str(root), str(step)]
    done = subprocess.run([*command, *program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 137, -9), done.stderr
    return done.returncode != 0


def require_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"strace may not trace here: {tried.stderr.decode().strip()}")


def assert_known_after_kills(root: Path, step: int, call: str, numbers: range) -> int:
    """Kill at each of these numbers until the save gets through; how often it was killed."""
    num_killed = 0
    for number in numbers:
        place = root / f"{call}-{number}"
        save_state(place, 1, 0)
        was_killed = killed_by_strace(place, step, call, number)
        found = restored(place)
        assert found in ({(1, 0), (2, 1)} if step == FRESH else {(1, 0), (1, 1)})
        if not was_killed:
            assert found == (step, 1)
            break
        num_killed += 1
    return num_killed


def test_strace_kills_at_one_call_and_a_known_step_restores(tmp_path: Path) -> None:
    require_strace()
    assert assert_known_after_kills(tmp_path, OVER, "renameat2", range(1, 2)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step", [FRESH, OVER])
def test_strace_kills_at_every_call_and_a_known_step_restores(tmp_path: Path, step: int, call: str) -> None:
    require_strace()
    num_killed = assert_known_after_kills(tmp_path, step, call, range(1, MOST))
    assert num_killed < MOST - 1
    assert num_killed or call in ("renameat2", "rmdir")
