"""How a row saves: plain files, or the engine's manager with whatever levels the row has.

Two implementations of one small protocol. Invariant: what `save` does when it returns is durable on the level
that the row saves to, unless the row saves in the background.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from penstock.checkpoint import Flush, Manager
from penstock.storage.capabilities import prefer_direct_access
from penstock.workflows.study.configurations import Level
from penstock.workflows.study.request import KEPT, Saving

if TYPE_CHECKING:
    from penstock.storage import Storage
    from penstock.workflows.study.configurations import Configuration
    from penstock.workflows.study.trainer import Trainer

CHUNK_BYTES: Final = 16 << 20
WRITERS: Final = 2
"""Files that a rank writes at a time: as many as a manager's."""

OpenLevel = Callable[[Level, str], "Storage"]
"""Opens a folder on a level, traced and as slow as it is to be."""


class Saver(Protocol):
    """Saves one rank's part of each checkpoint; all ranks call alike."""

    def save(self, number: int) -> None:
        """Save checkpoint `number`; returns when training may go on."""

    def close(self) -> None:
        """Finish what is under way."""


class FileSaver:
    """Each rank writes its files, durable, into a folder a checkpoint; nobody commits them."""

    def __init__(self, storage: Storage, root: Path, trainer: Trainer) -> None:
        self._storage = prefer_direct_access(storage)
        self._root = root
        self._trainer = trainer
        self._crew = ThreadPoolExecutor(WRITERS, thread_name_prefix="study-files")

    def save(self, number: int) -> None:
        """Write, then let go of what is too old."""
        writing = [
            self._crew.submit(self._write, f"{_own_folder(number, self._trainer.rank)}/{name}", content)
            for name, content in self._trainer.files()
        ]
        for each in writing:
            each.result()
        if number > KEPT:
            shutil.rmtree(self._root / _own_folder(number - KEPT, self._trainer.rank), ignore_errors=True)

    def close(self) -> None:
        """Let the threads go."""
        self._crew.shutdown()

    def _write(self, key: str, content: memoryview) -> None:
        with ExitStack() as undo:
            sink = self._storage.create(key, content.nbytes)
            undo.callback(sink.abort)
            for start in range(0, content.nbytes, CHUNK_BYTES):
                sink.submit(content[start : start + CHUNK_BYTES])
            sink.finish()
            undo.pop_all()


def _own_folder(number: int, rank: int) -> str:
    return f"step-{number}/rank-{rank}"


class ManagedSaver:
    """The engine, as a training loop uses it."""

    def __init__(self, manager: Manager, trainer: Trainer, saving: Saving) -> None:
        self._manager = manager
        self._trainer = trainer
        self._saving = saving

    def save(self, number: int) -> None:
        """Save the state."""
        if self._saving is Saving.BACKGROUND:
            self._manager.save_async(number, self._trainer.state)
        else:
            self._manager.save(number, self._trainer.state)

    def close(self) -> None:
        """Wait for saves and flushes."""
        self._manager.close()


def make_saver(
    row: Configuration, trainer: Trainer, open_level: OpenLevel, *, root: Path, domain: str, saving: Saving
) -> Saver:
    """The saver of a row; collective. `root` is the folder of bare files on the row's level."""
    if row.is_bare:
        return FileSaver(open_level(row.level, ""), root, trainer)
    if row.caching is None:
        return ManagedSaver(Manager(open_level(row.level, ""), keep=KEPT), trainer, saving)
    manager = Manager(
        open_level(Level.SLOW, ""),
        keep=KEPT,
        cache=open_level(Level.FAST, domain),
        redundancy=row.caching.schemes,
        # A daemon would not be in this process's trace.
        flush=Flush(by="trainer") if row.caching.is_flushed else None,
        keep_cached=KEPT,
        failure_domain=domain,
    )
    return ManagedSaver(manager, trainer, saving)
