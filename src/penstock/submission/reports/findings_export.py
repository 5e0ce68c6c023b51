"""Findings for programs: the document of `--json`, rows of CSV, and the exit code.

Invariant: CSV columns keep their names and places; new ones come last.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from penstock.submission.finding import Validity

if TYPE_CHECKING:
    from penstock.submission.check import CheckedResult
    from penstock.submission.edition import Edition


def check_document(
    judged: Sequence[CheckedResult], edition: Edition, empty: Sequence[str] = ()
) -> dict[str, Any]:
    """What `--json` prints; `empty` names the submitters without results."""
    return {
        "edition": edition.edition,
        "results": [_result(each) for each in judged],
        "summary": {
            **count_verdicts(judged),
            "without_results": list(empty),
            "for_the_reviewer": list(edition.for_the_reviewer),
        },
    }


def count_verdicts(judged: Sequence[CheckedResult]) -> dict[str, Any]:
    """How many results came to which verdict."""
    counts = Counter(each.verdict for each in judged)
    return {"results": len(judged)} | {verdict.value: counts[verdict] for verdict in Validity}


def exit_code(judged: Sequence[CheckedResult]) -> int:
    """0 valid, 1 something invalid, 3 something not checked (and nothing invalid)."""
    verdicts = {each.verdict for each in judged}
    if Validity.INVALID in verdicts:
        return 1
    return 3 if Validity.NOT_CHECKED in verdicts else 0


def _result(judged: CheckedResult) -> dict[str, Any]:
    return {
        "name": judged.name,
        "org": judged.organisation,
        "division": judged.division,
        "system": judged.system,
        "workload": judged.workload,
        "accelerator": judged.accelerator,
        "num_accelerators": judged.num_accelerators,
        "verdict": judged.verdict.value,
        "metrics": judged.metrics,
        "findings": [asdict(finding) for finding in judged.findings],
    }


FINDING_COLUMNS: Final = (
    "name", "org", "division", "system", "workload", "accelerator", "num_accelerators", "result", "rule",
    "verdict", "value", "limit", "evidence", "proof", "fix",
)  # fmt: skip


def findings_csv(judged: Sequence[CheckedResult]) -> str:
    """All findings; `result` is the verdict on the whole result."""
    return to_csv(FINDING_COLUMNS, (row for each in judged for row in _rows(each)))


def to_csv(columns: Sequence[str], rows: Iterator[Mapping[str, object]]) -> str:
    """Rows under fixed columns, by RFC 4180; what is None is an empty cell, what has no column a defect."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="raise", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _rows(judged: CheckedResult) -> Iterator[dict[str, object]]:
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
