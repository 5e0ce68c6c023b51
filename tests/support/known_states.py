"""States of tensors whose every value follows from step, generation and rank: what sweeps save and look for.

Place in the flow: above the manager, beside `known_steps`. Invariant: `restored` accepts a state only if all
of it is of one step and one generation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.support.child_processes import FunctionRef
from tests.support.gloo_ranks import as_rank
from tests.support.known_steps import files_below

from penstock.checkpoint.manager.manager import Manager
from penstock.storage import Storage
from penstock.storage.files.system_calls import FileCalls

NUM_ROWS = 300
SHORT_TIMEOUT_S = 60.0
"""For ranks whose peer is killed: most learn of it at once, by their broken connection."""


def known_state(step: int, generation: int, rank: int) -> dict[str, Any]:
    """Tensors of several kinds and sizes, one of this rank alone, and values that are no tensors."""
    seed = 1000 * step + 10 * generation
    common = torch.arange(NUM_ROWS * 100, dtype=torch.float32).reshape(NUM_ROWS, 100) + seed
    return {
        "model": {"weight": common, "bias": torch.full((7,), seed, dtype=torch.bfloat16)},
        "own": {f"rank_{rank}": torch.full((5000,), seed + rank, dtype=torch.int64)},
        "scalar": torch.tensor(seed, dtype=torch.int64),
        "step": step,
        "generation": generation,
    }


def blank_state(rank: int) -> dict[str, Any]:
    """A state of the same shapes that holds nothing known."""
    return known_state(9999, 7, rank)


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states are equal to the bit."""
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        theirs = other[name]
        if isinstance(value, Mapping):
            if not same_state(value, theirs):
                return False
        elif isinstance(value, torch.Tensor):
            if value.dtype != theirs.dtype or not torch.equal(value, theirs):
                return False
        elif value != theirs:
            return False
    return True


def restored(storage: Storage | Path, rank: int = 0) -> tuple[int, int] | None:
    """Step and generation of what a new manager restores; AssertionError where it is no known state."""
    state = blank_state(rank)
    with Manager(storage) as manager:
        step = manager.restore(state)
    if step is None:
        return None
    expected = known_state(step, state["generation"], rank)
    assert same_state(state, expected), f"step {step} was restored, but is not what was saved"
    return step, state["generation"]


def save_state(storage: Storage | Path, step: int, generation: int, rank: int = 0) -> None:
    """Save a known state as one rank of however many there are."""
    with Manager(storage, timeout_s=SHORT_TIMEOUT_S, keep=2) as manager:
        manager.save(step, known_state(step, generation, rank))


def save_state_alone(calls: FileCalls, *, root: Path, step: int, generation: int) -> None:
    """The same as a program of a crash sweep, in a process of its own."""
    torch.set_num_threads(1)
    save_state(files_below(root, calls), step, generation)


def save_state_as_rank(
    calls: FileCalls, *, root: Path, step: int, generation: int, rank: int, size: int
) -> None:
    """The same as one of `size` ranks, which meet beside the root."""
    meeting = str(root.with_suffix(".meeting"))
    as_rank(rank, size, meeting, FunctionRef.of(_save_on_rank), (calls, root, step, generation))


def _save_on_rank(rank: int, calls: FileCalls, root: Path, step: int, generation: int) -> None:
    save_state(files_below(root, calls), step, generation, rank)


def save_several_alone(calls: FileCalls, *, root: Path, steps: Sequence[int]) -> None:
    """Save these steps in the background, one after the other, keeping two: a program of a crash sweep."""
    torch.set_num_threads(1)
    with Manager(files_below(root, calls), keep=2) as manager:
        for step in steps:
            manager.save_async(step, known_state(step, 1, 0))
