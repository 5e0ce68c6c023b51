"""Findings as CSV: fixed columns, a row each, and texts that come back as they went in."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import csv_cell
from penstock.submission.check import CheckedResult
from penstock.submission.result_report import FINDING_COLUMNS, findings_csv, to_csv
from penstock.submission.rules.rule import Finding, Verdict

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)


def judged_with(*findings: Finding) -> CheckedResult:
    return CheckedResult(
        edition="v1.0",
        name="a/b",
        organisation="acme",
        division="open",
        system="fast",
        workload="unet3d",
        accelerator="h100",
        num_accelerators=None,
        metrics={},
        findings=findings,
    )


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_columns_are_those_that_were_promised() -> None:
    assert findings_csv([]) == (
        "name,org,division,system,workload,accelerator,num_accelerators,result,rule,verdict,value,limit,"
        "evidence,proof,fix,edition\r\n"
    )


def test_a_row_tells_its_result_and_its_finding() -> None:
    finding = Finding(
        verdict=Verdict.FAIL, proof="1 < 2", rule="sizing.steps", value="1", limit="2", fix="Add."
    )
    (row,) = rows_of(findings_csv([judged_with(finding)]))
    assert tuple(row) == FINDING_COLUMNS
    assert (row["org"], row["result"], row["verdict"], row["num_accelerators"]) == (
        "acme",
        "invalid",
        "fail",
        "",
    )
    assert (row["rule"], row["value"], row["limit"], row["proof"], row["fix"]) == (
        "sizing.steps", "1", "2", "1 < 2", "Add.",
    )  # fmt: skip


@given(texts=st.lists(TEXTS, min_size=4, max_size=4))
def test_texts_come_back_as_they_went_in_but_for_control_characters_and_formulas(texts: list[str]) -> None:
    proof, value, evidence, fix = texts
    finding = Finding(verdict=Verdict.PASS, proof=proof, value=value, evidence=evidence, fix=fix, rule="r")
    (row,) = rows_of(findings_csv([judged_with(finding)]))
    assert [row["proof"], row["value"], row["evidence"], row["fix"]] == list(map(csv_cell, texts))


def test_a_value_without_a_column_is_a_defect() -> None:
    with pytest.raises(ValueError, match="not in fieldnames"):
        to_csv(("a",), iter([{"a": 1, "b": 2}]))


def test_a_text_of_a_submission_is_no_formula_to_a_spreadsheet() -> None:
    finding = Finding(verdict=Verdict.FAIL, proof="=1+1", rule="r", value="-1", evidence="@SUM(1)")
    (row,) = rows_of(findings_csv([judged_with(finding)]))
    assert [row["proof"], row["value"], row["evidence"]] == ["'=1+1", "-1", "'@SUM(1)"]
