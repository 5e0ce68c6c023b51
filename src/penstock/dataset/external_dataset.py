"""The files of an external data set: listed once per node, in parallel, into one file that its ranks share.

Used where no manifest of ours exists. Collective: all ranks of all nodes see the same files, or all fail. The
listing's file is removed once every rank has mapped it.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final

from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.data_files import evaluation_files, training_files
from penstock.dataset.file_listing import Listing, list_files
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import ObjectInfo, Storage
from penstock.workload.spec import Dataset

_PAGE: Final = 1000
_LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalFiles:
    """The listings; `evaluation` is None where no evaluation files are needed."""

    train: Listing
    evaluation: Listing | None
    elapsed_s: float


def list_external_files(
    dataset: Dataset, storage: Storage, *, evaluates: bool, comm: Comm, progress: Progress
) -> ExternalFiles:
    """List the files of `dataset`; `UsageError` where there are fewer than it asks for. Collective."""
    began_s = time.monotonic()
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    first_here = hosts.index(comm.host)
    folder = Path(tempfile.mkdtemp(prefix="penstock-listing-")) if comm.rank == first_here else None
    try:
        if comm.rank == first_here:
            progress.begin("listing files", dataset.num_files_train + evaluates * dataset.num_files_eval)
        folders = all_gather_results(
            comm,
            lambda: _list_both(dataset, storage, folder, evaluates=evaluates, progress=progress),
            awaiting="one rank of each node to list the data set",
        )
        found = all_gather_results(
            comm, lambda: _open_both(folders[first_here]), awaiting="all ranks to open the listing"
        )[comm.rank]
        _require_same(comm, found, storage)
        train, evaluation = found
        _require_enough(len(train), dataset.num_files_train, f"{storage.uri}/train", key="num_files_train")
        if evaluation is not None:
            num_asked = dataset.num_files_eval
            _require_enough(len(evaluation), num_asked, f"{storage.uri}/valid", key="num_files_eval")
    finally:
        if folder is not None:
            shutil.rmtree(folder)
    return ExternalFiles(train=train, evaluation=evaluation, elapsed_s=time.monotonic() - began_s)


def _list_both(
    dataset: Dataset, storage: Storage, folder: Path | None, *, evaluates: bool, progress: Progress
) -> Path | None:
    if folder is None:
        return None
    asked = [("train", training_files(dataset).folders())]
    if evaluates and dataset.num_files_eval:
        asked.append(("valid", evaluation_files(dataset).folders()))
    for name, folders in asked:
        _list_one(dataset, storage, folder / name, folders=folders, progress=progress).close()
    return folder


def _list_one(
    dataset: Dataset, storage: Storage, path: Path, *, folders: Sequence[str], progress: Progress
) -> Listing:
    endings = dataset.format.endings

    def files(prefix: str) -> Iterator[ObjectInfo]:
        with suppress(ObjectNotFound):  # a root that does not exist has no files either
            for found in storage.list(prefix):
                if found.key.lower().endswith(endings):
                    progress.advance(1)
                    yield found

    listing = list_files(list_in_parallel(files, folders, threads=dataset.listing_threads), path)
    if len(listing) or len(folders) == 1:
        return listing
    listing.close()  # subfolders of other names than DLIO's
    return list_files(files(path.name), path)


def _require_enough(num_found: int, num_asked: int, where: str, *, key: str) -> None:
    advice = "Check --data, or make the data set with `penstock training generate`"
    if not num_found:
        raise ObjectNotFound(
            f"There are no files of this format here; dataset.{key} asks for {num_asked:,}",
            uri=where,
            fix=f"{advice}.",
        )
    if num_found < num_asked:
        raise UsageError(
            f"{num_found:,} files were found where dataset.{key} asks for {num_asked:,}",
            where=where,
            fix=f"{advice}; or set dataset.{key}={num_found}.",
        )


def _open_both(folder: Path | None) -> tuple[Listing, Listing | None]:
    assert folder is not None
    valid = folder / "valid"
    return Listing(folder / "train"), Listing(valid) if valid.exists() else None


def _require_same(comm: Comm, found: tuple[Listing, Listing | None], storage: Storage) -> None:
    mine = tuple(listing.fingerprint if listing else "" for listing in found)
    prints = comm.gather((comm.host, mine), awaiting="all ranks to compare their listings")
    others = sorted({host for host, seen in prints if seen != prints[0][1]})
    if others:
        raise StorageError(
            f"Hosts see different files: {', '.join(others)} and {prints[0][0]}",
            uri=storage.uri,
            fix="Mount the same storage everywhere, and write nothing to it while a run starts.",
        )


def list_in_parallel(
    files: Callable[[str], Iterator[ObjectInfo]], folders: Sequence[str], *, threads: int
) -> Iterator[ObjectInfo]:
    """The files of all folders, in any order, `threads` folders at a time and in bounded memory."""
    if len(folders) == 1:
        yield from files(folders[0])
        return
    pages: Queue[list[ObjectInfo]] = Queue(2 * threads)
    stopped = threading.Event()
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-list") as pool:
        waiting = [pool.submit(_put_pages, files, folder, pages, stopped) for folder in folders]
        try:
            while not (all(future.done() for future in waiting) and pages.empty()):
                with suppress(Empty):
                    yield from pages.get(timeout=_LOOK_S)
                for future in waiting:
                    if future.done():
                        future.result()
        finally:
            # Lets threads leave that wait for room in the queue; the others never start.
            stopped.set()
            for future in waiting:
                future.cancel()


def _put_pages(
    files: Callable[[str], Iterator[ObjectInfo]],
    folder: str,
    pages: Queue[list[ObjectInfo]],
    stopped: threading.Event,
) -> None:
    found = files(folder)
    page = list(islice(found, _PAGE))
    while page and not stopped.is_set():
        with suppress(Full):  # then see whether the listing was stopped meanwhile
            pages.put(page, timeout=_LOOK_S)
            page = list(islice(found, _PAGE))
