"""Checkpoints of Lightning's Trainer and Fabric: `Trainer(plugins=[PenstockIO()])`.

Lightning hands the whole checkpoint over on rank 0 and wants it back on every rank; this saves and loads it
as a tree. Invariant: a checkpoint is removed only after every save that was begun before has been committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.adapters.tree import load_tree, save_tree, save_tree_in
from penstock.checkpoint.commit.catalog import AnyPath, open_catalog, open_parent
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.checkpoint.saving.saver import DEFAULT_STAGING_BYTES, Saver
from penstock.errors import ObjectNotFound, Unavailable, UsageError

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
except ImportError as error:
    raise Unavailable(
        f"Lightning is not installed: no module {error.name!r}", fix="Run: pip install lightning"
    ) from error


class PenstockIO(CheckpointIO):
    """Saves each checkpoint as a folder under the path that Lightning gives it; committed when `fit` goes on.

    Files that were saved with Lightning's own plugin are loaded, too. `staging_bytes` bounds what saves take
    beside the state.
    """

    def __init__(self, *, writers: int = 2, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        self._saver = Saver(SaveOptions(writers=writers), staging_bytes=staging_bytes)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any | None = None
    ) -> None:
        """Rank 0: save, and replace what was saved at this path."""
        _refuse_options(storage_options)
        aside = _set_aside(path)
        save_tree(checkpoint, path, self._saver)
        if aside is not None:
            aside.unlink()

    def load_checkpoint(
        self,
        path: AnyPath,
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001 - as Lightning has it
    ) -> Any:
        """Any rank: the checkpoint, in fresh memory; with weights_only=False, objects of any kind."""
        if _is_file(path):
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return load_tree(path, device=_device_of(map_location), trust=weights_only is False)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Rank 0: take a checkpoint away; nothing happens where none is."""
        if _is_file(path):
            Path(path).unlink()
            return
        storage, name = open_parent(path)
        shelf = open_catalog(storage)
        try:
            shelf.remove(shelf.find(name))
        except ObjectNotFound:
            return

    def teardown(self) -> None:
        """Let go of memory."""
        self._saver.close()


class AsyncPenstockIO(PenstockIO):
    """The same, but `fit` goes on as soon as the state is copied; a failed save is raised by the next one.

    `ModelCheckpoint` removes the older checkpoint right after it has asked for the newer one; here this waits
    until the newer one is committed, and does not happen if that fails.
    """

    def __init__(self, *, writers: int = 2, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        super().__init__(writers=writers, staging_bytes=staging_bytes)
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: list[Future[None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any | None = None
    ) -> None:
        """Rank 0: copy, and write in the background."""
        _refuse_options(storage_options)
        self._raise_failure(only_done=True)
        aside = _set_aside(path)
        self._under_way.append(save_tree_in(self._own_worker(), checkpoint, path, self._saver))
        if aside is not None:
            self._once_all_is_saved(aside.unlink)

    def load_checkpoint(
        self,
        path: AnyPath,
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001 - as Lightning has it
    ) -> Any:
        """Any rank: wait for this process's saves, then load."""
        self._raise_failure()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """Rank 0: take a checkpoint away, once all saves before are committed."""
        self._once_all_is_saved(lambda: super(AsyncPenstockIO, self).remove_checkpoint(path))

    def teardown(self) -> None:
        """Wait for all saves; a failure that was not yet told is raised."""
        try:
            self._raise_failure()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                # Lightning uses its plugins again after tearing them down.
                self._worker = None
            super().teardown()

    def _once_all_is_saved(self, work: Callable[[], None]) -> None:
        """Do this after everything that is under way, unless some of that fails."""
        before = tuple(self._under_way)

        def run() -> None:
            # One thread does everything in order, so all of these are over.
            if not any(each.exception() for each in before):
                work()

        self._under_way.append(self._own_worker().submit(run))

    def _own_worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="penstock-save")
        return self._worker

    def _raise_failure(self, *, only_done: bool = False) -> None:
        """Raise the first failure of what is over, once; wait for the rest unless `only_done`."""
        over = [each for each in self._under_way if each.done() or not only_done]
        failures = [failure for each in over if (failure := each.exception()) is not None]
        self._under_way = [each for each in self._under_way if each not in over]
        if failures:
            raise failures[0]


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise UsageError(
            f"storage_options={storage_options!r} mean nothing to this plugin",
            fix="Put options into the URI: s3://bucket/run?client=minio.",
        )


def _is_file(path: AnyPath) -> bool:
    """Whether a checkpoint of one file lies here, as Lightning's own plugin leaves them."""
    return os.path.isfile(path)  # noqa: PTH113 - a URI is no file, and must not become a Path


def _set_aside(path: AnyPath) -> Path | None:
    """Make way for a folder: where a file of that name lies now, to be removed after the commit."""
    if not _is_file(path):
        return None
    old = Path(path)
    return old.rename(old.with_name(f"{old.name}.replaced"))


def _device_of(map_location: Any) -> torch.device:
    if map_location is None:
        return torch.device("cpu")
    if isinstance(map_location, str | torch.device):
        return torch.device(map_location)
    raise UsageError(
        f"map_location={map_location!r} cannot be followed: checkpoints do not keep devices",
        fix="Name one device, as in map_location='cuda:0', or leave it out.",
    )
