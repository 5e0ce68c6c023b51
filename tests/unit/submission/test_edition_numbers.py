"""Every number and every comparison of an edition decides something: changed a little, a verdict changes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.submission.edition_boundaries import Boundary, boundaries

from penstock.submission.check import apply_rule, read_tree
from penstock.submission.edition import Edition, load_edition
from penstock.submission.finding import Verdict
from penstock.submission.rules import rule_by_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ORDER: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING, Verdict.PASS, Verdict.NOT_APPLICABLE)
V3, V2 = load_edition("v3.0"), load_edition("v2.0")


def numbers(tree: object, above: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of an edition by their paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from numbers(value, f"{above}.{key}" if above else str(key))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield above, tree


def altered(edition: Edition, path: str, value: float) -> Edition:
    """The edition with another number."""
    tree = copy.deepcopy(edition.model_dump())
    here: Any = tree
    *above, last = path.split(".")
    for step in above:
        here = here[step]
    here[last] = value
    return Edition.model_validate(tree)


def verdict(boundary: Boundary, root: Path, edition: Edition) -> Verdict:
    """What the boundary's rule says of a tree."""
    rule = rule_by_id(boundary.rule)
    found = {
        finding.verdict
        for result in read_tree(root, edition)
        for finding in apply_rule(rule, result, edition)
    }
    return next(each for each in ORDER if each in found)


def differs(boundary: Boundary) -> bool:
    """Whether v2.0 has another number there than v3.0, which is judged in the quick tests."""
    return dict(numbers(V2.model_dump())).get(boundary.number) != dict(numbers(V3.model_dump())).get(
        boundary.number
    )


CASES: Final = [
    pytest.param(edition, boundary, id=f"{edition.edition}-{boundary.number}", marks=marks)
    for edition in (V3, V2)
    for boundary in boundaries(edition)
    for marks in [[] if edition is V3 or differs(boundary) else [pytest.mark.slow]]
]


@pytest.mark.parametrize("edition", [V2, V3], ids=lambda edition: edition.edition)
def test_every_number_of_an_edition_has_its_boundary(edition: Edition) -> None:
    unused = {"timed.memory_tolerance", "checkpoints.min_remap_share"} if edition is V2 else set()
    asked = {path for path, _ in numbers(edition.model_dump())}
    assert {boundary.number for boundary in boundaries(edition)} == asked - unused


@pytest.mark.parametrize(("edition", "boundary"), CASES)
def test_a_number_decides_where_it_says_and_nowhere_else(
    edition: Edition, boundary: Boundary, tmp_path: Path
) -> None:
    roots = [boundary.tree(steps).write(tmp_path / str(steps)) for steps in (-1, 0, 1)]
    assert tuple(verdict(boundary, root, edition) for root in roots) == boundary.verdicts
    number = dict(numbers(edition.model_dump()))[boundary.number]
    step = 1 if isinstance(number, int) else number * boundary.share
    for value in (number - step, number + step):
        other = altered(edition, boundary.number, value)
        assert tuple(verdict(boundary, root, other) for root in roots) != boundary.verdicts, value
