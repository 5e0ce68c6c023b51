"""The findings of a rule: verdict, evidence, figures, proof and the fix.

Rules make findings, `check` collects them, `reports` writes them. Invariant: what cannot be judged is `not
checked`, with the reason, and neither valid nor invalid.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from penstock.submission.parsed_file import MissingFact

_REPORTS: Final = frozenset({"results.json", "mlperf_storage_report.json"})
_FILE_ENDINGS: Final = (".json", ".yaml", ".yml", ".log", ".csv", ".parquet")


class Verdict(StrEnum):
    """The outcome of one rule for one thing."""

    PASS = "pass"  # noqa: S105 - a verdict, no password
    FAIL = "fail"
    WARNING = "warning"
    NOT_APPLICABLE = "not applicable"
    NOT_CHECKED = "not checked"


class Validity(StrEnum):
    """The outcome of all rules for one result."""

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


def combine(findings: Iterable[Finding]) -> Validity:
    """Invalid if any rule fails; else not checked if any could not be judged; else valid."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Validity.INVALID
    if Verdict.NOT_CHECKED in verdicts or not verdicts:
        return Validity.NOT_CHECKED
    return Validity.VALID


def pass_if(
    is_kept: bool,  # noqa: FBT001 - the condition that the call is about
    *,
    evidence: str,
    proof: str,
    value: object = "",
    limit: object = "",
    fix: str = "",
    otherwise: Verdict = Verdict.FAIL,
) -> Finding:
    """A pass if the rule is kept; else the verdict `otherwise`, with the fix."""
    return Finding(
        verdict=Verdict.PASS if is_kept else otherwise,
        evidence=evidence,
        value=str(value),
        limit=str(limit),
        proof=proof,
        fix="" if is_kept else fix,
    )


def not_applicable(evidence: str, reason: str) -> Finding:
    """The finding of a rule that does not apply."""
    return Finding(verdict=Verdict.NOT_APPLICABLE, evidence=evidence, proof=reason)


def not_checked(reason: MissingFact) -> Finding:
    """The finding of a rule that lacks a fact, with the field and the file."""
    return Finding(
        verdict=Verdict.NOT_CHECKED,
        proof=reason.what,
        evidence=reason.where,
        fix=reason.fix or _usual_fix(reason.where),
    )


def _usual_fix(where: str) -> str:
    """The fix for a fact that is missing here, by who writes such a file."""
    name = where.rpartition("/")[2]
    if "systems" in where.split("/"):
        return "Correct the description, which people write."
    if name in _REPORTS:
        return "Write the report again with `penstock submission report --write`."
    if name.startswith(".") or name.endswith(_FILE_ENDINGS):
        return "Restore the file as the benchmark wrote it."
    return "Hand in the whole folder, with every file of the benchmark."
