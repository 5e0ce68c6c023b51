"""A run's figures once more, from its step events alone: also of one that goes on or never finished.

Place in the flow: what `show` does where the record has no figures, and the check of those that it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.results.events import Phase
from penstock.results.figures import phase_figures
from penstock.results.layout import RUN_FILE
from penstock.results.spec import spec_of
from penstock.results.tables import read_events

if TYPE_CHECKING:
    from penstock.results.figures import PhaseFigures
    from penstock.results.record import RunRecord


def review(folder: Path, record: RunRecord, phase: Phase = Phase.TRAIN) -> PhaseFigures | None:
    """A phase's figures, with times rank by rank; None where no epoch has a block complete on all ranks."""
    workload = spec_of(
        record.workload,
        name=record.name,
        accelerator=record.accelerator,
        where=str(folder / RUN_FILE),
    )
    return phase_figures(read_events(folder), workload, phase=phase)
