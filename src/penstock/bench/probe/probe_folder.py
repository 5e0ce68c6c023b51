"""The folder that a probe works in, and always removes.

Nothing outside it is touched, and folders that the probe did not create stay.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from penstock.bench.probe.timed_streams import Mode
from penstock.cluster.comm import Comm
from penstock.environment import Environment
from penstock.errors import ObjectNotFound, StorageError
from penstock.storage import Storage, capabilities, open_storage, volumes
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.uri import Location

logger = logging.getLogger(__name__)

FOLDER_PREFIX: Final = "penstock-probe-"


class ProbeFolder:
    """One rank's view of the probe's folder at one location.

    Leaving its block is collective unless an error is raised.
    """

    def __init__(
        self,
        location: Location,
        folder_name: str,
        *,
        comm: Comm,
        environment: Environment,
        options: Mapping[str, str],
    ) -> None:
        self._comm = comm
        self.keys: set[str] = set()
        """The keys that this rank writes, noted beforehand so that incomplete objects are removed, too."""
        self.storage: Storage = open_storage(
            f"{location.uri}/{folder_name}",
            environment,
            options={**location.options, **options},
            rank=comm.rank,
        )
        self.mode = _find_mode(self.storage)
        self.folder = capabilities.find_local_root(self.storage)
        self._missing_folders = _missing_folders(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.remove_objects()
            self._comm.barrier(awaiting="all ranks to remove what they wrote")
        else:
            self._remove_everything()
        if self._comm.rank == 0 or kind is not None:
            self._remove_folders()

    def remove_objects(self) -> None:
        """Remove what this rank wrote."""
        for key in sorted(self.keys):
            with suppress(ObjectNotFound):  # a step that failed early has not written all its objects
                self.storage.delete(key)
        self.keys.clear()

    def _remove_everything(self) -> None:
        """After a failure, also remove what killed ranks left; every surviving rank tries.

        If removing fails, this is logged, and never hides the original failure.
        """
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        try:
            for stored in self.storage.list():
                with suppress(ObjectNotFound):
                    self.storage.delete(stored.key)
        except ObjectNotFound as error:
            logger.debug("Nothing to remove: %s", error)  # not even the bucket exists
        except StorageError as error:
            logger.warning("What the probe wrote may still be at %s: %s", self.storage.uri, error)

    def _remove_folders(self) -> None:
        for folder in self._missing_folders:
            with suppress(OSError):  # has files of other programs, or another rank was faster
                folder.rmdir()

    def check_free_space(self, size_bytes: int) -> None:
        """Raise an error at once if the file system lacks room for one measurement and a little more."""
        volumes.require_free_space(
            self.folder,
            size_bytes,
            what="Each measurement of this probe",
            fix="give a smaller --size, or fewer --streams and smaller --blocks",
        )


def _find_mode(storage: Storage) -> Mode:
    """Return the mode in which the storage transfers bytes, according to its capabilities."""
    paths = capabilities.find_local_paths(storage)
    if paths is not None:
        return "buffered" if paths.uses_page_cache else "direct"
    return "memory" if isinstance(capabilities.unwrap(storage), MemoryStorage) else "objects"


def _missing_folders(folder: Path | None) -> list[Path]:
    """Return the folders that a probe will create, innermost first. It removes these, and no others."""
    if folder is None:
        return []
    return [folder, *(parent for parent in folder.parents if volumes.nearest_folder(parent) != parent)]
