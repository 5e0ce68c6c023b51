"""All runs of a results folder: the entries of its history joined with the folders on disk.

`penstock results ls` and `rm` use it. Invariants: the disk decides where a folder is, the history what
happened to it; a folder without an entry and an entry without a folder are both listed; a removal never
includes an active run, and names the reason for each run that it spares.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, Self

from penstock.errors import PenstockError, UsageError, name_some
from penstock.results import provenance, run_comparison, run_folder
from penstock.results.history import FOLDER, Entry, HistoryFile
from penstock.storage.files.system_calls import translate_os_errors
from penstock.units import parse_seconds

OUTCOMES: Final = ("finished", "failed", "interrupted", "running", "unreadable", "unknown")
INCOMPLETE: Final = "incomplete"
_INCOMPLETE: Final = frozenset({"interrupted", "running", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogedRun:
    """One run. `id` is that of its entry, else its folder's name; `path` is None if the folder is gone.

    `outcome` is its record's, or `unreadable`, or `unknown`; `began` is None without an entry.
    """

    id: str
    folder: str
    path: Path | None
    where: Literal["here", "gone", "deleted"]
    outcome: str
    why: str
    workload: str
    started: datetime | None
    began: Entry | None
    summary: run_comparison.RunSummary | None


class _History:
    """The entries by run: the latest of each kind."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        by_event: dict[str, dict[str, Entry]] = {}
        for entry in entries:
            kind = "moved" if "batch" in entry and entry["event"] != "published" else entry["event"]
            by_event.setdefault(kind, {})[entry["run"]] = entry
        self.began, self.ended = by_event.get("began", {}), by_event.get("ended", {})
        self.moved = by_event.get("moved", {})
        self.folders: Mapping[str, str] = {
            run: entry["folder"] for run, entry in {**self.began, **by_event.get("published", {})}.items()
        }
        self.owners = {folder: run for run, folder in self.folders.items()}
        """The run that a folder's name belongs to: the last one that began in it."""

    def outcome(self, run: str, what: str) -> tuple[str, str]:
        """Return how a run without a record ended: as it was entered, else by whether its process runs."""
        if (end := self.ended.get(run)) is not None:
            return end["outcome"], " ".join(filter(None, (end["why"], what)))
        try:
            alive = provenance.is_alive(provenance.ProcessMark(**self.began[run]["process"]))
        except TypeError:  # the line was changed by hand
            alive = None
        outcome = {True: "running", False: "interrupted", None: "unknown"}[alive]
        return outcome, " ".join(filter(None, ("Its end was never entered.", what)))


def read_catalog(parent: Path) -> tuple[list[CatalogedRun], list[str]]:
    """Return the runs below `parent`, newest first, and a sentence for each damaged line of the history."""
    entries, complaints = HistoryFile(parent).read()
    history = _History(entries)
    runs = list(_list_present(parent, history))
    present = {run.id for run in runs}
    runs += [_catalog_entry(run, history) for run in history.began if run not in present]
    runs.sort(key=lambda run: (run.started.timestamp() if run.started else 0.0, run.folder), reverse=True)
    return runs, complaints


def _list_present(parent: Path, history: _History) -> Iterator[CatalogedRun]:
    folders = {folder.name: folder for folder in run_folder.run_folders(parent)}
    folders |= {name: parent / name for name in history.owners if (parent / name).is_dir()}
    for name, folder in folders.items():
        run_id = history.owners.get(name, name)
        began, summary = history.began.get(run_id), None
        if began is not None and not run_folder.is_run(folder):
            outcome, why = history.outcome(run_id, f"There is no {run_folder.RUN_FILE} in its folder.")
        else:
            try:
                summary = run_comparison.summarize_run(folder)
                outcome, why = summary.outcome, summary.why
            except PenstockError as error:
                outcome, why = "unreadable", str(error)
        yield CatalogedRun(
            id=run_id,
            folder=name,
            path=folder,
            where="here",
            outcome=outcome,
            why=why,
            workload=summary.workload if summary else began["workload"] if began else "",
            started=_parse_date(summary.started if summary else began["at"] if began else None),
            began=began,
            summary=summary,
        )


def _catalog_entry(run: str, history: _History) -> CatalogedRun:
    began, folder, moved = history.began[run], history.folders[run], history.moved.get(run)
    later, event = history.owners[folder], moved["event"] if moved else ""
    if event == "deleted":
        what = ""
    elif moved is not None and event == "removed":
        what = f"An earlier version moved its folder to {FOLDER}/trash/{moved['batch']}."
    else:
        what = f"Its folder is run {later}'s now." if later != run else "Its folder is gone."
    outcome, why = history.outcome(run, what)
    return CatalogedRun(
        id=run,
        folder=folder,
        path=None,
        where="deleted" if event == "deleted" else "gone",
        outcome=outcome,
        why=why,
        workload=began["workload"],
        started=_parse_date(began["at"]),
        began=began,
        summary=None,
    )


def _parse_date(text: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def find_run_folder(text: str, parent: Path) -> Path:
    """Find the run that a user names: a folder, a name below `parent`, an id, or a unique part of a name."""
    for folder in (Path(text), parent / text):
        if run_folder.is_run(folder):
            return folder
    entered = _History(HistoryFile(parent).read()[0]).folders.get(text)
    if entered and run_folder.is_run(parent / entered):
        return parent / entered
    alike = [folder for folder in run_folder.run_folders(parent) if text and text in folder.name]
    if len(alike) == 1:
        return alike[0]
    raise _cannot_choose(text, [folder.name for folder in alike], str(parent))


def find_run(text: str, runs: Sequence[CatalogedRun], *, where: str) -> CatalogedRun:
    """Find the run that a user names among `runs`, in the same way."""
    exact = [run for run in runs if text in (run.id, run.folder) or Path(text) == run.path]
    found = exact or [run for run in runs if text and text in run.folder]
    if len(found) == 1:
        return found[0]
    raise _cannot_choose(text, [run.folder for run in found], where)


def _cannot_choose(text: str, names: Sequence[str], where: str) -> UsageError:
    if names:
        return UsageError(
            f"{text!r} names {len(names)} runs: {name_some(names)}", fix="Give more of the name, or the id."
        )
    return UsageError(
        f"No run is called {text!r}", where=where, fix="`penstock results ls FOLDER` lists them."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCriteria:
    """The criteria that selected runs meet; None and empty match every run."""

    outcomes: frozenset[str] = frozenset()
    workload: str = ""
    begun_before: datetime | None = None

    @classmethod
    def parse(cls, *, status: str, workload: str, older_than: str, now: datetime) -> Self:
        """Parse the criteria of a command line."""
        return cls(
            outcomes=parse_outcomes(status) if status else frozenset(),
            workload=workload.lower(),
            begun_before=parse_age(older_than, now) if older_than else None,
        )

    @property
    def is_selective(self) -> bool:
        """True if any criterion is given."""
        return bool(self.outcomes or self.workload or self.begun_before)

    def fit(self, run: CatalogedRun) -> bool:
        """Check a run. One without a start time is never old."""
        if self.outcomes and run.outcome not in self.outcomes:
            return False
        if self.workload and self.workload not in run.workload.lower():
            return False
        return self.begun_before is None or (run.started is not None and run.started < self.begun_before)


def parse_outcomes(text: str) -> frozenset[str]:
    """Parse outcomes separated by commas; `incomplete` stands for those without a recorded end."""
    words = set(text.split(","))
    for word in words - {*OUTCOMES, INCOMPLETE}:
        raise UsageError(
            f"{word!r} is not an outcome of a run",
            where="--status",
            fix=f"Choose from: {', '.join(OUTCOMES)}, {INCOMPLETE}.",
        )
    return frozenset(words - {INCOMPLETE}) | (_INCOMPLETE if INCOMPLETE in words else frozenset())


def parse_age(text: str, now: datetime) -> datetime:
    """Parse an age (`2w`, `7d`, `12h`) as a moment before `now`, or a date as its beginning in UTC."""
    date = _parse_date(text)
    # A bare number would mean seconds: surely not what was meant by an age of runs.
    if date is None and text[-1:].isalpha():
        with suppress(UsageError, OverflowError):
            date = now - timedelta(seconds=parse_seconds(text))
    if date is None:
        raise UsageError(
            f"{text!r} is neither an age nor a date",
            where="--older-than",
            fix="Write 2w, 7d, 12h or 2026-01-31.",
        )
    return date


Spared = list[tuple[CatalogedRun, str]]


def plan_removal(
    runs: Sequence[CatalogedRun], wanted: RunCriteria, *, keep_last: int = 0
) -> tuple[list[CatalogedRun], Spared]:
    """Choose among `runs` (newest first) those to remove; each matching run that stays has a reason."""
    fitting = [run for run in runs if wanted.fit(run)]
    spared = [(run, f"one of the last {keep_last}") for run in fitting[:keep_last]]
    spared += [(run, "still running") for run in fitting[keep_last:] if run.outcome == "running"]
    return [run for run in fitting[keep_last:] if run.outcome != "running"], spared


def delete_runs(parent: Path, runs: Sequence[CatalogedRun]) -> None:
    """Delete the folders of `runs`, which must be directly below `parent` and not running."""
    for run in runs:
        if run.outcome == "running":
            raise UsageError(f"Run {run.id} is still running", where=run.folder, fix="Stop it, or wait.")
        if run.path is None or run.path.parent != parent:
            raise UsageError(
                f"Run {run.id} is not directly below this folder", where=str(parent), fix="Name its parent."
            )
    history = HistoryFile(parent)
    with translate_os_errors("Removing runs", str(parent)):
        for run in runs:
            shutil.rmtree(parent / run.folder)
            history.append("deleted", run.id, folder=run.folder, batch="")


def describe(run: CatalogedRun) -> dict[str, Any]:
    """Return what is known of a run besides its figures, as JSON."""
    return {
        "run": run.id,
        "folder": str(run.path) if run.path else None,
        "name": run.folder,
        "where": run.where,
        "outcome": run.outcome,
        "why": run.why,
        "workload": run.workload,
        "started": run.started.isoformat() if run.started else None,
        "has_entry": run.began is not None,
        "command": run.began["command"] if run.began else None,
        "working_folder": run.began["working_folder"] if run.began else None,
    }
