"""One way in: shipped names, files, overrides; every mistake is named with its place and the way out."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import UsageError
from penstock.workload.enums import DataFormat, LoaderKind, Shuffle
from penstock.workload.load_workload import load
from penstock.workload.quantities import Distribution, Duration
from penstock.workload.settings import parse_dlio_words, parse_settings
from penstock.workload.shipped_catalog import dlio_workloads
from penstock.workload.spec import write_workload

DLIO_FILE = """
model:
  name: unet3d
  model_size: 499153191
framework: pytorch
workflow:
  generate_data: False
  train: True
  checkpoint: True
dataset:
  data_folder: data/unet3d/
  format: npz
  num_files_train: 168
  num_samples_per_file: 1
  record_length_bytes: 146600628
  record_length_bytes_stdev: 68341808
data_reader:
  data_loader: pytorch
  batch_size: 4
  read_threads: 4
  file_shuffle: seed
  sample_shuffle: off
train:
  epochs: 5
  computation_time: 1.3604
  computation_time_stdev: 0.1
"""


def file_with(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def complaint(name: str, *settings: str, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(name, overrides=parse_settings(settings), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "accelerator"), [("unet3d_h100", ""), ("unet3d", "h100"), ("unet3d_h100", "h100")]
)
def test_a_shipped_workload_has_a_long_name_or_a_short_one_with_its_accelerator(
    name: str, accelerator: str
) -> None:
    workload = load(name, accelerator=accelerator).workload
    assert (workload.name, workload.accelerator, workload.full_name) == ("unet3d", "h100", "unet3d_h100")
    assert workload.train.computation_time == Duration(mean_s=0.323)


def test_an_only_accelerator_need_not_be_named() -> None:
    assert load("bert").workload.full_name == "bert_v100"
    assert load("megatron_deepspeed_LLNL").workload.full_name == "megatron_deepspeed_LLNL"


@pytest.mark.parametrize(
    ("name", "accelerator", "said"),
    [
        ("unet3d", "", "Choose one: --accelerator v100, a100, h100, b200."),
        ("unet3d", "mi355", "There is no unet3d for 'mi355'. Its accelerators: v100, a100, h100, b200."),
        ("unet3d_mi355", "", "There is no unet3d for 'mi355'"),
        (
            "unet3d_h100",
            "a100",
            "unet3d_h100 is for h100, but --accelerator says a100. Write unet3d --accelerator",
        ),
        ("megatron_deepspeed_LLNL", "h100", "it is the same for all"),
        ("unit3d", "", "Did you mean unet3d?"),
        ("zzz", "", "No workload is called 'zzz'. `penstock workloads` lists"),
    ],
)
def test_a_name_that_leads_nowhere_says_which_do(name: str, accelerator: str, said: str) -> None:
    assert said in complaint(name, accelerator=accelerator)


def test_a_file_of_dlio_loads_as_it_is(tmp_path: Path) -> None:
    loaded = load(file_with(tmp_path, DLIO_FILE))
    workload = loaded.workload
    assert (workload.name, workload.accelerator) == ("mine", "")
    assert workload.model.model_size_bytes == 499153191
    assert workload.dataset.format is DataFormat.NPZ
    assert workload.dataset.record_length_bytes_stdev == 68341808
    assert workload.reader.data_loader is LoaderKind.PYTORCH
    assert workload.reader.sample_shuffle is Shuffle.OFF
    assert workload.train.computation_time == Duration(law=Distribution.NORMAL, mean_s=1.3604, stdev_s=0.1)
    assert [remark.split(":")[0] for remark in loaded.remarks] == ["model.model_size"]


def test_a_files_accelerator_is_what_the_command_line_says(tmp_path: Path) -> None:
    assert load(file_with(tmp_path, DLIO_FILE), accelerator="h100").workload.full_name == "mine_h100"


@pytest.mark.parametrize("place", ["mine.yaml", "mine.yml", "workload/mine.yaml"])
def test_a_folder_of_configurations_holds_names(tmp_path: Path, place: str) -> None:
    file_with(tmp_path, DLIO_FILE, place)
    assert load("mine", config_dir=tmp_path).workload.reader.batch_size == 4


def test_a_file_in_that_folder_comes_before_a_shipped_workload(tmp_path: Path) -> None:
    file_with(tmp_path, DLIO_FILE, "unet3d_h100.yaml")
    assert load("unet3d_h100", config_dir=tmp_path).workload.train.computation_time.mean_s == 1.3604
    assert load("unet3d_a100", config_dir=tmp_path).workload.train.computation_time.mean_s == 0.636


def test_what_is_shown_of_a_workload_loads_again(tmp_path: Path) -> None:
    shipped = load("dlrm_b200").workload
    path = file_with(tmp_path, yaml.safe_dump({"workload": write_workload(shipped)}))
    again = load(path).workload
    assert again.dataset == shipped.dataset
    assert again.reader == shipped.reader
    assert again.train == shipped.train


@pytest.mark.parametrize("name", ["missing.yaml", "folder/missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    said = complaint(path)
    assert "Cannot read the workload" in said
    assert path.rstrip(".").rstrip("/") in said


def test_overrides_come_last_and_know_units() -> None:
    settings = [
        "dataset.num_files_train=42",
        "dataset.record_length_bytes=4MiB",
        "dataset.record_length_bytes_stdev=0",
        "train.computation_time=250ms",
        "reader.file_shuffle=off",
        "dataset.record_dims=[]",
        "dataset.num_files_train=43",
    ]
    workload = load("unet3d_h100", overrides=parse_settings(settings)).workload
    assert workload.dataset.num_files_train == 43
    assert workload.dataset.record_length_bytes == Fraction(4 << 20)
    assert workload.train.computation_time == Duration(mean_s=0.25)
    assert workload.reader.file_shuffle is Shuffle.OFF


def test_a_spread_can_be_set_upon_a_shipped_time() -> None:
    workload = load("unet3d_h100", overrides=parse_settings(["train.computation_time.stdev=10ms"])).workload
    assert workload.train.computation_time == Duration(law=Distribution.NORMAL, mean_s=0.323, stdev_s=0.01)


@pytest.mark.parametrize(
    ("parts", "time"),
    [
        (["type=uniform", "min=1", "max=2"], Duration(law=Distribution.UNIFORM, min_s=1, max_s=2)),
        (["min=1", "max=2", "type=uniform"], Duration(law=Distribution.UNIFORM, min_s=1, max_s=2)),
        (["type=gamma", "shape=1", "scale=1"], Duration(law=Distribution.GAMMA, shape=1, scale_s=1)),
        (["type=exponential", "scale=1"], Duration(law=Distribution.EXPONENTIAL, scale_s=1)),
        (["type=poisson", "lam=1"], Duration(law=Distribution.POISSON, expected_events=1)),
        (["type=normal", "mean=1", "stdev=1"], Duration(law=Distribution.NORMAL, mean_s=1, stdev_s=1)),
        (["mean=1"], Duration(mean_s=1)),
    ],
)
def test_a_distribution_replaces_a_bare_time(parts: list[str], time: Duration) -> None:
    settings = parse_settings([f"train.computation_time.{part}" for part in parts])
    assert load("default", overrides=settings, prefers_dlio=True).workload.train.computation_time == time


def test_dlios_own_names_are_known_and_mean_dlios_workloads_to_its_command() -> None:
    for name in dlio_workloads():
        assert load(name, prefers_dlio=True).workload.dataset.num_files_train
    assert load("unet3d_v100_s3").workload.reader.batch_size == 4
    assert load("unet3d_v100_s3").workload.train.epochs == 5
    assert load("dlrm", prefers_dlio=True).workload.dataset.num_samples_per_file == 1024
    with pytest.raises(UsageError, match="accelerator"):
        load("dlrm")


def test_an_interval_of_no_evaluations_fits_workloads_that_do_not_evaluate() -> None:
    every = "evaluation.epochs_between_evals=0"
    assert (
        load("unet3d_h100", overrides=parse_settings([every])).workload.evaluation.epochs_between_evals == 0
    )
    with pytest.raises(UsageError, match="epochs_between_evals is 0"):
        load("unet3d_h100", overrides=parse_settings([every, "workflow.evaluation=true"]))


def test_old_names_work_in_overrides_and_are_said() -> None:
    loaded = load(
        "unet3d_h100", overrides=parse_settings(["data_reader.batch_size=9", "model.model_size=1GiB"])
    )
    assert loaded.workload.reader.batch_size == 9
    assert loaded.workload.model.model_size_bytes == 1 << 30
    assert [remark.split(":")[0] for remark in loaded.remarks] == ["model.model_size"]


def test_only_what_the_user_wrote_is_remarked_upon() -> None:
    assert load("bert").remarks == ()
    loaded = load("bert", overrides=parse_settings(["reader.read_threads=1"]))
    assert [remark.split(":")[0] for remark in loaded.remarks] == ["reader.read_threads"]


def test_columns_count_where_a_record_length_says_otherwise() -> None:
    loaded = load("flux_b200", overrides=parse_settings(["dataset.record_length_bytes=1MiB"]))
    assert "columns make rows of 2164832 B" in str(loaded.remarks[0])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("dataset.num_fils_train=4", "did you mean dataset.num_files_train?"),
        ("datset.format=npz", "did you mean dataset?"),
        ("dataset.batch_size=4", "did you mean reader.batch_size?"),
        ("train.record_length=4", "did you mean dataset.record_length_bytes?"),
        ("epochs=4", "did you mean train.epochs?"),
        ("dataset.parquet.columns=[{name: a, dtpe: int8}]", "did you mean dataset.parquet.columns.dtype?"),
        ("storage.storage_options.endpoint=x", "did you mean storage.storage_options.endpoint_url?"),
        ("checkpoint.chkpoint_foldr=x", "did you mean checkpoint.checkpoint_folder?"),
        ("metric.zzzz=4", "known here: au, exclude_end_steps, exclude_start_steps"),
        ("zzzz.qqqq=4", "known here: checkpoint, data_reader, dataset, evaluation"),
        ("train_epochs=4", "did you mean train.epochs?"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_one(setting: str, said: str) -> None:
    answer = complaint("unet3d_h100", setting)
    assert said in answer
    assert "is not a key" in answer
    assert f"--set {setting}" in answer


def test_all_that_is_wrong_is_said_at_once_with_file_and_path(tmp_path: Path) -> None:
    path = file_with(
        tmp_path,
        "dataset: {num_fils_train: 3, format: npq}\n"
        "reader: {batch_size: many, reader_classname: my.Reader}\n",
    )
    lines = complaint(path, "train.epochs=0").split("\n")
    assert lines[0] == f"{path}: 5 values are not understood:"
    said = "\n".join(lines[1:])
    assert "dataset.num_fils_train is not a key; did you mean dataset.num_files_train?" in said
    assert "dataset.format is 'npq': it should be 'tfrecord'" in said
    assert "reader.batch_size is 'many'" in said
    assert "reader.reader_classname is 'my.Reader': classes are not loaded by name" in said
    assert "train.epochs is 0: it should be greater than or equal to 1 (--set train.epochs=0)" in said


def test_a_part_of_a_plain_value_cannot_be_set() -> None:
    assert "train.epochs.x cannot be set: train.epochs is 5" in complaint("unet3d_h100", "train.epochs.x=1")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["dataset.record_dims=[4,4]"], "cannot go with record_dims"),
        (["checkpoint.mode=subset"], "needs model.parallelism.data"),
        (["dataset.parquet.columns=[{name: a},{name: b},{name: a}]"], "name 'a' more than once"),
    ],
)
def test_values_that_contradict_each_other_are_refused(settings: list[str], said: str) -> None:
    assert said in complaint("unet3d_h100", *settings)


def test_a_data_set_needs_no_accelerator_and_what_differs_is_said() -> None:
    loaded = load("unet3d", is_data_set=True)
    assert loaded.workload.full_name == "unet3d"
    assert loaded.workload.dataset.num_files_train == 168
    assert [str(remark) for remark in loaded.remarks] == [
        "dataset: values shared by all accelerators; b200 sets num_files_train differently"
    ]
    own = parse_settings(["dataset.num_files_train=8"])
    assert load("unet3d", overrides=own, is_data_set=True).remarks == ()


def test_a_data_set_that_is_the_same_for_all_needs_no_words() -> None:
    assert load("resnet50", is_data_set=True).remarks == ()
    assert (
        load("megatron_deepspeed_LLNL", is_data_set=True).workload.dataset.format
        is DataFormat.MMAP_INDEXED_BINARY
    )


def test_a_data_set_with_an_accelerator_is_that_ones(tmp_path: Path) -> None:
    assert load("unet3d", accelerator="b200", is_data_set=True).workload.dataset.num_files_train == 7200
    assert load("retinanet_h100", is_data_set=True).workload.dataset.record_length_bytes == 153600
    assert load(file_with(tmp_path, DLIO_FILE), is_data_set=True).workload.dataset.num_files_train == 168
    with pytest.raises(UsageError, match="No workload is called"):
        load("nothing", is_data_set=True)


def test_a_data_set_takes_overrides() -> None:
    loaded = load("unet3d", overrides=parse_settings(["dataset.num_files_train=40"]), is_data_set=True)
    assert loaded.workload.dataset.num_files_train == 40


def test_a_wrong_secret_is_not_repeated(tmp_path: Path) -> None:
    path = file_with(tmp_path, "storage: {storage_options: {secret_access_key: 271828}}\n")
    assert "271828" not in complaint(path)
    assert "is a secret: it should be a valid string" in complaint(path)
    said = complaint("unet3d_h100", "storage.storage_options.secret_access_key=314159")
    assert "314159" not in said


def test_a_deviation_scales_with_a_changed_mean_and_that_is_reported() -> None:
    def deviation(*settings: str) -> tuple[int, bool]:
        loaded = load("unet3d_h100", overrides=parse_settings(settings))
        remarked = any("scaled with the mean" in remark for remark in loaded.remarks)
        return int(loaded.workload.dataset.record_length_bytes_stdev), remarked

    mean, spread = 146600628, 68341808
    assert deviation() == deviation(f"dataset.record_length_bytes={mean}") == (spread, False)
    assert deviation("dataset.record_length_bytes=4MiB") == (round(spread * 2**22 / mean), True)
    own = ("dataset.record_length_bytes=4MiB", "dataset.record_length_bytes_stdev=7")
    assert deviation(*own) == (7, False)
    as_dlio, _ = parse_dlio_words(["++workload.dataset.record_length_bytes=4194304"])
    assert load("unet3d_h100", overrides=as_dlio).workload.dataset.record_length_bytes_stdev == spread
