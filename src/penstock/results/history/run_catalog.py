"""All runs of a results folder: the entries of its history joined with the folders on disk.

`penstock results ls`, `rm`, `restore` and `rerun` use it. Invariants: the disk decides where a folder is, the
history what happened to it; a folder without an entry and an entry without a folder are both listed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from penstock.errors import PenstockError, UsageError, name_some
from penstock.results import provenance, run_comparison, run_folder
from penstock.results.history.history_file import FolderMoved, HistoryEntry, HistoryFile, RunBegan, RunEnded
from penstock.storage.files.system_calls import translate_os_errors


class FolderPlace(StrEnum):
    """Where a run's folder is."""

    HERE = "here"
    TRASH = "trash"
    DELETED = "deleted"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogedRun:
    """One run. `id` is that of its entry, else its folder's name; `path` is None if the folder is gone.

    `outcome` is its record's, or `unreadable`, or `unknown`; `began` is None without an entry.
    """

    id: str
    folder: str
    path: Path | None
    where: FolderPlace
    batch: str
    outcome: str
    why: str
    workload: str
    started: datetime | None
    began: RunBegan | None
    summary: run_comparison.RunSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCatalog:
    """All runs, newest first, and a sentence for each line of the history that cannot be read."""

    runs: tuple[CatalogedRun, ...]
    complaints: tuple[str, ...]
    has_history: bool

    def at(self, where: FolderPlace) -> tuple[CatalogedRun, ...]:
        """The runs whose folders are in this place."""
        return tuple(run for run in self.runs if run.where is where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """The entries by run: the latest of each kind."""

    began: Mapping[str, RunBegan]
    ended: Mapping[str, RunEnded]
    moved: Mapping[str, FolderMoved]
    folders: Mapping[str, str]
    owners: Mapping[str, str]
    """The run that a folder's name belongs to: the last one that began in it."""


def read_catalog(parent: Path) -> RunCatalog:
    """Read the catalog of the runs directly below `parent`."""
    history_file = HistoryFile(parent)
    lines = history_file.read()
    history = _index_entries(lines.entries)
    found = [*_list_present(parent, history), *_list_trashed(history_file, history)]
    seen = {run.id for run in found}
    found.extend(_catalog_entry(began, history) for began in history.began.values() if began.run not in seen)
    return RunCatalog(
        runs=tuple(sorted(found, key=_sort_key, reverse=True)),
        complaints=lines.complaints,
        has_history=history_file.exists(),
    )


def find_run_folder(text: str, parent: Path) -> Path:
    """Find the folder of the run that a user names: by folder, id, or a unique part of its name.

    A run in the trash is found by its name or id.
    """
    if any(run_folder.is_run(folder) for folder in (Path(text), parent / text)):
        return run_folder.resolve_run(text, parent)
    history_file = HistoryFile(parent)
    entered = _index_entries(history_file.read().entries).folders.get(text)
    named = {entered} if entered else set()
    removed = [
        folder
        for batch in subfolders(history_file.trash)
        for folder in subfolders(batch)
        if folder.name in {text, *named}
    ]
    places = [*(parent / name for name in named), *removed]
    found = next((folder for folder in places if run_folder.is_run(folder)), None)
    return found or run_folder.resolve_run(text, parent)


def find_run(text: str, runs: tuple[CatalogedRun, ...], *, where: str) -> CatalogedRun:
    """Find the run that a user names among `runs`, in the same way."""
    exact = [run for run in runs if text in (run.id, run.folder) or Path(text) == run.path]
    found = exact or [run for run in runs if text and text in run.folder]
    if len(found) == 1:
        return found[0]
    if found:
        names = name_some([run.folder for run in found])
        raise UsageError(
            f"{text!r} names {len(found)} runs: {names}", fix="Give more of the name, or the id."
        )
    raise UsageError(
        f"No run is called {text!r}", where=where, fix="`penstock results ls FOLDER` lists them."
    )


def _index_entries(entries: tuple[HistoryEntry, ...]) -> _History:
    began: dict[str, RunBegan] = {}
    ended: dict[str, RunEnded] = {}
    moved: dict[str, FolderMoved] = {}
    published: dict[str, str] = {}
    for entry in entries:
        match entry:
            case RunBegan():
                began[entry.run] = entry
            case RunEnded():
                ended[entry.run] = entry
            case FolderMoved(event="published"):
                published[entry.run] = entry.folder
            case FolderMoved():
                moved[entry.run] = entry
    folders = {entry.run: entry.folder for entry in began.values()} | published
    owners = {folder: run for run, folder in folders.items()}
    return _History(began=began, ended=ended, moved=moved, folders=folders, owners=owners)


def _list_present(parent: Path, history: _History) -> Iterator[CatalogedRun]:
    folders = {folder.name: folder for folder in run_folder.run_folders(parent)}
    for name in history.owners:
        if name not in folders and (parent / name).is_dir():
            folders[name] = parent / name
    for name, folder in folders.items():
        yield _catalog_folder(folder, name, history.owners.get(name, name), history)


def _list_trashed(history_file: HistoryFile, history: _History) -> Iterator[CatalogedRun]:
    removed = {(move.batch, move.folder): move.run for move in history.moved.values()}
    for batch in subfolders(history_file.trash):
        for folder in subfolders(batch):
            run = removed.get((batch.name, folder.name), history.owners.get(folder.name, folder.name))
            yield _catalog_folder(folder, folder.name, run, history, batch=batch.name)


def subfolders(folder: Path) -> list[Path]:
    """The folders directly below, by name; none if there is no such folder."""
    if not folder.is_dir():
        return []
    with translate_os_errors("Listing the runs", str(folder)):
        return sorted(entry for entry in folder.iterdir() if entry.is_dir())


def _catalog_folder(
    folder: Path, name: str, run_id: str, history: _History, *, batch: str = ""
) -> CatalogedRun:
    began = history.began.get(run_id)
    summary, outcome, why = _read_outcome(folder, began, history)
    return CatalogedRun(
        id=run_id,
        folder=name,
        path=folder,
        where=FolderPlace.TRASH if batch else FolderPlace.HERE,
        batch=batch,
        outcome=outcome,
        why=why,
        workload=summary.workload if summary else began.workload if began else "",
        started=_parse_date(summary.started if summary else began.at if began else None),
        began=began,
        summary=summary,
    )


def _read_outcome(
    folder: Path, began: RunBegan | None, history: _History
) -> tuple[run_comparison.RunSummary | None, str, str]:
    if began is not None and not run_folder.is_run(folder):
        return (None, *_infer_outcome(began, history, f"There is no {run_folder.RUN_FILE} in its folder."))
    try:
        summary = run_comparison.summarize_run(folder)
    except PenstockError as error:
        return None, "unreadable", str(error)
    return summary, summary.outcome, summary.why


def _catalog_entry(began: RunBegan, history: _History) -> CatalogedRun:
    moved = history.moved.get(began.run)
    is_deleted = moved is not None and moved.event == "deleted"
    later = history.owners[history.folders[began.run]]
    gone = f"Its folder is run {later}'s now." if later != began.run else "Its folder is gone."
    outcome, why = _infer_outcome(began, history, "" if is_deleted else gone)
    return CatalogedRun(
        id=began.run,
        folder=history.folders[began.run],
        path=None,
        where=FolderPlace.DELETED if is_deleted else FolderPlace.GONE,
        batch=moved.batch if moved else "",
        outcome=outcome,
        why=why,
        workload=began.workload,
        started=_parse_date(began.at),
        began=began,
        summary=None,
    )


def _infer_outcome(began: RunBegan, history: _History, what: str) -> tuple[str, str]:
    """How a run without a record ended: as it was entered, else by whether its process is alive."""
    if (end := history.ended.get(began.run)) is not None:
        return end.outcome, " ".join(filter(None, (end.why, what)))
    alive = provenance.is_alive(began.process)
    outcome = {True: "running", False: "interrupted", None: "unknown"}[alive]
    return outcome, " ".join(filter(None, ("Its end was never entered.", what)))


def _parse_date(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _sort_key(run: CatalogedRun) -> tuple[float, str]:
    return (run.started.timestamp() if run.started else 0.0, run.folder)
