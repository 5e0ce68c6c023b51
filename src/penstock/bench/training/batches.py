"""From a rank's order to what its loader reads: `BatchRequest`s in the pattern of the files' format.

Pure but for formats that must look into a file to know its ranges. One-sample files are read whole, others
block by block, TFRecords front to back in pieces. Invariant: O(1) memory; every byte range of an epoch is
asked for once, by the first batch that needs it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.bench.loader.base import BatchRequest, ReadRequest
from penstock.dataset.formats.base import COMPUTED
from penstock.storage.aligned import round_up
from penstock.storage.wrapping import WrappedSource

if TYPE_CHECKING:
    from penstock.bench.training.files import TrainingFiles
    from penstock.bench.training.plan import RankEpoch
    from penstock.dataset.formats.base import FileMap, Plan
    from penstock.results.events import Phase
    from penstock.storage import Storage

TRANSFER_BYTES: Final = 256 << 10
"""One sequential read where the workload does not say: what TensorFlow reads of a TFRecord file."""
KNOWN_FILES: Final = 64
"""Files that have been looked into and may come again soon."""


class _Block(NamedTuple):
    """Samples of one file that are read together; `position` is that of the first in the rank's stream."""

    position: int
    number: int
    samples: range


class Batches:
    """Makes the requests of one rank and phase. One thread at a time uses it.

    `survey_bytes` counts what was read to find ranges: footers, above all.
    """

    def __init__(
        self,
        files: TrainingFiles,
        storage: Storage,
        phase: Phase,
        *,
        transfer_bytes: int | None = None,
        known_files: int = KNOWN_FILES,
    ) -> None:
        self._files = files
        self._storage = storage
        self._phase = phase
        self._transfer_bytes = transfer_bytes or TRANSFER_BYTES
        self._max_known = known_files
        self._known: OrderedDict[int, tuple[Plan, FileMap]] = OrderedDict()
        self.survey_bytes = 0

    def of_epoch(self, order: RankEpoch, num_steps: int) -> Iterator[BatchRequest]:
        """The requests of the first `num_steps` steps of an epoch."""
        deal = order.deal
        num_samples = num_steps * deal.batch_size
        reads = self._reads(order, num_samples)
        waiting = next(reads, None)
        for step in range(1, num_steps + 1):
            reach = step * deal.batch_size
            if deal.window_samples:
                reach = min(round_up(reach, deal.window_samples), num_samples)
            requests = []
            while waiting is not None and waiting[0] < reach:
                requests.append(waiting[1])
                waiting = next(reads, None)
            yield BatchRequest(tuple(requests), deal.batch_size)

    def _reads(self, order: RankEpoch, num_samples: int) -> Iterator[tuple[int, ReadRequest]]:
        """Every read of an epoch, with the position of the first sample that needs it."""
        indexed: set[int] = set()
        for block in _blocks(order, num_samples):
            plan, found = self._look_into(block.number)
            if self._files.streams:
                yield from self._front_to_back(plan, block)
                continue
            for read in self._files.kind.reads(plan, found, block.samples):
                # An index beside a file is loaded when the file is opened, not for every sample.
                if read.part == 0 or block.number not in indexed:
                    yield block.position, self._request(plan, read.part, read.offset, read.size_bytes)
            if len(plan.parts) > 1:
                indexed.add(block.number)

    def _front_to_back(self, plan: Plan, block: _Block) -> Iterator[tuple[int, ReadRequest]]:
        """A whole file in pieces, each needed by the first sample that has a byte in it."""
        key, expected_bytes = plan.parts[0].key(plan.name), self._expected(plan, 0)
        size_bytes = self._storage.stat(key).size_bytes if expected_bytes is None else expected_bytes
        for offset in range(0, size_bytes, self._transfer_bytes):
            length = min(self._transfer_bytes, size_bytes - offset)
            first = block.position + offset * len(block.samples) // size_bytes
            yield first, ReadRequest(key, offset, length, expected_bytes)

    def _request(self, plan: Plan, part: int, offset: int, size_bytes: int) -> ReadRequest:
        key, expected_bytes = plan.parts[part].key(plan.name), self._expected(plan, part)
        is_whole = offset == 0 and size_bytes == plan.parts[part].size_bytes
        return ReadRequest(key, offset, None if is_whole else size_bytes, expected_bytes)

    def _expected(self, plan: Plan, part: int) -> int | None:
        return plan.parts[part].size_bytes if self._files.are_ours else None

    def _look_into(self, number: int) -> tuple[Plan, FileMap]:
        if number in self._known:
            self._known.move_to_end(number)
            return self._known[number]
        plan = self._files.plan(self._phase, number)
        known = plan, self._survey(plan) if self._files.needs_survey else COMPUTED
        self._known[number] = known
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return known

    def _survey(self, plan: Plan) -> FileMap:
        with closing(_CountedSource(self._storage.open(plan.parts[0].key(plan.name)))) as source:
            found = self._files.kind.survey(plan, source)
        self.survey_bytes += source.read_bytes
        return found


class _CountedSource(WrappedSource):
    """Counts what is read of it."""

    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read inside, and count."""
        super().read_into(offset, buffer)
        self.read_bytes += buffer.nbytes


def _blocks(order: RankEpoch, num_samples: int) -> Iterator[_Block]:
    """The rank's blocks in order, up to that many samples."""
    position = 0
    step = order.deal.block_samples
    for number, item in order.samples():
        for first in range(item.start, item.stop, step):
            if position >= num_samples:
                return
            samples = range(first, min(first + step, item.stop))
            yield _Block(position, number, samples)
            position += len(samples)


def ahead(requests: Iterator[BatchRequest], depth: int) -> Generator[BatchRequest, None, None]:
    """The same requests, made on a thread of its own up to `depth` before they are wanted.

    Planning then falls into the time in which the rank computes, as with the workers of other loaders.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-planner") as planner:
        waiting: deque[Future[BatchRequest | None]] = deque(
            planner.submit(next, requests, None) for _ in range(depth)
        )
        try:
            while (request := waiting.popleft().result()) is not None:
                waiting.append(planner.submit(next, requests, None))
                yield request
        finally:
            for future in waiting:
                future.cancel()
