"""`status.json`: what a run does at the moment, for people and monitoring in other processes.

It is also written as `penstock-RUN.prom`, for node exporter's text collector, where that is asked for.

Rank 0 alone writes it, at most once a second, and its last state stays next to the results. Each version
replaces the one before in one step but without a sync: it says nothing that a crash could make wrong. A
folder that takes no files any more costs the run nothing but this file.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final

from penstock import __version__
from penstock.errors import UsageError
from penstock.units import format_bytes, format_rate, format_seconds

logger = logging.getLogger(__name__)

STATUS_FILE: Final = "status.json"
FORMAT_VERSION: Final = 1
RUNNING: Final = "running"
DIED: Final = "died"
_COUNTED: Final = ("steps", "files", "operations", "samples")
"""Units at the end of phases' names: phases of bytes are shown as shares."""
_SHARES: Final = {
    "computing_s": "computing",
    "sample_wait_s": "waiting for samples",
    "rank_wait_s": "waiting for ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at one moment. Times are seconds since 1970; totals and rates are by unit, as `read_bytes`.

    `rates` are means since a unit was first counted, `rates_now` those of the last seconds. `state` is
    `working`, `computing`, or `waiting for` samples, storage or ranks, for `state_s` now; `absent_ranks`
    are those that rank 0 waits for, where that is known. Totals that end with `_s` are seconds of rank 0.
    """

    format: int = FORMAT_VERSION
    run: str
    kind: str
    workload: str
    ranks: int
    host: str
    started_at_s: float
    written_at_s: float
    outcome: str = RUNNING
    why: str = ""
    exit_code: int | None = None
    phase: str = ""
    phase_done: float = 0.0
    phase_total: float = 0.0
    share_done: float | None = None
    left_s: float | None = None
    state: str = "working"
    state_s: float = 0.0
    awaiting: str = ""
    absent_ranks: tuple[int, ...] = ()
    remark: str = ""
    totals: Mapping[str, float] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    rates_now: Mapping[str, float] = field(default_factory=dict)

    def died(self, why: str) -> "RunStatus":
        """The same of a run that ended without a word."""
        return replace(self, outcome=DIED, why=why, exit_code=1)


_NAMES: Final = tuple(field.name for field in fields(RunStatus))


def format_status(status: RunStatus) -> bytes:
    """The text of `status.json`, in one line: indented ones take json five times as long."""
    return json.dumps({name: getattr(status, name) for name in _NAMES}).encode() + b"\n"


def read_status(folder: Path) -> RunStatus | None:
    """The status in a run's folder; None without one, or one that another version wrote."""
    try:
        document = json.loads((folder / STATUS_FILE).read_bytes())
        if document.get("format") != FORMAT_VERSION:
            return None
        return RunStatus(**{**document, "absent_ranks": tuple(document["absent_ranks"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("No status in %s: %s", folder, error)
        return None


def replace_file(path: Path, content: bytes) -> bool:
    """Replace a file in one step, without a sync; whether that was possible."""
    unfinished = f"{path.parent}/.{path.name}.{os.getpid()}"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            is_whole = os.write(descriptor, content) == len(content)
        finally:
            os.close(descriptor)
        if not is_whole:  # the disk is full
            os.unlink(unfinished)  # noqa: PTH108 - as below
            return False
        os.rename(unfinished, path)  # noqa: PTH104 - once a second, during a measurement
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
        return False
    return True


class StatusFile:
    """Writes the status of a run into its folder."""

    interval_s = 1.0

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATUS_FILE
        self._is_closed = False

    def show(self, status: RunStatus) -> None:
        """Replace the file."""
        if not self._is_closed:
            replace_file(self._path, format_status(status))

    def close(self) -> None:
        """Leave the last state: the folder may be moved or cleaned from now on."""
        self._is_closed = True


FILE_INTERVAL_S: Final = 5.0
"""Collectors read the file every 15 s or less often."""
KEPT_S: Final = 3600.0
"""The file of a run that has written nothing for this long is removed by the next run there."""
_STATES: Final = (
    "working", "computing", "waiting for samples", "waiting for storage", "waiting for ranks",
)  # fmt: skip
_OUTCOMES: Final = (RUNNING, "finished", "failed", "interrupted", DIED)
_UNKNOWN: Final = float("nan")


def format_metrics(status: RunStatus) -> str:
    """Return the text that Prometheus reads; docs/following.md documents names and labels.

    Every family has the same help and type in all files, because a collector reads the files of several runs
    as one.
    """
    state = status.state if status.outcome == RUNNING else ""
    facts = {"kind": status.kind, "workload": status.workload, "host": status.host, "version": __version__}
    code = _UNKNOWN if status.exit_code is None else status.exit_code
    done = min(1.0, status.phase_done / status.phase_total) if status.phase_total else _UNKNOWN
    share = _UNKNOWN if status.share_done is None else status.share_done
    left = _UNKNOWN if status.left_s is None else status.left_s
    families: list[tuple[str, str, list[tuple[dict[str, str], float]]]] = [
        ("info", "What the run is; always 1.", [(facts, 1)]),
        ("ranks", "Ranks of the run.", [({}, status.ranks)]),
        (
            "outcome", "1 for how the run ended, or running.",
            [({"outcome": name}, status.outcome == name) for name in _OUTCOMES],
        ),
        ("start_time_seconds", "When the run began, since 1970.", [({}, status.started_at_s)]),
        ("update_time_seconds", "When the run last said anything.", [({}, status.written_at_s)]),
        ("exit_code", "The exit code of the run's command.", [({}, code)]),
        (
            "state", "1 for what rank 0 does now.",
            [({"state": name.replace(" ", "_")}, state == name) for name in _STATES],
        ),
        (
            "state_seconds", "For how long rank 0 has been in its state.",
            [({}, status.state_s if state else 0)],
        ),
        (
            "absent_rank", "1 for each rank that rank 0 waits for, the first eight of them.",
            [({"rank": str(rank)}, 1) for rank in status.absent_ranks],
        ),
        ("phase_done_ratio", "Share of the present phase that is done.", [({"phase": status.phase}, done)]),
        ("done_ratio", "Share of the whole run that is done.", [({}, share)]),
        ("left_seconds", "Estimated time to the end of the run.", [({}, left)]),
        (
            "counted_total", "What all ranks have done: read_bytes, written_bytes, samples, steps.",
            [({"unit": unit}, total) for unit, total in status.totals.items() if not unit.endswith("_s")],
        ),
        (
            "rank0_seconds_total", "Where the time of rank 0 went: computing, sample_wait, rank_wait.",
            [({"what": unit[:-2]}, total) for unit, total in status.totals.items() if unit.endswith("_s")],
        ),
    ]  # fmt: skip
    lines: list[str] = []
    for name, text, samples in families:
        known = [(labels, value) for labels, value in samples if not math.isnan(value)]
        if known:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP penstock_run_{name} {text}", f"# TYPE penstock_run_{name} {kind}"]
        for labels, value in known:
            pairs = {"run": status.run, **labels}
            # JSON escapes what Prometheus does: backslashes, quotes and line breaks.
            written = ",".join(
                f"{label}={json.dumps(content, ensure_ascii=False)}" for label, content in pairs.items()
            )
            lines.append(f"penstock_run_{name}{{{written}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


class TextCollectorFile:
    """Keeps `DIR/penstock-RUN.prom` up to date; its last state stays until `KEPT_S` have passed."""

    interval_s = FILE_INTERVAL_S

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(
                "No such directory",
                where=f"--metrics-dir {folder}",
                fix="Name the text collector's directory.",
            )
        self._folder = folder
        for old in folder.glob("penstock-*.prom"):
            with suppress(OSError):
                if time.time() - old.stat().st_mtime > KEPT_S:
                    old.unlink()

    def show(self, status: RunStatus) -> None:
        """Replace the file in one step."""
        replace_file(self._folder / f"penstock-{status.run}.prom", format_metrics(status).encode())

    def close(self) -> None:
        """Leave the last state."""


def format_age(seconds: float) -> str:
    """A time in whole seconds: `42 s`, `3 min 20 s`."""
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(round(seconds))


def state_sentence(status: RunStatus) -> str:
    """Describe what the run waits for and for how long; "" while it works."""
    if status.outcome != RUNNING:
        return ""
    for_s = f"for {format_age(status.state_s)}"
    if status.state == "waiting for ranks":
        shown = ", ".join(map(str, status.absent_ranks[:4])) + (
            " ..." if len(status.absent_ranks) > 4 else ""
        )
        which = f"rank{'s' * (len(status.absent_ranks) > 1)} {shown}" if shown else "other ranks"
        return f"waiting for {which} {for_s} ({status.awaiting})"
    if status.state in ("waiting for samples", "waiting for storage"):
        return f"{status.state} {for_s}"
    if status.state == "working" and status.state_s >= 10:
        return f"no progress {for_s}"
    return ""


def phase_sentence(status: RunStatus) -> str:
    """The phase and how far it is."""
    if not status.phase_total:
        return status.phase
    share = f"{min(1.0, status.phase_done / status.phase_total):.0%}"
    name, _, unit = status.phase.rpartition(" ")
    if unit in _COUNTED:
        count = f"{status.phase_done:,.0f} of {status.phase_total:,.0f} {unit}"
        return f"{name.rstrip(',')}: {count} ({share})"
    return f"{status.phase}: {share}"


def figure_lines(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Each kind of figure and its text: rates now and so far, and where the time of rank 0 went."""
    for unit, total in status.totals.items():
        if unit.endswith("_s") or unit == "steps":
            continue
        name, now, mean = unit.removesuffix("_bytes"), status.rates_now.get(unit), status.rates.get(unit, 0.0)
        is_bytes = unit.endswith("_bytes")
        rate = format_rate if is_bytes else lambda value: f"{value:,.1f}/s"
        moved = format_bytes(total) if is_bytes else f"{total:,.0f}"
        yield name, f"{rate(now or 0.0)} now, {rate(mean)} so far, {moved} in all"
    spent = {unit: status.totals[unit] for unit in _SHARES if unit in status.totals}
    whole_s = sum(spent.values())
    if whole_s:
        yield (
            "rank 0's time",
            ", ".join(f"{_SHARES[unit]} {seconds / whole_s:.1%}" for unit, seconds in spent.items()),
        )


def left_sentence(status: RunStatus) -> str:
    """Describe how far the whole run is and how long it will take, where that is known."""
    share = f"{status.share_done:.0%} of the run" if status.share_done is not None else ""
    left = f"about {format_age(max(1.0, status.left_s))} left" if status.left_s is not None else ""
    return ", ".join(filter(None, (share, left)))


def status_line(status: RunStatus) -> str:
    """All of it in one line, for logs."""
    figures = [
        f"{name} {text.partition(', ')[0]}" for name, text in figure_lines(status) if name != "rank 0's time"
    ]
    parts = [phase_sentence(status), *figures, left_sentence(status), state_sentence(status), status.remark]
    return "; ".join(filter(None, parts))
