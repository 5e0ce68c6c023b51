"""Pages are run as a reader would type them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest


@pytest.fixture
def typed() -> Callable[..., str]:
    """Run lines of shell, or a whole program, in a folder; what they printed, where all of them worked."""

    def run(
        text: str, here: Path, *, language: str = "sh", environment: Mapping[str, str] | None = None
    ) -> str:
        program = ["bash", "-euc", text] if language == "sh" else [sys.executable, "-c", text]
        result = subprocess.run(
            program,
            check=False,
            cwd=here,
            env={
                **os.environ,
                **(environment or {}),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout

    return run
