"""When a run began and ended, as its own files say."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.submission.facts import Document, Unknown

if TYPE_CHECKING:
    from penstock.submission.reading import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From the first to the last moment of an invocation."""

    begin: datetime
    end: datetime

    @property
    def duration_s(self) -> float:
        """Its length."""
        return (self.end - self.begin).total_seconds()


def interval_of(job: Job) -> Interval:
    """By the tool's own marks around the invocation; where it made none, by the benchmark's summary."""
    marks = ("invocation_start_time", "invocation_end_time")
    if all(job.metadata.has(mark) for mark in marks):
        document, keys = job.metadata, marks
    else:
        document, keys = job.summary, ("start", "end")
    found = Interval(begin=_moment(document, keys[0]), end=_moment(document, keys[1]))
    if found.duration_s < 0:
        raise Unknown(f"{keys[1]} is before {keys[0]}", where=document.file)
    return found


def _moment(document: Document, key: str) -> datetime:
    text = document.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Unknown(f"{key} is {text!r:.60}, not a date", where=document.file) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
