"""What the programs of this folder share: seeds, a time budget, and the account of what failed.

An attack yields attempts, each from a seed of its own: `python -m tests.adversary.NAME --seed SEED
--tries 1` repeats one. Invariant: nothing but the seed decides what an attempt tries; the kernel decides when
a kill strikes.
"""

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Attempt(NamedTuple):
    """What was tried, and what is wrong with its outcome, if anything."""

    kind: str
    seed: int
    failure: str = ""


Attack = Callable[[Iterator[int]], Iterator[Attempt]]
"""From seeds, which end with the budget, to attempts."""


def seeds_within(first: int, seconds: float, tries: int | None = None) -> Iterator[int]:
    """Seeds from `first` for so many seconds, or at most so many."""
    end_s = time.monotonic() + seconds
    for seed in itertools.count(first):
        if time.monotonic() > end_s or (tries is not None and seed >= first + tries):
            return
        yield seed


def account(attack: Attack, seeds: Iterator[int]) -> list[Attempt]:
    """Attack, and print what was tried and what failed; the failures."""
    counts: Counter[str] = Counter()
    failures = []
    for attempt in attack(seeds):
        counts[attempt.kind] += 1
        if attempt.failure:
            failures.append(attempt)
            print(f"--seed {attempt.seed} --tries 1 ({attempt.kind}): {attempt.failure}", flush=True)
    for kind, number in sorted(counts.items()):
        print(f"{number:8,}  {kind}")
    print(f"{counts.total():8,}  in all; {len(failures)} failed", flush=True)
    return failures


def main(attack: Attack) -> bool:
    """The command line of an attack; True if anything failed."""
    parser = argparse.ArgumentParser(description=attack.__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seconds", type=float, default=60.0, help="when to begin no further attempt")
    parser.add_argument("--tries", type=int, help="at most so many attempts")
    chosen = parser.parse_args()
    return bool(account(attack, seeds_within(chosen.seed, chosen.seconds, chosen.tries)))
