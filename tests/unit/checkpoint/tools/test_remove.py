"""Which checkpoint must be whole before another one may go: the newest first, and no more than needed."""

from penstock.checkpoint.tools.inspection import CheckpointListing, CheckpointState, find_other_whole


def listed(
    name: str, step: int | None, state: CheckpointState = CheckpointState.COMMITTED
) -> CheckpointListing:
    return CheckpointListing(
        name=name, step=step, state=state, size_bytes=1, num_files=1, num_tensors=1, modified_s=0.0
    )


def asked(checkpoints: list[CheckpointListing], name: str, whole: set[str]) -> tuple[str | None, list[str]]:
    """The answer, and which were read to find it."""
    read: list[str] = []

    def is_whole(other: str) -> bool:
        read.append(other)
        return other in whole

    return find_other_whole(checkpoints, name, is_whole), read


RUN = [
    listed("a", None),
    listed("step-1", 1),
    listed("step-2", 2),
    listed("step-9", 9, CheckpointState.DAMAGED),
]


def test_the_newest_other_checkpoint_is_verified_first() -> None:
    assert asked(RUN, "step-1", {"step-2", "a"}) == ("step-2", ["step-2"])


def test_older_checkpoints_are_verified_if_newer_ones_are_damaged() -> None:
    assert asked(RUN, "step-1", {"a"}) == ("a", ["step-2", "a"])
    assert asked(RUN, "step-2", set()) == (None, ["step-1", "a"])


def test_damaged_checkpoints_and_the_removed_one_are_not_verified() -> None:
    assert asked(RUN[2:], "step-2", {"step-2", "step-9"}) == (None, [])
