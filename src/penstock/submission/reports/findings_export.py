"""Findings for programs: the document of `--json`, rows of CSV, and the exit code.

Invariant: CSV columns keep their names and places; new ones come last.
"""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from penstock.errors import printable
from penstock.submission.check import CheckedResult, LoneDescription
from penstock.submission.edition import Edition
from penstock.submission.edition_choice import EditionChoice
from penstock.submission.find_results import FoundTree
from penstock.submission.finding import Validity


def check_document(
    checked: Sequence[CheckedResult],
    edition: Edition | EditionChoice,
    found: FoundTree,
    alone: Sequence[LoneDescription] = (),
) -> dict[str, Any]:
    """What `--json` prints; `found` names what is no result, `alone` judges descriptions without results."""
    return {
        "edition": edition.edition,
        "results": [
            result.identity()
            | {
                "edition": result.edition,
                "verdict": result.verdict.value,
                "metrics": result.metrics,
                "findings": [asdict(finding) for finding in result.findings],
            }
            for result in checked
        ],
        "summary": {
            **count_verdicts(checked),
            "without_results": list(found.without_results),
            "leftovers": list(found.leftovers),
            "unreadable": list(found.unreadable),
            "descriptions": [asdict(description) for description in alone],
            "for_the_reviewer": list(edition.for_the_reviewer),
        },
    }


def count_verdicts(checked: Sequence[CheckedResult]) -> dict[str, Any]:
    """The number of results by verdict."""
    counts = Counter(result.verdict for result in checked)
    return {"results": len(checked)} | {verdict.value: counts[verdict] for verdict in Validity}


def exit_code(checked: Sequence[CheckedResult]) -> int:
    """0 valid, 1 something invalid, 3 something not checked (and nothing invalid)."""
    verdicts = {result.verdict for result in checked}
    if Validity.INVALID in verdicts:
        return 1
    return 3 if Validity.NOT_CHECKED in verdicts else 0


FINDING_COLUMNS: Final = (
    "name", "org", "division", "system", "workload", "accelerator", "num_accelerators", "result", "rule",
    "verdict", "value", "limit", "evidence", "proof", "fix", "edition",
)  # fmt: skip


def findings_csv(checked: Sequence[CheckedResult]) -> str:
    """A row for each finding; `result` is the verdict on the whole result."""
    rows = (
        result.identity() | {"result": result.verdict.value, "edition": result.edition} | asdict(finding)
        for result in checked
        for finding in result.findings
    )
    return to_csv(FINDING_COLUMNS, rows)


def to_csv(columns: Sequence[str], rows: Iterator[Mapping[str, object]]) -> str:
    """Rows under fixed columns, by RFC 4180; None is an empty cell, an unknown column is an error.

    Programs print cells on terminals, so control characters are escaped as there.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="raise", lineterminator="\r\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: printable(cell) if isinstance(cell, str) else cell for key, cell in row.items()}
        )
    return text.getvalue()
