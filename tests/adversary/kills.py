"""Kill sweep: jobs that save steps to files, with and without caches, die by SIGKILL at random moments.

After each kill the job starts again: all its ranks must restore the newest step that was saved, bit for bit.

    python -m tests.adversary.kills --seconds 600
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.adversary.attempts import Attempt, main
from tests.adversary.killed_jobs import Setup, start_again_and_again
from tests.support.flush_daemons import ending_daemons

KILLS = 4
"""Of the jobs in one folder, one after the other."""


def attack(seeds: Iterator[int]) -> Iterator[Attempt]:
    """Kill jobs that save steps, and look at what they restore."""
    for seed in seeds:
        draw = random.Random(seed)
        level = draw.choice(("", "", "single", "partner", "xor"))
        with ExitStack() as exits:
            root = Path(exits.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            exits.enter_context(ending_daemons(root))
            setup = Setup(
                root=root,
                uri=f"{root}/run",
                environment={},
                size=draw.choice((1, 2)) if level in ("", "single") else 2,
                level=level,
                flushed_by=draw.choice(("trainer", "daemon")),
                is_async=draw.random() < 0.5,
            )
            kind = f"files, {setup.size} rank(s){level and f', cache: {level}, {setup.flushed_by}'}"
            yield from start_again_and_again(setup, kind, seed, draw, kills=KILLS)


if __name__ == "__main__":
    sys.exit(main(attack))
