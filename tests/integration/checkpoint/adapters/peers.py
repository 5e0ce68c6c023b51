"""Runs a program against a framework that is installed, or says which one is not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = "tests.integration.checkpoint.adapters.programs"
ROOT = Path(__file__).parents[4]


def seen_by(program: str, root: Path, *, needs: str) -> Any:
    """What a program prints about itself as its last line; a test without the peer is skipped."""
    if importlib.util.find_spec(needs.partition(".")[0]) is None:
        pytest.skip(f"{needs} is not installed: see tests/peers.txt and the extra `test`")
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-m", f"{PROGRAMS}.run", program, str(root)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{program}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return json.loads(done.stdout.splitlines()[-1])
