"""The folder that a probe works in, and always removes.

Nothing outside of it is touched, and folders that the probe did not make stay.
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
    """One rank's view of the probe's folder at one location. Leaving it is collective when all went well."""

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
        """What this rank writes, noted before, so that incomplete objects are removed, too."""
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
            with suppress(ObjectNotFound):  # a step that failed early did not write all of its objects
                self.storage.delete(key)
        self.keys.clear()

    def _remove_everything(self) -> None:
        """After a failure: also remove what killed ranks left. Every surviving rank tries.

        A failure to remove is logged, but never hides the failure that led here.
        """
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        try:
            for stored in self.storage.list():
                with suppress(ObjectNotFound):
                    self.storage.delete(stored.key)
        except ObjectNotFound as error:
            logger.debug("Nothing to remove: %s", error)  # not even the bucket is there
        except StorageError as error:
            logger.warning("What the probe wrote may still be at %s: %s", self.storage.uri, error)

    def _remove_folders(self) -> None:
        for folder in self._missing_folders:
            with suppress(OSError):  # it holds files of other programs, or another rank was faster
                folder.rmdir()

    def check_free_space(self, size_bytes: int) -> None:
        """Fail before the first byte if the file system has no room for one measurement and a little more."""
        volumes.require_free_space(
            self.folder,
            size_bytes,
            what="Each measurement of this probe",
            fix="give a smaller --size",
        )


def _find_mode(storage: Storage) -> Mode:
    """The way that the storage moves bytes, judged by its capabilities."""
    paths = capabilities.find_local_paths(storage)
    if paths is not None:
        return "buffered" if paths.uses_page_cache else "direct"
    return "memory" if isinstance(capabilities.unwrap(storage), MemoryStorage) else "objects"


def _missing_folders(folder: Path | None) -> list[Path]:
    """The folders that a probe will make, innermost first; it removes these, and no others."""
    if folder is None:
        return []
    return [folder, *(parent for parent in folder.parents if volumes.nearest_folder(parent) != parent)]
