"""A process steps behind those that train: its cores are those they leave, its turn at them comes last.

Invariant: what this machine refuses is told in the log and changes nothing else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import psutil

NICEST = 19
LEAST_URGENT = 7

logger = logging.getLogger(__name__)


def free_cores(used: Iterable[Iterable[int]], num_cores: int) -> list[int]:
    """The cores that no rank may run on, from the cores that each may."""
    taken = {core for cores in used for core in cores}
    return [core for core in range(num_cores) if core not in taken]


def step_behind(cores: list[int]) -> None:
    """Give this process and its future threads the lowest priority, and `cores` alone if there are any."""
    os.setpriority(os.PRIO_PROCESS, 0, NICEST)
    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, LEAST_URGENT)
    except (psutil.Error, OSError) as error:
        logger.info("The disks' turns cannot be ordered here: %s", error)
    if cores:
        keep_to(cores)


def keep_to(cores: list[int]) -> None:
    """Run on these cores alone, from now on."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.info("Cores %s cannot be had here: %s", cores, error)
