"""A rank that may start no more threads, as at a container's limit: calls end on all ranks, and say why."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.gloo_ranks import on_gloo_ranks

import penstock.checkpoint as pc
from penstock.errors import PenstockError
from penstock.storage.residency import evict_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_STARTS = 12


@contextmanager
def failing_start(number: int) -> Iterator[None]:
    """Let the start of a thread with this number fail, as Python says it."""
    start, count = threading.Thread.start, 0

    def start_or_fail(self: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise RuntimeError("can't start new thread")
        start(self)

    with patch.object(threading.Thread, "start", start_or_fail):
        yield


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((1 << 18,), value) for number in range(6)}


def told(call: Any) -> str:
    try:
        call()
    except PenstockError as error:
        return str(error)
    return "done"


def begin(rank: int, folder: Path, **options: Any) -> pc.Manager:
    manager = pc.Manager(folder / "run", timeout_s=30, **options)
    manager.save(1, state_of(1))
    if rank == 0:
        for file in (folder / "run").glob("step-1/*"):
            evict_file(str(file))
    dist.barrier()
    return manager


def load_with_one_thread_less(rank: int, folder: Path) -> list[str]:
    said = []
    with begin(rank, folder) as manager:
        for number in range(1, MOST_STARTS):
            state = state_of(0)
            load = manager.restore if number % 2 else lambda state: pc.load(state, folder / "run" / "step-1")
            with failing_start(number if rank else 0):
                said.append(told(lambda load=load, state=state: load(state)))
            if said[-1] == "done":
                assert all(torch.equal(part, torch.ones(1 << 18)) for part in state.values())
            state = state_of(0)
            assert manager.restore(state) == 1
            assert all(torch.equal(part, torch.ones(1 << 18)) for part in state.values())
    return said


def save_with_one_thread_less(rank: int, folder: Path, **options: Any) -> list[str]:
    said = []
    with begin(rank, folder, **options) as manager:
        for number in range(1, MOST_STARTS):
            step = 2 * number
            save = manager.save if number % 2 else lambda *given: manager.save_async(*given).result()
            with failing_start(number if rank else 0):
                said.append(told(lambda save=save, step=step: save(step, state_of(step))))
            manager.save(step + 1, state_of(step + 1))
            expected = ([step] if said[-1] == "done" else []) + [step + 1]
            assert manager.steps()[-len(expected) :] == expected
    return said


def save_with_parity_and_one_thread_less(rank: int, folder: Path) -> list[str]:
    cache = folder / f"node-{rank}"
    return save_with_one_thread_less(
        rank, folder, cache=cache, failure_domain=f"node-{rank}", redundancy=pc.Xor(group=2), flush=None
    )


@pytest.mark.parametrize(
    "program",
    [load_with_one_thread_less, save_with_one_thread_less, save_with_parity_and_one_thread_less],
)
def test_a_thread_that_cannot_be_started_fails_the_call_on_all_ranks(tmp_path: Path, program: Any) -> None:
    said = on_gloo_ranks(2, program, tmp_path)
    assert said[0] == said[1]
    assert "done" in said[0]
    failed = [text for text in said[0] if text != "done"]
    assert failed
    for text in failed:
        assert text.startswith("Rank 1 on ")
        assert "can't start new thread. Raise" in text


def test_one_process_says_so_itself(tmp_path: Path) -> None:
    said = []
    for number in range(1, MOST_STARTS):
        with failing_start(number):
            said.append(told(lambda: pc.save(state_of(1), tmp_path / "saved")))
        pc.save(state_of(1), tmp_path / "saved")
        for file in (tmp_path / "saved").iterdir():
            evict_file(str(file))
        with failing_start(number):
            said.append(told(lambda: pc.load(state_of(0), tmp_path / "saved")))
    assert "done" in said
    failed = [text for text in said if text != "done"]
    assert failed
    assert all(text.startswith("No more threads can be started: can't start new") for text in failed)
