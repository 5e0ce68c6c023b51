"""The names of folders and files in a tree of v2.0 or v3.0, whose runs are named by their time.

    TOP/code-images/code-<8 digits>/                       the program (v3.0; names in `code_image`)
    TOP/<closed|open>/ORG/submission.yaml                  the contents of the folder (v3.0)
    TOP/<closed|open>/ORG/systems/SYSTEM.{yaml,pdf}
    TOP/<closed|open>/ORG/results/SYSTEM/training/MODEL/{datasize,datagen,run}/20260102_030405/
    TOP/<closed|open>/ORG/results/SYSTEM/checkpointing/MODEL/20260102_030405/

Writers and checkers share these names. Invariant: a result directory is a folder that is named by a time.

Listings leave out files that operating systems and editors leave behind, and lookups ignore case, because
names in real trees differ in case from the rules. Invariant: a folder that is a link is never searched,
because it may lead out of the tree or back into it.
"""

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable

MANIFEST: Final = "submission.yaml"
PUBLIC_IDS: Final = "public_ids.json"
SENTINEL: Final = "mlperf-results.yaml"
RESULTS_FILE: Final = "results.json"
SUMMARY: Final = "summary.json"
CONFIG_FOLDER: Final = "dlio_config"
PROVENANCE: Final = "provenance.json"
SEPARATION: Final = "fs_separation.json"
DATAGEN_MANIFEST: Final = "datagen-manifest.json"
RUN_RECORD: Final = "run.json"
METADATA_SUFFIX: Final = "_metadata.json"
REHEARSAL: Final = "rehearsal"
"""The key in metadata that marks a rehearsal, whose sizes are scaled down."""
TIME_FORMAT: Final = "%Y%m%d_%H%M%S"

_TIME: Final = re.compile(r"\d{8}_\d{6}")
_LEAVINGS: Final = frozenset({"__macosx", ".ds_store", "thumbs.db", "desktop.ini", "__pycache__"})


class Benchmark(StrEnum):
    """The benchmark of a result, by the name of its folder."""

    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    VECTOR_SEARCH = "vector_database"
    KV_CACHE = "kv_cache"


class SubmissionPhase(StrEnum):
    """The phase of training that a result directory belongs to, by the name of its folder."""

    DATASIZE = "datasize"
    DATAGEN = "datagen"
    RUN = "run"


RUNNABLE_BENCHMARKS: Final = (Benchmark.TRAINING, Benchmark.CHECKPOINTING)
"""The benchmarks that Penstock itself can run; it judges the results of all benchmarks."""


def is_result_dir_name(name: str) -> bool:
    return _TIME.fullmatch(name) is not None


def log_names(benchmark: Benchmark, phase: SubmissionPhase) -> tuple[str, str]:
    """Return the names of the files that hold a run's standard output and standard error."""
    return f"{benchmark.value}_{phase.value}.stdout.log", f"{benchmark.value}_{phase.value}.stderr.log"


def is_leaving(name: str) -> bool:
    """Check whether operating systems, editors or file managers leave files of this name behind."""
    return name.lower() in _LEAVINGS or name.startswith(("._", ".#", "~$")) or name.endswith(("~", ".swp"))


def _scan(folder: Path | None) -> list[os.DirEntry[str]]:
    """Return the entries that are neither hidden nor left behind by tools, in the order of names."""
    if folder is None:
        return []
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in found if not (entry.name.startswith(".") or is_leaving(entry.name))]


def list_folder(folder: Path | None) -> list[Path]:
    """List the entries that are neither hidden nor left behind by tools; none if there is no folder."""
    return [Path(entry.path) for entry in _scan(folder)]


def list_subfolders(folder: Path | None, *, with_links: bool = False) -> list[Path]:
    """List the folders among the entries.

    With `with_links`, symbolic links to folders are included: use it where folders are read, not searched
    recursively.
    """
    return [Path(entry.path) for entry in _scan(folder) if _is_folder(entry, follows_links=with_links)]


def list_names(folder: Path | None) -> tuple[str, ...]:
    """Return the names of the listed entries; names of folders end in a slash."""
    return tuple(f"{entry.name}/" if _is_folder(entry) else entry.name for entry in _scan(folder))


def list_links(folder: Path) -> list[Path]:
    """List all links below a folder, including hidden ones; none if the folder cannot be listed."""
    found: list[Path] = []
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                below = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # reading the files of this folder reports it
            continue
        found += [Path(entry.path) for entry in below if entry.is_symlink()]
        pending += [Path(entry.path) for entry in below if entry.is_dir(follow_symlinks=False)]
    return found


def _is_folder(entry: os.DirEntry[str], *, follows_links: bool = True) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follows_links)
    except OSError:  # a link to itself
        return False


def find_folder(folder: Path | None, name: str) -> Path | None:
    """Find the folder called `name`, ignoring case."""
    found = (entry for entry in _scan(folder) if entry.name.lower() == name.lower())
    return next((Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)), None)


def find_file(folder: Path | None, name: str) -> Path | None:
    """Find the file called `name`, ignoring case; an exact match is preferred."""
    alike = [entry for entry in _scan(folder) if entry.name.lower() == name.lower()]
    found = next((entry for entry in alike if entry.name == name), alike[0] if alike else None)
    return None if found is None else Path(found.path)
