"""A result directory's way into the tree: reserved, written below `.mlps/under-way`, published in one step.

Invariant: a result directory that has its name in the tree is complete; a run that failed leaves a draft,
whose `run.json` says so.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from penstock.results.history.history_file import HistoryFile
from penstock.storage.files.durable import rename_durably, sync_folder
from penstock.storage.files.system_calls import translate_os_errors
from penstock.submission.authoring.ownership import OwnedTree, require_plain_name
from penstock.submission.tree_layout import TIME_FORMAT, Benchmark, SubmissionPhase, log_names, metadata_name

if TYPE_CHECKING:
    from penstock.workload.division_rules import SubmissionDivision

HIDDEN: Final = ".mlps"
UNDER_WAY: Final = "under-way"
TRASH: Final = "trash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All result directories of one workload on one system, in one division of one organisation's tree."""

    claim: OwnedTree
    division: SubmissionDivision
    system: str
    benchmark: Benchmark
    model: str

    def __post_init__(self) -> None:
        require_plain_name(self.system, what="system's name")
        require_plain_name(self.model, what="workload's name")

    @property
    def submitter(self) -> PurePosixPath:
        """The submitter's folder, relative to the tree's root."""
        return PurePosixPath(self.division.value, self.claim.organisation)

    @property
    def folder(self) -> PurePosixPath:
        """The workload's folder, relative to the tree's root."""
        return self.submitter / "results" / self.system / self.benchmark.value / self.model

    def folder_of(self, phase: SubmissionPhase) -> PurePosixPath:
        """The folder of a phase's result directories; checkpointing has no folders of phases."""
        return self.folder / phase.value if self.benchmark is Benchmark.TRAINING else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDirAddress:
    """The place of one result directory: of one phase, begun at one time."""

    series: Series
    phase: SubmissionPhase
    began: datetime

    @property
    def stamp(self) -> str:
        """The directory's name: when its run began, in UTC."""
        return self.began.strftime(TIME_FORMAT)

    @property
    def relative(self) -> PurePosixPath:
        """The directory, relative to the tree's root."""
        return self.series.folder_of(self.phase) / self.stamp

    @property
    def folder(self) -> Path:
        """The published directory."""
        return self.series.claim.root / self.relative

    @property
    def draft(self) -> Path:
        """The directory while it is written."""
        return self.series.claim.root / HIDDEN / UNDER_WAY / self.relative

    @property
    def metadata_file(self) -> str:
        """The name of its metadata."""
        return metadata_name(self.series.benchmark, self.stamp)

    @property
    def log_files(self) -> tuple[str, str]:
        """The names of the files for standard output and standard error."""
        return log_names(self.series.benchmark, self.phase)


def reserve_address(series: Series, phase: SubmissionPhase, *, now: datetime) -> ResultDirAddress:
    """The address of a run that begins now, with its draft created; a taken name moves to the next second."""
    address = ResultDirAddress(series=series, phase=phase, began=now.replace(microsecond=0))
    while address.folder.exists() or not _made(address.draft):
        address = replace(address, began=address.began + timedelta(seconds=1))
    return address


def _made(draft: Path) -> bool:
    """Whether this call created the folder; a run of the same second may have it."""
    with translate_os_errors("Creating the folder of a result directory", str(draft)):
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.mkdir()
        except FileExistsError:
            return False
    return True


def publish(address: ResultDirAddress) -> Path:
    """Move a draft to its place in the tree; after a power cut it has either name, with all its files."""
    folder = address.folder
    with translate_os_errors("Publishing a result directory", str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(address.draft)
        rename_durably(address.draft, folder)
        _prune(address.draft.parent, until=address.series.claim.root / HIDDEN)
    HistoryFile(address.series.claim.root).publish(address.draft, folder)
    return folder


def set_aside(claim: OwnedTree, folder: Path) -> Path:
    """Move a folder of the tree to the trash below `.mlps/`, from which a person can move it back."""
    target = claim.root / HIDDEN / TRASH / secrets.token_hex(4) / folder.relative_to(claim.root)
    with translate_os_errors("Moving a result directory to the trash", str(folder)):
        target.parent.mkdir(parents=True)
        rename_durably(folder, target)
    return target


def list_drafts(series: Series) -> list[Path]:
    """The drafts of runs that failed, or are still running."""
    below = series.claim.root / HIDDEN / UNDER_WAY / series.folder
    depth = "*/*" if series.benchmark is Benchmark.TRAINING else "*"
    return sorted(path for path in below.glob(depth) if path.is_dir())


def _prune(folder: Path, *, until: Path) -> None:
    """Remove empty folders from here up."""
    while folder != until:
        try:
            folder.rmdir()
        except OSError:  # it holds another draft
            return
        folder = folder.parent
