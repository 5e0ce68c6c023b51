"""Findings as SARIF: the members that the standard requires, kinds and levels, places and rules."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.timed_tree import valid_round

from penstock.submission.check import CheckedResult, check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Finding, Verdict
from penstock.submission.reports.sarif import sarif
from penstock.submission.rules import RULES

EDITION = load_edition("v1.0")


def judged_with(*findings: Finding, name: str = "closed/acme/results/fast/unet3d") -> CheckedResult:
    return CheckedResult(
        edition="v1.0",
        name=name,
        organisation="acme",
        division="closed",
        system="fast",
        workload="unet3d",
        accelerator="h100",
        num_accelerators=2,
        metrics={},
        findings=findings,
    )


def results_of(judged: Sequence[CheckedResult], root: Path = Path("/tree")) -> list[dict[str, Any]]:
    (run,) = sarif(judged, RULES, root)["runs"]
    results: list[dict[str, Any]] = run["results"]
    return results


def test_a_log_has_what_the_standard_requires(tmp_path: Path) -> None:
    submission = valid_submission()
    submission.drop("systems/")
    judged = list(check(submission.write(tmp_path), EDITION))
    log = sarif(judged, RULES, tmp_path)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "penstock"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", driver["semanticVersion"])
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids)
    assert run["originalUriBaseIds"]["TREE"]["uri"] == f"{tmp_path.resolve().as_uri()}/"
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]
    for result in run["results"]:
        assert result["message"]["text"]
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["kind"] in {"pass", "open", "notApplicable", "fail"}
        assert (result["level"] == "none") == (result["kind"] != "fail")


def test_every_finding_is_one_result_and_every_rule_is_described(tmp_path: Path) -> None:
    judged = list(check(valid_submission().write(tmp_path), EDITION))
    assert len(results_of(judged)) == sum(len(each.findings) for each in judged)
    (run,) = sarif(judged, RULES, tmp_path)["runs"]
    told = run["tool"]["driver"]["rules"]
    assert [each["id"] for each in told] == [rule.id for rule in RULES]
    assert all(each["shortDescription"]["text"] and each["help"]["text"] for each in told)


@pytest.mark.parametrize(
    ("verdict", "kind", "level"),
    [
        (Verdict.PASS, "pass", "none"),
        (Verdict.FAIL, "fail", "error"),
        (Verdict.WARNING, "fail", "warning"),
        (Verdict.NOT_APPLICABLE, "notApplicable", "none"),
        (Verdict.NOT_CHECKED, "open", "none"),
    ],
)
def test_each_verdict_has_its_kind_and_level(verdict: Verdict, kind: str, level: str) -> None:
    (result,) = results_of([judged_with(Finding(verdict=verdict, proof="p", rule="runs.number"))])
    assert (result["kind"], result["level"]) == (kind, level)
    assert result["properties"]["verdict"] == verdict.value


NAME = "closed/acme/results/fast/unet3d"


@pytest.mark.parametrize(
    ("evidence", "place"),
    [
        ("a b/ü#1.json", {"artifactLocation": {"uri": "a%20b/%C3%BC%231.json", "uriBaseId": "TREE"}}),
        (
            "systems/fast.yaml:12",
            {
                "artifactLocation": {"uri": "systems/fast.yaml", "uriBaseId": "TREE"},
                "region": {"startLine": 12},
            },
        ),
        ("", {"artifactLocation": {"uri": NAME, "uriBaseId": "TREE"}}),
        ("the top of the tree", {"artifactLocation": {"uri": NAME, "uriBaseId": "TREE"}}),
    ],
    ids=["odd names", "a line", "no file: the result itself", "words: the result itself"],
)
def test_a_result_points_to_its_evidence(evidence: str, place: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    for name in ("a b/ü#1.json", "systems/fast.yaml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    finding = Finding(verdict=Verdict.FAIL, proof="p", evidence=evidence, rule="runs.number")
    for name in (NAME, f"{NAME} (h100)"):
        (result,) = results_of([judged_with(finding, name=name)], tmp_path)
        (location,) = result["locations"]
        assert location["physicalLocation"] == place
        assert location["logicalLocations"][0]["fullyQualifiedName"] == name
        assert result["properties"]["evidence"] == evidence


def test_evidence_outside_of_the_tree_keeps_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.json").write_text("")
    evidence = str(tmp_path / "elsewhere.json")
    finding = Finding(verdict=Verdict.FAIL, proof="p", evidence=evidence, rule="runs.number")
    (result,) = results_of([judged_with(finding)], tmp_path / "tree")
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": Path(evidence).as_uri()}


@pytest.mark.parametrize("edition", ["v1.0", "v2.0", "v3.0"])
def test_every_result_of_a_real_tree_leads_to_something_that_is_there(tmp_path: Path, edition: str) -> None:
    tree = valid_submission() if edition == "v1.0" else valid_round(edition)
    judged = list(check(tree.write(tmp_path), load_edition(edition)))
    for result in results_of(judged, tmp_path):
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert (tmp_path / unquote(uri)).exists(), uri


def test_a_finding_keeps_its_fingerprint_when_its_verdict_changes() -> None:
    def prints(verdict: Verdict) -> list[str]:
        same = Finding(verdict=verdict, proof=verdict.value, evidence="summary.json", rule="means.run")
        results = results_of([judged_with(same, same), judged_with(same, name="another")])
        return [result["partialFingerprints"]["finding/v1"] for result in results]

    assert prints(Verdict.PASS) == prints(Verdict.FAIL)
    assert len(set(prints(Verdict.PASS))) == 3
