"""What leaves say: their metadata, their stamp, and where a workload's bytes lie."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.results.provenance import HostFacts
from penstock.submission.authoring.owned_tree import OwnedTree, ResultDirAddress, RunSeries
from penstock.submission.authoring.preflight import locate_checkpoints, locate_data
from penstock.submission.authoring.write_result_dir import (
    RunFacts,
    build_metadata,
    build_provenance,
    core_config_digest,
    core_parameters,
)
from penstock.submission.code_image import Program
from penstock.submission.tree_layout import Benchmark, SubmissionPhase
from penstock.workload.load_workload import load
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.settings import parse_settings
from penstock.workload.spec import Workload

BEGAN = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)


def workload(*settings: str) -> Workload:
    return load("unet3d_b200", overrides=parse_settings(settings)).workload


def host(name: str, memory_bytes: int) -> HostFacts:
    return HostFacts(
        host=name, kernel="", machine="", num_cores=64, memory_bytes=memory_bytes, cpuinfo={}, meminfo={}
    )


def facts(phase: SubmissionPhase = SubmissionPhase.RUN) -> RunFacts:
    series = RunSeries(
        tree=OwnedTree(root=Path("/tree"), organisation="acme"),
        division=SubmissionDivision.CLOSED,
        system="fast",
        benchmark=Benchmark.TRAINING,
        model="unet3d",
    )
    return RunFacts(
        address=ResultDirAddress(series=series, phase=phase, started_at=BEGAN),
        workload=workload(),
        accelerator="b200",
        changed={"dataset.num_files_train": 7200},
        data_path="/data",
        num_processes=8,
        hosts=[host("a", 512 << 30), host("b", 256 << 30)],
        command=("penstock", "--secret-token", "hush"),
        ended_at=BEGAN + timedelta(minutes=18),
        exit_status=0,
        data_size={"num_files_train": 7200, "num_subfolders_train": 0, "total_disk_bytes": 10**12},
    )


def test_memory_is_the_sum_of_hosts_and_times_are_those_of_the_whole_run() -> None:
    document = build_metadata(facts())
    assert document["system_info"] == {"total_memory_bytes": 768 << 30, "total_cores": 128}
    assert document["args"]["client_host_memory_in_gb"] == 256.0
    assert document["args"]["hosts"] == ["a", "b"]
    assert (document["runtime"], document["run_datetime"]) == (1080.0, "20260701_100000")
    assert document["result_dir"] == "/tree/closed/acme/results/fast/training/unet3d/run/20260701_100000"
    assert "hush" not in document["executed_command"]


@pytest.mark.parametrize(
    ("phase", "key"),
    [
        (SubmissionPhase.DATASIZE, "max_accelerators"),
        (SubmissionPhase.DATAGEN, "num_processes"),
        (SubmissionPhase.RUN, "num_accelerators"),
    ],
)
def test_each_phase_counts_its_processes_under_its_own_name(phase: SubmissionPhase, key: str) -> None:
    assert build_metadata(facts(phase))["args"][key] == 8


def stamped(asked: Workload) -> str:
    program = Program(folder=Path("/"), version="1.0", digest="0" * 32)
    found = build_provenance(asked, Benchmark.TRAINING, program=program, now=BEGAN)
    assert found["core_config"]["allowlist"] == "training@1"
    text: str = found["core_config"]["hash"]
    return text


@pytest.mark.parametrize(
    "free", ["dataset.num_files_train=9", "reader.read_threads=9", "dataset.data_folder=/x"]
)
def test_parameters_free_in_closed_are_not_in_the_core(free: str) -> None:
    assert stamped(workload(free)) == stamped(workload())


@pytest.mark.parametrize(
    "change",
    [
        "reader.batch_size=9",
        "train.epochs=9",
        "metric.au=0.5",
        "dataset.record_length_bytes=9",
        "framework=tensorflow",
    ],
)
def test_core_configuration_defines_the_workload(change: str) -> None:
    assert stamped(workload(change)) != stamped(workload())


def test_one_number_has_one_spelling_in_the_core() -> None:
    assert core_config_digest({"a": 7}) == core_config_digest({"a": 7.0}) == core_config_digest({"a": "7"})
    assert core_config_digest({"a": True}) == core_config_digest({"a": "true"})
    assert core_config_digest({"a": 7}) != core_config_digest({"a": 8})


def test_the_folder_of_checkpoints_and_their_number_are_no_part_of_the_core() -> None:
    parameters = {"checkpoint": {"checkpoint_folder": "/x", "num_checkpoints_write": 10, "fsync": True}}
    assert core_parameters(Benchmark.CHECKPOINTING, parameters) == {"checkpoint.fsync": True}


@pytest.mark.parametrize(
    ("uri", "changes"),
    [
        ("/data", {"dataset.data_folder": "/data"}),
        ("direct:///data", {"dataset.data_folder": "/data", "reader.odirect": True}),
        (
            "s3://big/a/b",
            {"dataset.data_folder": "a/b", "storage.storage_type": "s3", "storage.storage_root": "big"},
        ),
    ],
)
def test_location_is_set_under_the_workloads_keys(uri: str, changes: dict[str, object]) -> None:
    located = locate_data(workload(), uri)
    assert located.changes == changes
    assert located.workload.dataset.data_folder == changes["dataset.data_folder"]
    assert located.workload.reader.odirect is ("reader.odirect" in changes)


def test_checkpoints_have_a_place_of_their_own() -> None:
    located = locate_checkpoints(workload(), "direct:///saves")
    assert located.data_path == located.workload.checkpoint.checkpoint_folder == "/saves"


@pytest.mark.parametrize(
    ("settings", "name", "source"),
    [
        ((), "none", "n/a"),
        (("storage.storage_type=s3", "storage.storage_root=b"), "obstore", "package-metadata"),
    ],
)
def test_provenance_names_the_library_of_object_storage(
    settings: tuple[str, ...], name: str, source: str
) -> None:
    program = Program(folder=Path("/program"), version="1.0", digest="0" * 32)
    document = build_provenance(workload(*settings), Benchmark.TRAINING, program=program, now=BEGAN)
    assert document["storage_library"]["name"] == name
    assert ("version" in document["storage_library"]) is (name != "none")
    assert document["provenance"]["storage_library"] == source
