"""Compares every file of a data set with what its recipe generates; no checksums are stored.

A missing or truncated file counts as wrong and does not end the verification; a failure of storage does.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from penstock.cluster.comm import Comm
from penstock.dataset.content import Content
from penstock.dataset.data_files import DataFiles, for_each_group
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.formats.data_file_io import WrongFile, verify_file
from penstock.dataset.formats.format_protocol import FilePlan
from penstock.dataset.generate import data_files
from penstock.errors import ObjectNotFound, ShortTransfer
from penstock.progress import Progress
from penstock.storage import Storage

MAX_REPORTED: Final = 100
"""The number of wrong files that are reported one by one; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """The result over all ranks; `wrong` has the first `MAX_REPORTED` of `num_wrong` files."""

    num_files: int
    num_wrong: int
    wrong: tuple[WrongFile, ...]
    read_bytes: int
    elapsed_s: float


def verify(
    recipe: DatasetRecipe, storage: Storage, *, comm: Comm, threads: int, progress: Progress
) -> VerificationResult:
    """Compare every file with the recipe. Collective, with the same result on every rank."""
    files = data_files(recipe)
    Content(recipe.seed, 0).prepare_verification()
    progress.begin("verifying files", -(-len(files) // comm.size))
    began_s = time.monotonic()
    read_before = storage.counters.snapshot().read_bytes

    def check(plans: Iterator[FilePlan]) -> list[WrongFile | None]:
        return [_find_fault(files, plan, recipe, storage) for plan in plans]

    wrong: list[WrongFile] = []
    num_wrong = 0
    for fault in for_each_group(files, check, rank=comm.rank, num_ranks=comm.size, threads=threads):
        progress.advance(1)
        if fault is not None:
            num_wrong += 1
            wrong = [*wrong, fault][:MAX_REPORTED]
    read_bytes = storage.counters.snapshot().read_bytes - read_before
    reports = comm.gather(wrong, awaiting="all ranks to verify their files")
    return VerificationResult(
        num_files=len(files),
        num_wrong=comm.reduce(num_wrong, "sum", awaiting="the count of wrong files"),
        wrong=tuple(sorted(chain(*reports), key=lambda wrong_file: wrong_file.name)[:MAX_REPORTED]),
        read_bytes=comm.reduce(read_bytes, "sum", awaiting="the bytes that all ranks read"),
        elapsed_s=comm.reduce(time.monotonic() - began_s, "max", awaiting="the slowest rank's time"),
    )


def _find_fault(
    files: DataFiles, plan: FilePlan, recipe: DatasetRecipe, storage: Storage
) -> WrongFile | None:
    """Compare one file with its recipe; return None if it is right."""
    try:
        return verify_file(files.kind, plan, storage, Content(recipe.seed, plan.index, recipe.reduction))
    except ObjectNotFound:
        return WrongFile(plan.name, "missing; `penstock training generate` with the same options creates it")
    except ShortTransfer as error:
        return WrongFile(plan.name, str(error))
