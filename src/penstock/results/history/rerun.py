"""A run once more: its very command line, in the folder where it was given, or why that cannot be.

Pure but for a look whether folders are there. Invariant: what would not be the same command (a secret that
was not kept, ranks that another program started) is refused, never guessed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.results.history.run_catalog import CatalogedRun

_PROGRAMS: Final[Mapping[str, str]] = MappingProxyType(
    {"penstock": "penstock.cli", "penstock-dlio": "penstock.cli.dlio"}
)
"""Where each program's `main` is: the interpreter at hand runs it, whatever the PATH says."""
_OWN_RANKS: Final = ("--ranks", "--hosts", "--hostfile")
_HIDDEN: Final = "***"
_NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunPlan:
    """What to start and where; `shown` is the command as it was given, `notes` what is no longer the same."""

    arguments: tuple[str, ...]
    working_folder: str
    shown: str
    notes: tuple[str, ...]


def plan_rerun(run: CatalogedRun, settings: Mapping[str, str]) -> RerunPlan:
    """How to repeat `run`; `settings` are the user's own variables now, without secrets."""
    began = run.began
    if began is None:
        raise UsageError(
            f"Nobody entered how {run.folder} was started",
            fix="The history has runs that Penstock began in this folder; this one came from elsewhere.",
        )
    shown = shlex.join(began.command)
    program, *words = began.command or ("",)
    if program not in _PROGRAMS:
        raise UsageError(
            f"Run {run.id} was started by another program", where=shown, fix="Start it there once more."
        )
    if any(_HIDDEN in word for word in began.command):
        raise UsageError(
            f"The command of run {run.id} had a secret, which was not kept",
            where=shown,
            fix="Give the command yourself, secrets by the environment; then it can be repeated.",
        )
    if any(_NO_TEXT in word for word in (*began.command, began.working_folder)):
        raise UsageError(
            f"The command of run {run.id} had bytes that are no text, which were not kept",
            where=shown,
            fix="Give the command yourself.",
        )
    if began.ranks > 1 and not any(word.partition("=")[0] in _OWN_RANKS for word in words):
        raise UsageError(
            f"The {began.ranks} ranks of run {run.id} were started by a launcher",
            fix=f"Start them as you did, for instance: mpiexec -n {began.ranks} {shown}",
        )
    _check_folders(run, words)
    return RerunPlan(
        arguments=(sys.executable, "-c", _starter(program), *words),
        working_folder=began.working_folder,
        shown=shown,
        notes=tuple(_changes(began.settings, settings)),
    )


def _check_folders(run: CatalogedRun, words: list[str]) -> None:
    assert run.began is not None
    if not Path(run.began.working_folder).is_dir():
        raise UsageError(
            f"The folder where run {run.id} was started is gone",
            where=run.began.working_folder,
            fix="Make it, or give the command yourself: paths in it may be relative.",
        )
    if run.began.is_named and run.path is not None and any(run.folder in word for word in words):
        raise UsageError(
            f"The command of run {run.id} names its folder, which a repetition would clear",
            where=str(run.path),
            fix=f"Take the run away first: penstock results rm {run.id}; it can be restored.",
        )


def _starter(program: str) -> str:
    return f"import sys; from {_PROGRAMS[program]} import main; sys.exit(main())"


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {then.get(name, 'not set')}, and is {now.get(name, 'not set')} now"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
