"""Checkpoints of Lightning's Trainer and Fabric: `Trainer(plugins=[PenstockIO()])`.

Lightning passes the whole checkpoint on rank 0 and expects it back on every rank; it is saved and loaded as a
tree. `load_from_checkpoint` does not call plugins, so importing this module makes it load Penstock's folders,
too. Invariant: a checkpoint is removed only after every save that began earlier has been committed.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import torch

from penstock.checkpoint.adapters.tree import load_tree, save_tree
from penstock.checkpoint.commit.checkpoints import AnyPath, open_catalog, open_parent
from penstock.checkpoint.manager.manager import log_failure
from penstock.checkpoint.manager.step_store import start_lasting_worker
from penstock.checkpoint.plan.save_plan import SaveOptions
from penstock.checkpoint.saver import DEFAULT_STAGING_BYTES, Saver
from penstock.errors import ObjectNotFound, PenstockError, Unavailable, UsageError
from penstock.storage.uri import is_plain_path

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch.core import saving
except ImportError as error:
    raise Unavailable(
        f"Lightning is not installed: no module {error.name!r}", fix="Run: pip install lightning"
    ) from error


class PenstockIO(CheckpointIO):
    """Saves each checkpoint as a folder at Lightning's path, and commits it before `fit` continues.

    Also loads files that Lightning's own plugin saved. `staging_bytes` limits the memory that saves need in
    addition to the state.
    """

    def __init__(self, *, writers: int = 2, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        self._saver = Saver(SaveOptions(writers=writers), staging_bytes=staging_bytes)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any | None = None
    ) -> None:
        """On rank 0: save, and replace any checkpoint that exists at this path."""
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
        """On any rank: load the checkpoint into new memory; weights_only=False allows objects of any kind."""
        if _is_file(path):
            return TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
        return load_tree(path, device=_device_of(map_location), trust=weights_only is False)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """On rank 0: remove the checkpoint if it exists."""
        if _is_file(path):
            Path(path).unlink()
            return
        storage, name = open_parent(path)
        catalog = open_catalog(storage)
        with suppress(ObjectNotFound):
            catalog.hide(catalog.find(name))()

    def teardown(self) -> None:
        self._saver.close()


class AsyncPenstockIO(PenstockIO):
    """Saves in the background: `fit` continues once the state is copied; later calls raise a save's error.

    `ModelCheckpoint` removes the older checkpoint as soon as it has requested the newer one. Here, the older
    one is kept until the newer one is committed, and is not removed if that commit fails.
    """

    def __init__(self, *, writers: int = 2, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        super().__init__(writers=writers, staging_bytes=staging_bytes)
        self._worker: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        _BACKGROUND.add(self)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: AnyPath, storage_options: Any | None = None
    ) -> None:
        """On rank 0: copy the state, then write it in the background."""
        _refuse_options(storage_options)
        self.wait(only_done=True)
        aside = _set_aside(path)
        save = save_tree(checkpoint, path, self._saver, self._own_worker())
        save.add_done_callback(partial(log_failure, f"{path} was not saved"))
        self._pending.append(save)
        if aside is not None:
            self._run_after_saves(aside.unlink)

    def load_checkpoint(
        self,
        path: AnyPath,
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001 - as Lightning has it
    ) -> Any:
        """On any rank: wait for this process's saves, then load."""
        self.wait()
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: AnyPath) -> None:
        """On rank 0: remove a checkpoint once all earlier saves are committed."""
        self._run_after_saves(lambda: super(AsyncPenstockIO, self).remove_checkpoint(path))

    def wait(self, *, only_done: bool = False) -> None:
        """Wait for all saves, and raise the first failure that no call has raised yet.

        With `only_done`, do not wait: consider only saves that have already ended.
        """
        over = [save for save in self._pending if save.done() or not only_done]
        failures = [failure for save in over if (failure := save.exception()) is not None]
        self._pending = [save for save in self._pending if save not in over]
        if failures:
            raise failures[0]

    def teardown(self) -> None:
        """Wait for all saves, as `wait` does, and free the staging memory."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
                # Lightning continues to use its plugins after tearing them down.
                self._worker = None
            super().teardown()

    def _run_after_saves(self, work: Callable[[], None]) -> None:
        """Call `work` after all pending saves and removals, unless one of those fails."""
        before = tuple(self._pending)

        def run() -> None:
            # A single thread does everything in order, so all earlier work is done by now.
            if not any(save.exception() for save in before):
                work()

        self._pending.append(self._own_worker().submit(run))

    def _own_worker(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = start_lasting_worker("penstock-save")
        return self._worker


_BACKGROUND: Final[WeakSet[AsyncPenstockIO]] = WeakSet()
"""The plugins of this process: a load cannot tell which of them may be saving what it reads."""


_load_file = saving.pl_load


def _load(path_or_file: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:  # noqa: FBT001 - as Lightning has it
    """Load folders that `PenstockIO` saved; leave files to Lightning."""
    for plugin in _BACKGROUND:
        plugin.wait()
    if isinstance(path_or_file, str | os.PathLike) and _is_checkpoint_folder(path_or_file):
        # A function would place each tensor according to the device it was saved from, which is not stored.
        device = None if callable(map_location) else map_location
        return load_tree(path_or_file, device=_device_of(device), trust=weights_only is False)
    return _load_file(path_or_file, map_location=map_location, weights_only=weights_only)


saving.pl_load = _load
"""`LightningModule.load_from_checkpoint` calls this."""


def _is_checkpoint_folder(path: AnyPath) -> bool:
    """Return whether the path is a folder, or the URI of a checkpoint that Penstock can open."""
    if is_plain_path(os.fspath(path)):
        return os.path.isdir(path)  # noqa: PTH112 - as for files
    try:
        storage, name = open_parent(path)
        open_catalog(storage).find(name)
    except PenstockError:
        return False
    return True


def _refuse_options(storage_options: Any) -> None:
    if storage_options is not None:
        raise UsageError(
            f"storage_options={storage_options!r} is not supported by this plugin",
            fix="Put options into the URI: s3://bucket/run?client=minio.",
        )


def _is_file(path: AnyPath) -> bool:
    """Return whether the path is a single file, as Lightning's own plugin writes."""
    return os.path.isfile(path)  # noqa: PTH113 - a URI must not become a Path


def _set_aside(path: AnyPath) -> Path | None:
    """Rename the file that occupies the new folder's name, if there is one.

    Returns its new path, for removal after the commit, or None.
    """
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
        f"map_location={map_location!r} is not supported: checkpoints do not store devices",
        fix="Name one device, as in map_location='cuda:0', or leave it out.",
    )
