"""Starting the daemon of a node: a process of its own session, whose parent is gone when this returns.

Invariant: whatever ends the trainer, by signal or by itself, does not reach the daemon; and a daemon that is
started where one lives ends at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import penstock
from penstock.errors import Unavailable

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.daemon.folder import FlushFolder

START_LIMIT_S: Final = 120.0

_PROGRAM: Final = """\
import os, sys
sys.path.append({above!r})
if os.fork():
    os._exit(0)
from penstock.checkpoint.tiers.daemon.process import main
main({cache!r})
"""
"""Forks while nothing is loaded yet, so that the daemon is nobody's child and no thread is lost."""


def start_daemon(folder: FlushFolder) -> None:
    """Start a daemon for this cache; it takes a moment until it holds the lock."""
    folder.path.mkdir(parents=True, exist_ok=True)
    above = Path(penstock.__file__).resolve().parent.parent
    program = _PROGRAM.format(above=str(above), cache=str(folder.cache))
    with folder.log.open("ab") as log:
        try:
            subprocess.run(
                [sys.executable, "-P", "-c", program],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                timeout=START_LIMIT_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(
                f"The flush daemon could not be started: {error}",
                where=str(folder.log),
                fix='Look into this log, or let the trainer flush: pc.Flush(by="trainer").',
            ) from error
