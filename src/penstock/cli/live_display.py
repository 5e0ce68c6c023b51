"""The display of work in progress: a bar, live figures, or, without a terminal, a line every 30 s."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.environment import PROGRESS_COLUMNS, process_environment
from penstock.errors import printable
from penstock.results.run_status import (
    RUNNING,
    Follower,
    RunStatus,
    figure_lines,
    format_age,
    left_sentence,
    phase_sentence,
    state_sentence,
    status_line,
)
from penstock.units import format_count

if TYPE_CHECKING:
    from rich.console import Console


LINE_INTERVAL_S: Final = 30.0
_BAR_CELLS: Final = 40


def make_display(*, shows_figures: bool, first_line_s: float = LINE_INTERVAL_S) -> Follower:
    """Make a display that suits the stderr of this process, or of the process that launched it."""
    columns = process_environment().get(PROGRESS_COLUMNS)
    if not (columns or sys.stderr.isatty()):
        return Lines(first_s=first_line_s)
    # Importing Rich takes a tenth of a second, which is only worth it for a terminal.
    from rich.console import Console

    console = Console(
        stderr=True, force_terminal=columns is not None or None, highlight=False, markup=False, emoji=False
    )
    if columns is not None:
        console.width = int(columns)
    return LiveFigures(console) if shows_figures else Bars(console)


class Lines(Follower):
    """Prints one line on stderr from time to time, for logs."""

    interval_s = LINE_INTERVAL_S

    def __init__(self, *, first_s: float = LINE_INTERVAL_S) -> None:
        """Print no line in the first `first_s` seconds, so that short work prints none."""
        self._first_at_s = time.monotonic() + first_s

    def show(self, status: RunStatus) -> None:
        """Print the status in one line, with the time since the start."""
        if status.phase and status.outcome == RUNNING and time.monotonic() >= self._first_at_s:
            elapsed = format_age(status.written_at_s - status.started_at_s)
            print(printable(f"[{elapsed}] {status_line(status)}"), file=sys.stderr, flush=True)


class Bars(Follower):
    """A progress bar of the current phase: share, time spent, time left. It is erased at the end."""

    interval_s = 0.2

    def __init__(self, console: Console) -> None:
        from rich import progress as bars

        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn())
        times = (bars.TimeElapsedColumn(), bars.TextColumn("{task.fields[note]}"))
        self._display = bars.Progress(*columns, *times, console=console, transient=True)
        self._display.start()
        self._last: tuple[str, bars.TaskID] | None = None

    def show(self, status: RunStatus) -> None:
        """Move the bar, or replace the previous phase's bar."""
        if not status.phase or status.outcome != RUNNING:
            return
        left = f"left: {format_age(max(1.0, status.left_s))}" if status.left_s else ""
        note = state_sentence(status) or left
        if self._last is None or self._last[0] != status.phase:
            if self._last is not None:
                self._display.remove_task(self._last[1])
            task = self._display.add_task(status.phase, total=status.phase_total, note=note)
            self._last = (status.phase, task)
        self._display.update(self._last[1], completed=status.phase_done, note=note)

    def close(self) -> None:
        """Erase the bar."""
        self._display.stop()


class LiveFigures(Follower):
    """Live figures: lines that are redrawn every second, and erased at the end."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._live.start()

    def show(self, status: RunStatus) -> None:
        """Draw the status."""
        from rich.text import Text

        text = Text("\n".join(map(printable, panel_lines(status))), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Erase the figures."""
        self._live.stop()


def panel_lines(status: RunStatus) -> Iterator[str]:
    """Yield the status as lines of text, with waits last."""
    age = format_age(status.written_at_s - status.started_at_s)
    what = " ".join(filter(None, (status.kind, status.workload, f"on {format_count(status.ranks, 'rank')}")))
    yield f"{status.run}: {status.outcome}, {what}, {age}"
    if status.why:
        yield f"  {status.why}"
    if status.phase:
        share = min(1.0, status.phase_done / status.phase_total) if status.phase_total else 0.0
        cells = round(share * _BAR_CELLS)
        yield f"  {phase_sentence(status)}"
        yield f"  {'━' * cells}{'╌' * (_BAR_CELLS - cells)}  {left_sentence(status)}".rstrip()
    for name, text in figure_lines(status):
        yield f"  {name:<15}{text}"
    for text in filter(None, (state_sentence(status), status.remark)):
        yield f"  {text}"
