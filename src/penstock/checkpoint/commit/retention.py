"""Which old checkpoints a run removes: the newest `keep` remain, and always one that is complete."""

import logging
from collections.abc import Callable, Sequence

from penstock.checkpoint.commit.catalog import StepCatalog
from penstock.errors import StorageError

logger = logging.getLogger(__name__)


def choose_surplus(steps: Sequence[int], keep: int | None, is_whole: Callable[[int], bool]) -> list[int]:
    """The steps to remove so that the newest `keep` remain, oldest first; None keeps all.

    If none of those is complete, the newest complete one before them stays, too: a run never loses its last
    usable checkpoint. `is_whole` is called for the newest first and no more often than needed.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    surplus, newest = ordered[:-keep], ordered[-keep:]
    if any(is_whole(step) for step in reversed(newest)):
        return surplus
    spared = next((step for step in reversed(surplus) if is_whole(step)), None)
    return [step for step in surplus if step != spared]


def find_surplus(catalog: StepCatalog, committed: Sequence[int], keep: int | None) -> list[int]:
    """Which of the `committed` steps of a catalog to remove; see `choose_surplus`."""
    return choose_surplus(committed, keep, lambda step: catalog.find(step).is_whole())


def apply_retention(catalog: StepCatalog, step: int, keep: int | None) -> None:
    """Point to the newest step and remove the surplus. Never raises `StorageError`: `step` is committed."""
    try:
        committed = catalog.committed()
        if step == max(committed, default=None):
            catalog.set_latest(step)
        for removed in find_surplus(catalog, committed, keep):
            logger.info("Removing step %d: the newest %s are kept", removed, keep)
            catalog.remove(removed)
    except StorageError as error:
        logger.warning("Step %d is committed, but not all old steps could be removed: %s", step, error)
