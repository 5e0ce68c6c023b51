"""`report.html` in a run's folder: written when a run ends, and again on demand.

Invariant: a page never fails its run. What goes wrong is logged with how to make the page later.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from penstock.errors import ObjectNotFound, Unavailable
from penstock.reports.page import write_report
from penstock.reports.report import Report
from penstock.results.run_folder import CHECKPOINTS_FILE, PAGE_FILE

logger = logging.getLogger(__name__)


def draw_run(folder: Path) -> Report:
    """The page of the run in `folder`; `ObjectNotFound` where it has left nothing to draw."""
    # Most ways into a run's folder never draw.
    from penstock.results.checkpoint_page import make_checkpoint_page  # noqa: PLC0415
    from penstock.results.run_record import read_record  # noqa: PLC0415
    from penstock.results.training_page import make_training_page  # noqa: PLC0415

    record = read_record(folder)
    kind = record.plan.get("kind", "training")
    if command := _DRAWN_WHILE_MEASURED.get(kind):
        raise ObjectNotFound(
            f"The page of a {kind} run is not drawn from its files",
            uri=str(folder),
            fix=f"Ask for it with --page when you run `{command}`; the JSON files here have its figures.",
        )
    is_checkpoints = kind == "checkpoint" or (folder / CHECKPOINTS_FILE).is_file()
    return (make_checkpoint_page if is_checkpoints else make_training_page)(folder, record)


def leave_run_page(folder: Path) -> None:
    """Write the page at the end of a run; where that fails, say how to make it."""
    try:
        write_report(draw_run(folder), folder / PAGE_FILE)
    except ObjectNotFound as error:
        logger.debug("Nothing to draw: %s", error)  # it ended before its first step, and said why
    except Unavailable as error:
        logger.warning("No page was made of this run: %s; then %s", error, _LATER.format(folder=folder))
    except Exception as error:  # hours of measurement must not end as a failure to draw them
        logger.warning("No page was made of this run: %r. %s", error, _LATER.format(folder=folder))
        logger.debug("The page of %s", folder, exc_info=error)


_DRAWN_WHILE_MEASURED: Final = {"probe": "penstock storage probe", "kvcache": "penstock kvcache run"}
_LATER: Final = "`penstock results page {folder}` makes it."
