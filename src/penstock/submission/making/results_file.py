"""`results.json` beside a result's runs: its figures, recomputed from the runs themselves.

Place in the flow: written once a result is whole. Invariant: its figures are those that judges recompute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.results.durable import write_json
from penstock.submission.check import check
from penstock.submission.names import RESULTS_FILE, Phase

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.making.leaf import Series


def write_results_file(series: Series, edition: Edition) -> None:
    """Write the figures of the series' result."""
    root = series.claim.root
    name = str(series.folder)
    found = next(each for each in check(root, edition, rules=()) if each.name == name)
    document = {
        "organisation": found.organisation,
        "division": found.division,
        "system": found.system,
        "workload": found.workload,
        "accelerator": found.accelerator,
        "num_accelerators": found.num_accelerators,
        "metrics": found.metrics,
    }
    write_json(root / series.folder_of(Phase.RUN), RESULTS_FILE, document)
