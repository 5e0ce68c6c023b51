"""The rule that names a rehearsal, and which other findings its scale explains.

A rehearsal is never valid; `assess_rehearsal` says whether it would be at full size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from penstock.submission.finding import Finding, Verdict, violation
from penstock.submission.rules import rule
from penstock.submission.tree_layout import REHEARSAL

RULE_ID: Final = "runs.rehearsal"
_SIZE_RULES: Final = frozenset({"sizing.steps", "sizing.memory", "checkpoint.size", "checkpoint.ratio"})
"""What a scale alone breaks."""
_PLACE_RULES: Final = frozenset({"paths.filesystems"})
"""What a rehearsal breaks that keeps data and results in one folder."""
_UTILIZATION_RULES: Final = frozenset({"utilization.minimum", "utilization.stated"})
"""What a scale may break: the start of an epoch weighs more where an epoch has a few steps."""


@rule.result_rule(
    id=RULE_ID,
    title="The result is no rehearsal",
    editions=rule.LATER,
    benchmarks=rule.BOTH,
    source="3.1.2, 4.3.4: sizes are those of the rules",
    formula="no metadata file has the key rehearsal",
    passes="runs of `penstock submission run`",
    fails="runs of `penstock submission rehearse`",
)
def _check_rehearsal(case: rule.ResultCase) -> Iterator[Finding]:
    result = case.result
    dirs = (*result.datasize, *result.datagen, *result.run_dirs())
    rehearsed = [directory for directory in dirs if directory.metadata.has(REHEARSAL)]
    if not rehearsed:
        yield Finding(verdict=Verdict.PASS, evidence=result.name, proof="no directory is of a rehearsal")
        return
    metadata = rehearsed[0].metadata
    scale = f"{metadata.number(REHEARSAL, 'scale'):g}" if metadata.has(REHEARSAL, "scale") else "unknown"
    yield violation(
        evidence=metadata.file,
        value=f"scale {scale}",
        limit="scale 1",
        proof=f"{len(rehearsed)} of {len(dirs)} result directories are of a rehearsal, at scale {scale}",
        fix="Make the result at full size with `penstock submission run`, in a tree of its own.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalAssessment:
    """The findings against a rehearsal by what explains them; nothing explains `other`."""

    size: tuple[Finding, ...]
    place: tuple[Finding, ...]
    utilization: tuple[Finding, ...]
    other: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them."""
        return (*self.size, *self.place, *self.utilization, *self.other)

    @property
    def is_ready(self) -> bool:
        """Whether the result would be valid elsewhere, at full size and with enough utilization."""
        return not self.other

    @property
    def summary(self) -> str:
        """The assessment as a phrase."""
        parts = ["size"]
        parts += ["place"] if self.place else []
        parts += ["utilization"] if self.utilization else []
        excuse = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        if self.is_ready:
            return f"valid but for {excuse}"
        broken = ", ".join(dict.fromkeys(finding.rule for finding in self.other))
        return f"not valid, whatever its {excuse}: {broken}"


def assess_rehearsal(findings: Iterable[Finding]) -> RehearsalAssessment | None:
    """Assess the findings of one result; None if it is no rehearsal."""
    open_verdicts = (Verdict.FAIL, Verdict.NOT_CHECKED)
    against = tuple(finding for finding in findings if finding.verdict in open_verdicts)
    if not any(finding.rule == RULE_ID for finding in against):
        return None

    def of(rules: frozenset[str]) -> tuple[Finding, ...]:
        """One finding for each rule and proof, however many runs it concerns."""
        chosen = {(finding.rule, finding.proof): finding for finding in against if finding.rule in rules}
        return tuple(chosen.values())

    explained = _SIZE_RULES | _PLACE_RULES | _UTILIZATION_RULES | {RULE_ID}
    return RehearsalAssessment(
        size=of(_SIZE_RULES),
        place=of(_PLACE_RULES),
        utilization=of(_UTILIZATION_RULES),
        other=of(frozenset(finding.rule for finding in against) - explained),
    )
