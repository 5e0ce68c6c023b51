"""Rules on time: runs follow one another without long pauses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.submission.facts import Unknown
from penstock.submission.rules.base import LATER, Rule, judged
from penstock.submission.times import interval_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.finding import Finding
    from penstock.submission.reading import Result


class Pauses(Rule):
    """Consecutive runs."""

    editions = LATER
    id = "runs.pauses"
    title = "Runs follow one another, with pauses shorter than a run"
    source = "2.1.18: the text measures from end to start, its tool from start to start; both agree here"
    formula = "0 <= begin of a run - end of the run before < max_pause_runs x duration of the shortest run"
    passes = "runs of 18 minutes with 2 minutes between them"
    fails = "runs of 18 minutes with 18 minutes between them"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each pause."""
        if len(result.runs) < 2:
            raise Unknown(f"there are {len(result.runs)} runs, and no pause", where=result.name)
        times = [interval_of(run.jobs[0]) for run in result.runs]
        shortest_s = min(each.duration_s for each in times)
        limit_s = edition.of_time().max_pause_runs * shortest_s
        for (before, after), run in zip(pairwise(times), result.runs[1:], strict=True):
            pause_s = (after.begin - before.end).total_seconds()
            kept = 0 <= pause_s < limit_s
            yield judged(
                kept,
                evidence=run.jobs[0].name,
                value=f"{pause_s:g} s",
                limit=f"{limit_s:g} s",
                proof=(
                    f"{pause_s:g} s after the run before, {'within' if kept else 'not within'} 0 and "
                    f"{limit_s:g} s (the shortest run takes {shortest_s:g} s)"
                ),
                fix="Repeat the runs one after the other.",
            )
