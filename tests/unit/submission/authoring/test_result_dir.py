"""Result directories on their way into the tree: reserved, drafted, published, listed, and set aside."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import StorageError
from penstock.results.active_run import ActiveRun
from penstock.results.provenance import HostFacts
from penstock.results.run_record import RunRequest
from penstock.submission.authoring.owned_tree import (
    OwnedTree,
    RunSeries,
    claim_tree,
    list_drafts,
    reserve_address,
    set_aside,
)
from penstock.submission.authoring.run_sequence import list_progress, missing_system_files, read_series_state
from penstock.submission.authoring.write_result_dir import (
    RunFacts,
    probe_fs_separation,
    write_manifest,
    write_result_dir,
)
from penstock.submission.code_image import Program
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import Benchmark, SubmissionPhase
from penstock.workload.load_workload import load
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.settings import parse_settings
from penstock.workload.spec import Workload

STARTED = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DIGEST = "0123456789abcdef" * 2
PROGRAM = Program(folder=Path("/program"), version="1.2", digest=DIGEST)
LOGS = ("out\n", "err\n")
HOST = HostFacts(host="a", kernel="", machine="", num_cores=8, memory_bytes=1 << 30, cpuinfo={}, meminfo={})
PROVENANCE_FILES = {".mlps-code-image", "provenance.json"}


@pytest.fixture
def tree(tmp_path: Path) -> OwnedTree:
    return claim_tree(tmp_path / "tree", "acme", now=STARTED, by="tests")


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load("unet3d_b200", overrides=parse_settings(["dataset.num_files_train=7000"])).workload


def make_series(
    tree: OwnedTree, benchmark: Benchmark = Benchmark.TRAINING, model: str = "unet3d"
) -> RunSeries:
    return RunSeries(
        tree=tree, division=SubmissionDivision.CLOSED, system="fast", benchmark=benchmark, model=model
    )


def publish(
    series: RunSeries,
    workload: Workload,
    *,
    minute: float = 0,
    phase: SubmissionPhase = SubmissionPhase.RUN,
    logs: tuple[str, str] | None = None,
    separation: dict[str, Any] | None = None,
    exit_status: int = 0,
) -> Path:
    started_at = STARTED + minute * MINUTE
    facts = RunFacts(
        address=reserve_address(series, phase, now=started_at),
        workload=workload,
        accelerator="b200",
        changed={"reader.read_threads": 8},
        data_path="/data",
        num_processes=4,
        hosts=[HOST],
        command=("penstock",),
        ended_at=started_at + 18 * MINUTE,
        exit_status=exit_status,
        data_size={"num_files_train": 7000, "num_subfolders_train": 0, "total_disk_bytes": 10**12},
    )
    return write_result_dir(
        facts, program=PROGRAM, now=started_at + 18 * MINUTE, logs=logs, separation=separation
    )


def test_reserved_addresses_of_one_second_differ(tree: OwnedTree, workload: Workload) -> None:
    series = make_series(tree)
    now = STARTED.replace(microsecond=700_000)
    addresses = [reserve_address(series, SubmissionPhase.RUN, now=now) for _ in range(3)]
    assert [address.stamp for address in addresses] == [f"20260701_10000{second}" for second in range(3)]
    assert all(address.draft.is_dir() and not address.folder.exists() for address in addresses)
    assert list_drafts(series) == [address.draft for address in addresses]
    published = publish(series, workload)
    assert published.name == "20260701_100003"
    assert reserve_address(series, SubmissionPhase.DATAGEN, now=now).stamp == "20260701_100000"


def test_size_directory_has_metadata_and_provenance_alone(tree: OwnedTree, workload: Workload) -> None:
    folder = publish(make_series(tree), workload, phase=SubmissionPhase.DATASIZE)
    relative = "closed/acme/results/fast/training/unet3d/datasize/20260701_100000"
    assert folder == tree.root / relative
    names = {path.name for path in folder.iterdir()}
    assert names == PROVENANCE_FILES | {"training_20260701_100000_metadata.json"}
    assert (folder / ".mlps-code-image").read_text() == f"md5-tree-v2:{DIGEST}\n"


def test_run_directory_has_configuration_logs_and_separation(tree: OwnedTree, workload: Workload) -> None:
    folder = publish(make_series(tree), workload, logs=LOGS, separation={"same_filesystem": False})
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "dlio_config",
        "fs_separation.json",
        "training_run.stdout.log",
        "training_run.stderr.log",
    }
    assert (folder / "training_run.stdout.log").read_text() == "out\n"
    assert (folder / "training_run.stderr.log").read_text() == "err\n"
    assert json.loads((folder / "fs_separation.json").read_text()) == {"same_filesystem": False}
    overrides = yaml.safe_load((folder / "dlio_config/overrides.yaml").read_text())
    assert overrides == [
        "workload=unet3d_b200",
        f"++workload.workflow.generate_data={workload.workflow.generate_data}",
        f"++workload.workflow.train={workload.workflow.train}",
        f"++workload.workflow.checkpoint={workload.workflow.checkpoint}",
        "++workload.reader.read_threads=8",
    ]
    hydra = yaml.safe_load((folder / "dlio_config/hydra.yaml").read_text())["hydra"]
    assert hydra["run"]["dir"] == str(folder)


def test_published_draft_leaves_no_empty_folders(tree: OwnedTree, workload: Workload) -> None:
    series = make_series(tree)
    left = reserve_address(series, SubmissionPhase.RUN, now=STARTED - MINUTE)
    publish(series, workload, phase=SubmissionPhase.DATASIZE)
    assert [path.name for path in (left.draft.parents[1]).iterdir()] == ["run"]
    left.draft.rmdir()
    publish(series, workload)
    assert [path.name for path in (tree.root / ".mlps").iterdir()] == []


def test_set_aside_directory_is_in_the_trash_under_its_path(tree: OwnedTree, workload: Workload) -> None:
    folder = publish(make_series(tree), workload)
    target = set_aside(tree, folder)
    assert not folder.exists()
    assert target.is_relative_to(tree.root / ".mlps" / "trash")
    assert target.as_posix().endswith(folder.relative_to(tree.root).as_posix())
    assert (target / "provenance.json").is_file()


def test_checkpointing_has_no_folders_of_phases(tree: OwnedTree) -> None:
    series = make_series(tree, Benchmark.CHECKPOINTING, "llama3-8b")
    address = reserve_address(series, SubmissionPhase.RUN, now=STARTED)
    assert address.folder.parent == tree.root / "closed/acme/results/fast/checkpointing/llama3-8b"
    assert list_drafts(series) == [address.draft]
    assert list_drafts(make_series(tree)) == []


def test_manifest_lists_every_directory_and_unknown_for_what_it_does_not_state(
    tree: OwnedTree, workload: Workload
) -> None:
    series = make_series(tree)
    complete, damaged = publish(series, workload), publish(series, workload, minute=30)
    (damaged / "provenance.json").write_text("{")
    next(damaged.glob("*_metadata.json")).unlink()
    systems = tree.root / "closed/acme/systems"
    systems.mkdir()
    (systems / "fast.yaml").touch()
    (systems / "slow.yaml").touch()
    (systems / "slow.pdf").touch()
    write_manifest(series, by="tests", now=STARTED)
    manifest = yaml.safe_load((tree.root / "closed/acme/submission.yaml").read_text())
    first, second = manifest["runs"]
    relative = complete.relative_to(tree.root / "closed/acme").as_posix()
    assert (first["leaf"], first["provenance"]) == (relative, f"{relative}/provenance.json")
    assert (first["benchmark"], first["command"], first["system"]) == ("training", "run", "fast")
    assert (first["accelerator"], first["rules_edition"]) == ("b200", "3.0")
    assert {second[key] for key in ("benchmark", "command", "accelerator", "provenance", "core_config")} == {
        "unknown"
    }
    assert "tool_version" not in first
    assert (manifest["tool_versions"], manifest["code_images"]) == (["1.2"], [f"md5-tree-v2:{DIGEST}"])
    assert manifest["systems"] == [
        {"name": "fast", "description": "systems/fast.yaml", "pdf": "missing"},
        {"name": "slow", "description": "systems/slow.yaml", "pdf": "systems/slow.pdf"},
    ]


def test_state_of_a_series_has_its_directories_by_phase_and_time(tree: OwnedTree, workload: Workload) -> None:
    series = make_series(tree)
    runs = [publish(series, workload, minute=minute, exit_status=minute > 30) for minute in (0, 20, 40)]
    size = publish(series, workload, minute=-30, phase=SubmissionPhase.DATASIZE)
    (runs[0].parent / "results.json").touch()
    (runs[0].parent / "notes").mkdir()
    state = read_series_state(series)
    assert [run.folder for run in state.runs] == runs
    assert [run.exit_status for run in state.runs] == [0, 0, 1]
    assert ([entry.folder for entry in state.datasizes], state.datagens) == ([size], ())
    first = state.runs[0]
    assert (first.started_at, first.duration) == (STARTED, 18 * MINUTE)
    assert (first.accelerator, first.num_processes) == ("b200", 4)
    assert (first.num_files, first.data_path) == (7000, "/data")
    assert (state.attempts, state.unreadable) == ((), ())


def test_directories_that_cannot_be_read_are_named_with_the_reason(
    tree: OwnedTree, workload: Workload
) -> None:
    series = make_series(tree)
    runs = [publish(series, workload, minute=20 * number) for number in range(4)]
    files = [next(run.glob("*_metadata.json")) for run in runs]
    files[0].unlink()
    files[1].write_text("{")
    document = json.loads(files[2].read_text())
    del document["accelerator"]
    files[2].write_text(json.dumps(document))
    state = read_series_state(series)
    assert [run.folder for run in state.runs] == runs[3:]
    relative = "closed/acme/results/fast/training/unet3d/run/20260701_1"
    assert state.unreadable[0] == f"{relative}00000: it has 0 files of metadata, not one"
    assert state.unreadable[1].startswith(f"{relative}02000: Expecting property name")
    assert state.unreadable[2] == f"{relative}04000: accelerator: Field required"


def test_drafts_are_attempts_with_how_they_ended(tree: OwnedTree, workload: Workload) -> None:
    series = make_series(tree)
    empty, failed, damaged = (
        reserve_address(series, SubmissionPhase.RUN, now=STARTED + number * MINUTE) for number in range(3)
    )
    request = RunRequest(workload=workload, ranks=1, hosts=[HOST], command=["penstock"])
    with (
        pytest.raises(StorageError, match="full"),
        ActiveRun.start_in(failed.draft, request, results=tree.root),
    ):
        raise StorageError("The disk is full", uri="/data")
    (damaged.draft / "run.json").write_text("{")
    attempts = read_series_state(series).attempts
    assert [attempt.folder for attempt in attempts] == [empty.draft, failed.draft, damaged.draft]
    assert [attempt.outcome for attempt in attempts] == ["interrupted", "failed", "unreadable"]
    assert attempts[0].why == "It left no run.json."
    assert "The disk is full" in attempts[1].why


def test_progress_counts_runs_that_follow_one_another_and_names_what_is_missing(
    tree: OwnedTree, workload: Workload
) -> None:
    training = make_series(tree)
    for minute in (0, 20, 90, 110, 130):
        publish(training, workload, minute=minute)
    publish(training, workload, minute=-60, phase=SubmissionPhase.DATAGEN)
    reserve_address(make_series(tree, Benchmark.CHECKPOINTING, "llama3-8b"), SubmissionPhase.RUN, now=STARTED)
    checkpointing, progress = list_progress(tree, load_edition("v3.0"), now=STARTED + 150 * MINUTE)
    assert (progress["system"], progress["workload"]) == (training.system, training.model)
    assert (progress["num_runs"], progress["num_runs_wanted"]) == (3, 6)
    assert (progress["num_accelerators"], progress["accelerator"]) == (4, "b200")
    assert progress["lacks"] == ["datasize", "3 runs", "systems/fast.yaml", "systems/fast.pdf"]
    assert (checkpointing["num_runs"], checkpointing["num_runs_wanted"]) == (0, 1)
    assert (checkpointing["num_accelerators"], checkpointing["accelerator"]) == (None, "")
    assert checkpointing["lacks"] == ["1 run", "systems/fast.yaml", "systems/fast.pdf"]
    assert [attempt["outcome"] for attempt in checkpointing["attempts"]] == ["interrupted"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("typo: 1\n", "systems/fast.yaml, line 1"),
        (
            "".join(f"typo{number}: 1\n" for number in range(7)),
            "systems/fast.yaml, lines 1, 2, 3, 4, 5 and 2 more",
        ),
    ],
)
def test_lines_of_a_description_to_correct_are_listed(tree: OwnedTree, text: str, missing: str) -> None:
    systems = tree.root / "closed/acme/systems"
    systems.mkdir(parents=True)
    (systems / "fast.yaml").write_text(text)
    (systems / "fast.pdf").touch()
    assert list(missing_system_files(make_series(tree))) == [missing]


def test_separation_probe_leaves_nothing_and_knows_one_file_system(tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    results.mkdir()
    document = probe_fs_separation(str(data), results, host="a", now=STARTED)
    assert document is not None
    assert document["same_filesystem"] is True
    assert (document["probed_by_host"], document["probed_by_rank"]) == ("a", 0)
    assert document["data_or_chkpt_path"] == str(data)
    assert list(results.iterdir()) == list(data.iterdir()) == []
    assert probe_fs_separation("s3://bucket/data", results, host="a", now=STARTED) is None


def test_separation_probe_that_cannot_write_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="share a file system") as caught:
        probe_fs_separation(str(tmp_path / "data"), tmp_path / "missing", host="a", now=STARTED)
    assert "writable" in caught.value.fix
