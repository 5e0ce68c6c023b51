"""A rank whose failure cannot be announced: `speechless.py DIRECTORY`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cluster.supervision import join_job
from penstock.environment import process_environment

if TYPE_CHECKING:
    from penstock.cluster.supervision.control_protocol import Failed


def refuse(_failure: Failed) -> None:
    raise ConnectionError("nobody listens")


with join_job(process_environment(), announce=refuse):
    child = subprocess.Popen(["sleep", "60"])
    directory = Path(sys.argv[1])
    (directory / "0.rank").write_text(str(os.getpid()))
    (directory / "0.supervisor").write_text(str(os.getppid()))
    (directory / "0.child").write_text(str(child.pid))
    raise ValueError("the tank is empty")
