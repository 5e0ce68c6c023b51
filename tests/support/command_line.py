"""Command lines of `penstock` run inside the test process: what they print, and their exit code.

An interpreter and its imports take most of a short command's time, so only tests of
processes (signals, ranks, start-up, other directories) start one.
"""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from penstock.cli import main


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command line printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The JSON document that it printed; fails if the command failed."""
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout)


def run_command(*words: object, **environment: str) -> CommandResult:
    """Run a command line with these additional environment variables."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    # Rich and click ask the environment how wide the terminal is.
    with (
        patch.dict(os.environ, {"COLUMNS": "100", **environment}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main([str(word) for word in words])
    return CommandResult(code, _text_of(out), _text_of(err))


def _text_of(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
