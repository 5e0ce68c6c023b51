"""Remove and restore runs: a removal renames folders into the trash, so that it can be undone.

Invariant: the rename comes first and the entry after it; a kill in between loses no folder, because the
catalog takes the disk's word for where a folder is.
"""

import secrets
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from penstock.errors import UsageError
from penstock.results.history.history_file import FolderMoved, HistoryFile
from penstock.results.history.run_catalog import CatalogedRun, subfolders
from penstock.storage.files import durable, system_calls


def move_to_trash(parent: Path, runs: Sequence[CatalogedRun], now: datetime) -> str:
    """Move the folders of `runs` into a new batch of the trash; returns the batch's name."""
    for run in runs:
        if run.outcome == "running":
            raise UsageError(
                f"Run {run.id} is still running", where=run.folder, fix="Stop it first, or wait."
            )
        if run.path is None or run.path.parent != parent:
            raise UsageError(
                f"Run {run.id} is not directly below this folder", where=str(parent), fix="Name its parent."
            )
    history = HistoryFile(parent)
    batch = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = history.trash / batch
    with system_calls.translate_os_errors("Removing runs", str(folder)):
        folder.mkdir(parents=True)
        for run in runs:
            _move(run, folder / run.folder)
            _enter(history, "removed", run, now, batch=batch)
    return batch


def restore_from_trash(parent: Path, runs: Sequence[CatalogedRun], now: datetime) -> None:
    """Move folders back from the trash; nothing moves if one of their names is taken."""
    for run in runs:
        if (parent / run.folder).exists():
            raise UsageError(
                f"The folder {run.folder} exists already",
                where=str(parent),
                fix=f"Move it away first; the removed one stays in the trash, batch {run.batch}.",
            )
    history = HistoryFile(parent)
    with system_calls.translate_os_errors("Restoring runs", str(parent)):
        for run in runs:
            _move(run, parent / run.folder)
            _enter(history, "restored", run, now, batch=run.batch)
        _drop_empty_batches(history)


def delete_from_trash(parent: Path, runs: Sequence[CatalogedRun], now: datetime) -> None:
    """Delete folders in the trash for good; a kill on the way leaves the others there."""
    history = HistoryFile(parent)
    with system_calls.translate_os_errors("Emptying the trash", str(history.trash)):
        for run in runs:
            assert run.path is not None
            shutil.rmtree(run.path)
            _enter(history, "deleted", run, now, batch=run.batch)
        _drop_empty_batches(history)


def _move(run: CatalogedRun, target: Path) -> None:
    assert run.path is not None
    durable.rename_durably(run.path, target)


def _drop_empty_batches(history: HistoryFile) -> None:
    for batch in subfolders(history.trash):
        if not any(batch.iterdir()):
            batch.rmdir()


def _enter(
    history: HistoryFile,
    event: Literal["removed", "restored", "deleted"],
    run: CatalogedRun,
    now: datetime,
    *,
    batch: str,
) -> None:
    at = now.isoformat(timespec="microseconds")
    history.append(FolderMoved(event=event, run=run.id, at=at, folder=run.folder, batch=batch))
