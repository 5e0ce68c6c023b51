"""The waist between rules and reports: a finding, its evidence, and how grave it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.trace.compare.study import Study

if TYPE_CHECKING:
    from penstock.trace.questions.base import Answer


class Weight(StrEnum):
    """How much a finding matters to whoever reads the tables."""

    ALARM = "alarm"  # numbers of this comparison mislead
    COST = "cost"  # time or bytes that could be saved
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that stands out: `says` in whole sentences with numbers, `evidence` as rows."""

    code: str
    weight: Weight
    title: str
    runs: Sequence[str]
    says: Sequence[str]
    evidence: Answer


Rule = Callable[[Study], list[Finding]]
