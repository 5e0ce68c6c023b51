"""Ranks by forking, after the slow import of a framework, which then is paid for once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def without_cuda() -> None:
    """Stand in for the calls that frameworks make as if every machine had a GPU, where this one has none."""
    # Counting asks the driver's library, and leaves CUDA alone for the ranks that are forked.
    if torch.cuda.device_count():
        return
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda *_: None
    torch.cuda.device_count = lambda: 1


def on_forked_ranks(size: int, program: Callable[..., Any], root: Path, *arguments: Any) -> list[Any]:
    """What `program(rank, root, *arguments)` returns on each of `size` gloo ranks."""
    context = multiprocessing.get_context("fork")
    root.mkdir(parents=True, exist_ok=True)
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_as_rank, args=((rank, size), ends[rank][1], program, root, arguments))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for _, mine in ends:
        mine.close()
    try:
        return [theirs.recv() for theirs, _ in ends]
    finally:
        for rank in ranks:
            rank.join()


def _as_rank(
    place: tuple[int, int],
    end: Any,
    program: Callable[..., Any],
    root: Path,
    arguments: tuple[Any, ...],
) -> None:
    rank, size = place
    is_over = False
    try:
        store = dist.FileStore(str(root / "ranks"), size)  # type: ignore[attr-defined] # torch's stubs lack it
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        end.send(program(rank, root, *arguments))
        dist.destroy_process_group()
        is_over = True
    finally:
        if not is_over:
            # At once, for the other ranks must not wait for this one.
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
