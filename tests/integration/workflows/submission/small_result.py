"""A small result of our own: a shipped workload, scaled down, on simulated hosts of a few MiB of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_run import TrainingRequest
from penstock.cluster.comm import SoloComm
from penstock.environment import process_environment
from penstock.progress import Progress
from penstock.results.provenance import HostFacts
from penstock.storage import open_storage
from penstock.submission.authoring.owned_tree import RunSeries, claim_tree
from penstock.submission.authoring.preflight import locate_data
from penstock.submission.code_image import Program, capture
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import Benchmark, SubmissionPhase
from penstock.workflows.submission_results import ResultWriter, TrainingSequence, add_run
from penstock.workload.load_workload import load
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.settings import parse_settings

if TYPE_CHECKING:
    from penstock.bench.training.training_result import TrainingResult
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage
    from penstock.submission.authoring.run_sequence import RunSequence
    from penstock.workload.spec import Workload

COMM = SoloComm()
BEGAN = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
NUM_FILES = 28
SCALE = (
    f"dataset.num_files_train={NUM_FILES}",
    "dataset.record_length_bytes=4096",
    "dataset.record_length_bytes_stdev=0",
    "dataset.record_length_bytes_resize=0",
    "train.computation_time=0.02",
    "train.epochs=2",
    "metric.au=0.01",
)


DESCRIBED = {
    "system_under_test": {
        "solution": {
            "submission_name": "fast",
            "friendly_description": "A disk",
            "usable_capacity_tib": 1,
            "availability": "available",
            "architecture": {
                "storage_location": "local",
                "benchmark_API": "file",
                "product_API": "file",
                "client_footprint": "open_source",
                "client_installation": "in_box",
            },
            "capabilities": {
                "multi_host": False,
                "simultaneous_write": True,
                "simultaneous_read": True,
                "remap_time_in_seconds": 0,
            },
        },
        "deployment": "onprem",
        "clients": [
            {
                "friendly_description": "A small machine",
                "quantity": 1,
                "chassis": {
                    "model_name": "Box",
                    "cpu_model": "Processor",
                    "cpu_qty": 1,
                    "cpu_cores": 4,
                    "memory_capacity": 16 / 2**20,
                },
            }
        ],
    }
}


@dataclass
class TickingClock:
    """A second passes between any two looks at it, and a minute with every run."""

    now: datetime = BEGAN
    step: timedelta = timedelta(seconds=1)
    run: timedelta = timedelta(minutes=1)

    def __call__(self) -> datetime:
        """The time, later each time."""
        self.now += self.step
        return self.now

    def host_during_run(self, host: str) -> HostFacts:
        """Every run asks once what its host is."""
        self.now += self.run
        return small_host(host)


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
        self.tree = claim_tree(self.root, "acme", now=BEGAN, by="tests")
        loaded = load("unet3d_b200", overrides=parse_settings(SCALE)).workload
        located = locate_data(loaded, str(self.data))
        self.workload: Workload = located.workload
        scaled = dict(text.split("=") for text in SCALE)
        self.session = ResultWriter(
            series=RunSeries(
                tree=self.tree,
                division=SubmissionDivision.CLOSED,
                system="fast",
                benchmark=Benchmark.TRAINING,
                model="unet3d",
            ),
            program=replace(self.program, digest=capture(self.program, self.root, now=BEGAN)),
            data_path=located.data_path,
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
            division=Remainder.DROP,
            loader=NativeOptions(threads=2),
            command=self.session.command,
            facts_of=self.clock.host_during_run,
        )

    def datasize(self) -> Path:
        """The result directory of the size."""
        return self.sequence().add_datasize()

    def datagen(self) -> Path:
        """The result directory of the data set."""
        return self.sequence().add_datagen()

    def run(self) -> TrainingResult:
        """Run once, into a result directory."""
        return add_run(
            self.session,
            self.request(),
            self.storage,
            comm=COMM,
            progress=Progress(),
            format_logs=format_logs,
        )

    def sequence(
        self,
        notes: list[str] | None = None,
        progress: Progress | None = None,
        *,
        comm: Comm = COMM,
        num_accelerators: int = 1,
    ) -> TrainingSequence:
        """The whole result."""
        return TrainingSequence(
            writer=self.session,
            request=self.request(),
            storage=self.storage,
            comm=comm,
            edition=load_edition("v3.0"),
            num_accelerators=num_accelerators,
            hosts=[small_host("here")],
            progress=progress or Progress(),
            note=print if notes is None else notes.append,
            format_logs=format_logs,
            generator_threads=2,
        )

    def describe(self) -> None:
        """What a human adds: the system's description and its picture."""
        systems = self.root / "closed" / "acme" / "systems"
        systems.mkdir(parents=True)
        (systems / "fast.pdf").write_text("%PDF-1.4")
        (systems / "fast.yaml").write_text(yaml.safe_dump(DESCRIBED))

    def whole(self, progress: Progress | None = None, *, comm: Comm = COMM) -> tuple[RunSequence, list[str]]:
        """The whole sequence, and the notes on its way."""
        notes: list[str] = []
        return self.sequence(notes, progress, comm=comm, num_accelerators=comm.size).make_all(), notes

    def part(self, phase: SubmissionPhase) -> tuple[RunSequence, list[str]]:
        """One result directory, and the notes on its way."""
        notes: list[str] = []
        return self.sequence(notes).make_part(phase), notes

    def runs(self, num_runs: int) -> Iterator[Path]:
        """Several result directories, one after the other."""
        for _ in range(num_runs):
            yield Path(self.run().results_dir)

    def with_changed(self, **changes: object) -> SmallResult:
        """The same with other changes of the workload."""
        self.session = replace(self.session, changed={**self.session.changed, **changes})
        return self


def format_logs(result: TrainingResult) -> tuple[str, str]:
    """What a command would have printed."""
    return f"{result.results_dir}\n", "a remark\n"
