"""Judged results as one document, and the exit code that they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.submission.finding import Validity

if TYPE_CHECKING:
    from penstock.submission.check import Judged
    from penstock.submission.edition import Edition


def document(judged: Sequence[Judged], edition: Edition, empty: Sequence[str] = ()) -> dict[str, Any]:
    """What `--json` prints; `empty` names the submitters without results."""
    return {
        "edition": edition.edition,
        "results": [_result(each) for each in judged],
        "summary": {
            **summary(judged),
            "without_results": list(empty),
            "for_the_reviewer": list(edition.for_the_reviewer),
        },
    }


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """How many results came to which verdict."""
    counts = Counter(each.verdict for each in judged)
    return {"results": len(judged)} | {verdict.value: counts[verdict] for verdict in Validity}


def exit_code(judged: Sequence[Judged]) -> int:
    """0 valid, 1 something invalid, 3 something not checked (and nothing invalid)."""
    verdicts = {each.verdict for each in judged}
    if Validity.INVALID in verdicts:
        return 1
    return 3 if Validity.NOT_CHECKED in verdicts else 0


def _result(judged: Judged) -> dict[str, Any]:
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
