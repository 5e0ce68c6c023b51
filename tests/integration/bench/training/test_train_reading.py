"""Whole runs that do more with samples than read them: decode, check, preprocess, or read them all first."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.bench.loader.loader_protocol import ContentCheck
from penstock.bench.loader.native_loader import NativeOptions
from penstock.bench.training.training_run import TrainingRequest, train
from penstock.cluster.comm import SoloComm
from penstock.dataset.content import IRREDUCIBLE
from penstock.dataset.dataset_manifest import KEY, DatasetRecipe
from penstock.dataset.formats.format_protocol import FilePlan, FileSurvey, RangeRead
from penstock.dataset.formats.npz import NpzFormat
from penstock.dataset.generate import generate
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.progress import Progress
from penstock.results.event_files import read_events
from penstock.results.run_folder import STAGES_FILE
from penstock.results.run_record import read_record
from penstock.storage import open_storage
from penstock.workload.enums import DataFormat, ProcessStart, ReadType, Shuffle
from penstock.workload.quantities import Duration
from penstock.workload.spec import Dataset, ReaderSection, Train, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bench.loader.loader_protocol import LoaderOptions
    from penstock.bench.training.training_result import TrainingResult

FILES = Dataset(format=DataFormat.NPZ, num_files_train=12, record_length_bytes=Fraction(4000))
READER = ReaderSection(batch_size=3, file_shuffle=Shuffle.SEED, sample_shuffle=Shuffle.SEED)
NATIVE = NativeOptions(threads=2, buffer_bytes=1 << 16)


@dataclass
class Ground:
    """A generated data set on files, and a folder for results."""

    place: Path
    dataset: Dataset = FILES

    def __post_init__(self) -> None:
        self.data = str(self.place / "data")
        self.storage = open_storage(self.data, {})
        recipe = DatasetRecipe(dataset=self.dataset, seed=3, reduction=IRREDUCIBLE)
        generate(recipe, self.storage, comm=SoloComm(), threads=1, progress=Progress())

    def run(
        self, reads: ReaderSection = READER, /, *, loader: LoaderOptions = NATIVE, **fields: Any
    ) -> TrainingResult:
        request = TrainingRequest(
            workload=Workload(
                name="small",
                dataset=self.dataset,
                reader=reads,
                train=Train(epochs=2, computation_time=Duration(mean_s=0.002)),
            ),
            results=self.place / "runs",
            seed=5,
            loader=loader,
            reopen=partial(open_storage, self.data, {}),
            **fields,
        )
        return train(request, self.storage, comm=SoloComm(), progress=Progress())

    def damage(self) -> str:
        """Flip the last byte of a sample's array, in the file that is read last in neither epoch."""
        path = sorted(self.place.glob("data/train/*"))[4]
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
        return path.name


class Beginnings(NpzFormat):
    """A reader that takes only the first 1000 bytes of each file."""

    def reads(self, _plan: FilePlan, _survey: FileSurvey, samples: range) -> Iterator[RangeRead]:
        if samples:
            yield RangeRead(offset=0, size_bytes=1000)


def total(result: TrainingResult, column: str) -> int:
    return sum(int(rank.steps[column].sum()) for rank in read_events(Path(result.results_dir)))


@pytest.mark.parametrize("name", ["native", "pytorch"])
def test_decoding_is_timed_apart_from_reading(tmp_path: Path, name: str) -> None:
    loader: LoaderOptions = NATIVE
    if name == "pytorch":
        pytest.importorskip("torch")
        from penstock.bench.loader.pytorch_loader import PytorchOptions

        loader = PytorchOptions(workers=1, sample_bytes=64, context=ProcessStart.FORK)
    result = Ground(tmp_path).run(decodes=True, check=ContentCheck.FULL, loader=loader)
    assert total(result, "decode_ns") > 0
    assert total(result, "read_ns") > 0
    assert result.stages.ceiling is None
    assert sum(rate.samples for rate in result.train.epochs) == 24


def test_without_decoding_nothing_is_decoded(tmp_path: Path) -> None:
    assert total(Ground(tmp_path).run(), "decode_ns") == 0


def test_a_flipped_byte_ends_a_run_that_decodes_as_numpy_would_and_one_that_checks(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    name = ground.damage()
    ground.run()
    with pytest.raises(StorageError, match=rf"{name} is damaged: the CRC-32 of x\.npy is wrong"):
        ground.run(decodes=True)
    with pytest.raises(StorageError, match=rf"Sample 0 of train/{name} is not what was generated"):
        ground.run(check=ContentCheck.FULL)


def test_decoding_files_from_elsewhere_is_refused(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    (tmp_path / "data" / KEY).unlink()
    with pytest.raises(UsageError, match=r"only where penstock's manifest.*--decode"):
        ground.run(decodes=True)


def test_samples_are_preprocessed_for_as_long_as_asked(tmp_path: Path) -> None:
    result = Ground(tmp_path).run(replace(READER, preprocess_time=Duration(mean_s=0.001)))
    assert total(result, "decode_ns") >= 24 * 1_000_000


def test_what_shall_be_in_memory_is_read_before_the_first_step_and_not_in_any(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    result = ground.run(replace(READER, read_type=ReadType.MEMORY))
    assert total(result, "read_bytes") == 0
    assert total(result, "samples") == 24
    sizes = sum(path.stat().st_size for path in tmp_path.glob("data/train/*"))
    stages = json.loads((Path(result.results_dir) / STAGES_FILE).read_text())
    assert [epoch["preload"]["read_bytes"] for epoch in stages["epochs"]] == [sizes, sizes]
    assert all(epoch["preload"]["elapsed_s"] > 0 for epoch in stages["epochs"])


def test_a_data_set_of_others_is_listed_and_more_files_than_asked_for_are_said(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    (tmp_path / "data" / KEY).unlink()
    for path in sorted((tmp_path / "data" / "train").iterdir()):
        path.rename(path.with_name(f"case-{path.name}"))
    ground.dataset = replace(FILES, num_files_train=9)
    result = ground.run()
    assert result.stages.files_found == 12
    assert result.stages.remarks == ("12 files were found, and the first 9 of them are read",)
    assert read_record(Path(result.results_dir)).remarks[-1] == result.stages.remarks[0]
    assert sum(rate.samples for rate in result.train.epochs) == 18
    assert result.stages.validated_files == 0


def test_with_skip_listing_names_are_dlios_and_looked_up(tmp_path: Path) -> None:
    ground = Ground(tmp_path)
    (tmp_path / "data" / KEY).unlink()
    ground.dataset = replace(FILES, skip_listing=True)
    assert ground.run().stages.files_found is None
    ground.dataset = replace(ground.dataset, num_files_train=13)
    with pytest.raises(ObjectNotFound, match=r"listing_validation_interval=0"):
        ground.run()


def test_a_reader_of_ones_own_says_what_is_read_of_each_file(tmp_path: Path) -> None:
    result = Ground(tmp_path).run(reader=Beginnings)
    assert total(result, "read_bytes") == 24 * 1000
