"""Ranks of torch.distributed over gloo, as processes of this machine: for tests of what is collective.

Place in the flow: above `clean_processes`. Invariant: ranks meet through a file of their own, so that jobs of
tests that run side by side never meet each other.
"""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.child_processes import LIMIT_S, FunctionRef, run_children

MANY = 16
"""More ranks than these yield to the other tests, each of which has one process against theirs."""


def on_gloo_ranks(
    size: int, program: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S
) -> list[Any]:
    """What `program(rank, *arguments)` returns on each of `size` ranks, in their order.

    `program` stands at the top of its module. AssertionError shows the traceback of each rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "ranks")
        calls = [(as_rank, (rank, size, meeting, FunctionRef.of(program), arguments)) for rank in range(size)]
        return run_children(calls, limit_s)


def as_rank(rank: int, size: int, meeting: str, program: FunctionRef, arguments: tuple[Any, ...]) -> Any:
    """Become one rank of the job that meets at this file, run `program` and leave."""
    torch.set_num_threads(1)
    if size > MANY:
        os.nice(10)
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined] # documented, but not in torch's stubs
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
    )
    try:
        return program.load()(rank, *arguments)
    finally:
        dist.destroy_process_group()
