"""Whole training runs of one rank, on real files, memory and an object server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.s3.server import BUCKET

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_files import choose_checked_files, open_files, validate
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe
from penstock.dataset.generate import generate
from penstock.errors import ObjectNotFound, PenstockError, ShortTransfer, UsageError
from penstock.progress import Progress
from penstock.results.event_files import read_events
from penstock.results.run_folder import run_folders
from penstock.results.run_record import RunOutcome, read_record
from penstock.results.step_events import RankEvents, SpanKind, StepPhase
from penstock.storage import open_storage
from penstock.storage.capabilities import uses_page_cache
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedSource, WrappedStorage
from penstock.workload.enums import DataFormat, Shuffle
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, Evaluation, Metric, ReaderSection, Train, Workflow, Workload

if TYPE_CHECKING:
    from tests.support.s3.server import S3Server

    from penstock.bench.training.training_result import TrainingResult
    from penstock.storage import Source, Storage

COMM = SoloComm()
FILES = Dataset(
    format=DataFormat.NPZ,
    num_files_train=24,
    record_length_bytes=Fraction(5000),
    record_length_bytes_stdev=Fraction(500),
)
SHUFFLED = ReaderSection(batch_size=4, file_shuffle=Shuffle.SEED, sample_shuffle=Shuffle.SEED)


def workload(dataset: Dataset = FILES, *, epochs: int = 2, **fields: Any) -> Workload:
    base = Workload(
        name="small",
        dataset=dataset,
        reader=SHUFFLED,
        train=Train(epochs=epochs, computation_time=Duration(mean_s=0.004)),
    )
    return replace(base, **fields)


@dataclass
class Ground:
    """A data set on some storage, and a folder for results."""

    storage: Storage
    results: Path

    def make(self, dataset: Dataset = FILES) -> Ground:
        recipe = DatasetRecipe(dataset=dataset, seed=3, reduction=IRREDUCIBLE)
        generate(recipe, self.storage, comm=COMM, threads=1, progress=Progress())
        return self

    def run(self, asked: Workload | None = None, **fields: Any) -> TrainingResult:
        request = TrainingRequest(
            workload=asked or workload(),
            results=self.results,
            seed=5,
            loader=NativeOptions(threads=2, buffer_bytes=1 << 16),
            **fields,
        )
        return train(request, self.storage, comm=COMM, progress=Progress())

    def sizes(self) -> dict[str, int]:
        return {info.key: info.size_bytes for info in self.storage.list() if info.key != KEY}


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(open_storage(str(tmp_path / "data"), {}), tmp_path / "runs")


def only_rank(result: TrainingResult) -> RankEvents:
    (events,) = read_events(Path(result.results_dir))
    return events


def test_au_and_throughput_follow_from_the_step_events_alone(ground: Ground) -> None:
    """DLIO's formula, once more by hand: compute over the block's time less the first step's."""
    result = ground.make().run()
    events = only_rank(result)
    found = []
    for epoch in (1, 2):
        steps = events.steps[events.steps["epoch"] == epoch]
        (span,) = [
            one
            for one in events.spans_of(SpanKind.BLOCK)
            if one.epoch == epoch and one.phase == StepPhase.TRAIN
        ]
        computed = steps["computed_ns"] - steps["loaded_ns"]
        excluded = int(steps["computed_ns"][0] - steps["start_ns"][0])
        found.append(100 * int(computed[1:].sum()) / (span.end_ns - span.start_ns - excluded))
    document = result.document()
    assert document["au_compat"] == pytest.approx(np.mean(found))
    assert [epoch["au_compat"] for epoch in document["epochs"]] == pytest.approx(found)
    assert 0 < document["au_compat"] <= 100
    assert document["au_strict"] >= document["au_compat"]
    assert document["read_bytes"] == int(events.steps["read_bytes"].sum())


def test_the_moments_of_each_step_are_in_order_and_computation_lasts_as_asked(ground: Ground) -> None:
    steps = only_rank(ground.make().run()).steps
    for earlier, later in (
        ("start_ns", "loaded_ns"), ("loaded_ns", "computed_ns"), ("computed_ns", "barrier_ns")
    ):  # fmt: skip
        assert (steps[later] >= steps[earlier]).all()
    assert (steps["computed_ns"] - steps["loaded_ns"] >= 4_000_000).all()
    assert (steps["start_ns"][1:] >= steps["barrier_ns"][:-1]).all()
    assert steps["step"].tolist() == [*range(1, 7), *range(1, 7)]
    assert set(steps["samples"].tolist()) == {4}


@pytest.mark.parametrize("shuffle", [Shuffle.OFF, Shuffle.SEED])
def test_every_epoch_reads_every_byte_once(ground: Ground, shuffle: Shuffle) -> None:
    ground.make()
    size_bytes = sum(ground.sizes().values())
    before = ground.storage.counters.snapshot().read_bytes
    reader = ReaderSection(batch_size=4, file_shuffle=shuffle, sample_shuffle=shuffle)
    result = ground.run(workload(epochs=3, reader=reader))
    assert [epoch.read_bytes for epoch in result.train.epochs] == [size_bytes] * 3
    manifest_bytes = ground.storage.stat(KEY).size_bytes
    seen = ground.storage.counters.snapshot().read_bytes - before
    # The manifest is read to open the data set and to compare it, and the ceiling run reads nothing.
    assert seen == 3 * size_bytes + 2 * manifest_bytes


def test_the_run_leaves_its_record_and_what_readers_of_dlio_know(ground: Ground) -> None:
    result = ground.make().run(
        command=("penstock", "training", "run"),
        environment={"AWS_REGION": "here", "HOME": "there"},
        remarks=("said",),
    )
    folder = Path(result.results_dir)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "run.json", "steps.parquet", "spans.parquet", "counters.parquet", "stages.json",
        "summary.json", "report.html", "dlio.log", "0_output.json", "0_per_epoch_stats.json", ".hydra",
    }  # fmt: skip
    record = read_record(folder)
    assert record.outcome is RunOutcome.FINISHED
    assert record.seeds == {"order": 5}
    assert record.remarks == ("said",)
    assert "AWS_REGION" in (folder / "run.json").read_text()
    assert '"HOME"' not in (folder / "run.json").read_text()
    assert [epoch["ranks"][0]["samples"] for epoch in record.plan["epochs"]] == [24, 24]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metric"]["train_au_mean_percentage"] == pytest.approx(result.document()["au_compat"])
    assert summary["num_files_train"] == 24
    stages = json.loads((folder / "stages.json").read_text())
    assert stages == json.loads(json.dumps(result.stages.document()))


def test_what_is_outside_of_the_score_is_reported_by_itself(ground: Ground) -> None:
    stages = ground.make().run().document()["outside_of_score"]
    for name in ("opening_s", "planning_s", "loader_start_s", "ceiling_s"):
        assert stages[name] >= 0
    assert stages["validation"]["num_files"] == 2
    assert [epoch["epoch"] for epoch in stages["epochs"]] == [1, 2]
    assert all(epoch["change_s"] >= 0 for epoch in stages["epochs"])
    assert stages["loader"] == {
        "name": "native", "threads": 2, "prefetch_batches": 2, "buffer_bytes": 1 << 16,
        "preprocess_threads": None,
    }  # fmt: skip
    assert stages["storage"]["uri"] == ground.storage.uri


def test_the_page_cache_of_the_data_set_is_dropped_before_each_epoch(ground: Ground) -> None:
    result = ground.make().run()
    size_bytes = sum(ground.sizes().values())
    drops = [epoch["cache"] for epoch in result.stages.epochs]
    assert len(drops) == 2
    for drop in drops:
        assert drop is not None
        assert drop["total_bytes"] == size_bytes
        assert 0 <= drop["resident_bytes"] <= drop["before_bytes"] <= size_bytes
        assert drop["resident_share"] == drop["resident_bytes"] / size_bytes


def test_direct_reads_need_no_drop(tmp_path: Path) -> None:
    ground = Ground(open_storage(f"direct://{tmp_path}/data", {}), tmp_path / "runs").make()
    assert not uses_page_cache(ground.storage)
    assert [epoch["cache"] for epoch in ground.run().stages.epochs] == [None, None]


def test_only_files_that_an_epoch_reads_are_dropped_from_the_page_cache(ground: Ground) -> None:
    dataset = replace(FILES, num_files_eval=6, listing_validation_interval=0)
    ground.make(dataset)
    asked = workload(
        dataset,
        train=Train(epochs=3, total_training_steps=4),
        workflow=Workflow(evaluation=True),
        evaluation=Evaluation(eval_after_epoch=2),
    )
    opened: set[str] = set()
    ground.storage = _WatchedStorage(ground.storage, opened)
    (epoch,) = ground.run(asked).stages.epochs
    assert len(opened) == 4 * 4
    assert epoch["cache"] is not None
    sizes = ground.sizes()
    assert epoch["cache"]["total_bytes"] == sum(sizes[key] for key in opened)


class _WatchedStorage(WrappedStorage):
    """Keeps the keys that are opened."""

    def __init__(self, inside: Storage, opened: set[str]) -> None:
        super().__init__(inside)
        self._opened = opened

    def open(self, key: str) -> Source:
        if key != KEY:
            self._opened.add(key)
        return super().open(key)


def test_the_page_cache_is_kept_where_the_workload_says_so(ground: Ground) -> None:
    ground.make()
    result = ground.run(workload(reader=replace(SHUFFLED, drop_page_cache=False)))
    assert [epoch["cache"] for epoch in result.stages.epochs] == [None, None]


def test_synthetic_samples_have_no_pages(ground: Ground) -> None:
    result = ground.run(workload(replace(FILES, format=DataFormat.SYNTHETIC)))
    assert [epoch["cache"] for epoch in result.stages.epochs] == [None, None]


class _SlowStorage(WrappedStorage):
    """Every read takes 30 ms."""

    def open(self, key: str) -> Source:
        return _SlowSource(super().open(key))


class _SlowSource(WrappedSource):
    def read_into(self, offset: int, buffer: memoryview) -> None:
        time.sleep(0.03)
        super().read_into(offset, buffer)


def test_the_ceiling_run_tells_what_this_client_could_do(tmp_path: Path) -> None:
    # On memory, a run may exceed what was measured as the ceiling, which then does not count.
    inside = Ground(MemoryStorage(), tmp_path).make()
    result = Ground(_SlowStorage(inside.storage), tmp_path).run()
    ceiling = result.stages.ceiling
    assert ceiling is not None
    assert ceiling["steps"] == 6
    assert 0 < ceiling["au_compat"] <= 100
    assert ceiling["samples_per_s"] > 0
    assert result.document()["ceiling"]["steps"] == 6
    assert any("storage that costs nothing" in sentence for sentence in result.document()["evidence"])


def test_slow_storage_is_named_as_the_bottleneck(tmp_path: Path) -> None:
    inside = Ground(MemoryStorage(), tmp_path).make()
    # The client alone keeps this utilization, whatever else the machine does.
    asked = workload(train=Train(epochs=2, computation_time=Duration(mean_s=0.02)), metric=Metric(au=0.5))
    document = Ground(_SlowStorage(inside.storage), tmp_path).run(asked).document()
    assert document["bottleneck"] == "storage"
    assert not document["meets_threshold"]
    assert document["ceiling"]["au_compat"] > document["au_compat"]


def test_without_computation_the_longest_wait_is_the_verdict(tmp_path: Path) -> None:
    inside = Ground(MemoryStorage(), tmp_path).make()
    asked = workload(train=Train(epochs=1))
    document = Ground(_SlowStorage(inside.storage), tmp_path).run(asked).document()
    assert document["bottleneck"] == "storage"
    assert document["ceiling"]["samples_per_s"] > document["samples_per_s"]


def test_one_step_is_too_short_for_a_ceiling_or_a_verdict(ground: Ground) -> None:
    asked = workload(train=Train(epochs=1, total_training_steps=1))
    document = ground.make().run(asked).document()
    assert document["ceiling"] is None
    assert document["bottleneck"] is None
    assert document["evidence"] == []
    assert document["au_strict"] is None


def test_evaluation_follows_the_epochs_it_was_asked_for(ground: Ground) -> None:
    dataset = replace(FILES, num_files_eval=6)
    asked = workload(
        dataset,
        epochs=3,
        workflow=Workflow(evaluation=True),
        evaluation=Evaluation(eval_time=Duration(mean_s=0.002), eval_after_epoch=2),
        reader=replace(SHUFFLED, batch_size_eval=2),
    )
    result = ground.make(dataset).run(asked)
    steps = only_rank(result).steps
    of_eval = steps[steps["phase"] == StepPhase.EVAL]
    assert sorted(set(of_eval["epoch"].tolist())) == [2, 3]
    assert len(of_eval) == 2 * 3
    assert (of_eval["barrier_ns"] - of_eval["computed_ns"] < 1_000_000_000).all()
    evaluation = result.document()["evaluation"]
    eval_bytes = sum(size for key, size in ground.sizes().items() if key.startswith("valid/"))
    assert evaluation["read_bytes"] == 2 * eval_bytes
    assert result.document()["read_bytes"] == 3 * (sum(ground.sizes().values()) - eval_bytes)


def test_the_run_stops_after_its_total_of_steps(ground: Ground) -> None:
    asked = workload(epochs=5, train=Train(epochs=5, total_training_steps=8))
    result = ground.make().run(asked)
    assert [epoch.samples for epoch in result.train.epochs] == [24, 8]


def test_excluded_steps_do_not_count(ground: Ground) -> None:
    ground.make()
    times = ground.run(workload(epochs=1, metric=Metric(exclude_start_steps=3))).train.times
    assert times is not None
    assert times.over_ranks["wait"].num_steps == 3


def test_a_file_that_is_missing_ends_the_run_before_it_begins(ground: Ground) -> None:
    ground.make()
    ground.storage.delete("train/img_00_of_24.npz")
    with pytest.raises(ObjectNotFound, match=r"1 of 2 files looked up .* train/img_00_of_24.npz") as caught:
        ground.run()
    assert caught.value.uri == f"{ground.storage.uri}/train/img_00_of_24.npz"
    assert "listing_validation_interval=0" in caught.value.fix
    assert not ground.results.exists()


@pytest.mark.parametrize("drops", [True, False])
def test_a_file_that_is_missing_in_the_middle_is_named_with_what_decided_its_name(
    ground: Ground, *, drops: bool
) -> None:
    ground.make()
    ground.storage.delete("train/img_07_of_24.npz")
    asked = workload(reader=ReaderSection(batch_size=4, drop_page_cache=drops))
    with pytest.raises(PenstockError) as caught:
        ground.run(asked)
    said = str(caught.value)
    assert "A file of the data set is missing" in said
    assert "train/img_07_of_24.npz" in said
    assert "follows from the manifest" in said


def test_the_first_three_missing_files_are_named_and_all_counted(ground: Ground) -> None:
    dataset = replace(FILES, listing_validation_interval=1)
    ground.make(dataset)
    for number in (3, 5, 7, 11):
        ground.storage.delete(f"train/img_{number:02}_of_24.npz")
    with pytest.raises(ObjectNotFound) as caught:
        ground.run(workload(dataset))
    assert "4 of 24" in caught.value.what
    assert all(f"img_{number:02}_of" in caught.value.what for number in (3, 5, 7))
    assert "img_11" not in caught.value.what


def test_a_missing_index_is_a_missing_file(ground: Ground) -> None:
    dataset = replace(FILES, format=DataFormat.INDEXED_BINARY, num_samples_per_file=4)
    ground.make(dataset)
    ground.storage.delete("train/img_00_of_24.indexed_binary.sz.idx")
    files = open_files(dataset, ground.storage, seed=1, evaluates=False)
    with pytest.raises(ObjectNotFound, match=r"sz\.idx"):
        validate(files, ground.storage, comm=COMM, progress=Progress())


def test_first_last_and_every_kth_file_are_looked_up() -> None:
    files = open_files(replace(FILES, num_files_eval=6), MemoryStorage(), seed=1, evaluates=True)
    assert choose_checked_files(files, 10) == [0, 10, 20, 23, 24, 29]
    assert choose_checked_files(files, 1000) == [0, 23, 24, 29]
    assert choose_checked_files(files, 1) == list(range(30))
    assert choose_checked_files(files, 0) == []


def test_a_file_lost_between_validation_and_its_step_fails_the_run_by_name(tmp_path: Path) -> None:
    ground = Ground(MemoryStorage(), tmp_path).make()
    ground.storage.delete("train/img_07_of_24.npz")
    with pytest.raises(ObjectNotFound, match="img_07_of_24") as caught:
        ground.run(workload(replace(FILES, listing_validation_interval=0)))
    assert "the manifest" in caught.value.fix
    ground.storage.delete(KEY)
    with pytest.raises(ObjectNotFound, match="img_07_of_24") as caught:
        ground.run(workload(replace(FILES, listing_validation_interval=0, skip_listing=True)))
    assert "dataset.skip_listing" in caught.value.fix


def test_a_short_file_fails_the_run_by_name_and_the_record_says_why(ground: Ground) -> None:
    ground.make()
    path = Path(ground.storage.uri.removeprefix("file://"), "train/img_09_of_24.npz")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShortTransfer, match="img_09_of_24"):
        ground.run()
    (folder,) = run_folders(ground.results)
    record = read_record(folder)
    assert record.outcome is RunOutcome.FAILED
    assert "img_09_of_24" in record.why


def test_a_place_without_files_says_what_to_do(ground: Ground) -> None:
    with pytest.raises(ObjectNotFound, match="training generate"):
        ground.run()


def test_ctrl_c_leaves_a_run_that_is_marked_so(ground: Ground) -> None:
    class Impatient(Progress):
        def advance(self, amount: float) -> None:
            if self.is_training:
                raise KeyboardInterrupt

        is_training = False

        def begin(self, phase: str, total: float) -> None:
            self.is_training = phase.startswith("epoch 2")

    ground.make()
    request = TrainingRequest(
        workload=workload(), results=ground.results, seed=5, loader=NativeOptions(threads=2)
    )
    with pytest.raises(KeyboardInterrupt):
        train(request, ground.storage, comm=COMM, progress=Impatient())
    (folder,) = run_folders(ground.results)
    assert read_record(folder).outcome is RunOutcome.INTERRUPTED
    (events,) = read_events(folder)
    assert len(events.steps) == 7


def test_a_remainder_that_shall_be_an_error_ends_the_run(ground: Ground) -> None:
    ground.make()
    with pytest.raises(UsageError, match="do not divide evenly"):
        ground.run(workload(reader=replace(SHUFFLED, batch_size=5)), division=Remainder.ERROR)


def test_too_few_evaluation_files_are_an_error(ground: Ground) -> None:
    dataset = replace(FILES, num_files_eval=1)
    reader = replace(SHUFFLED, batch_size_eval=2)
    asked = workload(dataset, workflow=Workflow(evaluation=True), reader=reader)
    with pytest.raises(UsageError, match="evaluation would have no step"):
        ground.make(dataset).run(asked)


def test_synthetic_samples_need_no_data_set(tmp_path: Path) -> None:
    dataset = replace(FILES, format=DataFormat.SYNTHETIC)
    document = Ground(MemoryStorage(), tmp_path).run(workload(dataset)).document()
    assert document["read_bytes"] == 0
    assert document["au_strict"] > 0


@pytest.fixture
def objects(moto: S3Server, tmp_path: Path) -> Iterator[Ground]:
    storage = open_storage(f"s3://{BUCKET}/{tmp_path.name}", moto.environment)
    yield Ground(storage, tmp_path / "runs")
    for info in list(storage.list()):
        storage.delete(info.key)


def test_on_an_object_service_every_epoch_reads_every_byte_once(objects: Ground) -> None:
    result = objects.make().run(workload(epochs=3))
    assert [epoch.read_bytes for epoch in result.train.epochs] == [sum(objects.sizes().values())] * 3
    assert [epoch["cache"] for epoch in result.stages.epochs] == [None] * 3
