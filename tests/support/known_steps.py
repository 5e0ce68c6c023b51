"""Checkpoints whose every byte follows from name and generation: what a crash sweep saves and looks for.

Place in the flow: above the commit, below the sweeps. Invariant: `assert_known` accepts a root only if each
of its checkpoints is whole and of one generation.
"""

import hashlib
from pathlib import Path
from typing import Final

from penstock.checkpoint.commit.checkpoints import CheckpointRef, begin_save, open_catalog, open_parent
from penstock.checkpoint.commit.protocol import MANIFEST_NAME, METADATA_NAME, Committed, Seal
from penstock.cluster.comm import Comm, SoloComm, all_gather_results
from penstock.storage import Storage
from penstock.storage.files.file_storage import FileOptions, FileStorage
from penstock.storage.files.system_calls import FileCalls
from penstock.storage.protocol import read_object, write_object
from penstock.storage.uri import Location

NUM_FILES: Final = 2
"""Of each rank."""
_GENERATIONS: Final = range(4)


def known_bytes(name: str, generation: int, file_name: str) -> bytes:
    """The content of a file: a few thousand bytes that no other file shares."""
    seed = hashlib.sha256(f"{name}/{generation}/{file_name}".encode()).digest()
    return seed * (100 + seed[0])


def find_checkpoint(path: Path) -> CheckpointRef:
    """The committed checkpoint at this path; `ObjectNotFound` if there is none."""
    storage, name = open_parent(path)
    return CheckpointRef(storage, open_catalog(storage).find(name))


def save_known(storage: Storage, name: str, generation: int, comm: Comm) -> Committed:
    """Save the checkpoint `name` of this generation; collective."""
    place = begin_save(storage, name, comm)
    names = [f"__{comm.rank}_{number}.distcp" for number in range(NUM_FILES)]

    def write() -> dict[str, int]:
        for file_name in names:
            write_object(
                place.data_storage, place.draft.key(file_name), [known_bytes(name, generation, file_name)]
            )
        return {file_name: len(known_bytes(name, generation, file_name)) for file_name in names}

    shares = all_gather_results(comm, write, awaiting="all ranks to write their files")
    sizes = {file_name: size for share in shares for file_name, size in share.items()}
    seal = Seal(
        manifest=known_bytes(name, generation, MANIFEST_NAME),
        metadata=known_bytes(name, generation, METADATA_NAME),
        sizes=sizes,
    )
    return place.commit(lambda: seal)


def save_known_alone(calls: FileCalls, *, root: Path, name: str, generation: int) -> None:
    """The same in a process of its own, as a program of a crash sweep."""
    save_known(files_below(root, calls), name, generation, SoloComm())


def files_below(root: Path, calls: FileCalls) -> FileStorage:
    """Files below `root` through these system calls."""
    return FileStorage(Location("file", str(root)), FileOptions(), calls=calls)


def assert_known(storage: Storage, num_ranks: int = 1) -> dict[str, int]:
    """The generation of each committed checkpoint; AssertionError where one is not whole, or mixed."""
    shelf = open_catalog(storage)
    return {name: _generation_of(storage, shelf.find(name), num_ranks) for name in shelf.names()}


def _generation_of(storage: Storage, committed: Committed, num_ranks: int) -> int:
    prefix = f"{committed.folder}/"
    names = {info.key.removeprefix(prefix) for info in storage.list(committed.folder)}
    expected = {f"__{rank}_{number}.distcp" for rank in range(num_ranks) for number in range(NUM_FILES)}
    expected |= {MANIFEST_NAME, METADATA_NAME}
    assert names == expected, f"{committed.name} holds {sorted(names)}, which is not all or too much"
    stored = {name: bytes(read_object(storage, committed.key(name))) for name in names}
    for generation in _GENERATIONS:
        if all(known_bytes(committed.name, generation, name) == stored[name] for name in names):
            return generation
    raise AssertionError(f"{committed.name} is of no generation, or of several: {sorted(names)}")
