"""`results.json` and `results.csv` beside a result's runs: the report of that result as judges make it.

Place in the flow: written once a result is whole. Invariant: its figures are recomputed from the leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.submission.reports.files import plan_tree, write_files
from penstock.submission.reports.reported import report_all

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.making.leaf import Series


def write_report(series: Series, edition: Edition) -> None:
    """Write the report of the series' result."""
    folder = (series.claim.root / series.folder).resolve()
    # The report holds the verdict, and a rule asks for the report: the second one is right about itself.
    for _ in range(2):
        found = [each for each in report_all(series.claim.root, edition) if folder in each.place.parents]
        planned, _kept = plan_tree(found)
        write_files(planned)
