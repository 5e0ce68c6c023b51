"""The timed loop alone, on memory: what it records, when ranks meet, and that failures come out."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import BatchRequest, ReadRequest
from penstock.bench.loader.native_loader import NativeLoader, NativeOptions
from penstock.bench.recorded_run import EventsInMemory
from penstock.bench.training.training_loop import (
    PhaseWork,
    PreparedTraining,
    TrainingLoop,
    make_phase_works,
    measure_harness_limit,
)
from penstock.bench.training.training_run import prepare_training
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import DatasetRecipe
from penstock.dataset.generate import generate
from penstock.errors import ObjectNotFound
from penstock.progress import Progress
from penstock.results.step_events import RankEvents, SpanKind, StepPhase
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import DataFormat
from penstock.workload.quantities import Distribution, Duration
from penstock.workload.spec import Dataset, Evaluation, ReaderSection, Train, Workflow, Workload

WORKLOAD = Workload(
    name="w",
    workflow=Workflow(evaluation=True),
    dataset=Dataset(
        format=DataFormat.NPY, num_files_train=12, num_files_eval=4, record_length_bytes=Fraction(2000)
    ),
    reader=ReaderSection(batch_size=3, batch_size_eval=2),
    train=Train(epochs=2, computation_time=Duration(mean_s=0.002)),
    evaluation=Evaluation(eval_time=Duration(mean_s=0.001)),
)


class MeetingComm(SoloComm):
    """Says whom it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[str] = []

    def barrier(self, *, awaiting: str, timeout_s: float | None = None) -> None:
        self.awaited.append(awaiting)
        super().barrier(awaiting=awaiting, timeout_s=timeout_s)


class Counting(Progress):
    """Counts the steps that were told."""

    advanced = 0.0

    def advance(self, amount: float) -> None:
        self.advanced += amount


class Scene:
    """A data set in memory and everything that a loop needs."""

    def __init__(self, workload: Workload = WORKLOAD) -> None:
        self.workload = workload
        self.storage = MemoryStorage()
        recipe = DatasetRecipe(dataset=workload.dataset, seed=1, reduction=IRREDUCIBLE)
        generate(recipe, self.storage, comm=SoloComm(), threads=1, progress=Progress())
        self.comm, self.recorder, self.progress = MeetingComm(), EventsInMemory(), Counting()
        self.prepared = self._prepare()
        self.works = make_phase_works(workload, self.prepared, self.storage, rank=0)
        self.comm.awaited.clear()
        self.progress.advanced = 0

    def _prepare(self) -> PreparedTraining:
        return prepare_training(
            self.workload,
            self.storage,
            seed=3,
            division=Remainder.ROTATE,
            comm=self.comm,
            progress=self.progress,
        )

    def run(self, phase: StepPhase, num_steps: int) -> RankEvents:
        with closing(NativeLoader(self.storage, NativeOptions(threads=2))) as loader:
            loop = TrainingLoop(
                comm=self.comm,
                loader=loader,
                recorder=self.recorder,
                progress=self.progress,
                planned_ahead=3,
            )
            began_ns = time.monotonic_ns()
            work: PhaseWork = self.works[phase]
            loop.run(work, 1, num_steps)
            loop.add_span(SpanKind.EPOCH, StepPhase.TRAIN, 1, began_ns)
        return self.recorder.events(rank=0, host="here")


def test_every_step_of_training_meets_all_ranks() -> None:
    scene = Scene()
    events = scene.run(StepPhase.TRAIN, 4)
    assert scene.comm.awaited == [f"all ranks to finish step {step}" for step in (1, 2, 3, 4)]
    assert events.steps["step"].tolist() == [1, 2, 3, 4]
    assert scene.progress.advanced == 4


def test_evaluation_meets_nobody_and_takes_its_own_time() -> None:
    scene = Scene()
    events = scene.run(StepPhase.EVAL, 2)
    assert scene.comm.awaited == []
    assert set(events.steps["phase"].tolist()) == {StepPhase.EVAL}
    computed = events.steps["computed_ns"] - events.steps["loaded_ns"]
    assert (computed >= 1_000_000).all()
    assert events.steps["samples"].tolist() == [2, 2]


def test_a_block_holds_all_steps_and_an_epoch_its_block() -> None:
    events = Scene().run(StepPhase.TRAIN, 4)
    (block,) = events.spans_of(SpanKind.BLOCK)
    (epoch,) = events.spans_of(SpanKind.EPOCH)
    assert epoch.start_ns <= block.start_ns <= int(events.steps["start_ns"][0])
    assert int(events.steps["barrier_ns"][-1]) <= block.end_ns <= epoch.end_ns
    assert block.step == 4


def test_steps_say_what_was_read_for_them() -> None:
    scene = Scene()
    events = scene.run(StepPhase.TRAIN, 4)
    stored = sum(info.size_bytes for info in scene.storage.list("train"))
    assert int(events.steps["read_bytes"].sum()) == stored
    assert events.steps["reads"].tolist() == [3, 3, 3, 3]
    assert (events.steps["read_ns"] > 0).all()


def test_computation_is_drawn_anew_each_step_where_it_has_a_law() -> None:
    law = Duration(law=Distribution.UNIFORM, min_s=0.001, max_s=0.01)
    scene = Scene(replace(WORKLOAD, train=replace(WORKLOAD.train, computation_time=law)))
    events = scene.run(StepPhase.TRAIN, 4)
    computed = (events.steps["computed_ns"] - events.steps["loaded_ns"]).tolist()
    assert len({round(each / 1e5) for each in computed}) > 1
    assert all(each >= 1_000_000 for each in computed)


def test_a_read_that_fails_comes_out_of_the_loop_and_leaves_no_thread() -> None:
    of_others = set(threading.enumerate())
    scene = Scene()
    scene.storage.delete("train/img_07_of_12.npy")
    with pytest.raises(ObjectNotFound, match="img_07_of_12"):
        scene.run(StepPhase.TRAIN, 4)
    left = set(threading.enumerate()) - of_others
    assert not [thread for thread in left if thread.name.startswith("penstock-")]


def test_a_ceiling_run_reads_nothing_and_takes_the_same_steps() -> None:
    scene = Scene()
    before = scene.storage.counters.snapshot().read_bytes
    ceiling, *_ = measure_harness_limit(
        WORKLOAD,
        scene.prepared,
        scene.storage,
        options=NativeOptions(threads=2),
        comm=scene.comm,
        progress=scene.progress,
    )
    assert ceiling is not None
    assert ceiling["steps"] == 4
    assert scene.storage.counters.snapshot().read_bytes == before
    assert scene.comm.awaited[1:] == [f"all ranks to finish step {step}" for step in (1, 2, 3, 4)]


def test_workers_that_can_change_over_measure_the_ceiling_and_then_read() -> None:
    pytest.importorskip("torch")
    from penstock.bench.loader.pytorch_loader import PytorchOptions

    scene = Scene()
    before = scene.storage.counters.snapshot().read_bytes
    limit, loader, _ = measure_harness_limit(
        WORKLOAD,
        scene.prepared,
        scene.storage,
        options=PytorchOptions(workers=0, sample_bytes=16),
        comm=scene.comm,
        progress=scene.progress,
        reopen=lambda: scene.storage,
    )
    assert limit is not None
    assert loader is not None
    assert scene.storage.counters.snapshot().read_bytes == before
    (batch,) = loader.epoch([BatchRequest((ReadRequest("train/img_01_of_12.npy"),), 1)])
    assert batch.read_bytes == scene.storage.counters.snapshot().read_bytes - before > 0
    loader.close()


def test_two_runs_after_one_another_do_not_disturb_each_other() -> None:
    scene = Scene()
    first = scene.run(StepPhase.TRAIN, 4).steps.copy()
    second = scene.run(StepPhase.TRAIN, 4).steps[4:]
    assert first["read_bytes"].sum() == second["read_bytes"].sum()
    assert second["step"].tolist() == [1, 2, 3, 4]
