"""The outer form: derived from the spec, strict, and a round trip for everything but secrets."""

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workload.enums import DataFormat, Shuffle
from penstock.workload.load_workload import shipped
from penstock.workload.quantities import Distribution, Duration
from penstock.workload.spec import (
    KeyPath,
    Parquet,
    ParquetColumn,
    StorageOptions,
    Transformer,
    Workload,
    known_paths,
    read_workload,
    write_workload,
)


def read(tree: dict[str, Any]) -> Workload:
    workload, problems = read_workload(without_nulls(tree), name="w", accelerator="")
    assert problems == []
    assert workload is not None
    return workload


def without_nulls(tree: dict[str, Any]) -> dict[str, Any]:
    """What `dialect.settle` does before."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def problems_of(tree: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    workload, problems = read_workload(tree, name="w", accelerator="")
    assert workload is None
    return problems


def test_nothing_asked_for_is_all_defaults() -> None:
    assert read({}) == Workload(name="w")


def test_an_empty_section_is_its_defaults() -> None:
    assert read({"dataset": {}, "train": {}}) == Workload(name="w")


@pytest.mark.parametrize(
    "workload", [loaded.workload for loaded in shipped()], ids=lambda w: str(w.full_name)
)
def test_every_shipped_workload_survives_being_written_and_read(workload: Workload) -> None:
    again, problems = read_workload(
        without_nulls(write_workload(workload)), name=workload.name, accelerator=workload.accelerator
    )
    assert problems == []
    assert again == workload


@given(
    length=st.decimals(min_value="0.01", max_value=10**9, places=2).map(Fraction),
    stdev=st.integers(0, 10**9).map(Fraction),
    threads=st.none() | st.integers(0, 64),
    shuffle=st.sampled_from(Shuffle),
    kind=st.sampled_from(DataFormat),
    columns=st.lists(
        st.builds(ParquetColumn, name=st.text(min_size=1), size=st.integers(1, 9), read=st.booleans())
    ),
    time=(st.just(0.0) | st.floats(1e-9, 10)).map(lambda mean: Duration(mean_s=mean))
    | st.just(Duration(law=Distribution.GAMMA, shape=2.0, scale_s=0.5)),
)
def test_any_values_survive_being_written_and_read(**values: Any) -> None:
    plain = Workload(name="w")
    workload = replace(
        plain,
        dataset=replace(
            plain.dataset,
            format=values["kind"],
            record_length_bytes=values["length"],
            record_length_bytes_stdev=values["stdev"],
            parquet=Parquet(columns=tuple(values["columns"])),
        ),
        reader=replace(
            plain.reader,
            read_threads=values["threads"],
            file_shuffle=values["shuffle"],
            preprocess_time=values["time"],
        ),
        model=replace(plain.model, transformer=Transformer(hidden_size=64)),
    )
    assert read(write_workload(workload)) == workload


def test_secrets_are_read_but_never_written_or_shown() -> None:
    options = {"access_key_id": "who", "secret_access_key": "hush", "region": "here"}
    workload = read({"storage": {"storage_options": options}})
    assert workload.storage.storage_options.secret_access_key == "hush"
    assert "hush" not in repr(workload) + str(write_workload(workload))
    assert "who" not in repr(workload) + str(write_workload(workload))
    assert write_workload(workload)["storage"]["storage_options"]["region"] == "here"


def test_dlios_words_name_our_fields() -> None:
    workload = read(
        {
            "dataset": {"chunk_size": "1MiB"},
            "reader": {"transfer_size": "256KiB"},
            "checkpoint": {"time_between_checkpoints": "5s"},
            "storage": {"post_generation_settle_seconds": 1.5},
        }
    )
    assert workload.dataset.chunk_size_bytes == 1 << 20
    assert workload.reader.transfer_bytes == 262144
    assert workload.checkpoint.time_between_checkpoints_s == 5.0
    assert workload.storage.post_generation_settle_s == 1.5


@pytest.mark.parametrize(
    ("written", "shuffle"),
    [
        (False, Shuffle.OFF),
        ("off", Shuffle.OFF),
        ("OFF", Shuffle.OFF),
        ("Seed", Shuffle.SEED),
        ("random", Shuffle.RANDOM),
    ],
)
def test_a_bare_off_and_any_case_are_understood(written: Any, shuffle: Shuffle) -> None:
    workload = read({"reader": {"file_shuffle": written, "sample_shuffle": written}})
    assert workload.reader.file_shuffle is shuffle
    assert workload.reader.sample_shuffle is shuffle


@pytest.mark.parametrize("written", [True, "true", "on", "yes", 1])
def test_switches_have_the_usual_spellings(written: Any) -> None:
    assert read({"workflow": {"checkpoint": written}}).workflow.checkpoint is True


@pytest.mark.parametrize(
    ("tree", "path", "said"),
    [
        ({"reader": {"batch_size": "7"}}, ("reader", "batch_size"), "is '7': it should be a valid integer"),
        ({"reader": {"batch_size": 7.5}}, ("reader", "batch_size"), "valid integer"),
        ({"reader": {"batch_size": True}}, ("reader", "batch_size"), "valid integer"),
        ({"reader": {"batch_size": 0}}, ("reader", "batch_size"), "greater than or equal to 1"),
        ({"reader": {"file_shuffle": "sed"}}, ("reader", "file_shuffle"), "'off', 'seed' or 'random'"),
        ({"reader": {"file_shuffle": True}}, ("reader", "file_shuffle"), "'off', 'seed' or 'random'"),
        ({"dataset": {"format": "dlio_npz"}}, ("dataset", "format"), "'tfrecord'"),
        ({"dataset": {"record_length_bytes": 0}}, ("dataset", "record_length_bytes"), "greater than 0"),
        ({"dataset": {"record_length_bytes": "4G"}}, ("dataset", "record_length_bytes"), "ambiguous unit"),
        ({"dataset": {"record_element_type": "u9"}}, ("dataset", "record_element_type"), "element type"),
        ({"dataset": {"record_dims": 4}}, ("dataset", "record_dims"), "is 4"),
        ({"dataset": {"record_dims": [4, 0]}}, ("dataset", "record_dims", "1"), "greater than or equal"),
        ({"dataset": {"file_prefix": 3}}, ("dataset", "file_prefix"), "valid string"),
        ({"metric": {"au": 90}}, ("metric", "au"), "less than or equal to 1"),
        ({"train": {"computation_time": "soon"}}, ("train", "computation_time"), "'soon'"),
        ({"train": 5}, ("train",), "is 5, but it must be a section of keys"),
        (
            {"dataset": {"parquet": {"columns": [{"dtype": "int8"}]}}},
            ("dataset", "parquet", "columns", "0", "name"),
            "is missing",
        ),
        (
            {"model": {"parallelism": {"zero_stage": 4}}},
            ("model", "parallelism", "zero_stage"),
            "less than or equal to 3",
        ),
    ],
)
def test_a_wrong_value_is_refused_at_its_path(tree: dict[str, Any], path: tuple[str, ...], said: str) -> None:
    ((refused, why),) = problems_of(tree)
    assert refused == path
    assert said in why


def test_all_problems_come_at_once_and_unknown_keys_are_called_so() -> None:
    found = problems_of({"reader": {"batch_size": 0, "bath_size": 1}, "tarin": {"epochs": 1}})
    assert {(path, why != "") for path, why in found} == {
        (("reader", "batch_size"), True),
        (("reader", "bath_size"), False),
        (("tarin",), False),
    }


def test_known_paths_are_whole_and_reach_into_lists() -> None:
    paths = set(known_paths())
    assert ("dataset", "num_files_train") in paths
    assert ("dataset", "parquet", "columns", "dtype") in paths
    assert ("train", "computation_time") in paths
    assert ("model", "transformer", "vocab_size") in paths
    assert ("name",) not in paths
    assert ("framework",) in paths
    assert {path[-1] for path in paths if path[:2] == ("storage", "storage_options")} >= {
        entry.name for entry in fields(StorageOptions)
    }
