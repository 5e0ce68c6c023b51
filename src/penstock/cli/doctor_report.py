"""`penstock doctor`: what is installed and usable on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import option, verb
from penstock.cli.parsers import FOLDER
from penstock.cli.terminal import Terminal, View, bold
from penstock.environment import process_environment
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cluster.doctor import Diagnosis

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


@dataclass(frozen=True, kw_only=True)
class _DoctorOptions:
    at: Path = option("--at", FOLDER, "Examine the file system of this directory.", default=".")


@verb(_DoctorOptions)
def doctor(options: _DoctorOptions, terminal: Terminal) -> None:
    """Report what is installed and usable on this machine, with a fix for everything that is missing.

    Exits with 0 even if something is missing: that is a fact about this machine, not a failure.

    Examples:

      penstock doctor

      penstock doctor --at /mnt/pfs --json
    """
    from penstock.cluster.doctor import examine

    if not options.at.is_dir():
        raise UsageError(f"Directory {options.at} does not exist", where="--at", fix="Name a directory.")
    diagnoses = list(examine(options.at, process_environment()))
    terminal.result(
        {"diagnoses": [asdict(diagnosis) for diagnosis in diagnoses]},
        _view(diagnoses),
    )


def _view(diagnoses: list[Diagnosis]) -> View:
    """Diagnoses by area, each fix below what it is for."""
    width = max(len(diagnosis.subject) for diagnosis in diagnoses)
    for area, members in groupby(diagnoses, key=lambda diagnosis: diagnosis.area):
        yield bold(area)
        for diagnosis in members:
            state = (f"{diagnosis.state:<8}", _COLOURS[diagnosis.state])
            yield ["  ", state, f" {diagnosis.subject:<{width}}  {diagnosis.found}"]
            if diagnosis.fix:
                yield [" " * (width + 13), (diagnosis.fix, "italic")]
    states: list[str] = [diagnosis.state for diagnosis in diagnoses]
    yield ", ".join(f"{states.count(state)} {state}" for state in _COLOURS)
