"""A small result of our own: a shipped workload, scaled down, on simulated hosts of a few MiB of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.loader.native import NativeOptions
from penstock.bench.order import Division
from penstock.bench.training.request import TrainingRequest
from penstock.campaign.submission.session import Said, Session
from penstock.campaign.submission.training import DataSet, add_datagen, add_datasize, add_run
from penstock.cluster.solo import SoloComm
from penstock.dataset.content import Reduction
from penstock.dataset.manifest import Recipe
from penstock.environment import process_environment
from penstock.progress import Silent
from penstock.results.host import HostFacts
from penstock.storage import open_storage
from penstock.submission.making.claim import claim
from penstock.submission.making.image import Program, capture
from penstock.submission.making.leaf import Series
from penstock.submission.making.located import locate_data
from penstock.submission.making.writing import Image
from penstock.submission.names import Benchmark
from penstock.workload.divisions import SubmissionDivision
from penstock.workload.loading import load
from penstock.workload.overrides import parse_settings

if TYPE_CHECKING:
    from penstock.bench.training.outcome import TrainingResult
    from penstock.storage import Storage
    from penstock.workload.spec import Workload

COMM = SoloComm()
BEGAN = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
NUM_FILES = 28
SCALE = (
    f"dataset.num_files_train={NUM_FILES}",
    "dataset.record_length_bytes=4096",
    "dataset.record_length_bytes_stdev=0",
    "dataset.record_length_bytes_resize=0",
    "train.computation_time=0.004",
    "train.epochs=2",
)


@dataclass
class TickingClock:
    """Seven seconds pass between any two looks at it."""

    now: datetime = BEGAN
    step: timedelta = field(default_factory=lambda: timedelta(seconds=7))

    def __call__(self) -> datetime:
        """The time, later each time."""
        self.now += self.step
        return self.now


def small_host(host: str) -> HostFacts:
    """A machine with 16 KiB of memory, five times of which is less than any data set."""
    return HostFacts(
        host=host,
        kernel="Linux 6.1",
        machine="x86_64",
        num_cores=4,
        memory_bytes=16 * 1024,
        cpuinfo={},
        meminfo={"MemTotal": "16 kB"},
    )


@dataclass
class SmallResult:
    """Everything that makes leaves of one small training result, in the closed division."""

    root: Path
    data: Path
    clock: TickingClock = field(default_factory=TickingClock)

    def __post_init__(self) -> None:
        self.program = Program(folder=self._program(), version="1.0")
        self.claim = claim(self.root, "acme", now=BEGAN, by="tests")
        loaded = load("unet3d_b200", overrides=parse_settings(SCALE)).workload
        located = locate_data(loaded, str(self.data))
        self.workload: Workload = located.workload
        scaled = dict(text.split("=") for text in SCALE)
        self.session = Session(
            series=Series(
                claim=self.claim,
                division=SubmissionDivision.CLOSED,
                system="fast",
                benchmark=Benchmark.TRAINING,
                model="unet3d",
            ),
            image=Image(program=self.program, digest=capture(self.program, self.root, now=BEGAN)),
            place=located.place,
            changed={**scaled, **located.changes},
            command=("penstock", "submission", "run", "training", "unet3d"),
            clock=self.clock,
        )
        self.storage: Storage = open_storage(str(self.data), process_environment())

    def _program(self) -> Path:
        folder = self.root.parent / "program"
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text("print()")
        return folder

    def request(self) -> TrainingRequest:
        """One run."""
        return TrainingRequest(
            workload=self.workload,
            results=self.root,
            seed=self.workload.train.seed,
            division=Division.DROP,
            loader=NativeOptions(threads=2),
            command=self.session.command,
            facts_of=small_host,
        )

    def datasize(self) -> Path:
        """Its leaf."""
        hosts = [small_host("here")]
        return add_datasize(self.session, self.workload, hosts=hosts, num_accelerators=1, comm=COMM)

    def datagen(self) -> Path:
        """Its leaf."""
        recipe = Recipe(
            dataset=self.workload.dataset,
            seed=self.workload.train.seed,
            reduction=Reduction(compressible=0.0, dedupable=0.0),
        )
        data_set = DataSet(workload=self.workload, recipe=recipe, threads=2, hosts=[small_host("here")])
        return add_datagen(self.session, data_set, self.storage, comm=COMM, progress=Silent())

    def run(self) -> TrainingResult:
        """One run and its leaf."""
        return add_run(self.session, self.request(), self.storage, comm=COMM, progress=Silent(), tell=told)

    def runs(self, num_runs: int) -> Iterator[Path]:
        """Several leaves, one after the other."""
        for _ in range(num_runs):
            yield Path(self.run().results_dir)

    def with_changed(self, **changes: object) -> SmallResult:
        """The same with other words in its session."""
        self.session = replace(self.session, changed={**self.session.changed, **changes})
        return self


def told(result: TrainingResult) -> Said:
    """What a command would have printed."""
    return Said(stdout=f"{result.results_dir}\n", stderr="a remark\n")
