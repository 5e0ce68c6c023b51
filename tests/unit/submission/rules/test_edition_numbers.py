"""Every number and every comparison of an edition decides something: changed a little, a verdict changes."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
from tests.support.submission.edition_boundaries import Boundary, boundaries
from tests.support.submission.tree_store import TreeStore, worst

from penstock.submission.check import apply_rule, read_tree
from penstock.submission.edition import Edition, load_edition
from penstock.submission.result_files import SubmittedResult
from penstock.submission.rules import rule_by_id
from penstock.submission.rules.rule import Verdict

Verdicts = tuple[Verdict, Verdict, Verdict]
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
    tree = copy.deepcopy(edition.model_dump(exclude_none=True))
    here: Any = tree
    *above, last = path.split(".")
    for step in above:
        here = here[step]
    here[last] = value
    return Edition.model_validate(tree)


def verdicts(boundary: Boundary, trees: Sequence[Sequence[SubmittedResult]], edition: Edition) -> Verdicts:
    """The worst verdict of the boundary's rule on each of three trees."""
    rule = rule_by_id(boundary.rule)
    below, at, above = (
        worst([finding for result in tree for finding in apply_rule(rule, result, edition)]) for tree in trees
    )
    return below, at, above


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
    only_v3 = {"timed.memory_tolerance", "checkpoints.min_remap_share", "sizing.memory_tolerance"}
    unused = only_v3 if edition is V2 else set()
    asked = {path for path, _ in numbers(edition.model_dump())}
    assert {boundary.number for boundary in boundaries(edition)} == asked - unused


@pytest.mark.parametrize(("edition", "boundary"), CASES)
def test_a_number_decides_where_it_says_and_nowhere_else(
    edition: Edition, boundary: Boundary, store: TreeStore
) -> None:
    roots = [store.write(boundary.tree(steps)) for steps in (-1, 0, 1)]

    def read(edition: Edition) -> list[list[SubmittedResult]]:
        return [list(read_tree(root, edition)) for root in roots]

    trees = read(edition)
    assert verdicts(boundary, trees, edition) == boundary.verdicts
    number = dict(numbers(edition.model_dump()))[boundary.number]
    step = 1 if isinstance(number, int) else number * boundary.share
    for value in (number - step, number + step):
        other = altered(edition, boundary.number, value)
        # Only the number of warm-ups has a part in reading; it decides which runs count.
        other_trees = read(other) if boundary.number in ("num_runs", "num_warm_ups") else trees
        assert verdicts(boundary, other_trees, other) != boundary.verdicts, value
