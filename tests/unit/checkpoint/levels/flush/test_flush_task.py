"""Which steps a daemon flushes, in which order, and how long it waits."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.commit.catalog import choose_surplus
from penstock.checkpoint.levels.flush.daemon import free_cores
from penstock.checkpoint.levels.flush.daemon_client import NodeOrders, find_orphans
from penstock.checkpoint.levels.flush.flush_task import poll_delay, retry_delay, superseded_by

steps = st.sets(st.integers(0, 30), max_size=8)


@given(steps, st.integers(0, 30), st.none() | st.integers(1, 5))
def test_a_step_is_superseded_only_if_retention_would_remove_it_at_once(
    durable: set[int], step: int, keep: int | None
) -> None:
    newer = superseded_by(step, durable, keep)
    removed = choose_surplus(sorted({*durable, step}), keep, lambda _: True)
    assert bool(newer) == (step in removed)
    assert set(newer) <= durable


def test_retry_delays_double_up_to_a_limit() -> None:
    pauses = [retry_delay(number) for number in range(100)]
    assert pauses[:4] == [0.0, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0


def test_poll_delays_grow_with_the_wait() -> None:
    assert poll_delay(0.0) == 0.05
    assert poll_delay(10.0) == 1.0
    assert poll_delay(9e9) == 5.0


def test_free_cores_are_those_of_no_rank() -> None:
    assert free_cores([[0, 1], [1, 2]], 6) == [3, 4, 5]
    assert free_cores([range(8)], 8) == []


SAVE = 7, "0123456789abcdef"


def test_an_order_that_a_kill_left_on_some_nodes_is_missing_on_the_others() -> None:
    known = NodeOrders(open={SAVE: 1}, over=frozenset())
    unknown = NodeOrders(open={}, over=frozenset())
    assert find_orphans([known, unknown], {SAVE: 3}) == {SAVE: {0, 2}}
    other = NodeOrders(open={SAVE: 0}, over=frozenset())
    assert find_orphans([known, other], {SAVE: 2}) == {}


def test_an_order_that_is_over_on_one_node_is_missing_nowhere() -> None:
    known = NodeOrders(open={SAVE: 1}, over=frozenset())
    ended = NodeOrders(open={}, over=frozenset({SAVE}))
    assert find_orphans([known, ended], {SAVE: 2}) == {}
