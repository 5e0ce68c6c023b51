"""DLIO's files as they are: every key of its table is accepted, and lands in the spec or is explained."""

from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.workload.dlio_keys import ALIASES, EXPLAINED, REFUSED, apply_dlio_rules, read_layer
from penstock.workload.settings import LayeredSettings
from penstock.workload.spec import Workload, known_paths, read_workload

TABLE: dict[str, Any] = {
    "framework": "pytorch",
    "workflow.generate_data": True,
    "workflow.train": False,
    "workflow.evaluation": True,
    "workflow.checkpoint": True,
    "workflow.profiling": True,
    "workflow.query": "dataset.format",
    "workflow.debug": True,
    "logging.verbosity": "debug",
    "storage.storage_type": "s3",
    "storage.storage_root": "bucket",
    "storage.storage_library": "minio",
    "storage.endpoint_uris": ["http://a:9000", "http://b:9000"],
    "storage.endpoint_template": "http://a{1...4}:9000",
    "storage.use_mpi_endpoint_distribution": True,
    "storage.load_balance_strategy": "round_robin",
    "storage.post_generation_settle_seconds": 2.0,
    "storage.s3_force_path_style": True,
    "storage.storage_options.storage_library": "s3dlio",
    "storage.storage_options.endpoint_url": "http://127.0.0.1:9000",
    "storage.storage_options.endpoint_uris": ["http://a:9000"],
    "storage.storage_options.endpoint_template": "http://b{1...4}:9000",
    "storage.storage_options.use_mpi_endpoint_distribution": True,
    "storage.storage_options.load_balance_strategy": "least_connections",
    "storage.storage_options.access_key_id": "a",
    "storage.storage_options.secret_access_key": "b",
    "storage.storage_options.region": "us-east-1",
    "storage.storage_options.uri_scheme": "s3",
    "storage.storage_options.use_full_object_uri": "false",
    "storage.storage_options.secure": False,
    "storage.storage_options.s3_force_path_style": True,
    "storage.storage_options.s3_max_attempts": 5,
    "storage.storage_options.s3_profile": "me",
    "storage.storage_options.prefetch_window": 64,
    "storage.storage_options.prefetch_workers": 32,
    "storage.storage_options.max_outstanding": 512,
    "storage.storage_options.coalesce_rgs": 8,
    "storage.storage_options.footer_cap": 4194304,
    "storage.storage_options.footer_batch_size": 16,
    "storage.storage_options.columns": ["a", "b"],
    "storage.storage_options.decode": "arrow",
    "storage.storage_options.decode_output": "torch",
    "storage.storage_options.stagger_workers": "true",
    "storage.storage_options.simulate_io": "false",
    "storage.storage_options.sim_log_secs": 60,
    "dataset.format": "hdf5",
    "dataset.data_folder": "d",
    "dataset.num_files_train": 9,
    "dataset.num_files_eval": 3,
    "dataset.num_samples_per_file": 2,
    "dataset.record_length_bytes": 1000,
    "dataset.record_length_bytes_stdev": 10,
    "dataset.record_length_bytes_resize": 500,
    "dataset.record_length": 1000,
    "dataset.record_length_stdev": 10,
    "dataset.record_length_resize": 500,
    "dataset.num_subfolders_train": 2,
    "dataset.num_subfolders_eval": 2,
    "dataset.file_prefix": "part",
    "dataset.compression": "gzip",
    "dataset.compression_level": 5,
    "dataset.enable_chunking": True,
    "dataset.chunk_size": 1024,
    "dataset.generation_buffer_size": 4096,
    "dataset.data_gen_method": "dgen",
    "dataset.keep_files": False,
    "dataset.record_dims": [4, 5],
    "dataset.record_element_type": "float32",
    "dataset.record_element_bytes": 4,
    "dataset.skip_listing": True,
    "dataset.listing_validation_interval": 0,
    "dataset.listing_threads": 8,
    "dataset.files_pre_sharded": True,
    "dataset.num_files_generated": 9,
    "dataset.total_disk_bytes": 9000,
    "dataset.parquet.columns": [{"name": "a", "dtype": "float32", "size": 3, "read": False}],
    "dataset.parquet.row_group_size": 10,
    "dataset.parquet.partition_by": "a",
    "dataset.parquet.generation_batch_size": 5,
    "dataset.parquet.use_s3dlio_gen": True,
    "dataset.parquet.read_mode": "row_group",
    "dataset.hdf5.chunk_dims": [1, 2],
    "dataset.hdf5.num_dset_per_record": 2,
    "dataset.hdf5.max_shape": [8, 8],
    "reader.data_loader": "dali",
    "reader.batch_size": 4,
    "reader.batch_size_eval": 5,
    "reader.read_threads": 0,
    "reader.write_threads": 2,
    "reader.computation_threads": 3,
    "reader.prefetch_size": 4,
    "reader.file_shuffle": "seed",
    "reader.sample_shuffle": "random",
    "reader.shuffle_size": 10,
    "reader.read_type": "memory",
    "reader.file_access": "shared",
    "reader.transfer_size": 4096,
    "reader.dont_use_mmap": True,
    "reader.odirect": True,
    "reader.drop_page_cache": False,
    "reader.pin_memory": False,
    "reader.multiprocessing_context": "fork",
    "reader.preprocess_time": 0.1,
    "reader.preprocess_time_stdev": 0.01,
    "reader.data_loader_classname": None,
    "reader.reader_classname": None,
    "reader.data_loader_sampler": "index",
    "reader.seed": 10,
    "reader.storage_library": "minio",
    "reader.storage_root": "bucket",
    "reader.storage_type": "s3",
    "reader.transformed_record_dims": [2],
    "reader.transformed_record_element_type": "int8",
    "train.epochs": 3,
    "train.total_training_steps": 7,
    "train.seed": 5,
    "train.seed_change_epoch": False,
    "train.computation_time": {"type": "uniform", "min": 0.1, "max": 0.2},
    "train.computation_time_stdev": 0.1,
    "evaluation.eval_time": 0.2,
    "evaluation.eval_time_stdev": 0.1,
    "evaluation.eval_after_epoch": 2,
    "evaluation.epochs_between_evals": 2,
    "checkpoint.checkpoint_folder": "c",
    "checkpoint.checkpoint_after_epoch": 2,
    "checkpoint.epochs_between_checkpoints": 2,
    "checkpoint.steps_between_checkpoints": 10,
    "checkpoint.type": "all_ranks",
    "checkpoint.fsync": True,
    "checkpoint.recovery_rank_shift": True,
    "checkpoint.rank_sync": True,
    "checkpoint.time_between_checkpoints": 5,
    "checkpoint.num_checkpoints_write": 10,
    "checkpoint.num_checkpoints_read": 10,
    "checkpoint.mode": "subset",
    "checkpoint.randomize_tensor": False,
    "checkpoint.ksm.madv_mergeable_id": 12,
    "checkpoint.ksm.high_ram_trigger": 30,
    "checkpoint.ksm.low_ram_exit": 15,
    "checkpoint.ksm.await_time": 200,
    "checkpoint.checkpoint_mechanism_classname": None,
    "checkpoint.model_size": 100,
    "model.name": "m",
    "model.type": "transformer",
    "model.model_size_bytes": 99,
    "model.model_size": 99,
    "model.model_datatype": "bf16",
    "model.optimizer_datatype": "fp64",
    "model.num_layers": 4,
    "model.layer_parameters": [1, 2],
    "model.optimization_groups": [3],
    "model.parallelism.tensor": 2,
    "model.parallelism.pipeline": 3,
    "model.parallelism.data": 4,
    "model.parallelism.zero_stage": 3,
    "model.transformer.vocab_size": 100,
    "model.transformer.hidden_size": 64,
    "model.transformer.ffn_hidden_size": 256,
    "model.transformer.num_attention_heads": 4,
    "model.transformer.num_kv_heads": 2,
    "output.folder": "out",
    "output.log_file": "x.log",
    "metric.au": 0.7,
    "metric.exclude_start_steps": 2,
    "metric.exclude_end_steps": 1,
    "profiling.profiler": "none",
    "profiling.iostat_devices": ["sda"],
}
"""Every key that DLIO or its harness reads or ships, with a value that is not the default."""


def tree_of(path: str, value: Any) -> dict[str, Any]:
    for step in reversed(path.split(".")):
        value = {step: value}
    assert isinstance(value, dict)
    return value


def taken_in(tree: dict[str, Any]) -> tuple[Workload, list[str]]:
    values, said = read_layer(tree, "test.yaml")
    stack = LayeredSettings()
    stack.add_layer(values, source="test.yaml")
    remarks, problems = apply_dlio_rules(stack)
    workload, refused = read_workload(stack.tree(), name="w", accelerator="")
    assert problems == refused == []
    assert workload is not None
    return workload, [*said, *remarks]


@pytest.mark.parametrize("key", TABLE)
def test_every_key_of_dlios_table_changes_the_spec_or_is_explained(key: str) -> None:
    path, value = tuple(key.split(".")), TABLE[key]
    if path in REFUSED:
        taken_in(tree_of(key, None))
        return
    if key.endswith("_time_stdev"):  # a spread has no meaning without its mean
        stem = key.removesuffix("_stdev")
        tree = tree_of(stem, 0.5)
        tree[path[0]][path[-1]] = value
        workload, _ = taken_in(tree)
        assert workload != taken_in(tree_of(stem, 0.5))[0]
        return
    workload, remarks = taken_in(tree_of(key, value))
    explained = any(path[: len(known)] == known for known in EXPLAINED)
    if explained:
        assert workload == Workload(name="w")
        assert any(remark.startswith(key) and "without effect here" in remark for remark in remarks)
    else:
        assert workload != Workload(name="w")


def test_every_key_of_ours_is_in_the_table() -> None:
    ours = {".".join(path) for path in known_paths() if "columns" not in path[:-1]}
    assert ours <= set(TABLE)


def test_every_alias_and_explanation_and_refusal_is_in_the_table() -> None:
    for path in (*ALIASES, *EXPLAINED, *REFUSED):
        key = ".".join(path)
        assert any(known == key or known.startswith(f"{key}.") for known in TABLE), key


def test_the_other_name_of_the_reader_section_is_the_same() -> None:
    workload, _ = taken_in({"data_reader": {"batch_size": 7}})
    assert workload.reader.batch_size == 7


def test_a_bare_model_is_its_name() -> None:
    assert taken_in({"model": "resnet50"})[0].model.name == "resnet50"


def test_a_wrapping_section_is_taken_off() -> None:
    assert taken_in({"workload": {"train": {"epochs": 4}}})[0].train.epochs == 4


@pytest.mark.parametrize(
    "tree",
    [
        {"reader": {"batch_size": 1}, "data_reader": {"batch_size": 2}},
        {"model": {"model_size": 1, "model_size_bytes": 2}},
        {"dataset": {"record_length": 1, "record_length_bytes": 1}},
    ],
)
def test_two_names_of_one_key_in_one_file_are_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        read_layer(tree, "test.yaml")
    assert "is given twice" in str(caught.value)
    assert "test.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "train.total_training_steps",
        "checkpoint.steps_between_checkpoints",
        "checkpoint.num_checkpoints_write",
        "checkpoint.num_checkpoints_read",
        "checkpoint.time_between_checkpoints",
        "model.num_layers",
        "model.parallelism.data",
    ],
)
def test_minus_one_asks_for_nothing_where_dlio_says_so(key: str) -> None:
    assert taken_in(tree_of(key, -1)) == (Workload(name="w"), [])


def test_a_null_asks_for_nothing() -> None:
    assert taken_in({"dataset": {"compression": None, "parquet": {"partition_by": None}}})[0] == Workload(
        name="w"
    )


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.model_size", 499153191, "DLIO ignores model_size"),
        ("dataset.record_length", 5, "reads only the key with _bytes"),
        ("dataset.compression", "zip", "never compresses npz"),
        ("dataset.enable_chunking", True, "here HDF5 is chunked"),
        ("dataset.chunk_size", 5, "HDF5's chunks"),
        ("dataset.listing_threads", 16, "as many as you ask for"),
        ("reader.file_shuffle", False, "here off means off"),
        ("reader.file_shuffle", "off", "here off means off"),
        ("reader.sample_shuffle", "seed", "here they are shuffled"),
        ("reader.read_type", "on_demand", "read on demand"),
        ("reader.file_access", "collective", "applied"),
        ("reader.read_threads", 1, "here it is one thread"),
        ("reader.write_threads", 1, "here it is one thread"),
        ("checkpoint.type", "all_ranks", "applied"),
        ("checkpoint.fsync", True, "every file is synced"),
        ("checkpoint.recovery_rank_shift", True, "what another node wrote"),
        ("storage.storage_type", "parallel_fs", "here it is files"),
    ],
)
def test_what_dlio_ignores_or_misreads_is_honoured_and_said_once(key: str, value: Any, said: str) -> None:
    stack_of_dlio = {"dataset": {"format": "npz"}, "reader": {"data_loader": "pytorch"}}
    section, _, name = key.partition(".")
    stack_of_dlio.setdefault(section, {})[name] = value
    _, remarks = taken_in(stack_of_dlio)
    assert len(remarks) == 1
    assert remarks[0].startswith(f"{key}: ")
    assert said in remarks[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dataset.compression", "none"),
        ("dataset.enable_chunking", False),
        ("dataset.chunk_size", 0),
        ("dataset.compression", "gzip"),
        ("reader.sample_shuffle", "seed"),
        ("reader.multiprocessing_context", "None"),
        ("reader.file_shuffle", "seed"),
        ("reader.sample_shuffle", "off"),
        ("reader.read_threads", 4),
        ("reader.file_access", "multi"),
        ("checkpoint.fsync", False),
        ("storage.storage_type", "s3"),
    ],
)
def test_nothing_is_said_where_both_do_the_same(key: str, value: Any) -> None:
    assert taken_in(tree_of(key, value))[1] == []


@pytest.mark.parametrize("path", list(REFUSED), ids=".".join)
def test_classes_by_name_are_refused_with_the_way_that_there_is(path: tuple[str, ...]) -> None:
    stack = LayeredSettings()
    stack.add_layer({path: "my.module.Class"}, source="test.yaml")
    _, ((refused, why),) = apply_dlio_rules(stack)
    assert refused == path
    assert "entry point" in why or path[0] == "checkpoint"
    assert stack.tree() == {}


def test_an_interpolation_is_refused_instead_of_taken_for_a_name() -> None:
    stack = LayeredSettings()
    stack.add_layer({("storage", "storage_root"): "${oc.env:BUCKET}"}, source="test.yaml")
    _, ((_, why),) = apply_dlio_rules(stack)
    assert "write the value itself" in why
