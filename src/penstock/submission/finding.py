"""What a rule says of a thing it judged: verdict, evidence, figures, proof, and what to do.

Place in the flow: rules make findings, `check` gathers them, `report` writes them. Invariant: what could not
be judged is `not checked` with the reason; it never counts as valid, and never as invalid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a rule found."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"
    WARNING = "warning"
    NOT_APPLICABLE = "not applicable"
    NOT_CHECKED = "not checked"


class Validity(StrEnum):
    """What all findings of a result come to."""

    VALID = "valid"
    INVALID = "invalid"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict. `proof` is the arithmetic, or the reason why nothing was checked; `evidence` the file."""

    verdict: Verdict
    proof: str
    evidence: str = ""
    value: str = ""
    limit: str = ""
    fix: str = ""
    rule: str = ""


def validity(findings: Iterable[Finding]) -> Validity:
    """Invalid if one rule fails; else not checked if one could not be judged; else valid."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Validity.INVALID
    if Verdict.NOT_CHECKED in verdicts or not verdicts:
        return Validity.NOT_CHECKED
    return Validity.VALID
