"""Ranks, daemons, or both killed at random moments of saving, protecting and flushing."""

import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.child_processes import FunctionRef, clean_context, ending
from tests.support.flush_daemons import daemons_below, ending_daemons, wait_until
from tests.support.gloo_ranks import as_rank, on_gloo_ranks

from penstock.checkpoint.levels.flush import FlushFolder
from penstock.checkpoint.levels.options import Flush, Partner
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.tools.verify import verify

HOSTS = 2
NUM_ITEMS = 200_000
RATE = 8e6
"""Slow enough that a kill meets a flush half-way."""


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


def state_of(rank: int, step: int) -> dict[str, Any]:
    own = torch.arange(NUM_ITEMS, dtype=torch.int64) * (rank + 1) + step
    return {"shared": torch.full((1000,), step), f"rank_{rank}": {"own": own, "step": torch.tensor(step)}}


def manager_of(rank: int, root: Path) -> Manager:
    return Manager(
        root / "durable",
        cache=root / f"host-{rank}",
        redundancy=Partner(group=HOSTS),
        failure_domain=f"host-{rank}",
        flush=Flush(by="daemon", bandwidth=RATE),
        timeout_s=60,
    )


def train_for_ever(rank: int, root: Path, first: int) -> None:
    manager = manager_of(rank, root)
    for step in itertools.count(first):
        manager.save_async(step, state_of(rank, step)).result()


def restore(rank: int, root: Path) -> int:
    """What a restarted job loads, compared bit by bit."""
    found = state_of(rank, 0)
    with manager_of(rank, root) as manager:
        step = manager.restore(found) or 0
        wanted = state_of(rank, step)
        assert torch.equal(found["shared"], wanted["shared"]) or step == 0
        assert torch.equal(found[f"rank_{rank}"]["own"], wanted[f"rank_{rank}"]["own"])
        assert int(found[f"rank_{rank}"]["step"]) == step
    return step


def committed(folder: Path) -> set[int]:
    return {int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")}


def given(root: Path) -> set[int]:
    """The steps that all caches had and were to make durable when everything died."""
    hosts = [root / f"host-{host}" for host in range(HOSTS)]
    pending = [set(FlushFolder(host).notes()) & committed(host) for host in hosts]
    return set.intersection(*pending) - committed(root / "durable")


def kill(pid: int | None) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_and_kill(root: Path, first: int, victims: str, chance: random.Random) -> None:
    """A job of two ranks, killed as a whole after its victims, which die a little earlier."""
    context = clean_context()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=as_rank,
                args=(rank, HOSTS, f"{folder}/ranks", FunctionRef.of(train_for_ever), (root, first)),
            )
            for rank in range(HOSTS)
        ]
        for rank in ranks:
            rank.start()
        with ending(ranks):
            is_saving = f".penstock-save-*-step-{first}"
            wait_until(
                lambda: any(root.glob(f"host-*/{is_saving}")) or first in committed(root / "host-0"),
                "the first step is being saved",
            )
            time.sleep(chance.uniform(0.0, 1.5))
            if victims != "ranks":
                for pid in chance.sample(found := daemons_below(root), chance.randint(0, len(found))):
                    kill(pid)
            if victims != "daemons":
                kill(ranks[chance.randrange(HOSTS)].pid)
            time.sleep(chance.uniform(0.0, 0.3))


def kill_again_and_again(root: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(rounds):
        victims = ("ranks", "daemons", "both")[number % 3]
        run_and_kill(root, 1000 * number + 1, victims, chance)
        whole = set.intersection(*(committed(root / f"host-{host}") for host in range(HOSTS)))
        newest = max(whole | committed(root / "durable"), default=0)
        promised = given(root)
        steps = on_gloo_ranks(HOSTS, restore, root)
        where = f"round {number} of seed {seed}"
        assert len(set(steps)) == 1, where
        assert steps[0] >= newest, f"{where}: {newest} could be restored"
        wait_until(
            lambda promised=promised: promised <= committed(root / "durable"),  # type: ignore[misc]
            f"{sorted(promised)} are durable ({where})",
        )
    for step in committed(root / "durable"):
        assert verify(str(root / f"durable/step-{step}")).is_whole


def test_killed_at_three_moments_the_newest_step_restores_and_what_was_given_becomes_durable(
    tmp_path: Path,
) -> None:
    kill_again_and_again(tmp_path, rounds=3, seed=1)
