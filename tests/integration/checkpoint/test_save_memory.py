"""The memory of a background save: its staging memory and little else, whatever the state's size."""

import re
from pathlib import Path

import pytest
import torch
from tests.support.child_processes import run_children

from penstock.checkpoint.manager.manager import Manager

MIB = 1 << 20


def _memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def peak_of_save(folder: Path, state_bytes: int, staging_bytes: int) -> int:
    """What saving in the background adds to the peak of this process's memory."""
    state = {f"w{number}": torch.ones(state_bytes // 16 // 4) for number in range(16)}
    with Manager(folder, staging_bytes=staging_bytes) as manager:
        # A first save of little brings in what is only imported when it is needed.
        manager.save(1, {"little": torch.ones(5)})
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _memory_bytes("VmRSS")
        manager.save_async(2, state).result()
    return _memory_bytes("VmHWM") - before


def test_a_background_save_takes_its_staging_memory_and_no_copy_of_the_state(tmp_path: Path) -> None:
    (extra,) = run_children([(peak_of_save, (tmp_path, 256 * MIB, 32 * MIB))], 240)
    assert extra < 80 * MIB


@pytest.mark.slow
def test_a_background_save_of_4_gib_stays_under_700_mib(tmp_path: Path) -> None:
    (extra,) = run_children([(peak_of_save, (tmp_path, 4096 * MIB, 512 * MIB))], 600)
    assert extra < 700 * MIB
