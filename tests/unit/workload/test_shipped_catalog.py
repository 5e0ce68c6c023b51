"""The catalog's numbers, typed here a second time."""

from fractions import Fraction

import pytest

from penstock.workload.enums import DataFormat, Framework, LoaderKind, Shuffle
from penstock.workload.load_workload import load, shipped
from penstock.workload.quantities import Duration
from penstock.workload.shipped_catalog import families
from penstock.workload.sizing import column_bytes, read_bytes_per_sample, record_bytes

# name, framework: format, files, samples a file, record, stdev, resize, batch, seconds, epochs, threads,
# files and samples shuffled, AU
NUMBERS = """
unet3d_v100     torch npz      168     1       146600628 68341808 2097152 4     1.3604    5 4 seed seed 0.90
unet3d_a100     torch npz      168     1       146600628 68341808 2097152 7     0.636     5 4 seed seed 0.90
unet3d_h100     torch npz      168     1       146600628 68341808 2097152 7     0.323     5 4 seed seed 0.90
unet3d_b200     torch npz      7200    1       146600628 68341808 2097152 7     0.162     5 4 seed seed 0.90
resnet50_v100   tf    tfrecord 1024    1251    114660.07 0        150528  64    0.195     5 8 off  off  0.90
resnet50_a100   tf    tfrecord 1024    1251    114660.07 0        150528  400   0.435     5 8 off  off  0.90
resnet50_h100   tf    tfrecord 1024    1251    114660.07 0        150528  400   0.224     5 8 off  off  0.90
cosmoflow_v100  tf    tfrecord 524288  1       2828486   71311    0       1     0.00936   5 4 seed seed 0.70
cosmoflow_a100  tf    tfrecord 524288  1       2828486   71311    0       1     0.00551   5 4 seed seed 0.70
cosmoflow_h100  tf    tfrecord 524288  1       2828486   71311    0       1     0.00350   5 4 seed seed 0.70
retinanet_b200  torch jpeg     1170301 1       322957    0        0       24    0.04755   8 8 seed seed 0.85
retinanet_mi355 torch jpeg     1170301 1       322957    0        0       32    0.0634    8 8 seed seed 0.85
retinanet_h100  torch jpeg     1743042 1       153600    51200    0       16    0.180     5 8 seed seed 0.85
dlrm_b200       torch parquet  1024    4718592 761       0        0       16384 0.000375  1 4 seed off  0.70
dlrm_mi355      torch parquet  1024    4718592 761       0        0       16384 0.0005625 1 4 seed off  0.70
dlrm_h100       torch npz      65536   1       512       0        0       8192  0.005     1 8 seed seed 0.70
flux_b200       torch parquet  4296    288     2164832   0        0       48    1.35      1 8 seed off  0.90
flux_mi355      torch parquet  4296    288     2164832   0        0       72    2.025     1 8 seed off  0.90
flux_h100       torch jpeg     1099776 1       307200    102400   0       8     0.850     5 8 seed seed 0.80
bert_v100       tf    tfrecord 500     313532  2500      0        0       48    0.968     1 1 seed seed 0.90
megatron_deepspeed_LLNL torch mmap_indexed_binary 1 277203535 2048 0 0 16 2.44 3 1 seed seed 0.90
"""
FRAMEWORKS = {"tf": Framework.TENSORFLOW, "torch": Framework.PYTORCH}
ROWS = [line.split() for line in NUMBERS.split("\n") if line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_shipped_workload_has_exactly_these_numbers(row: list[str]) -> None:
    workload = load(row[0]).workload
    dataset, reader = workload.dataset, workload.reader
    found = [
        dataset.format,
        dataset.num_files_train,
        dataset.num_samples_per_file,
        dataset.record_length_bytes,
        dataset.record_length_bytes_stdev,
        dataset.record_length_bytes_resize,
        reader.batch_size,
        workload.train.computation_time,
        workload.train.epochs,
        reader.read_threads,
        reader.file_shuffle,
        reader.sample_shuffle,
        workload.metric.au,
        workload.framework,
    ]
    assert found == [
        DataFormat(row[2]),
        *(int(text) for text in row[3:5]),
        Fraction(row[5]),
        Fraction(row[6]),
        int(row[7]),
        int(row[8]),
        Duration(mean_s=float(row[9])),
        int(row[10]),
        int(row[11]),
        Shuffle(row[12]),
        Shuffle(row[13]),
        float(row[14]),
        FRAMEWORKS[row[1]],
    ]
    assert reader.data_loader == LoaderKind(FRAMEWORKS[row[1]])


def test_the_table_and_the_catalog_have_the_same_workloads() -> None:
    assert {loaded.workload.full_name for loaded in shipped()} == {row[0] for row in ROWS}


def test_shipped_workloads_load_without_remarks() -> None:
    assert all(loaded.remarks == () for loaded in shipped())


def test_every_family_says_what_it_is() -> None:
    assert all(family["about"].endswith(".") for family in families().values())


def test_dlrm_reads_a_fifth_of_its_columns() -> None:
    dataset = load("dlrm_b200").workload.dataset
    columns = dataset.parquet.columns
    assert [column.name for column in columns] == [f"feature_{number:03d}" for number in range(200)]
    assert {column.dtype for column in columns} == {"float16", "float32", "float64", "int8"}
    assert sum(column.read for column in columns) == 40
    assert dataset.parquet.row_group_size == 6144
    assert record_bytes(dataset) == 761
    assert read_bytes_per_sample(dataset) == 160
    assert load("dlrm_b200").workload.reader.prefetch_size == 2


def test_flux_reads_all_of_its_five_columns() -> None:
    dataset = load("flux_b200").workload.dataset
    sizes = {column.name: column_bytes(column) // 4 for column in dataset.parquet.columns}
    assert sizes == {
        "t5_encodings": 524328,
        "clip_encodings": 409,
        "mean": 8232,
        "logvar": 8232,
        "timestamp": 7,
    }
    assert record_bytes(dataset) == read_bytes_per_sample(dataset) == dataset.record_length_bytes


def test_early_drafts_have_no_columns() -> None:
    assert load("flux_h100").workload.dataset.parquet.columns == ()
    assert load("dlrm_h100").workload.dataset.parquet.columns == ()


def test_cosmoflow_shuffles_within_two_samples_and_resnet_computes_on_eight_threads() -> None:
    assert load("cosmoflow_h100").workload.reader.shuffle_size == 2
    assert load("resnet50_h100").workload.reader.computation_threads == 8


def test_unet3d_has_its_checkpoints_and_model() -> None:
    workload = load("unet3d_h100").workload
    assert workload.model.model_size_bytes == 499153191
    assert workload.checkpoint.checkpoint_after_epoch == 5
    assert workload.checkpoint.epochs_between_checkpoints == 2


def test_bert_and_megatron_have_their_steps_and_layers() -> None:
    bert = load("bert").workload
    assert (bert.train.total_training_steps, bert.checkpoint.steps_between_checkpoints) == (1000, 250)
    assert (bert.dataset.file_prefix, bert.reader.transfer_bytes) == ("part", 262144)
    model = load("megatron_deepspeed_LLNL").workload.model
    assert (model.parallelism.tensor, model.parallelism.pipeline, model.num_layers) == (4, 8, 40)
    assert model.layer_parameters == (52583936, 209715200)
