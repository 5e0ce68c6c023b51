"""An organization's submission tree, and how result directories get into it.

    mlperf-results.yaml            the owner of the tree: a sentinel that is written once and never changed
    .mlps/under-way/.../20260102_030405/               a draft: reserved, written, then published
    .mlps/under-way/.../20260102_030405.attempt.json   who writes it; later how it ended, if unpublished

Invariants: if two processes claim one folder at the same time, one succeeds and the other learns who owns the
folder; a result directory in its place in the tree is complete; a run that failed leaves a draft; an attempt
whose process is gone is never reported as running.
"""

import re
import secrets
import shlex
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.cluster.comm import format_cause
from penstock.errors import DataDamaged, StorageError, UsageError, name_some
from penstock.results import provenance, run_folder, run_record
from penstock.results.history import HistoryFile
from penstock.results.published_files import write_json, write_text
from penstock.results.run_record import RunOutcome
from penstock.storage.files import file_storage, local_files, system_calls
from penstock.storage.files.local_files import parse_json, read_document
from penstock.submission.tree_layout import SENTINEL, TIME_FORMAT, Benchmark, SubmissionPhase
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.strict_yaml import parse_yaml

VERSION: Final = 2
HIDDEN: Final = ".mlps"
UNDER_WAY: Final = "under-way"
TRASH: Final = "trash"
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class _Sentinel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mlperf_results_version: int
    orgname: str
    initialized_at: str
    initialized_by: str
    rehearsal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTree:
    """An organization's tree.

    `is_new` is true if `claim_tree` has just created the tree. The tree of a rehearsal holds no real results.
    """

    root: Path
    organisation: str
    claimed_at: str = ""
    is_new: bool = False
    is_rehearsal: bool = False

    def require_purpose(self, *, is_rehearsal: bool) -> None:
        """Raise `UsageError` if rehearsed and real results would be mixed."""
        what = "for real results, which a rehearsal must not be mixed with"
        fix = "Rehearse in a new or an empty folder."
        if self.is_rehearsal:
            what = "a rehearsal's, which real results must not be added to"
            fix = "Make another one: penstock submission init ORG DIR"
        if self.is_rehearsal != is_rehearsal:
            raise UsageError(f"This tree is {what}", where=str(self.root), fix=fix)


def claim_tree(
    root: Path, organisation: str, *, now: datetime, by: str, is_rehearsal: bool = False
) -> OwnedTree:
    """Make `root` the organization's tree.

    Raises `UsageError` if the folder belongs to another organization or serves another purpose.
    """
    require_plain_name(organisation, what="organization's name")
    tree, is_new = _read_owner(root), False
    if tree is None:
        with system_calls.translate_os_errors("Listing the folder", str(root)):
            names = sorted(path.name for path in root.iterdir()) if root.exists() else []
        # Drafts of a sentinel are allowed: another process may be claiming the folder, and the link decides
        # who succeeds.
        others = [name for name in names if SENTINEL not in name and not file_storage.is_unfinished(name)]
        if others:
            raise UsageError(
                f"There are other files here ({name_some(others)}), and no {SENTINEL}",
                where=str(root),
                fix="Choose a new or an empty folder.",
            )
        sentinel = _Sentinel(
            mlperf_results_version=VERSION,
            orgname=organisation,
            initialized_at=f"{now:%Y-%m-%dT%H:%M:%SZ}",
            initialized_by=by,
            rehearsal=is_rehearsal,
        )
        is_new = _write_sentinel(root, sentinel)
        tree = _read_owner(root)
        assert tree is not None
    if tree.organisation != organisation:
        raise UsageError(
            f"This submission tree already belongs to {tree.organisation!r} (initialized "
            f"{tree.claimed_at}; names are case-sensitive)",
            where=str(root),
            fix=f"Name another folder for {organisation}.",
        )
    tree.require_purpose(is_rehearsal=is_rehearsal)
    return replace(tree, is_new=is_new)


def require_owned_tree(root: Path) -> OwnedTree:
    """Return the tree at `root`.

    If the folder is not such a tree, raises `UsageError` with the command that claims it.
    """
    tree = _read_owner(root)
    if tree is None:
        raise UsageError(
            "This is not a submission tree",
            where=str(root),
            fix=f"Initialize it: penstock submission init ORG {shlex.quote(str(root))}",
        )
    return tree


def _read_owner(root: Path) -> OwnedTree | None:
    path = root / SENTINEL
    try:
        values = parse_yaml(read_document(path).decode(), source=str(path))
        sentinel = _Sentinel.model_validate(values)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataDamaged(f"This sentinel cannot be read: {error}", where=str(path)) from error
    if sentinel.mlperf_results_version != VERSION:
        raise DataDamaged(
            f"This tree has layout {sentinel.mlperf_results_version}, not {VERSION}",
            where=str(path),
            fix="Write into it with the tool that made it.",
        )
    return OwnedTree(
        root=root.absolute(),
        organisation=sentinel.orgname,
        claimed_at=sentinel.initialized_at,
        is_rehearsal=sentinel.rehearsal,
    )


def _write_sentinel(root: Path, sentinel: _Sentinel) -> bool:
    """Write the sentinel; return false if another process was faster. A hard link never replaces a file."""
    draft = f".{SENTINEL}-{secrets.token_hex(4)}"
    write_text(root, draft, yaml.safe_dump(sentinel.model_dump(exclude_defaults=True), sort_keys=False))
    with system_calls.translate_os_errors("Claiming the folder", str(root)):
        try:
            (root / SENTINEL).hardlink_to(root / draft)
        except FileExistsError:
            return False
        finally:
            (root / draft).unlink()
    return True


def require_plain_name(name: str, *, what: str) -> str:
    """Return `name` if it can name a folder in the tree (rule 2.1.1); otherwise raise `UsageError`."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{name!r} cannot be an {what}" if what[0] in "aeiou" else f"{name!r} cannot be a {what}",
            fix="Use only letters, digits, '.', '_' and '-' (rule 2.1.1).",
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeries:
    """The result directories of one workload on one system, in one division of an organization's tree."""

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
        """Return the folder of a phase's result directories. Checkpointing has no folders for phases."""
        return self.folder / phase.value if self.benchmark is Benchmark.TRAINING else self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDirAddress:
    """The place of one result directory: a phase of a series, and the time its run started, in UTC."""

    series: RunSeries
    phase: SubmissionPhase
    started_at: datetime

    @property
    def stamp(self) -> str:
        return self.started_at.strftime(TIME_FORMAT)

    @property
    def folder(self) -> Path:
        """The published directory."""
        return self.series.tree.root / self.series.folder_of(self.phase) / self.stamp

    @property
    def draft(self) -> Path:
        """The directory in which the draft is written."""
        root = self.series.tree.root
        return root / HIDDEN / UNDER_WAY / self.folder.relative_to(root)


def reserve_address(series: RunSeries, phase: SubmissionPhase, *, now: datetime) -> ResultDirAddress:
    """Reserve an address and a draft for a run that begins now, or in the first second that is not taken.

    The name is in whole seconds, but the start is exact: rounded down, it could precede the end of the
    previous run.
    """
    address = ResultDirAddress(series=series, phase=phase, started_at=now)
    while True:
        if not address.folder.exists():
            with system_calls.translate_os_errors("Creating a result directory's folder", str(address.draft)):
                address.draft.parent.mkdir(parents=True, exist_ok=True)
                try:
                    address.draft.mkdir()
                except FileExistsError:  # another run has taken this second
                    pass
                else:
                    return address
        address = replace(address, started_at=address.started_at + timedelta(seconds=1))


def publish(address: ResultDirAddress) -> Path:
    """Move a draft to its place in the tree.

    After a power cut, the directory has either the old or the new name, with all its files.
    """
    folder = address.folder
    with system_calls.translate_os_errors("Publishing a result directory", str(folder)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        local_files.sync_folder(address.draft)
        local_files.rename_durably(address.draft, folder)
        _remove_empty(address.draft.parent, until=address.series.tree.root / HIDDEN)
    HistoryFile(address.series.tree.root).publish(address.draft, folder)
    return folder


def set_aside(tree: OwnedTree, folder: Path) -> Path:
    """Move a folder of the tree to the trash below `.mlps/`, from which it can be moved back by hand."""
    target = tree.root / HIDDEN / TRASH / secrets.token_hex(4) / folder.relative_to(tree.root)
    with system_calls.translate_os_errors("Moving a result directory to the trash", str(folder)):
        target.parent.mkdir(parents=True)
        local_files.rename_durably(folder, target)
    return target


def list_drafts(series: RunSeries) -> list[Path]:
    """List the drafts of runs that failed or are still running."""
    below = series.tree.root / HIDDEN / UNDER_WAY / series.folder
    depth = "*/*" if series.benchmark is Benchmark.TRAINING else "*"
    return sorted(path for path in below.glob(depth) if path.is_dir())


def _remove_empty(folder: Path, *, until: Path) -> None:
    """Remove empty folders, from `folder` upward, but neither `until` nor anything above it."""
    while folder != until:
        try:
            folder.rmdir()
        except OSError:  # not empty, because it holds another draft
            return
        folder = folder.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A draft whose run failed, was stopped, or is still running; never part of the result."""

    folder: Path
    outcome: str
    why: str


class RecordedAttempt:
    """An attempt in progress, as a context manager.

    Its file exists while the body runs; if the body fails, the file remains, with the reason.
    """

    def __init__(self, address: ResultDirAddress) -> None:
        self._file = _attempt_file(address.draft)
        self._hidden = address.series.tree.root / HIDDEN
        self._process = asdict(provenance.identify_this_process())

    def __enter__(self) -> Self:
        self._write(RunOutcome.RUNNING, "")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            why = str(error) or "Stopped by its user, or because another rank failed."
            self._write(RunOutcome.INTERRUPTED, why)
        elif error is not None:
            self._write(RunOutcome.FAILED, format_cause(error))
        else:
            self._file.unlink()
            _remove_empty(self._file.parent, until=self._hidden)

    def _write(self, outcome: RunOutcome, why: str) -> None:
        document = {"outcome": outcome.value, "why": why, "process": self._process}
        write_json(self._file.parent, self._file.name, document)


def read_attempt(draft: Path) -> Attempt:
    """Read how an attempt ended, as far as this host can tell."""
    file = _attempt_file(draft)
    try:
        document = parse_json(read_document(file))
        outcome, why = RunOutcome(document["outcome"]), str(document["why"])
        process = provenance.ProcessMark(**document["process"])
    except FileNotFoundError:
        return _read_run(draft)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Attempt(folder=draft, outcome="unreadable", why=f"{file.name}: {error}")
    if outcome is RunOutcome.RUNNING:
        is_alive = provenance.is_alive(process)
        if is_alive is None:  # from another host, only the heartbeats of a run can be seen
            return _read_run(draft)
        why = f"By process {process.pid}."
        if not is_alive:
            outcome, why = (
                RunOutcome.INTERRUPTED,
                f"Process {process.pid} was killed, or its machine stopped.",
            )
    return Attempt(folder=draft, outcome=outcome.value, why=why)


def _read_run(draft: Path) -> Attempt:
    """Read how an attempt ended from the record of its run alone."""
    if not (draft / run_folder.RUN_FILE).exists():
        return Attempt(folder=draft, outcome=RunOutcome.INTERRUPTED.value, why="It left no run.json.")
    try:
        record = run_record.read_record(draft)
    except StorageError as error:
        return Attempt(folder=draft, outcome="unreadable", why=str(error))
    return Attempt(folder=draft, outcome=record.outcome.value, why=record.why)


def _attempt_file(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}.attempt.json")
