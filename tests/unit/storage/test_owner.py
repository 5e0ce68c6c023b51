"""Telling a living process from a dead one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.storage import owner
from penstock.storage.owner import this_process

if TYPE_CHECKING:
    import pytest

SAY_WHO = "from penstock.storage.owner import this_process; print(this_process()); input()"


def test_a_process_is_there_until_it_has_ended_and_its_zombie_is_gone() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAY_WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        theirs = eval(child.stdout.readline(), {"Owner": owner.Owner})
        assert theirs.pid == child.pid
        assert theirs.is_gone(asked_by=this_process()) is False
        child.kill()
        child.stdout.read()
        while theirs.is_gone(asked_by=this_process()) is False:
            pass
        assert theirs.is_gone(asked_by=this_process()) is True
        child.wait()
        assert theirs.is_gone(asked_by=this_process()) is True


def test_where_kernels_cannot_be_told_apart_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_BOOT_ID", tmp_path / "absent")
    me = this_process()
    assert me.kernel == ""
    assert me.is_gone(asked_by=me) is None
