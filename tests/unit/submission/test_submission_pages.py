"""The page of verdicts as text: everything is in it, and nothing can break out of it."""

import re
from collections.abc import Sequence

from penstock.reports.page import render_report
from penstock.submission import submission_pages
from penstock.submission.check import CheckedResult
from penstock.submission.result_figures import measure_figure
from penstock.submission.rules.rule import Finding, Verdict
from penstock.submission.submission_pages import figure_row

EVIL = '</script><img src=x onerror="alert(1)">'


def verdicts_page(
    checked: Sequence[CheckedResult], edition: str, left: Sequence[str], empty: Sequence[str] = ()
) -> str:
    return render_report(submission_pages.verdicts_page(checked, edition, left, empty))


def judged_with(*findings: Finding, name: str = "closed/acme/x") -> CheckedResult:
    return CheckedResult(
        edition="v1.0",
        name=name,
        organisation="acme",
        division="",
        system="",
        workload="",
        accelerator="",
        num_accelerators=None,
        metrics={},
        findings=findings,
    )


def test_every_finding_is_in_the_page_with_proof_figures_and_what_to_do() -> None:
    findings = [
        Finding(
            verdict=verdict,
            proof=f"proof of {verdict.name}",
            value="7",
            limit="5",
            fix=f"mend {verdict.name}",
            evidence=f"{verdict.name}.json",
            rule="r",
        )
        for verdict in Verdict
    ]
    page = verdicts_page([judged_with(*findings)], "v1.0", ["caches"], ["closed/idle"])
    for verdict in Verdict:
        assert f"proof of {verdict.name}" in page
        assert f"mend {verdict.name}" in page
        assert f"{verdict.name}.json" in page
    assert page.count("value 7; limit 5") == 5
    assert "closed/idle" in page
    assert "caches" in page


def test_texts_of_strangers_cannot_become_markup() -> None:
    finding = Finding(verdict=Verdict.FAIL, proof=EVIL, value=EVIL, evidence=EVIL, fix=EVIL, rule=EVIL)
    page = verdicts_page([judged_with(finding, name=EVIL)], EVIL, [EVIL], [EVIL])
    assert "<img" not in page
    assert page.count("</script>") == 1


def test_the_page_loads_nothing() -> None:
    page = verdicts_page([judged_with()], "v1.0", [])
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page) == []
    assert "@import" not in page


def test_findings_that_differ_in_evidence_alone_are_merged() -> None:
    findings = [
        Finding(verdict=Verdict.PASS, proof="5 >= 5", evidence=f"run{number}/summary.json", rule="r")
        for number in range(1, 6)
    ]
    page = verdicts_page([judged_with(*findings)], "v1.0", [])
    assert page.count("5 &gt;= 5") == 1
    assert "r, 5 times" in page
    assert all(finding.evidence in page for finding in findings)


def test_file_that_several_rules_cannot_read_is_one_finding() -> None:
    findings = [
        Finding(
            verdict=Verdict.NOT_CHECKED, proof="line 5 column 1", evidence="summary.json", rule=rule, fix=rule
        )
        for rule in ("means.run", "sizing.steps", "sizing.memory")
    ]
    page = verdicts_page([judged_with(*findings)], "v1.0", [])
    assert page.count("line 5 column 1") == 2, "in the answers, and once among the findings"
    assert "also sizing.steps, sizing.memory" in page
    assert "3 times" not in page


def test_row_of_a_figure_has_its_interval_only_from_two_runs_on() -> None:
    def row(**values: float) -> dict[str, str]:
        return figure_row(measure_figure("read", "s", values))

    assert (row(a=2.0)["95% from"], row(a=2.0)["to"], row(a=2.0)["mean"]) == ("-", "-", "2")
    assert (row(a=2.0, b=2.0)["95% from"], row(a=2.0, b=2.0)["to"]) == ("2", "2")
