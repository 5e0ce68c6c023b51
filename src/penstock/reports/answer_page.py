"""Pages that answer first: a banner with five answers and small charts, and below them the evidence.

Every page about a run, a probe or a state begins with the same five answers, so that a reader finds them
without reading: did it pass, how much was reached, what limits it, since when, and what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from penstock.errors import UsageError
from penstock.reports.html_page import Table, is_page, make_table, render_page
from penstock.reports.panels import Panel
from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import write_object


class Look(StrEnum):
    """The colour of a verdict; its word stands beside it."""

    GOOD = "good"
    BAD = "bad"
    DOUBT = "doubt"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """The answers of a page, each a word or a sentence.

    `troubles` are sentences about what stands out, the gravest first; `more` are other answers by name.
    """

    verdict: str
    look: Look
    figure: str
    limited_by: str
    since: str
    to_do: str
    troubles: Sequence[str] = ()
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def answers(self) -> dict[str, str]:
        """The answers below the figure, by their names."""
        return {
            **self.more,
            "Limited by": self.limited_by,
            "Since": self.since,
            "To do": self.to_do,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """Charts or a table below the banner; `why_empty` is said where there are none."""

    name: str
    title: str
    says: str = ""
    panels: Sequence[Panel] = ()
    table: Table | None = None
    is_folded: bool = False
    why_empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPage:
    """A whole page; `first` are the charts that stand beside the banner, on the first screen."""

    title: str
    subtitle: str
    banner: Banner
    first: Sequence[Panel] = ()
    exhibits: Sequence[Exhibit] = ()


def folded_table(
    name: str, title: str, rows: Sequence[Mapping[str, str]], *, says: str = "", bars: str = ""
) -> Exhibit:
    """A table that opens with a click; rows of one and the same columns."""
    return Exhibit(
        name=name,
        title=title,
        says=says,
        table=make_table(rows, bars=bars),
        is_folded=True,
        why_empty="None.",
    )


def write_answer_page(page: AnswerPage, path: Path) -> None:
    """Write the page, over an earlier one; a file that is no page is kept, and an error."""
    if path.exists() and not is_page(path):
        raise UsageError(
            "This file is no page of Penstock, and is kept", where=str(path), fix="Name another one."
        )
    text = render_answer_page(page).encode(errors="backslashreplace")
    # Complete or not at all, as every file of a run's folder.
    write_object(open_local(path.parent), path.name, [text])


def render_answer_page(page: AnswerPage) -> str:
    """The page as HTML; it loads nothing and runs no script."""
    return render_page("answer.html", title=page.title, subtitle=page.subtitle, page=page)
