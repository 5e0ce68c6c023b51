"""Generates a data set, or resumes an interrupted generation.

A file appears under its name only when it is complete, so existing files are kept. The recipe alone
determines the bytes of each file, whichever rank writes it and when.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Final

from penstock.cluster.comm import Comm
from penstock.dataset.content import Content
from penstock.dataset.data_files import (
    DataFiles,
    evaluation_files,
    for_each_group,
    training_files,
)
from penstock.dataset.dataset_manifest import DatasetRecipe, is_claimed, write_manifest
from penstock.dataset.formats import open_format
from penstock.dataset.formats.data_file_io import buffer_pool, write_file, write_together
from penstock.dataset.formats.format_protocol import FilePlan
from penstock.errors import AlreadyThere, ObjectNotFound
from penstock.progress import Progress
from penstock.storage import Storage, capabilities, volumes
from penstock.storage.files import file_storage
from penstock.storage.protocol import SupportsWritesAtOnce
from penstock.workload.spec import Dataset

_GROUP_FILES: Final = 64
_GROUP_BYTES: Final = 16 << 20
"""The number of bytes that each thread writes before the first file of a group is synced."""
_TASKS_A_THREAD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The result over all ranks. `written_bytes` are new; `kept_files` existed from an earlier attempt."""

    num_files: int
    written_files: int
    kept_files: int
    written_bytes: int
    elapsed_s: float

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate of the whole generation, end to end."""
        return self.written_bytes / self.elapsed_s if self.elapsed_s else 0.0


def data_files(recipe: DatasetRecipe) -> DataFiles:
    """Return all files of a recipe, whose names are a formula."""
    return DataFiles(
        kind=open_format(recipe.dataset, recipe.seed),
        train=training_files(recipe.dataset),
        evaluation=evaluation_files(recipe.dataset),
    )


def expected_bytes(dataset: Dataset) -> int:
    """Return the approximate size of a data set: its samples at their mean size, without what formats add."""
    num_files = dataset.num_files_train + dataset.num_files_eval
    return ceil(num_files * dataset.num_samples_per_file * dataset.record_length_bytes)


def missing_bytes(recipe: DatasetRecipe, storage: Storage) -> int:
    """Return how many bytes remain to be written; raise `UsageError` if another data set is there."""
    size_bytes = expected_bytes(recipe.dataset)
    if not is_claimed(storage, recipe):
        return size_bytes
    return max(0, size_bytes - sum(stored.size_bytes for stored in storage.list()))


def generate(
    recipe: DatasetRecipe, storage: Storage, *, comm: Comm, threads: int, progress: Progress
) -> GenerationResult:
    """Write all files that do not exist yet. Collective. Can be interrupted and called again."""
    files = data_files(recipe)
    size_bytes = expected_bytes(recipe.dataset)
    is_resumed = comm.broadcast(
        _prepare(recipe, storage, size_bytes) if comm.rank == 0 else None,
        awaiting="rank 0 to claim the location",
    )
    # If a power failure removes a name, the next attempt writes the file again, so one sync per folder
    # suffices.
    tree = capabilities.find_folder_tree(storage)
    target = storage if tree is None else capabilities.defer_sync(storage, "names")
    pool = buffer_pool()
    # Small files become durable together, in groups; each thread gets several groups.
    are_small = size_bytes // max(1, len(files)) <= _GROUP_BYTES // _GROUP_FILES
    together = target if are_small and isinstance(target, SupportsWritesAtOnce) else None
    group_files = max(1, min(_GROUP_FILES, len(files) // (comm.size * threads * _TASKS_A_THREAD)))

    def write_group(plans: Iterator[FilePlan]) -> list[tuple[FilePlan, int | None]]:
        """Write these files; return each plan with the bytes written, or None for a file that existed."""
        outcomes: list[tuple[FilePlan, int | None]] = []

        def missing() -> Iterator[tuple[FilePlan, Content]]:
            for plan in plans:
                if is_resumed and _is_whole(plan, storage):
                    outcomes.append((plan, None))
                else:
                    yield plan, Content(recipe.seed, plan.index, recipe.reduction)

        if together is not None:
            outcomes += write_together(files.kind, missing(), together, pool)
            return outcomes
        for plan, content in missing():
            stored = write_file(files.kind, plan, target, content, pool)
            outcomes.append((plan, sum(part.size_bytes for part in stored)))
        return outcomes

    # On a machine's first use, this compiles; every thread of the pool would wait for it.
    progress.begin("loading the content generator", 1)
    Content(recipe.seed, 0)
    progress.advance(1)
    progress.begin("generating", size_bytes / comm.size)
    began_s = time.monotonic()
    written_files = written_bytes = 0
    for plan, new_bytes in for_each_group(
        files,
        write_group,
        rank=comm.rank,
        num_ranks=comm.size,
        threads=threads,
        in_a_row=None if together is None else group_files,
    ):
        written_files += new_bytes is not None
        written_bytes += new_bytes or 0
        progress.advance(plan.num_samples * plan.sample_bytes)
    # Each rank makes durable the names that it has written, and those of their folders.
    folders = *training_files(recipe.dataset).folders(), *evaluation_files(recipe.dataset).folders()
    for folder in sorted({"", "train", "valid", *folders}):
        with suppress(ObjectNotFound):
            capabilities.sync_names(storage, folder)
    total_files = comm.reduce(written_files, "sum", awaiting="all ranks to write their files")
    total_bytes = comm.reduce(written_bytes, "sum", awaiting="the bytes of all ranks")
    elapsed_s = comm.reduce(time.monotonic() - began_s, "max", awaiting="the slowest rank's time")
    # Every rank took part in the reductions above, so all files are written.
    if comm.rank == 0:
        for folder in ("train", "valid"):
            # DLIO lists both folders, even if one has no file.
            with suppress(AlreadyThere):
                if tree is not None:
                    tree.make(folder)
        write_manifest(storage, recipe, complete=True)
    return GenerationResult(
        num_files=len(files),
        written_files=total_files,
        kept_files=len(files) - total_files,
        written_bytes=total_bytes,
        elapsed_s=elapsed_s,
    )


def _prepare(recipe: DatasetRecipe, storage: Storage, size_bytes: int) -> bool:
    # A resumed data set already occupies part of its space; how much is not known yet.
    if is_claimed(storage, recipe):
        # A killed process leaves up to one group of unfinished files per thread.
        file_storage.reclaim_unfinished(storage)
        return True
    # Before the claim: a data set that is refused must not keep another one out of this folder.
    volumes.require_free_space(
        capabilities.find_local_root(storage),
        size_bytes,
        what="This data set",
        fix="ask for fewer files or smaller samples",
    )
    write_manifest(storage, recipe, complete=False)
    return False


def _is_whole(plan: FilePlan, storage: Storage) -> bool:
    try:
        return all(
            part.size_bytes in (None, storage.stat(part.key(plan.name)).size_bytes) for part in plan.parts
        )
    except ObjectNotFound:
        return False
