"""The files of an external data set: rank 0 lists them once, in parallel, into one file for each node.

Used if Penstock has left no manifest there. Collective: all ranks of all nodes see the same files, or all
raise an error. The file with the listing is removed once every rank has mapped it.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final

from penstock.cluster.comm import Comm, all_gather_results, run_on_rank0
from penstock.dataset.data_files import evaluation_files, training_files
from penstock.dataset.file_listing import Listing, list_files
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.storage import ObjectInfo, Storage
from penstock.storage.files.system_calls import map_os_error
from penstock.workload.spec import Dataset

LONGEST_LISTING_S: Final = 24 * 3600.0
"""The longest that ranks wait while rank 0 lists: object storage with 50 million objects takes hours."""
_ADVICE: Final = (
    "Check --data (penstock-dlio: dataset.data_folder), or make the data set with "
    "`penstock training generate` (workflow.generate_data=True)"
)
_PAGE: Final = 1000
_PIECE_BYTES: Final = 16 << 20
_LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalFiles:
    """The listings; `evaluation` is None if no evaluation files are needed."""

    train: Listing
    evaluation: Listing | None
    elapsed_s: float


def list_external_files(
    dataset: Dataset, storage: Storage, *, evaluates: bool, comm: Comm, progress: Progress
) -> ExternalFiles:
    """List the files of `dataset`; raise `UsageError` if there are too few. Collective."""
    began_s = time.monotonic()
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    first_here = hosts.index(comm.host)
    folder = Path(tempfile.mkdtemp(prefix="penstock-listing-")) if comm.rank == first_here else None
    try:
        if comm.rank == 0:
            progress.begin("listing files", dataset.num_files_train + evaluates * dataset.num_files_eval)
        sizes = run_on_rank0(
            comm,
            lambda: _list_both(dataset, storage, folder, evaluates=evaluates, progress=progress),
            awaiting="rank 0 to list the data set",
            timeout_s=max(LONGEST_LISTING_S, comm.timeout_s),
        )
        if len(set(hosts)) > 1:
            _hand_on(comm, folder, sizes)
        folders = comm.gather(folder, awaiting="each node to have the listing")
        train, evaluation = all_gather_results(
            comm, lambda: _open_both(folders[first_here]), awaiting="all ranks to open the listing"
        )[comm.rank]
        if not len(train):
            run_on_rank0(comm, lambda: _require_root(storage), awaiting="rank 0 to look for the data set")
        _require_enough(len(train), dataset.num_files_train, f"{storage.uri}/train", key="num_files_train")
        if evaluation is not None:
            num_asked = dataset.num_files_eval
            _require_enough(len(evaluation), num_asked, f"{storage.uri}/valid", key="num_files_eval")
        all_gather_results(
            comm,
            lambda: _require_here(storage, train, comm.host) if comm.rank == first_here else None,
            awaiting="each node to look up the first and the last file",
        )
    finally:
        if folder is not None:
            shutil.rmtree(folder)
    return ExternalFiles(train=train, evaluation=evaluation, elapsed_s=time.monotonic() - began_s)


def _list_both(
    dataset: Dataset, storage: Storage, folder: Path | None, *, evaluates: bool, progress: Progress
) -> dict[str, int]:
    """List training and evaluation files into files of `folder`; return these files' names and sizes."""
    assert folder is not None
    asked = [("train", training_files(dataset).folders())]
    if evaluates and dataset.num_files_eval:
        asked.append(("valid", evaluation_files(dataset).folders()))
    for name, folders in asked:
        _list_one(dataset, storage, folder / name, folders=folders, progress=progress).close()
    return {name: (folder / name).stat().st_size for name, _ in asked}


def _hand_on(comm: Comm, folder: Path | None, sizes: Mapping[str, int]) -> None:
    """Copy rank 0's listings to each other node, piece by piece. Collective."""
    failures: list[StorageError] = []

    def raise_first() -> None:
        for failure in failures:
            raise failure

    for name, size_bytes in sizes.items():
        for start in range(0, size_bytes, _PIECE_BYTES):
            own = None
            if comm.rank == 0:
                assert folder is not None
                with (folder / name).open("rb") as listing:
                    listing.seek(start)
                    own = listing.read(_PIECE_BYTES)
            piece = comm.broadcast(own, awaiting="rank 0 to hand on its listing")
            if comm.rank and folder is not None and not failures:
                # The other ranks continue to send: the failure is reported once they have finished.
                try:
                    with (folder / name).open("ab") as copy:
                        copy.write(piece)
                except OSError as error:
                    failures.append(map_os_error(error, "Keeping the listing", f"file://{folder}"))
    all_gather_results(comm, raise_first, awaiting="each node to have a copy of the listing")


def _require_here(storage: Storage, files: Listing, host: str) -> None:
    """Raise `StorageError` unless this node sees the first and the last file that rank 0 has listed."""
    for number in sorted({0, len(files) - 1}):
        name = files.name(number)
        try:
            storage.stat(name)
        except ObjectNotFound as error:
            raise StorageError(
                f"{host} does not see what rank 0 has listed: {name} is not there",
                uri=storage.uri,
                fix="Mount the same storage everywhere, and write nothing to it while a run starts.",
            ) from error


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
    listing.close()  # subfolders whose names are not DLIO's
    return list_files(files(path.name), path)


def _require_root(storage: Storage) -> None:
    """Raise the storage's own error if its root does not exist, for example because it is misspelled."""
    try:
        next(iter(storage.list("")), None)
    except ObjectNotFound as error:
        raise ObjectNotFound(error.what, uri=error.uri, fix=f"{_ADVICE}.") from error


def _require_enough(num_found: int, num_asked: int, where: str, *, key: str) -> None:
    if not num_found:
        raise ObjectNotFound(
            f"There are no files of this format here; dataset.{key} is {num_asked:,}",
            uri=where,
            fix=f"{_ADVICE}.",
        )
    if num_found < num_asked:
        raise UsageError(
            f"{num_found:,} files were found, but dataset.{key} is {num_asked:,}",
            where=where,
            fix=f"{_ADVICE}; or set dataset.{key}={num_found}.",
        )


def _open_both(folder: Path | None) -> tuple[Listing, Listing | None]:
    assert folder is not None
    valid = folder / "valid"
    return Listing(folder / "train"), Listing(valid) if valid.exists() else None


def list_in_parallel(
    files: Callable[[str], Iterator[ObjectInfo]], folders: Sequence[str], *, threads: int
) -> Iterator[ObjectInfo]:
    """Yield the files of all folders, in any order, `threads` folders at a time and in bounded memory."""
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
            # Releases threads that wait for room in the queue; those that have not started never will.
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
        with suppress(Full):  # then check whether the listing was stopped in the meantime
            pages.put(page, timeout=_LOOK_S)
            page = list(islice(found, _PAGE))
