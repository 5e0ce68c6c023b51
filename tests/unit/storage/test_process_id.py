"""Whether a process has ended, as far as another one can know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.storage import process_id
from penstock.storage.process_id import current_process

if TYPE_CHECKING:
    import pytest

SAY_WHO = "from penstock.storage.process_id import current_process; print(current_process()); input()"


def test_a_process_is_there_until_it_has_ended_and_its_zombie_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAY_WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        theirs = eval(child.stdout.readline(), {"ProcessId": process_id.ProcessId})
        assert theirs.pid == child.pid
        assert theirs.has_ended(observer=current_process()) is False
        child.kill()
        child.stdout.read()
        while theirs.has_ended(observer=current_process()) is False:
            pass
        assert theirs.has_ended(observer=current_process()) is True
        child.wait()
        assert theirs.has_ended(observer=current_process()) is True


def test_without_boot_ids_it_is_unknown_whether_a_process_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_id, "_BOOT_ID", tmp_path / "absent")
    me = current_process()
    assert me.kernel == ""
    assert me.has_ended(observer=me) is None
