"""A result directory's way into the tree: reserved, written below `.mlps/under-way`, published in one step.

Invariant: a result directory that has its name in the tree is complete; a run that failed leaves a draft,
whose `run.json` says so.
"""

import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Final

from penstock.results.history import HistoryFile
from penstock.storage.files import durable, system_calls
from penstock.submission.authoring.tree_owner import OwnedTree, require_plain_name
from penstock.submission.tree_layout import TIME_FORMAT, Benchmark, SubmissionPhase, log_names, metadata_name
from penstock.workload.mlperf_divisions import SubmissionDivision

HIDDEN: Final = ".mlps"
UNDER_WAY: Final = "under-way"
TRASH: Final = "trash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The result directories of one workload on one system, in one division of an organisation's tree."""

    tree: OwnedTree
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
        return PurePosixPath(self.division.value, self.tree.organisation)

    @property
    def folder(self) -> PurePosixPath:
        """The workload's folder, relative to the tree's root."""
        return self.submitter / "results" / self.system / self.benchmark.value / self.model

    def folder_of(self, phase: SubmissionPhase) -> PurePosixPath:
        """The folder of a phase's result directories; checkpointing has no folders of phases."""
        return self.folder / phase.value if self.benchmark is Benchmark.TRAINING else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDirAddress:
    """Where one result directory goes: a phase of a series, and the time its run started."""

    series: Series
    phase: SubmissionPhase
    started_at: datetime

    @property
    def stamp(self) -> str:
        """The directory's name: when its run began, in UTC."""
        return self.started_at.strftime(TIME_FORMAT)

    @property
    def relative(self) -> PurePosixPath:
        """The directory, relative to the tree's root."""
        return self.series.folder_of(self.phase) / self.stamp

    @property
    def folder(self) -> Path:
        """The published directory."""
        return self.series.tree.root / self.relative

    @property
    def draft(self) -> Path:
        """The directory while it is written."""
        return self.series.tree.root / HIDDEN / UNDER_WAY / self.relative

    @property
    def metadata_file(self) -> str:
        """The name of its metadata."""
        return metadata_name(self.series.benchmark, self.stamp)

    @property
    def log_files(self) -> tuple[str, str]:
        """The names of the files for standard output and standard error."""
        return log_names(self.series.benchmark, self.phase)


def reserve_address(series: Series, phase: SubmissionPhase, *, now: datetime) -> ResultDirAddress:
    """The address of a run that begins now, with its draft created; a taken name moves to the next second.

    Only the name is in whole seconds: a start that is rounded down would precede the end of the run before.
    """
    address = ResultDirAddress(series=series, phase=phase, started_at=now)
    while address.folder.exists() or not _create_draft(address.draft):
        address = replace(address, started_at=address.started_at + timedelta(seconds=1))
    return address


def _create_draft(draft: Path) -> bool:
    """Whether this call created the folder; a run of the same second may have been first."""
    with system_calls.translate_os_errors("Creating the folder of a result directory", str(draft)):
        draft.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.mkdir()
        except FileExistsError:
            return False
    return True


def publish(address: ResultDirAddress) -> Path:
    """Move a draft to its place in the tree; after a power cut it has either name, with all its files."""
    folder = address.folder
    with system_calls.translate_os_errors("Publishing a result directory", str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        durable.sync_folder(address.draft)
        durable.rename_durably(address.draft, folder)
        remove_empty_parents(address.draft.parent, until=address.series.tree.root / HIDDEN)
    HistoryFile(address.series.tree.root).publish(address.draft, folder)
    return folder


def set_aside(tree: OwnedTree, folder: Path) -> Path:
    """Move a folder of the tree to the trash below `.mlps/`, from which a person can move it back."""
    target = tree.root / HIDDEN / TRASH / secrets.token_hex(4) / folder.relative_to(tree.root)
    with system_calls.translate_os_errors("Moving a result directory to the trash", str(folder)):
        target.parent.mkdir(parents=True)
        durable.rename_durably(folder, target)
    return target


def list_drafts(series: Series) -> list[Path]:
    """The drafts of runs that failed, or are still running."""
    below = series.tree.root / HIDDEN / UNDER_WAY / series.folder
    depth = "*/*" if series.benchmark is Benchmark.TRAINING else "*"
    return sorted(path for path in below.glob(depth) if path.is_dir())


def remove_empty_parents(folder: Path, *, until: Path) -> None:
    """Remove empty folders from here up."""
    while folder != until:
        try:
            folder.rmdir()
        except OSError:  # not empty: it holds another draft
            return
        folder = folder.parent
