"""Findings as CSV, a row each, in columns that stay as they are.

Pure: judged results in, text out. Invariant: columns keep their names and places; new ones come last.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.submission.check import Judged

FINDING_COLUMNS: Final = (
    "name", "org", "division", "system", "workload", "accelerator", "num_accelerators", "result", "rule",
    "verdict", "value", "limit", "evidence", "proof", "fix",
)  # fmt: skip


def findings_csv(judged: Sequence[Judged]) -> str:
    """All findings; `result` is the verdict on the whole result."""
    return to_csv(FINDING_COLUMNS, (row for each in judged for row in _rows(each)))


def to_csv(columns: Sequence[str], rows: Iterator[Mapping[str, object]]) -> str:
    """Rows under fixed columns, by RFC 4180; what is None is an empty cell, what has no column a defect."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="raise", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(judged: Judged) -> Iterator[dict[str, object]]:
    for finding in judged.findings:
        yield {
            "name": judged.name,
            "org": judged.organisation,
            "division": judged.division,
            "system": judged.system,
            "workload": judged.workload,
            "accelerator": judged.accelerator,
            "num_accelerators": judged.num_accelerators,
            "result": judged.verdict.value,
            "rule": finding.rule,
            "verdict": finding.verdict.value,
            "value": finding.value,
            "limit": finding.limit,
            "evidence": finding.evidence,
            "proof": finding.proof,
            "fix": finding.fix,
        }
