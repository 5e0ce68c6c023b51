"""`report.html` in a run's folder: written when a run ends, and again on demand.

Invariant: a page never makes its run fail. Errors are logged, with the command that creates the page later.
"""

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.errors import DataDamaged, ObjectNotFound, PenstockError, Unavailable, name_some
from penstock.reports.page import write_report
from penstock.reports.report import Look, Report, table_section
from penstock.results.run_folder import CHECKPOINTS_FILE, PAGE_FILE
from penstock.units import format_bytes, format_count

logger = logging.getLogger(__name__)


Pages = Mapping[str, Callable[[Path], Report]]
"""For kinds of runs that this package does not know: the function that builds the page for a run's folder."""


def draw_run(folder: Path, others: Pages) -> Report:
    """Build the page for the run in `folder`. Raises `ObjectNotFound` if the run has left nothing to show."""
    # Imported here, because most code that uses a run's folder builds no page.
    from penstock.results.checkpoint_page import make_checkpoint_page  # noqa: PLC0415
    from penstock.results.run_record import RunOutcome, read_record  # noqa: PLC0415
    from penstock.results.training_page import make_training_page  # noqa: PLC0415

    record = read_record(folder)
    kind = record.plan.get("kind", "training")
    try:
        if draw := others.get(kind):
            page = draw(folder)
            facts = {"measured": page.subtitle}
        else:
            is_checkpoints = kind == "checkpoint" or (folder / CHECKPOINTS_FILE).is_file()
            page, facts = (make_checkpoint_page if is_checkpoints else make_training_page)(folder, record)
    except PenstockError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise DataDamaged(
            f"The files of this run are not as Penstock writes them: {error!r}",
            uri=str(folder),
            fix="--debug shows which one was being read.",
        ) from error
    banner = page.banner
    if record.outcome is not RunOutcome.FINISHED:
        look = Look.BAD if record.outcome is RunOutcome.FAILED else Look.DOUBT
        banner = replace(banner, verdict=record.outcome.value, look=look)
    if record.why:
        banner = replace(banner, troubles=[record.why, *banner.troubles])
    hosts = name_some([host.host for host in record.hosts])
    workload = "_".join(filter(None, (record.name, record.accelerator)))
    subtitle = (
        f"{workload}, {format_count(record.ranks, 'rank')} on {hosts or 'unknown hosts'}, "
        f"{record.started_at[:16].replace('T', ' ')} UTC, penstock {record.penstock_version}"
    )
    facts = {
        "command": shlex.join(record.command),
        **facts,
        "outcome": f"{record.outcome}: {record.why}" if record.why else str(record.outcome),
        "began": record.started_at,
        "ended": record.ended_at or "-",
        "hosts": "; ".join(
            f"{host.host}: {format_count(host.num_cores, 'core')}, {format_bytes(host.memory_bytes)}, "
            f"{host.kernel}"
            for host in record.hosts
        ),
        "versions": f"penstock {record.penstock_version}, Python {record.python_version}",
    }
    facts |= {f"remark {number}": remark for number, remark in enumerate(record.remarks, start=1)}
    rows = [{"fact": name, "value": value} for name, value in facts.items()]
    table = table_section("facts", "Run and settings", rows)
    return replace(page, subtitle=subtitle, banner=banner, sections=[*page.sections, table])


def leave_run_page(folder: Path, others: Pages) -> None:
    """Write the page at the end of a run. If that fails, log how to create it."""
    later = f"`penstock results page {shlex.quote(str(folder))}` makes it."
    try:
        write_report(draw_run(folder, others), folder / PAGE_FILE)
    except ObjectNotFound as error:
        logger.debug("Nothing to draw: %s", error)  # the run ended before its first step, and reported why
    except Unavailable as error:
        logger.warning("No page was made of this run: %s; then %s", error, later)
    except Exception as error:  # hours of measurement must not end as a failure to draw them
        logger.warning("No page was made of this run: %r. %s", error, later)
        logger.debug("The page of %s", folder, exc_info=error)
