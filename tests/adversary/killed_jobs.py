"""Jobs that save steps until they are killed, start again, and are held to what they promised.

    a job: restore, compare every bit, save step after step -> killed at a random moment -> started again

Promise: the newest step whose save had returned, and the newest that is committed, is restored by all ranks,
bit for bit. Invariant: ranks tell what they did line by line in files of their own, which outlive them.
"""

import itertools
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from tests.adversary.attempts import Attempt
from tests.support.child_processes import FunctionRef, clean_context, ending
from tests.support.gloo_ranks import as_rank
from tests.support.known_states import blank_state, known_state, same_state

from penstock.checkpoint.commit.checkpoints import StepCatalog
from penstock.checkpoint.levels.options import Flush, Partner, Single, Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.environment import Environment
from penstock.storage import open_storage

LIMIT_S: Final = 120.0
GENERATIONS: Final = 50


@dataclass(frozen=True, slots=True)
class Setup:
    """How the jobs of an attempt save."""

    root: Path
    uri: str
    environment: Environment
    size: int
    level: str = ""
    """The redundancy of a cache; none without one."""
    flushed_by: Literal["trainer", "daemon"] = "trainer"
    is_async: bool = False
    keep: int | None = 2

    def manager(self, rank: int) -> Manager:
        schemes = {"single": Single(), "partner": Partner(group=2), "xor": Xor(group=2)}
        levels: dict[str, Any] = {}
        if self.level:
            levels = {
                "cache": self.root / f"host-{rank}",
                "failure_domain": f"host-{rank}",
                "redundancy": schemes[self.level],
                "flush": Flush(every=2, by=self.flushed_by),
            }
        # An open storage cannot be given to a daemon that flushes.
        storage = open_storage(self.uri, self.environment, rank=rank) if self.environment else self.uri
        return Manager(storage, timeout_s=60.0, keep=self.keep, **levels)

    def committed(self) -> int:
        """The newest step that is committed: on all hosts, or durably."""
        durable = StepCatalog(open_storage(self.uri, self.environment)).committed()
        hosts = [self.root / f"host-{rank}" for rank in range(self.size)] if self.level else []
        each = [{int(path.parent.name[5:]) for path in host.glob("step-*/.metadata")} for host in hosts]
        return max({*durable, *(set.intersection(*each) if each else ())}, default=0)


def run_job(rank: int, setup: Setup, job: int, last: int | None) -> None:
    """Restore, compare and save, from a rank's view."""
    torch.set_num_threads(1)
    with (setup.root / f"told-{job}-{rank}").open("a", buffering=1) as told, suppress(Exception):
        try:
            with setup.manager(rank) as manager:
                state = blank_state(rank)
                step = manager.restore(state) or 0
                is_same = not step or same_state(state, known_state(step, state["generation"], rank))
                told.write(f"restored {step} {'whole' if is_same else 'wrong'}\n")
                for number in itertools.count(step + 1) if last is None else range(last):
                    state = known_state(number, job % GENERATIONS, rank)
                    if setup.is_async:
                        manager.save_async(number, state).result()
                    else:
                        manager.save(number, state)
                    told.write(f"saved {number}\n")
        except BaseException as error:
            told.write(f"failed {type(error).__name__}: {error!s:.300}".replace("\n", " ") + "\n")
            (setup.root / f"trace-{job}-{rank}").write_text(traceback.format_exc())
            raise


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank told before it ended."""

    restored: int | None
    is_whole: bool
    saved: int
    failure: str

    @classmethod
    def of(cls, path: Path) -> "Told":
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split(maxsplit=1) for line in lines]
        restored = next((rest for word, rest in words if word == "restored"), None)
        return cls(
            restored=int(restored.split()[0]) if restored else None,
            is_whole=not restored or restored.endswith("whole"),
            saved=max((int(rest) for word, rest in words if word == "saved"), default=0),
            failure=next((rest for word, rest in words if word == "failed"), ""),
        )


def has_told(word: str, path: Path) -> bool:
    """Whether a rank told of this, or that it failed."""
    return path.exists() and any(line.startswith((word, "failed")) for line in path.read_text().splitlines())


def start_and_kill(
    setup: Setup, job: int, draw: random.Random, *, last: int | None = None
) -> tuple[list[Told], bool]:
    """Run a job until it is killed, or to its `last` step; what its ranks told, and whether it hung."""
    context = clean_context()
    with tempfile.TemporaryDirectory(dir=setup.root) as folder:
        ranks = [
            context.Process(
                target=as_rank,
                args=(rank, setup.size, f"{folder}/ranks", FunctionRef.of(run_job), (setup, job, last)),
            )
            for rank in range(setup.size)
        ]
        told = [setup.root / f"told-{job}-{rank}" for rank in range(setup.size)]
        for rank in ranks:
            rank.start()
        with ending(ranks):
            hung = False
            moment = "restored" if last is not None else draw.choice(("saved", "saved", "restored", ""))
            if moment:
                end_s = time.monotonic() + LIMIT_S
                while not all(map(partial(has_told, moment), told)) and any(
                    rank.is_alive() for rank in ranks
                ):
                    if hung := time.monotonic() > end_s:
                        break
                    time.sleep(0.005)
            if last is not None:
                for rank in ranks:
                    rank.join(LIMIT_S)
                    hung |= rank.exitcode is None
            else:
                time.sleep(draw.choice((draw.uniform(0, 0.05), draw.uniform(0, 0.4), draw.uniform(0, 1.5))))
                for rank in draw.sample(ranks, draw.choice((1, len(ranks)))):
                    if rank.pid is not None and rank.is_alive():
                        rank.kill()
                time.sleep(draw.choice((0.0, draw.uniform(0, 0.3))))
    return [Told.of(path) for path in told], hung


def judge(told: Sequence[Told], *, promised: int, may_fail: bool) -> str:
    """What is wrong with how a job began again, if anything."""
    restored = {each.restored for each in told if each.restored is not None}
    if len(restored) > 1:
        return f"ranks restored different steps: {sorted(restored)}"
    if not all(each.is_whole for each in told):
        return f"step {restored} was restored, but is not what was saved"
    if restored and min(restored) < promised:
        return f"restored {min(restored)}, but {promised} was saved"
    failures = [each.failure for each in told if each.failure and each.restored is None]
    return f"nothing was restored: {failures[0]}" if failures and not may_fail else ""


def start_again_and_again(
    setup: Setup,
    kind: str,
    seed: int,
    draw: random.Random,
    *,
    kills: int,
    harm: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Attempt]:
    """Kill `kills` jobs in one folder, one after the other, each under `harm`; a last one runs unharmed."""
    promised = 0
    for job in range(kills + 1):
        is_last = job == kills
        with nullcontext() if is_last else harm():
            told, hung = start_and_kill(setup, job, draw, last=0 if is_last else None)
        failure = f"hung: {told}" if hung else judge(told, promised=promised, may_fail=not is_last)
        yield Attempt(kind, seed, failure and f"start {job + 1}: {failure}")
        if failure:
            return
        promised = max(promised, setup.committed(), *(each.saved for each in told))
