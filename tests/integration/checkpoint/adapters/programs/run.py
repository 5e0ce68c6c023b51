"""Runs programs that stand beside this one, each in a fork of a process that has imported what all need.

Each line of stdin is a JSON list of a program's name and a folder: its `main(folder)` prints into the file
`printed` there, and a line of stdout tells how it ended. Processes that a framework spawns import this file,
and so nothing slow.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def run(name: str, folder: Path) -> None:
    """Become the program, with everything that it prints in one file."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (printed, 1), (printed, 2)):
        os.dup2(descriptor, place)
    importlib.import_module(f"tests.integration.checkpoint.adapters.programs.{name}").main(folder)


def serve() -> None:
    """Until stdin ends."""
    for module in ("penstock.checkpoint.api", "penstock.checkpoint.torch_dcp"):
        importlib.import_module(module)
    for line in sys.stdin:
        name, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            run(name, Path(folder))
            return
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    serve()
