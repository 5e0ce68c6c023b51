"""`penstock results watch`: follow a run in progress from another terminal, process or node."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.live_display import make_display, panel_lines
from penstock.cli.option_groups import METRICS_FOLDER, RUNS_FOLDER, follow_by_metrics
from penstock.cli.options import flag, optional_argument, verb
from penstock.cli.parsers import RUN
from penstock.cli.results_runs import show_folder
from penstock.cli.terminal import Terminal
from penstock.errors import PenstockError, UsageError
from penstock.results.run_status import DIED, RUNNING, RunStatus, read_status

if TYPE_CHECKING:
    from penstock.results.run_record import RunRecord
    from penstock.results.run_status import Follower

LOOK_INTERVAL_S: Final = 1.0
SILENT_S: Final = 120.0
"""A run on another host counts as dead if it has not written its status for this long."""
_INTERRUPTED: Final = 130
_GOODBYE_S: Final = 5.0
"""The time that a run is given to write its page, between its last record and its last status."""


@verb
def watch(
    terminal: Terminal,
    *,
    run: str = optional_argument(
        "[RUN]",
        RUN,
        "Run, given by its directory, its id, or part of its name (default: the newest active run).",
        default="",
    ),
    parent: Path = RUNS_FOLDER,
    is_once: bool = flag("--once", "Print the current figures and exit."),
    metrics_folder: Path | None = METRICS_FOLDER,
) -> int:
    """Follow a run until it ends, and exit with its exit code; Ctrl-C ends this command, not the run.

    The run may be in another terminal or on another node, because its state is read from its directory. If
    the run's process has died, the command says so and exits with 1.

    Examples:

      penstock results watch

      penstock results watch unet3d_h100-20260102-030405-1a2b3c --results /mnt/results

      penstock results watch 1a2b3c --once --json

      penstock results watch --metrics-dir /var/lib/node_exporter/textfile
    """
    watched = _WatchedRun(_find_folder(run, parent))
    status = watched.look()
    if not is_once and status.outcome == RUNNING:
        status = _follow(watched, metrics_folder, terminal)
    if status.outcome == "finished" and not (is_once or terminal.as_json):
        show_folder(watched.folder, terminal)
    else:
        terminal.result(asdict(status), list(panel_lines(status)))
    if status.outcome == RUNNING:
        return 0 if is_once else _INTERRUPTED
    return status.exit_code if status.exit_code is not None else 1


def _find_folder(run: str, parent: Path) -> Path:
    from penstock.results.history import find_run_folder
    from penstock.results.run_folder import RUN_FILE, run_folders
    from penstock.results.run_record import RunOutcome, read_record

    if run:
        return find_run_folder(run, parent)
    found: list[tuple[str, Path]] = []
    for folder in run_folders(parent):
        try:
            record = read_record(folder) if (folder / RUN_FILE).is_file() else None
        except PenstockError:  # `results ls` reports runs that cannot be read
            continue
        if record is not None and record.outcome is RunOutcome.RUNNING:
            found.append((record.started_at, folder))
    if not found:
        raise UsageError(
            "No run is active", where=str(parent), fix="Name a run, or look elsewhere with --results DIR."
        )
    return max(found)[1]


class _WatchedRun:
    """A run observed from another process. A status is new if it changed, whatever the hosts' clocks say."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._last_written_s = 0.0
        self._news_s = clock()

    def look(self) -> RunStatus:
        """Return the current state: the status that the run wrote, or its outcome according to its record."""
        from penstock.results.run_record import RunOutcome, read_record

        record = read_record(self.folder)
        status = read_status(self.folder) or _without_status(self.folder, record)
        if status.written_at_s != self._last_written_s:
            self._last_written_s, self._news_s = status.written_at_s, self._clock()
        if status.outcome != RUNNING:
            return status
        if record.outcome is RunOutcome.RUNNING:
            silent_s = self._clock() - self._news_s
            is_silent = silent_s >= SILENT_S and (self.folder / "status.json").exists()
            return _found_dead(status, f"It has said nothing for {silent_s:.0f} s.") if is_silent else status
        if record.ended_at is None:
            return _found_dead(status, record.why)
        if self._clock() - self._news_s < _GOODBYE_S:
            return status
        # The run ended without being able to write its last status.
        return _without_status(self.folder, record)


def _found_dead(status: RunStatus, why: str) -> RunStatus:
    return replace(status, outcome=DIED, why=why, exit_code=1, left_s=None)


def _without_status(folder: Path, record: RunRecord) -> RunStatus:
    """Derive the status from the record alone, for a run that wrote no status."""
    from datetime import datetime

    codes = {"finished": 0, "interrupted": _INTERRUPTED, "failed": 1}
    began_s = datetime.fromisoformat(record.started_at).timestamp()
    ended_s = datetime.fromisoformat(record.ended_at).timestamp() if record.ended_at else began_s
    return RunStatus(
        run=folder.name,
        kind=str(record.plan.get("kind", "training")),
        workload=record.name,
        ranks=record.ranks,
        host=record.hosts[0].host if record.hosts else "",
        started_at_s=began_s,
        written_at_s=ended_s,
        outcome=DIED if record.outcome != RUNNING and record.ended_at is None else record.outcome.value,
        why=record.why,
        exit_code=codes.get(record.outcome.value),
    )


def _follow(watched: _WatchedRun, metrics_folder: Path | None, terminal: Terminal) -> RunStatus:
    """Show the run until it ends, or until the user stops watching."""
    with ExitStack() as undo:
        followers: list[Follower] = [
            *follow_by_metrics(metrics_folder),
            make_display(shows_figures=True, first_line_s=0),
        ]
        for follower in followers:
            undo.callback(follower.close)
        due_s = dict.fromkeys(followers, 0.0)
        status = watched.look()
        try:
            while status.outcome == RUNNING:
                now_s = time.monotonic()
                for follower in followers:
                    if due_s[follower] <= now_s:
                        follower.show(status)
                        due_s[follower] = now_s + follower.interval_s
                time.sleep(LOOK_INTERVAL_S)
                status = watched.look()
        except KeyboardInterrupt:
            terminal.note("Stopped watching; the run continues.")
            return status
        for follower in followers:
            follower.show(status)
        return status
