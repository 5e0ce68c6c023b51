"""What is left of a rehearsal's findings once its scale is taken into account."""

import pytest

from penstock.submission.check import assess_rehearsal
from penstock.submission.rules.rule import Finding, Verdict

REHEARSAL = Finding(rule="runs.rehearsal", verdict=Verdict.FAIL, proof="1 of 8")


def fail(rule: str, proof: str = "too few") -> Finding:
    return Finding(rule=rule, verdict=Verdict.FAIL, proof=proof)


@pytest.mark.parametrize(
    ("rules", "summary", "is_ready"),
    [
        ((), "valid but for size", True),
        (("sizing.steps", "sizing.memory"), "valid but for size", True),
        (("checkpoint.size",), "valid but for size", True),
        (("paths.filesystems",), "valid but for size and place", True),
        (("utilization.minimum",), "valid but for size and utilization", True),
        (("paths.filesystems", "utilization.stated"), "valid but for size, place and utilization", True),
        (("runs.pauses",), "not valid, whatever its size: runs.pauses", False),
        (
            ("runs.exit", "runs.pauses", "runs.exit"),
            "not valid, whatever its size: runs.exit, runs.pauses",
            False,
        ),
    ],
)
def test_assessment_names_what_stands_against_the_result(
    rules: tuple[str, ...],
    summary: str,
    is_ready: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    assessment = assess_rehearsal([REHEARSAL, *map(fail, rules)])
    assert assessment is not None
    assert (assessment.summary, not assessment.other) == (summary, is_ready)


def test_what_was_not_checked_stands_against_the_result() -> None:
    unknown = Finding(rule="runs.files", verdict=Verdict.NOT_CHECKED, proof="no file")
    assessment = assess_rehearsal([REHEARSAL, unknown])
    assert assessment is not None
    assert assessment.other == (unknown,)


def test_equal_findings_of_several_runs_are_one() -> None:
    assessment = assess_rehearsal(
        [REHEARSAL, fail("sizing.steps"), fail("sizing.steps"), fail("sizing.steps", "b")]
    )
    assert assessment is not None
    assert [finding.proof for finding in assessment.findings] == ["too few", "b"]


def test_a_real_result_has_no_assessment() -> None:
    assert assess_rehearsal([fail("sizing.steps")]) is None
