"""The flush daemon of a node: what it commits, what it outlives, and what ends it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from penstock.checkpoint.manager import Manager
from penstock.checkpoint.tiers.daemon.folder import FlushFolder
from penstock.checkpoint.tiers.flush import Flush
from penstock.checkpoint.verify import verify
from penstock.testing.clean_processes import exit_code_of
from penstock.testing.daemons import daemons_below, ending_daemons, wait_until

BY_DAEMON = Flush(by="daemon")


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(step)), "step": torch.tensor(step)}


def manager_of(root: Path, **choices: Any) -> Manager:
    return Manager(root / "durable", cache=root / "cache", **{"flush": BY_DAEMON, "timeout_s": 60, **choices})


def durable_steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (root / "durable").glob("step-*/.metadata"))


def loaded_by_torch(path: Path) -> dict[str, Any]:
    state = {"weight": torch.zeros(50_000), "step": torch.tensor(-1)}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_a_daemon_makes_steps_durable_byte_for_byte_as_they_are_cached(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
    assert durable_steps(tmp_path) == [1]
    cached, durable = tmp_path / "cache/step-1", tmp_path / "durable/step-1"
    for path in durable.iterdir():
        assert path.read_bytes() == (cached / path.name).read_bytes(), path.name
    assert verify(str(durable)).is_whole
    assert torch.equal(loaded_by_torch(durable)["weight"], state_of(1)["weight"])
    assert (tmp_path / "durable/latest").read_text() == "step-1\n"
    hidden = [path.name for path in (tmp_path / "durable").iterdir() if path.name.startswith(".penstock")]
    assert hidden == []


def save_and_die(root: Path) -> None:
    manager = manager_of(root, engine=None)
    manager.save(1, state_of(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_outlives_a_trainer_that_is_killed_and_stock_torch_loads_what_it_leaves(tmp_path: Path) -> None:
    assert exit_code_of(save_and_die, tmp_path) == -signal.SIGKILL
    wait_until(lambda: durable_steps(tmp_path) == [1], "step 1 is durable")
    assert torch.equal(loaded_by_torch(tmp_path / "durable/step-1")["weight"], state_of(1)["weight"])
    wait_until(lambda: not daemons_below(tmp_path), "the daemon ends by itself")
    assert FlushFolder(tmp_path / "cache").orders.steps() == []
