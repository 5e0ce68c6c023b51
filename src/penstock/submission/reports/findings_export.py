"""Findings for programs: the document of `--json`, rows of CSV, and the exit code.

Invariant: CSV columns keep their names and places; new ones come last.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from penstock.errors import printable
from penstock.submission.check import CheckedResult

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
