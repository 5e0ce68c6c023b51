"""Samples shuffled within a bounded window, while their files are read one after another.

Formats that are read sequentially (TFRecord by file, Parquet by row group) shuffle twice: blocks by a
`RankOrder`, samples here. Pure. Invariant: the stream of blocks is cut at fixed places and each piece is
permuted by itself: a window depends on no other, and holds at most `shuffle_size` samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.bench.permutation import Permutation, Positions
from penstock.errors import UsageError
from penstock.workload.choices import Shuffle


@dataclass(frozen=True, slots=True)
class Run:
    """`num_samples` samples of one block, from `first_sample` on, as they lie in storage."""

    block: int
    first_sample: int
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A piece of the stream: `runs` is what to read, in this order, `picks` in which order to give it out.

    A pick counts samples from the beginning of the first run. `position` is that of the first pick in the
    rank's whole stream; only a window that is resumed half-way has fewer picks than samples.
    """

    position: int
    runs: tuple[Run, ...]
    picks: Positions

    def samples(self) -> tuple[Positions, Positions]:
        """For each pick its block and its sample therein."""
        lengths = np.array([run.num_samples for run in self.runs], dtype=np.int64)
        ends = np.cumsum(lengths)
        of_run = np.searchsorted(ends, self.picks, side="right")
        blocks = np.array([run.block for run in self.runs], dtype=np.int64)
        firsts = np.array([run.first_sample for run in self.runs], dtype=np.int64)
        return blocks[of_run], firsts[of_run] + self.picks - (ends - lengths)[of_run]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOrder:
    """How samples are shuffled within windows: another way for each seed, epoch, rank and window."""

    shuffle_size: int
    """Samples of a window: what a loader holds in memory, times two if it reads ahead."""
    seed: int
    epoch: int
    rank: int
    shuffle: Shuffle = Shuffle.SEED

    def __post_init__(self) -> None:
        if self.shuffle_size < 1:
            raise UsageError(
                f"A window of {self.shuffle_size} samples holds nothing",
                fix="Give shuffle_size of at least 1.",
            )

    def picks(self, window: int, num_samples: int) -> Positions:
        """In which order the `num_samples` of a window come."""
        in_turn = np.arange(num_samples, dtype=np.int64)
        if self.shuffle is Shuffle.OFF:
            return in_turn
        identity = f"window {self.seed} {self.epoch} {self.rank} {window}".encode()
        return Permutation(num_samples, identity).items(in_turn)


def whole_blocks(blocks: Iterable[int], samples_per_block: int) -> Iterator[Run]:
    """Each block, in this order, from its first sample to its last."""
    return (Run(block, 0, samples_per_block) for block in blocks)


def windowed(runs: Iterable[Run], order: WindowOrder, *, start: int = 0) -> Iterator[Window]:
    """The windows of a rank's stream from its sample `start` on; `runs` is the stream from its beginning.

    What lies before `start` costs a step a block, not a sample, and nothing is read for it; but the window
    that holds `start` needs all of its runs again.
    """
    size = order.shuffle_size
    for window, part in enumerate(_cut(runs, size)):
        if (window + 1) * size <= start:
            continue
        picks = order.picks(window, sum(run.num_samples for run in part))
        given = max(start - window * size, 0)
        if given < picks.size:
            yield Window(position=window * size + given, runs=part, picks=picks[given:])


def _cut(runs: Iterable[Run], size: int) -> Iterator[tuple[Run, ...]]:
    """The same stream in pieces of `size` samples; the last one may be smaller."""
    piece: list[Run] = []
    room = size
    for whole in runs:
        run = whole
        while run.num_samples >= room:
            yield (*piece, replace(run, num_samples=room))
            run = replace(run, first_sample=run.first_sample + room, num_samples=run.num_samples - room)
            piece, room = [], size
        if run.num_samples:
            piece.append(run)
            room -= run.num_samples
    if piece:
        yield tuple(piece)
