"""What is known of every run of a results folder: its entries joined with the folders that are on disk.

Place in the flow: `file` and folders -> kept runs -> listed, selected, restored. Invariants: the disk says
where a folder is, the history what became of it; a folder without an entry and an entry without a folder are
both told as what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, UsageError
from penstock.results.history.history_file import FolderMoved, HistoryEntry, HistoryFile, RunBegan, RunEnded
from penstock.results.provenance import is_alive
from penstock.results.run_comparison import summarize_run
from penstock.results.run_folder import RUN_FILE, is_run, resolve_run, run_folders
from penstock.storage.files.system_calls import translate_os_errors

if TYPE_CHECKING:
    from penstock.results.run_comparison import RunSummary


class FolderPlace(StrEnum):
    """Where a run's folder is."""

    HERE = "here"
    TRASH = "trash"
    DELETED = "deleted"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogedRun:
    """One run. `id` is that of its entry, else its folder's name; `path` is None where no folder is left.

    `outcome` is its record's, or `unreadable`, or `unknown`; `began` None where nobody entered it.
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
    view: RunSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCatalog:
    """All runs, newest first, and a sentence for each line of the history that could not be read."""

    runs: tuple[CatalogedRun, ...]
    complaints: tuple[str, ...]
    has_history: bool

    def at(self, where: FolderPlace) -> tuple[CatalogedRun, ...]:
        """The runs whose folders are there."""
        return tuple(run for run in self.runs if run.where is where)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Story:
    """The entries by run: the latest of each kind."""

    began: Mapping[str, RunBegan]
    ended: Mapping[str, RunEnded]
    moved: Mapping[str, FolderMoved]
    folders: Mapping[str, str]
    owners: Mapping[str, str]
    """Which run a folder's name belongs to: the last that began in it."""


def read_catalog(parent: Path) -> RunCatalog:
    """Everything that is known of the runs right below `parent`."""
    history = HistoryFile(parent)
    lines = history.read()
    story = _story(lines.entries)
    found = [*_here(parent, story), *_in_trash(history, story)]
    seen = {run.id for run in found}
    found.extend(_without_folder(began, story) for began in story.began.values() if began.run not in seen)
    return RunCatalog(
        runs=tuple(sorted(found, key=_age, reverse=True)),
        complaints=lines.complaints,
        has_history=history.exists(),
    )


def find_run_folder(text: str, parent: Path) -> Path:
    """The folder of the run that a person names: by its folder, its id, or a part that only one name has.

    One in the trash is found by its name or id.
    """
    if any(is_run(folder) for folder in (Path(text), parent / text)):
        return resolve_run(text, parent)
    history = HistoryFile(parent)
    own = _story(history.read().entries).folders.get(text)
    named = {own} if own else set()
    removed = [folder for batch in subfolders(history.trash) for folder in subfolders(batch)]
    places = [*(parent / name for name in named), *(each for each in removed if each.name in {text, *named})]
    found = next((folder for folder in places if is_run(folder)), None)
    return found or resolve_run(text, parent)


def find_run(text: str, runs: tuple[CatalogedRun, ...], *, where: str) -> CatalogedRun:
    """The run of `runs` that a person names, likewise."""
    exact = [run for run in runs if text in (run.id, run.folder) or Path(text) == run.path]
    found = exact or [run for run in runs if text and text in run.folder]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(run.folder for run in found[:3])
        raise UsageError(
            f"{text!r} names {len(found)} runs: {names}", fix="Write more of the name, or the id."
        )
    raise UsageError(
        f"No run is called {text!r}", where=where, fix="`penstock results ls FOLDER` lists them."
    )


def _story(entries: tuple[HistoryEntry, ...]) -> _Story:
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
    folders = {each.run: each.folder for each in began.values()} | published
    owners = {folder: run for run, folder in folders.items()}
    return _Story(began=began, ended=ended, moved=moved, folders=folders, owners=owners)


def _here(parent: Path, story: _Story) -> Iterator[CatalogedRun]:
    folders = {folder.name: folder for folder in run_folders(parent)}
    for name in story.owners:
        if name not in folders and (parent / name).is_dir():
            folders[name] = parent / name
    for name, folder in folders.items():
        yield _on_disk(folder, name, story.owners.get(name, name), story)


def _in_trash(history: HistoryFile, story: _Story) -> Iterator[CatalogedRun]:
    removed = {(move.batch, move.folder): move.run for move in story.moved.values()}
    for batch in subfolders(history.trash):
        for folder in subfolders(batch):
            run = removed.get((batch.name, folder.name), story.owners.get(folder.name, folder.name))
            yield _on_disk(folder, folder.name, run, story, batch=batch.name)


def subfolders(folder: Path) -> list[Path]:
    """The folders right below, by name; none where there is no such folder."""
    if not folder.is_dir():
        return []
    with translate_os_errors("Listing the runs", str(folder)):
        return sorted(each for each in folder.iterdir() if each.is_dir())


def _on_disk(folder: Path, name: str, run_id: str, story: _Story, *, batch: str = "") -> CatalogedRun:
    began = story.began.get(run_id)
    view, outcome, why = _seen(folder, began, story)
    return CatalogedRun(
        id=run_id,
        folder=name,
        path=folder,
        where=FolderPlace.TRASH if batch else FolderPlace.HERE,
        batch=batch,
        outcome=outcome,
        why=why,
        workload=view.workload if view else began.workload if began else "",
        started=_moment(view.started if view else began.at if began else None),
        began=began,
        view=view,
    )


def _seen(folder: Path, began: RunBegan | None, story: _Story) -> tuple[RunSummary | None, str, str]:
    if began is not None and not is_run(folder):
        return (None, *_outcome(began, story, f"There is no {RUN_FILE} in its folder."))
    try:
        view = summarize_run(folder)
    except PenstockError as error:
        return None, "unreadable", str(error)
    return view, view.outcome, view.why


def _without_folder(began: RunBegan, story: _Story) -> CatalogedRun:
    moved = story.moved.get(began.run)
    is_deleted = moved is not None and moved.event == "deleted"
    later = story.owners[story.folders[began.run]]
    gone = f"Its folder is run {later}'s now." if later != began.run else "Its folder is gone."
    outcome, why = _outcome(began, story, "" if is_deleted else gone)
    return CatalogedRun(
        id=began.run,
        folder=story.folders[began.run],
        path=None,
        where=FolderPlace.DELETED if is_deleted else FolderPlace.GONE,
        batch=moved.batch if moved else "",
        outcome=outcome,
        why=why,
        workload=began.workload,
        started=_moment(began.at),
        began=began,
        view=None,
    )


def _outcome(began: RunBegan, story: _Story, what: str) -> tuple[str, str]:
    """How a run without a record ended: as it was entered, else as its process tells."""
    if (end := story.ended.get(began.run)) is not None:
        return end.outcome, " ".join(filter(None, (end.why, what)))
    alive = is_alive(began.process)
    outcome = {True: "running", False: "interrupted", None: "unknown"}[alive]
    return outcome, " ".join(filter(None, ("Its end was never entered.", what)))


def _moment(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _age(run: CatalogedRun) -> tuple[float, str]:
    return (run.started.timestamp() if run.started else 0.0, run.folder)
