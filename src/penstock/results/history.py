"""The runs of a results folder: those in its history, joined with the folders on disk.

The history gets a line whenever a run begins, ends, is published or is deleted.

    PARENT/.penstock/history.jsonl

Lines are appended and never changed, so a crash or power cut costs at most the line being written. Lines that
cannot be read are reported and skipped. A run is entered before its folder is created, and its end is entered
after its record is closed. `run.json` therefore decides how the run ended, and if its end cannot be entered,
this is only logged.

The disk shows where a run's folder is, and the history what happened to it; a folder without an entry and an
entry without a folder are both listed. A removal never includes an active run, and gives a reason for
each selected run that it keeps.

    {"format": 1, "event": "ended", "run": "1a2b3c", "at": "2026-01-02T03:04:05.000000+00:00", ...}
"""

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shlex import quote
from typing import Any, Final, Literal

from penstock.errors import PenstockError, StorageError, UsageError, name_some
from penstock.results import provenance, run_comparison, run_folder
from penstock.results.run_record import RunRequest
from penstock.storage.files import local_files, system_calls
from penstock.units import parse_seconds

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
"""Incremented whenever a key is added, renamed or changes its meaning."""
FOLDER: Final = ".penstock"
FILE: Final = "history.jsonl"
LONGEST_WAIT_S: Final = 10.0
"""The longest wait for the lock. A process that holds it longer was suspended, or died on another host. Even
without the lock, lines are written atomically.
"""

Entry = Mapping[str, Any]
_EVERY: Final = {"event": str, "run": str, "at": str}
_MOVED: Final = {**_EVERY, "folder": str, "batch": str}
_KEYS: Final[Mapping[str, Mapping[str, type]]] = {
    "began": {
        **_EVERY, "folder": str, "is_named": bool, "workload": str, "ranks": int, "command": list,
        "working_folder": str, "settings": dict, "process": dict,
    },
    "ended": {**_EVERY, "outcome": str, "why": str},
    "published": _MOVED,
    "deleted": _MOVED,
    # Version 0.2 moved removed runs to `.penstock/trash/BATCH/`, from where they could be restored.
    "removed": _MOVED,
    "restored": _MOVED,
}  # fmt: skip
_NAMES: Final = frozenset({"run", "folder"})
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")


def format_entry(entry: Entry) -> bytes:
    return json.dumps({"format": FORMAT_VERSION, **entry}, separators=(",", ":")).encode() + b"\n"


def parse_entry(line: bytes) -> Entry:
    """Parse the entry in a line. Raises `ValueError`, which says what is wrong with it."""
    document: Any = local_files.parse_json(line.decode())
    version = document.pop("format", None) if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"it has format {version}, not {FORMAT_VERSION}")
    keys = _KEYS.get(document.get("event"))
    if keys is None:
        raise ValueError(f"unknown event {document.get('event')!r}")
    for key in sorted({*keys, *document}):
        if key not in keys or not isinstance(document.get(key), keys[key]):
            raise ValueError(f"key {key!r} is {'wrong' if key in keys else 'unknown'}")
    for key in _NAMES & document.keys():
        name = os.fsencode(document[key])
        # The system would refuse it, or a terminal would show more lines than there are runs.
        if len(name) > 1024 or max(map(len, name.split(b"/"))) > 255 or _CONTROL.search(name):
            raise ValueError(f"key {key!r} is not a possible name")
    return document  # type: ignore[no-any-return]


def parse_lines(content: bytes, name: str) -> tuple[list[Entry], list[str]]:
    """Parse a file's content into its entries, and a sentence for each line that cannot be read."""
    entries: list[Entry] = []
    complaints: list[str] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append(parse_entry(line))
        except (ValueError, RecursionError) as error:
            is_torn = number == len(lines)
            what = f"is cut off after {len(line)} bytes" if is_torn else f"cannot be read: {error}"
            complaints.append(f"{name}: line {number} {what}; it is skipped")
    return entries, complaints


class HistoryFile:
    """The history of the runs in `parent`."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.path = parent / FOLDER / FILE

    def exists(self) -> bool:
        return self.path.is_file()

    def read(self) -> tuple[list[Entry], list[str]]:
        """Read all entries, and a sentence for each damaged line. A missing file is an empty history."""
        with system_calls.translate_os_errors("Reading the history of runs", str(self.path)):
            try:
                content = local_files.read_document(self.path)
            except (FileNotFoundError, NotADirectoryError):
                content = b""
        return parse_lines(content, str(self.path))

    def begin(self, request: RunRequest, now: datetime, *, named: str = "") -> Entry:
        """Record a run that starts at `now`, in the user's folder `named` or one with a generated name."""
        workload = request.workload.full_name

        def make_entry() -> Entry:
            used = {entry["run"] for entry in self.read()[0]}
            # Six digits are easy to read; after a few collisions, more are used.
            candidates = (secrets.token_hex(num_bytes) for num_bytes in (3, 3, 3, 4, 8, 16))
            run_id = next(candidate for candidate in candidates if candidate not in used)
            return {
                "event": "began",
                "run": run_id,
                "at": now.isoformat(timespec="microseconds"),
                "folder": named or run_folder.run_folder_name(workload, now, run_id),
                "is_named": bool(named),
                "workload": workload,
                "ranks": request.ranks,
                "command": list(provenance.redact(request.command)),
                "working_folder": provenance.replace_surrogates(str(Path.cwd())),
                "settings": provenance.redact_settings(request.environment),
                "process": asdict(provenance.identify_this_process()),
            }

        return self._append(make_entry)

    def append(self, event: str, run: str, **values: str) -> None:
        """Record an event of a run with the current time."""
        at = datetime.now(UTC).isoformat(timespec="microseconds")
        self._append(lambda: {"event": event, "run": run, "at": at, **values})

    def end(self, run: str, outcome: str, why: str) -> None:
        """Record how a run ended; if that fails, only log it."""
        try:
            self.append("ended", run, outcome=outcome, why=why)
        except StorageError as error:
            logger.warning("The end of run %s could not be entered: %s", run, error)

    def publish(self, old: Path, new: Path) -> None:
        """Record that the folder `old` of a recorded run now has its final name `new`."""
        if not self.exists():
            return
        old_name, new_name = (path.relative_to(self.parent).as_posix() for path in (old, new))
        runs = [entry["run"] for entry in self.read()[0] if entry.get("folder") == old_name]
        if runs:
            self.append("published", runs[-1], folder=new_name, batch="")

    def _append(self, make_entry: Callable[[], Entry]) -> Entry:
        with system_calls.translate_os_errors("Writing the history of runs", str(self.path)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.exists()
            descriptor = local_files.open_without_links(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                _lock(descriptor, self.path)
                entry = make_entry()
                # One write call, so that other processes' lines come before or after these, never in between.
                size_bytes = os.fstat(descriptor).st_size
                ends_whole = size_bytes == 0 or os.pread(descriptor, 1, size_bytes - 1) == b"\n"
                left = memoryview((b"" if ends_whole else b"\n") + format_entry(entry))
                while left:
                    left = left[os.write(descriptor, left) :]
                local_files.sync_open_file(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                for folder in (self.path.parent, self.parent):
                    local_files.sync_folder(folder)
        return entry


def _lock(descriptor: int, path: Path) -> None:
    """Wait for other writers; continue without a lock if none is available (see `_append`)."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            logger.warning("%s has been locked for %.0f s; writing without the lock", path, LONGEST_WAIT_S)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", path, error)
        return


# The catalog


OUTCOMES: Final = ("finished", "failed", "interrupted", "running", "unreadable", "unknown")
INCOMPLETE: Final = "incomplete"
_INCOMPLETE: Final = frozenset({"interrupted", "running", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogedRun:
    """One run. `id` is from its entry or else its folder's name; `path` is None if the folder is gone.

    `outcome` is from its record, or else `unreadable` or `unknown`; `began` is None if it has no entry.
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
    """The latest entry of each kind for each run, and the run's folder."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.began: dict[str, Entry] = {}
        self.ended: dict[str, Entry] = {}
        self.moved: dict[str, Entry] = {}
        self.folders: dict[str, str] = {}
        for entry in entries:
            run, event = entry["run"], entry["event"]
            kind = {"began": self.began, "ended": self.ended}.get(event, self.moved)
            if event != "published":
                kind[run] = entry
            if event in ("began", "published"):
                self.folders[run] = entry["folder"]
        # The run that a folder's name belongs to is the last one that began in it.
        self.owners = {folder: run for run, folder in self.folders.items()}

    def outcome(self, run: str, what: str) -> tuple[str, str]:
        """Return the outcome of a run without a record, and why: from its last entry, or its process."""
        if (end := self.ended.get(run)) is not None:
            return end["outcome"], " ".join(filter(None, (end["why"], what)))
        try:
            alive = provenance.is_alive(provenance.ProcessMark(**self.began[run]["process"]))
        except TypeError:  # the line was edited by hand
            alive = None
        outcome = {True: "running", False: "interrupted", None: "unknown"}[alive]
        return outcome, " ".join(filter(None, ("Its end was never entered.", what)))


def read_catalog(parent: Path) -> tuple[list[CatalogedRun], list[str]]:
    """Return the runs in `parent`, newest first, and a sentence for each damaged line of the history."""
    entries, complaints = HistoryFile(parent).read()
    history = _History(entries)
    folders = {folder.name: folder for folder in run_folder.run_folders(parent)}
    folders |= {name: parent / name for name in history.owners if (parent / name).is_dir()}
    runs = [
        _catalog(history, history.owners.get(name, name), name, folder) for name, folder in folders.items()
    ]
    present = {run.id for run in runs}
    runs += [
        _catalog(history, run, history.folders[run], None) for run in history.began if run not in present
    ]
    runs.sort(key=lambda run: (run.started.timestamp() if run.started else 0.0, run.folder), reverse=True)
    return runs, complaints


def _catalog(history: _History, run: str, name: str, path: Path | None) -> CatalogedRun:
    """Make the catalog's entry for a run, whose folder is `path` (None if gone) and was called `name`."""
    began, moved, summary = history.began.get(run), history.moved.get(run), None
    event = moved["event"] if moved and path is None else ""
    what = f"There is no {run_folder.RUN_FILE} in its folder."
    if path is None:
        later = history.owners[name]
        what = f"Its folder is run {later}'s now." if later != run else "Its folder is gone."
    if event == "deleted":
        what = ""
    elif moved is not None and event == "removed":
        what = f"An earlier version moved its folder to {FOLDER}/trash/{moved['batch']}."
    if began is not None and (path is None or not run_folder.is_run(path)):
        outcome, why = history.outcome(run, what)
    else:
        assert path is not None
        try:
            summary = run_comparison.summarize_run(path)
            outcome, why = summary.outcome, summary.why
        except PenstockError as error:
            outcome, why = "unreadable", str(error)
    return CatalogedRun(
        id=run,
        folder=name,
        path=path,
        where="here" if path else "deleted" if event == "deleted" else "gone",
        outcome=outcome,
        why=why,
        workload=summary.workload if summary else began["workload"] if began else "",
        started=_parse_date(summary.started if summary else began["at"] if began else None),
        began=began,
        summary=summary,
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
    """Find the run that a user names among `runs`, as `find_run_folder` does."""
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
        f"No run is called {text!r}", where=where, fix=f"`penstock results ls {quote(where)}` lists them."
    )


def select_runs(
    runs: Sequence[CatalogedRun], *, status: str = "", workload: str = "", older_than: str = "", now: datetime
) -> list[CatalogedRun]:
    """Select the runs that meet all criteria of a command line. A criterion of "" matches every run.

    A run without a start time never counts as old.
    """
    outcomes = parse_outcomes(status) if status else frozenset()
    before = parse_age(older_than, now) if older_than else None
    return [
        run
        for run in runs
        if (not outcomes or run.outcome in outcomes)
        and workload.lower() in run.workload.lower()
        and (before is None or (run.started is not None and run.started < before))
    ]


def parse_outcomes(text: str) -> frozenset[str]:
    """Parse outcomes separated by commas. `incomplete` stands for all runs without a recorded end."""
    words = set(text.split(","))
    for word in words - {*OUTCOMES, INCOMPLETE}:
        raise UsageError(
            f"{word!r} is not an outcome of a run",
            where="--status",
            fix=f"Choose from: {', '.join(OUTCOMES)}, {INCOMPLETE}.",
        )
    return frozenset(words - {INCOMPLETE}) | (_INCOMPLETE if INCOMPLETE in words else frozenset())


def parse_age(text: str, now: datetime) -> datetime:
    """Parse an age (`2w`, `7d`, `12h`) as a time before `now`, or a date as its start in UTC."""
    date = _parse_date(text)
    # A bare number would mean seconds, which nobody means as the age of runs.
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


def plan_removal(
    selected: Sequence[CatalogedRun], keep_last: int = 0
) -> tuple[list[CatalogedRun], list[tuple[CatalogedRun, str]]]:
    """Choose the runs to remove among `selected` (newest first); return them, and why other runs stay."""
    older = selected[keep_last:]
    spared = [(run, f"one of the last {keep_last}") for run in selected[:keep_last]]
    spared += [(run, "still running") for run in older if run.outcome == "running"]
    return [run for run in older if run.outcome != "running"], spared


def delete_runs(parent: Path, runs: Sequence[CatalogedRun]) -> None:
    """Delete the folders of `runs`, which must be directly below `parent` and not running."""
    for run in runs:
        if run.outcome == "running":
            raise UsageError(f"Run {run.id} is still running", where=run.folder, fix="Stop it, or wait.")
        if run.path is None or run.path.parent != parent or run.path.name == "..":
            raise UsageError(
                f"Run {run.id} is not directly below this folder", where=str(parent), fix="Name its parent."
            )
    history = HistoryFile(parent)
    with system_calls.translate_os_errors("Removing runs", str(parent)):
        # No run must be gone before its deletion can be recorded.
        local_files.refuse_links(history.path.parent, history.path)
        for run in runs:
            if not run_folder.may_delete(parent / run.folder):
                raise UsageError(
                    f"No file in the folder of {run.id} is one of a run",
                    where=str(parent / run.folder),
                    fix="Delete it yourself if it is one.",
                )
            shutil.rmtree(parent / run.folder)
            history.append("deleted", run.id, folder=run.folder, batch="")


def describe(run: CatalogedRun) -> dict[str, Any]:
    """Return everything known about a run except its figures, as plain data."""
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
