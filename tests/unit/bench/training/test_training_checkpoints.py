"""When checkpoints of a training run are due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.training.training_checkpoints import count_due, is_due
from penstock.workload.spec import CheckpointSection


def _due(when: CheckpointSection, epochs: list[int]) -> list[tuple[int, int]]:
    return [
        (epoch, step)
        for epoch, num_steps in enumerate(epochs, start=1)
        for step in range(1, num_steps + 1)
        if is_due(when, epoch, step, num_steps)
    ]


@pytest.mark.parametrize(
    ("when", "due"),
    [
        (CheckpointSection(), [(1, 5), (2, 5), (3, 5)]),
        (CheckpointSection(checkpoint_after_epoch=2), [(2, 5), (3, 5)]),
        (CheckpointSection(epochs_between_checkpoints=2), [(1, 5), (3, 5)]),
        (CheckpointSection(steps_between_checkpoints=2), [(1, 2), (1, 4), (2, 2), (2, 4), (3, 2), (3, 4)]),
        (CheckpointSection(steps_between_checkpoints=5, checkpoint_after_epoch=9), [(1, 5), (2, 5), (3, 5)]),
        (CheckpointSection(steps_between_checkpoints=6), []),
    ],
)
def test_checkpoints_follow_chosen_epochs_or_every_so_many_steps(
    when: CheckpointSection, due: list[tuple[int, int]]
) -> None:
    assert _due(when, [5, 5, 5]) == due


@given(
    epochs=st.lists(st.integers(1, 12), max_size=6),
    after=st.integers(1, 4),
    between=st.integers(1, 4),
    steps=st.none() | st.integers(1, 7),
)
def test_as_many_are_counted_before_as_are_taken(
    epochs: list[int], after: int, between: int, steps: int | None
) -> None:
    when = CheckpointSection(
        checkpoint_after_epoch=after, epochs_between_checkpoints=between, steps_between_checkpoints=steps
    )
    assert count_due(when, list(enumerate(epochs, start=1))) == len(_due(when, epochs))
