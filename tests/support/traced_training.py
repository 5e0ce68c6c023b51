"""Small real training runs on files, traced, with the computation and the bandwidth that a test needs."""

import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_result import TrainingResult
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.environment import TRACE
from penstock.progress import Progress
from penstock.results.event_files import read_events
from penstock.results.step_events import Rows
from penstock.storage import Source, Storage, open_storage
from penstock.storage.protocol import WrappedSource, WrappedStorage
from penstock.trace.capture.recorder import get_recorder
from penstock.trace.capture.traced_storage import trace_storage
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

FILE_BYTES = 100_000
UNLIMITED = 1e12


class SlowStorage(WrappedStorage):
    """Every read takes as long as its bytes at a rate, however long nothing was read before."""

    def __init__(self, inside: Storage, rate: float) -> None:
        super().__init__(inside)
        self._rate = rate

    def open(self, key: str) -> Source:
        return SlowSource(self.inside.open(key), self._rate)


class SlowSource(WrappedSource):
    """An object of such a storage."""

    def __init__(self, inside: Source, rate: float) -> None:
        super().__init__(inside)
        self._rate = rate

    def read_into(self, offset: int, buffer: memoryview) -> None:
        time.sleep(buffer.nbytes / self._rate)
        self.inside.read_into(offset, buffer)


DATASET = Dataset(format=DataFormat.NPZ, num_files_train=24, record_length_bytes=Fraction(FILE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """A finished run, and the folder of its trace."""

    result: TrainingResult
    traces: Path

    @property
    def steps(self) -> Rows:
        """The step events of its only rank."""
        (events,) = read_events(Path(self.result.results_dir))
        return events.steps


def make_data_set(folder: Path) -> None:
    """Write 24 files of one sample each."""
    recipe = DatasetRecipe(dataset=DATASET, seed=3, reduction=IRREDUCIBLE)
    generate(recipe, open_storage(str(folder), {}), comm=SoloComm(), threads=1, progress=Progress())


def train_traced(data: Path, out: Path, *, compute_s: float, rate: float = UNLIMITED) -> TracedRun:
    """Train an epoch of 12 steps on the data set, which yields at most `rate` bytes a second."""
    traces = out / "traces"
    environment = {TRACE: str(traces)}
    # The trace is around the delay, so that it shows what that costs.
    storage = trace_storage(SlowStorage(open_storage(str(data), {}), rate), environment)
    workload = Workload(
        name="small",
        dataset=DATASET,
        reader=ReaderSection(batch_size=2),
        train=Train(epochs=1, computation_time=Duration(mean_s=compute_s)),
    )
    request = TrainingRequest(
        workload=workload,
        results=out / "runs",
        seed=5,
        loader=NativeOptions(threads=1, prefetch_batches=1, buffer_bytes=1 << 18),
        environment=environment,
    )
    try:
        result = train(request, storage, comm=SoloComm(), progress=Progress())
    finally:
        get_recorder(str(traces)).close()
    return TracedRun(result=result, traces=traces)
