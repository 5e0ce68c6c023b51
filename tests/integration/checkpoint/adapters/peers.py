"""Runs programs against frameworks that are installed, or says which one is not."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


class Programs:
    """The programs beside this module; see `programs/run.py`, which is started by the first of them."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def seen_by(self, program: str, folder: Path, *, needs: str) -> Any:
        """What a program says as its last line; a test without the framework is skipped."""
        if importlib.util.find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed: see tests/peers.txt and the extra `test`")
        self._server = server = self._server or _started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([program, str(folder)]) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        printed = (folder / "printed").read_text(errors="replace") if (folder / "printed").exists() else ""
        assert code == "0", f"{program} ended with {code or 'its server'}:\n{printed[-8000:]}"
        return json.loads(printed.splitlines()[-1])

    def close(self) -> None:
        """End whatever still runs."""
        if self._server is None:
            return
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


def _started() -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.checkpoint.adapters.programs.run"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # So that what frameworks start is ended with it.
        start_new_session=True,
    )
