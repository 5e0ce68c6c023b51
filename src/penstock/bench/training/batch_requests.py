"""Turn a rank's order into `BatchRequest`s for its loader, in the access pattern of the files' format.

Pure, except for formats whose files must be opened to find their ranges. Files with one sample are read
whole, TFRecords front to back, and others block by block. Takes O(1) memory; every byte range of an epoch is
requested once, by the first batch that needs it.
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Final

from penstock.bench.epoch_order import DrawnTimes
from penstock.bench.loader.loader_protocol import BatchRequest, BlockRequest, ContentCheck, ReadRequest
from penstock.bench.training.training_files import TrainingFiles
from penstock.bench.training.training_plan import RankEpoch
from penstock.dataset.formats.format_protocol import COMPUTED, FileFormat, FilePlan, FileSurvey
from penstock.results.step_events import StepPhase
from penstock.storage import Storage, aligned
from penstock.storage.protocol import WrappedSource

TRANSFER_BYTES: Final = 256 << 10
"""The size of a sequential read if the workload does not set it: what TensorFlow reads of a TFRecord file."""
KNOWN_FILES: Final = 64
"""The number of surveyed files that are remembered, because they may soon be needed again."""


_Block = tuple[int, int, range]
"""The position of the block's first sample in the rank's stream, the number of its file, and the samples that
are read together.
"""


class BatchPlanner:
    """Creates the requests of one rank and phase. Only one thread at a time may use it.

    With `check`, samples are decoded, and the share that it sets is compared with what the generator
    produced; otherwise, samples are dropped undecoded. `survey_bytes` counts the bytes read to find ranges,
    which are mostly footers.
    """

    def __init__(
        self,
        files: TrainingFiles,
        storage: Storage,
        phase: StepPhase,
        *,
        transfer_bytes: int | None = None,
        known_files: int = KNOWN_FILES,
        check: ContentCheck | None = None,
        preprocess: DrawnTimes | None = None,
    ) -> None:
        self._files = files
        self._storage = storage
        self._phase = phase
        self._check = check
        self._preprocess = preprocess
        self._transfer_bytes = transfer_bytes or TRANSFER_BYTES
        self._max_known = known_files
        self._kind, self._is_stream = files.data_files.kind, files.dataset.format.is_stream
        self._have_manifest = files.recipe is not None
        # For other kinds, ranges are known only after looking into each file.
        self._needs_survey = type(self._kind).survey is not FileFormat.survey
        self._known: OrderedDict[int, tuple[FilePlan, FileSurvey]] = OrderedDict()
        self.survey_bytes = 0

    def of_epoch(self, order: RankEpoch, num_steps: int) -> Iterator[BatchRequest]:
        """Yield the requests for the first `num_steps` steps of an epoch."""
        sharding = order.sharding
        num_samples = num_steps * sharding.batch_size
        reads = self._reads(order, num_samples)
        waiting = next(reads, None)
        for step in range(1, num_steps + 1):
            reach = step * sharding.batch_size
            if sharding.window_samples:
                reach = min(aligned.round_up(reach, sharding.window_samples), num_samples)
            requests = []
            while waiting is not None and waiting[0] < reach:
                requests.append(waiting[1])
                waiting = next(reads, None)
            times = self._preprocess
            preprocess_ns = times.of_batch(order.epoch, step, sharding.batch_size) if times else ()
            yield BatchRequest(tuple(requests), sharding.batch_size, preprocess_ns)

    def _reads(self, order: RankEpoch, num_samples: int) -> Iterator[tuple[int, ReadRequest | BlockRequest]]:
        """Yield every read of an epoch, with the position of the first sample that needs it."""
        if self._check is not None:
            yield from self._blocks_to_decode(order, num_samples, self._check)
            return
        if self._files.are_read_whole:
            yield from self._whole_files(order, num_samples)
            return
        indexed: set[int] = set()
        for position, number, samples in _blocks(order, num_samples):
            plan, survey = self._look_into(number)
            if self._is_stream:
                yield from self._front_to_back(plan, position, samples)
            else:
                for read in self._reads_of(number, plan, survey, samples, indexed):
                    yield position, read

    def _whole_files(self, order: RankEpoch, num_samples: int) -> Iterator[tuple[int, ReadRequest]]:
        """Yield the reads of an epoch if files are read whole.

        This takes the least work possible, because there may be millions of small files.
        """
        files, phase, expects, position = self._files, self._phase, self._have_manifest, 0
        for number, samples in order.samples():
            if position >= num_samples:
                return
            plan = files.plan(phase, number)
            yield position, ReadRequest(plan.name, 0, None, plan.parts[0].size_bytes if expects else None)
            position += samples.stop - samples.start

    def _reads_of(
        self, number: int, plan: FilePlan, survey: FileSurvey, samples: range, indexed: set[int]
    ) -> Iterator[ReadRequest]:
        for read in self._kind.reads(plan, survey, samples):
            part = plan.parts[read.part]
            # An index file is loaded when its data file is opened, not for every sample.
            if read.part == 0 or number not in indexed:
                is_whole = read.offset == 0 and read.size_bytes == part.size_bytes
                size_bytes = None if is_whole else read.size_bytes
                expected_bytes = self._expected(plan, read.part)
                yield ReadRequest(part.key(plan.name), read.offset, size_bytes, expected_bytes)
        if len(plan.parts) > 1:
            indexed.add(number)

    def _blocks_to_decode(
        self, order: RankEpoch, num_samples: int, check: ContentCheck
    ) -> Iterator[tuple[int, ReadRequest | BlockRequest]]:
        """Yield each block with the reads that it is decoded from. Index files are read, but not decoded."""
        indexed: set[int] = set()
        for count, (position, number, samples) in enumerate(
            self._pieces_of_streams(_blocks(order, num_samples))
        ):
            plan, survey = self._look_into(number)
            data_key = plan.parts[0].key(plan.name)
            reads = (
                self._records(plan, samples)
                if self._is_stream
                else self._reads_of(number, plan, survey, samples, indexed)
            )
            together = []
            for read in reads:
                if read.key == data_key:
                    together.append(read)
                else:
                    yield position, read
            is_checked = check.includes(count)
            yield position, BlockRequest(tuple(together), plan, survey, samples, is_checked)

    def _pieces_of_streams(self, blocks: Iterator[_Block]) -> Iterator[_Block]:
        """Divide blocks of files that are read front to back, so that one read covers each part."""
        for position, number, samples in blocks:
            if not self._is_stream:
                yield position, number, samples
                continue
            plan, _ = self._look_into(number)
            step = max(1, self._transfer_bytes // _record_bytes(plan))
            for first in range(samples.start, samples.stop, step):
                piece = range(first, min(first + step, samples.stop))
                yield position + first - samples.start, number, piece

    def _records(self, plan: FilePlan, samples: range) -> Iterator[ReadRequest]:
        record_bytes = _record_bytes(plan)
        end = samples.stop * record_bytes
        for offset in range(samples.start * record_bytes, end, self._transfer_bytes):
            size_bytes = min(self._transfer_bytes, end - offset)
            yield ReadRequest(plan.parts[0].key(plan.name), offset, size_bytes, self._expected(plan, 0))

    def _front_to_back(
        self, plan: FilePlan, position: int, samples: range
    ) -> Iterator[tuple[int, ReadRequest]]:
        """Read a whole file in pieces. Each piece is needed by the first sample that has a byte in it."""
        key, expected_bytes = plan.parts[0].key(plan.name), self._expected(plan, 0)
        size_bytes = self._storage.stat(key).size_bytes if expected_bytes is None else expected_bytes
        for offset in range(0, size_bytes, self._transfer_bytes):
            length = min(self._transfer_bytes, size_bytes - offset)
            first = position + offset * len(samples) // size_bytes
            yield first, ReadRequest(key, offset, length, expected_bytes)

    def _expected(self, plan: FilePlan, part: int) -> int | None:
        return plan.parts[part].size_bytes if self._have_manifest else None

    def _look_into(self, number: int) -> tuple[FilePlan, FileSurvey]:
        if number in self._known:
            self._known.move_to_end(number)
            return self._known[number]
        plan, survey = self._files.plan(self._phase, number), COMPUTED
        if self._needs_survey:
            with closing(_CountedSource(self._storage.open(plan.parts[0].key(plan.name)))) as source:
                survey = self._kind.survey(plan, source)
            self.survey_bytes += source.read_bytes
        self._known[number] = plan, survey
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        return plan, survey


class _CountedSource(WrappedSource):
    """Counts the bytes that are read from it."""

    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read from the wrapped source, and count."""
        super().read_into(offset, buffer)
        self.read_bytes += buffer.nbytes


def _record_bytes(plan: FilePlan) -> int:
    """Return the size of one record of a file whose records have equal sizes."""
    size_bytes = plan.parts[0].size_bytes
    assert size_bytes is not None
    return size_bytes // plan.num_samples


def _blocks(order: RankEpoch, num_samples: int) -> Iterator[_Block]:
    """Yield the rank's blocks in order, up to `num_samples` samples."""
    position = 0
    step = order.sharding.block_samples
    for number, item in order.samples():
        for first in range(item.start, item.stop, step):
            if position >= num_samples:
                return
            samples = range(first, min(first + step, item.stop))
            yield position, number, samples
            position += len(samples)


def plan_ahead(requests: Iterator[BatchRequest], depth: int) -> Generator[BatchRequest, None, None]:
    """Yield `requests`, which a separate thread plans up to `depth` ahead.

    Planning then takes place while the rank computes, as with the workers of other loaders.
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
