"""A run's own part of a history: entered before its folder is made, closed after its record is.

Place in the flow: `OpenRun` holds one. Invariant: the run's record is the truth about how it ended; an end
that cannot be entered is logged, and costs the run nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.errors import StorageError
from penstock.results.history.history_file import HistoryFile, RunBegan, RunEnded
from penstock.results.provenance import as_text, mark_this_process, redacted, redacted_settings
from penstock.results.run_folder import run_folder_name

if TYPE_CHECKING:
    from penstock.results.run_record import RunRequest

_log = logging.getLogger(__name__)


class RunEntry:
    """The entries of one run."""

    def __init__(self, history: HistoryFile, began: RunBegan) -> None:
        self._history = history
        self._began = began

    @classmethod
    def begin(cls, history: HistoryFile, request: RunRequest, now: datetime, *, named: str = "") -> Self:
        """Enter a run that starts `now`, in the folder that its user `named` or one of its own name."""
        workload = request.workload.full_name

        def entry(run_id: str) -> RunBegan:
            return RunBegan(
                run=run_id,
                at=_text(now),
                folder=named or run_folder_name(workload, now, run_id),
                is_named=bool(named),
                workload=workload,
                ranks=request.ranks,
                command=redacted(request.command),
                working_folder=as_text(str(Path.cwd())),
                settings=redacted_settings(request.environment),
                process=mark_this_process(),
            )

        return cls(history, history.begin(entry))

    @classmethod
    def begin_in(cls, folder: Path, request: RunRequest, now: datetime, *, results: Path) -> Self | None:
        """The same for a folder below `results`; None where that is its parent and has no history."""
        history, place = HistoryFile(results.absolute()), folder.absolute()
        if not place.is_relative_to(history.parent) or (
            place.parent == history.parent and not history.exists()
        ):
            return None
        return cls.begin(history, request, now, named=place.relative_to(history.parent).as_posix())

    @property
    def folder_name(self) -> str:
        """What the run's folder is called."""
        return self._began.folder

    def end(self, outcome: str, why: str) -> None:
        """Enter how the run ended."""
        try:
            self._history.append(
                RunEnded(run=self._began.run, at=_text(datetime.now(UTC)), outcome=outcome, why=why)
            )
        except StorageError as error:
            _log.warning("The end of run %s could not be entered: %s", self._began.run, error)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Enter that the run failed, where the block that makes its folder fails."""
        try:
            yield
        except StorageError as error:
            self.end("failed", f"{type(error).__name__}: {error}")
            raise


def _text(now: datetime) -> str:
    return now.isoformat(timespec="microseconds")
