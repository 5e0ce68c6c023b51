"""Repeat a run: its exact command line in its working folder, or the reason why that is not possible.

Only the existence of folders is looked up. Invariant: a command that would differ (a secret was redacted,
another program started the ranks) is refused, never guessed.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from penstock.errors import UsageError
from penstock.results.history.run_catalog import CatalogedRun

_PROGRAMS: Final[Mapping[str, str]] = MappingProxyType(
    {"penstock": "penstock.cli", "penstock-dlio": "penstock.cli.dlio"}
)
"""The module with each program's `main`, which this interpreter runs, whatever the PATH says."""
_OWN_RANKS: Final = ("--ranks", "--hosts", "--hostfile")
_HIDDEN: Final = "***"
_UNDECODABLE: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunPlan:
    """What to start and where; `command` is the original command line, `notes` what has changed since."""

    arguments: tuple[str, ...]
    working_folder: str
    command: str
    notes: tuple[str, ...]


def plan_rerun(run: CatalogedRun, settings: Mapping[str, str]) -> RerunPlan:
    """Plan the repetition of `run`; `settings` are the user's present variables, without secrets."""
    began = run.began
    if began is None:
        raise UsageError(
            f"The history has no entry for {run.folder}, so its command is unknown",
            fix="Give the command yourself. Only runs that Penstock started in this folder are entered.",
        )
    shown = shlex.join(began.command)
    program, *words = began.command or ("",)
    if program not in _PROGRAMS:
        raise UsageError(
            f"Run {run.id} was started by another program", where=shown, fix="Repeat it with that program."
        )
    if any(_HIDDEN in word for word in began.command):
        raise UsageError(
            f"The command of run {run.id} had a secret, which was not recorded",
            where=shown,
            fix="Give the command yourself, with secrets in the environment; then it can be repeated.",
        )
    if any(_UNDECODABLE in word for word in (*began.command, began.working_folder)):
        raise UsageError(
            f"The command of run {run.id} had bytes that are not text, which were not recorded",
            where=shown,
            fix="Give the command yourself.",
        )
    if began.ranks > 1 and not any(word.partition("=")[0] in _OWN_RANKS for word in words):
        raise UsageError(
            f"The {began.ranks} ranks of run {run.id} were started by a launcher",
            fix=f"Start them with the launcher, for instance: mpiexec -n {began.ranks} {shown}",
        )
    _check_folders(run, words)
    starter = f"import sys; from {_PROGRAMS[program]} import main; sys.exit(main())"
    return RerunPlan(
        arguments=(sys.executable, "-c", starter, *words),
        working_folder=began.working_folder,
        command=shown,
        notes=tuple(_changes(began.settings, settings)),
    )


def _check_folders(run: CatalogedRun, words: list[str]) -> None:
    assert run.began is not None
    if not Path(run.began.working_folder).is_dir():
        raise UsageError(
            f"The folder where run {run.id} was started is gone",
            where=run.began.working_folder,
            fix="Create it, or give the command yourself: paths in it may be relative.",
        )
    if run.began.is_named and run.path is not None and any(run.folder in word for word in words):
        raise UsageError(
            f"The command of run {run.id} names its folder, which the repetition would overwrite",
            where=str(run.path),
            fix=f"Remove the run first: penstock results rm {run.id}; it can be restored.",
        )


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was {then.get(name, 'not set')}, and is now {now.get(name, 'not set')}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
