"""Findings as SARIF 2.1.0, which viewers of code analysis show next to the files.

Invariants: one result for each finding, passes included; each path exists in the checked folder, whose own
location is stated once in `originalUriBaseIds`.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from penstock import __version__
from penstock.submission.check import CheckedResult
from penstock.submission.finding import Finding, Verdict
from penstock.submission.reports.findings_export import count_verdicts, exit_code
from penstock.submission.rules.rule import Rule

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
TREE: Final = "TREE"
"""The name of the checked folder in every location."""

_KINDS: Final[Mapping[Verdict, tuple[str, str]]] = MappingProxyType(
    {
        Verdict.FAIL: ("fail", "error"),
        Verdict.WARNING: ("fail", "warning"),
        Verdict.NOT_CHECKED: ("open", "none"),
        Verdict.PASS: ("pass", "none"),
        Verdict.NOT_APPLICABLE: ("notApplicable", "none"),
    }
)
"""`kind` and `level`; the standard allows a level other than "none" for the kind "fail" alone."""

_LINE: Final = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)")


def sarif(checked: Sequence[CheckedResult], rules: Sequence[Rule], root: Path) -> dict[str, Any]:
    """All findings below `root` as one run of one tool."""
    positions = {rule.id: position for position, rule in enumerate(rules)}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver(rules)},
                "originalUriBaseIds": {TREE: {"uri": _folder_uri(root)}},
                "columnKind": "unicodeCodePoints",
                "invocations": [{"executionSuccessful": True, "exitCode": exit_code(checked)}],
                "results": [result for entry in checked for result in _build_results(entry, positions, root)],
                "properties": count_verdicts(checked),
            }
        ],
    }


def _driver(rules: Sequence[Rule]) -> dict[str, Any]:
    return {
        "name": "penstock",
        "fullName": "penstock submission check",
        "semanticVersion": __version__,
        "rules": [_describe_rule(rule) for rule in rules],
    }


def _describe_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.formula},
        "help": {"text": f"Passes: {rule.passes}\nFails: {rule.fails}\nSource: {rule.source}"},
        "defaultConfiguration": {"level": "error"},
        "properties": {"editions": list(rule.editions)},
    }


def _build_results(
    checked: CheckedResult, positions: Mapping[str, int], root: Path
) -> Iterator[dict[str, Any]]:
    occurrences: Counter[tuple[str, str]] = Counter()
    for finding in checked.findings:
        subject = (finding.rule, finding.evidence)
        occurrences[subject] += 1
        kind, level = _KINDS[finding.verdict]
        yield {
            "ruleId": finding.rule,
            **({"ruleIndex": positions[finding.rule]} if finding.rule in positions else {}),
            "kind": kind,
            "level": level,
            "message": {"text": _message(finding)},
            "locations": [_location(finding.evidence, checked, root)],
            "partialFingerprints": {
                "finding/v1": _fingerprint(checked.name, *subject, str(occurrences[subject]))
            },
            "properties": {
                "verdict": finding.verdict.value,
                "value": finding.value,
                "limit": finding.limit,
                "fix": finding.fix,
                "evidence": finding.evidence,
            },
        }


def _message(finding: Finding) -> str:
    return " ".join(filter(None, (finding.proof, finding.fix))) or finding.verdict.value


def _location(evidence: str, checked: CheckedResult, root: Path) -> dict[str, Any]:
    match = _LINE.fullmatch(evidence)
    file = match["file"] if match else evidence
    is_there = bool(file) and (root / file).exists()
    region = {"region": {"startLine": int(match["line"])}} if match and is_there else {}
    artifact = _artifact(file if is_there else _find_folder(checked, root))
    return {
        "physicalLocation": {"artifactLocation": artifact, **region},
        "logicalLocations": [{"fullyQualifiedName": checked.name, "kind": "object"}],
    }


def _artifact(file: str) -> dict[str, str]:
    if Path(file).is_absolute():
        return {"uri": Path(file).as_uri()}
    return {"uri": quote(os.fsencode(file)) or "./", "uriBaseId": TREE}


def _find_folder(checked: CheckedResult, root: Path) -> str:
    """The location of a finding without a file: the result's folder, else the checked folder."""
    names = (checked.name, checked.name.rpartition(" (")[0])
    return next((name for name in names if name and (root / name).is_dir()), "")


def _fingerprint(*words: str) -> str:
    """Identifies the finding in later checks, whatever its verdict and figures are then."""
    return hashlib.sha256("\0".join(words).encode(errors="backslashreplace")).hexdigest()


def _folder_uri(root: Path) -> str:
    return f"{root.resolve().as_uri().rstrip('/')}/"
