"""Which steps there are, what they are called, and which are removed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.commit.checkpoints import choose_surplus, parse_step, step_dirname
from penstock.errors import UsageError

STEPS = st.sets(st.integers(0, 50), max_size=12)


@given(st.integers(0, 10**18))
def test_a_step_is_found_by_its_name(step: int) -> None:
    assert parse_step(step_dirname(step)) == step


@pytest.mark.parametrize(
    "name", ["step-01", "step-", "step--1", "step-1.tmp", "xstep-1", "step-1\n", "latest"]
)
def test_other_names_are_not_steps(name: str) -> None:
    assert parse_step(name) is None


@pytest.mark.parametrize("step", [-1, True])
def test_invalid_steps_are_refused(step: int) -> None:
    with pytest.raises(UsageError, match="Invalid step"):
        step_dirname(step)


@given(STEPS, st.integers(1, 6), STEPS)
def test_the_newest_steps_and_the_last_complete_one_are_kept(
    steps: set[int], keep: int, whole: set[int]
) -> None:
    removed = choose_surplus(list(steps), keep, whole.__contains__)
    left = steps - set(removed)
    assert removed == sorted(removed)
    assert set(sorted(steps)[-keep:]) <= left
    assert len(left) <= keep + 1
    if steps & whole:
        assert left & whole
    if set(sorted(steps)[-keep:]) & whole:
        assert len(left) <= keep


@given(STEPS)
def test_keep_none_keeps_all_steps_and_checks_nothing(steps: set[int]) -> None:
    def never(_step: int) -> bool:
        raise AssertionError("nobody needs to know")

    assert choose_surplus(list(steps), None, never) == []
    assert choose_surplus(list(steps), len(steps) + 1, never) == []
