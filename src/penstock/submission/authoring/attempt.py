"""How an attempt at a result directory ended: a file beside its draft, from before the draft is written.

    20260102_030405/               the draft, below `.mlps/under-way`
    20260102_030405.attempt.json   who writes it; later how that ended, unless it was published

Every phase has one, also those that leave no `run.json`. Invariant: an attempt whose process is gone is never
read as running.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from penstock.errors import PenstockError, StorageError
from penstock.results import provenance, run_folder, run_record
from penstock.results.published_files import write_json
from penstock.results.run_record import RunOutcome
from penstock.submission.authoring.result_dir import HIDDEN, ResultDirAddress, remove_empty_parents

_SUFFIX: Final = ".attempt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A draft whose run failed, was stopped, or is still running; never part of the result."""

    folder: Path
    outcome: str
    why: str


class RecordedAttempt:
    """An attempt in progress: the file is there during the body, and stays if that fails, with the reason."""

    def __init__(self, address: ResultDirAddress) -> None:
        self._file = _file(address.draft)
        self._hidden = address.series.tree.root / HIDDEN
        self._process = asdict(provenance.identify_this_process())

    def __enter__(self) -> Self:
        self._write(RunOutcome.RUNNING, "")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._write(*_describe(error))
            return
        self._file.unlink()
        remove_empty_parents(self._file.parent, until=self._hidden)

    def _write(self, outcome: RunOutcome, why: str) -> None:
        document = {"outcome": outcome.value, "why": why, "process": self._process}
        write_json(self._file.parent, self._file.name, document)


def read_attempt(draft: Path) -> Attempt:
    """What became of a draft, as far as can be seen from here."""
    try:
        document = json.loads(_file(draft).read_text(encoding="utf-8"))
        outcome, why = RunOutcome(document["outcome"]), str(document["why"])
        process = provenance.ProcessMark(**document["process"])
    except FileNotFoundError:
        return _read_run(draft)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return Attempt(folder=draft, outcome="unreadable", why=f"{_file(draft).name}: {error}")
    if outcome is RunOutcome.RUNNING:
        return _read_running(draft, process)
    return Attempt(folder=draft, outcome=outcome.value, why=why)


def _read_running(draft: Path, process: provenance.ProcessMark) -> Attempt:
    is_alive = provenance.is_alive(process)
    if is_alive is None:  # only the heartbeats of a run can be seen from another host
        return _read_run(draft)
    if is_alive:
        return Attempt(folder=draft, outcome=RunOutcome.RUNNING.value, why=f"By process {process.pid}.")
    why = f"Process {process.pid} was killed, or its machine stopped."
    return Attempt(folder=draft, outcome=RunOutcome.INTERRUPTED.value, why=why)


def _read_run(draft: Path) -> Attempt:
    """By the record of its run alone."""
    if not (draft / run_folder.RUN_FILE).exists():
        return Attempt(folder=draft, outcome=RunOutcome.INTERRUPTED.value, why="It left no run.json.")
    try:
        record = run_record.read_record(draft)
    except StorageError as error:
        return Attempt(folder=draft, outcome="unreadable", why=str(error))
    return Attempt(folder=draft, outcome=record.outcome.value, why=record.why)


def _describe(error: BaseException) -> tuple[RunOutcome, str]:
    if isinstance(error, KeyboardInterrupt):
        return RunOutcome.INTERRUPTED, str(error) or "Stopped by its user, or because another rank failed."
    name = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
    return RunOutcome.FAILED, f"{name}{error}"


def _file(draft: Path) -> Path:
    return draft.with_name(draft.name + _SUFFIX)
