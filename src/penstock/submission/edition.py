"""An edition of the rules as data: the numbers, names and lists that rules compare with.

Place in the flow: YAML is parsed here once, strictly; rules get an `Edition`. Invariant: a rule holds
no number.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import Unavailable, UsageError
from penstock.workload.divisions import SubmissionDivision
from penstock.workload.yamlfile import parse_yaml


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Folders(_Strict):
    """What a submitter's folder must hold, and what it should."""

    required: tuple[str, ...]
    expected: tuple[str, ...]


class SizingLimits(_Strict):
    """How large a data set must be; `rounding` says how a part of a file counts."""

    min_steps: int
    memory_multiple: int
    rounding: Literal["up", "down"]


class Tolerance(_Strict):
    """How far a stated mean may lie from the recomputed one."""

    relative_tolerance: float


class Parameters(_Strict):
    """Which keys a run may set."""

    tool: frozenset[str]
    closed: frozenset[str]
    open_adds: frozenset[str]
    compared: tuple[str, ...]

    def allowed(self, division: SubmissionDivision) -> frozenset[str]:
        """The keys that are free in `division`, with those that the benchmark's script sets."""
        adds = self.open_adds if division is SubmissionDivision.OPEN else frozenset[str]()
        return self.tool | self.closed | adds


class Edition(_Strict):
    """One edition."""

    edition: str
    num_runs: int
    folders: Folders
    run_files: tuple[str, ...]
    sizing: SizingLimits
    means: Tolerance
    accelerators: tuple[str, ...]
    min_utilization_percent: dict[str, float]
    parameters: Parameters
    for_the_reviewer: tuple[str, ...]


KNOWN = ("v1.0", "v2.0", "v3.0")


@cache
def load_edition(name: str) -> Edition:
    """The edition called `name`; `Unavailable` where its rules are not written yet."""
    if name not in KNOWN:
        raise UsageError(f"There is no edition {name!r}", fix=f"Known are: {', '.join(KNOWN)}.")
    source = files("penstock.submission") / "editions" / f"{name}.yaml"
    if not source.is_file():
        raise Unavailable(f"The rules of {name} are not there yet", fix="Only v1.0 can be checked so far.")
    try:
        return Edition.model_validate(parse_yaml(source.read_text(encoding="utf-8"), source=f"{name}.yaml"))
    except ValidationError as error:
        raise UsageError(f"The edition is malformed: {error}", where=f"{name}.yaml") from error
