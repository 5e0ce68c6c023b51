"""Kill sweep on an S3 that lies: answers are lost, late, cut short, refused, and connections end.

    a job that saves steps -> a server with faults at random -> the job fails, is killed, or goes on -> again

Whatever it was told, the job must restore the newest step that was saved, bit for bit, or nothing, for an
older one would be taken without proof. With an honest server it must then restore it.

    python -m tests.adversary.liar --seconds 600
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.adversary.attempts import Attempt, main
from tests.adversary.killed_jobs import Setup, start_again_and_again
from tests.support.s3.fake_server import FakeServer, running_fake
from tests.support.s3.fault_plan import Fault, FaultPlan
from tests.support.s3.server import BUCKET

KILLS = 2
"""Of the jobs on one server, one after the other."""


class Lies(FaultPlan):
    """Any request may suffer anything, but that a stored object is not what was sent."""

    def __init__(self, draw: random.Random, share: float) -> None:
        super().__init__()
        self._draw = draw
        self._share = share

    def next_for(self, operation: str, key: str, part: int | None) -> Fault | None:
        """What this request suffers, if anything."""
        with self._lock:
            if self._draw.random() > self._share:
                return None
            fault = self._draw.choice(
                (
                    Fault(action="delay", seconds=self._draw.uniform(0, 0.2)),
                    Fault(action="drop"),
                    Fault(action="refuse"),
                    Fault(action="refuse", status=500, code="InternalError"),
                    Fault(action="truncate"),
                    Fault(action="silence"),
                    Fault(action="silence"),
                    Fault(action="shuffle"),
                )
            )
            self.fired[fault.action] += 1
            return fault


@contextmanager
def lying(server: FakeServer, draw: random.Random) -> Iterator[None]:
    """Let the server lie as long as the context lasts."""
    server.plan = Lies(random.Random(draw.random()), draw.choice((0.03, 0.1)))
    try:
        yield
    finally:
        server.plan = FaultPlan()


def attack(seeds: Iterator[int]) -> Iterator[Attempt]:
    """Let jobs save steps to a server that lies, kill them, and look at what they restore."""
    for seed in seeds:
        draw = random.Random(seed)
        with ExitStack() as exits:
            root = Path(exits.enter_context(tempfile.TemporaryDirectory()))
            server = exits.enter_context(running_fake())
            setup = Setup(
                root=root,
                uri=f"s3://{BUCKET}/run",
                environment=server.as_server().environment,
                size=draw.choice((1, 1, 2)),
                is_async=draw.random() < 0.5,
            )
            kind = f"S3, {setup.size} rank(s)"
            harm = partial(lying, server, draw)
            yield from start_again_and_again(setup, kind, seed, draw, kills=KILLS, harm=harm)


if __name__ == "__main__":
    sys.exit(main(attack))
