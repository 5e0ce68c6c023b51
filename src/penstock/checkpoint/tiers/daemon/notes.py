"""Notes of living processes in a cache: which trainers are there, and which are just saving.

A note names its process, so that one left by the dead counts for nothing. Invariant: nobody waits for a
process that is gone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.commit.lease import is_dead, lease_text
from penstock.storage.process_id import ProcessId, current_process

if TYPE_CHECKING:
    from collections.abc import Callable


class Notes:
    """The notes of one kind, in a folder of their own."""

    def __init__(self, folder: Path, kind: str, *, owner: Callable[[], ProcessId] = current_process) -> None:
        self._folder = folder / kind
        self._owner = owner

    @contextmanager
    def left(self) -> Iterator[None]:
        """A note of this process, for as long as the block runs."""
        path = self.put()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def put(self) -> Path:
        """Leave a note of this process."""
        owner = self._owner()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{owner.host}-{owner.pid}-{secrets.token_hex(4)}"
        unfinished = path.with_name(f".{path.name}")
        unfinished.write_bytes(lease_text(owner))
        unfinished.replace(path)
        return path

    def any_living(self) -> bool:
        """Whether one of them lives; notes of the dead may go on the way."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - asked before every block
        except FileNotFoundError:
            return False
        return any(self._lives(self._folder / name) for name in names if not name.startswith("."))

    def _lives(self, path: Path) -> bool:
        try:
            age_s = time.time() - path.stat().st_mtime
            if not is_dead(path.read_bytes(), age_s=age_s, observer=self._owner()):
                return True
            path.unlink()
        except FileNotFoundError:
            return False
        return False
