"""Runs `main` of a program beside this one: `python -m tests...programs.run PROGRAM FOLDER`.

Processes that a framework spawns import the program that was started, which is this: without the framework.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    package = "tests.integration.checkpoint.adapters.programs"
    importlib.import_module(f"{package}.{sys.argv[1]}").main(Path(sys.argv[2]))
