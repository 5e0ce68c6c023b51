"""`penstock-dlio` as DLIO's users type it: every shipped workload, alone and on ranks, and what is left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.s3.server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

from penstock.cli.dlio import main
from penstock.results.run_comparison import summarize_run
from penstock.results.run_record import RunOutcome, read_record
from penstock.workload.load_workload import shipped

PHASE = {
    "au_percentage",
    "au_mean_percentage",
    "au_meet_expectation",
    "au_stdev_percentage",
    "throughput_samples_per_second",
    "throughput_mean_samples_per_second",
    "throughput_stdev_samples_per_second",
    "io_mean_MB_per_second",
    "io_stdev_MB_per_second",
}
SUMMARY = {
    *("start", "end", "epochs", "num_accelerators", "num_hosts", "hostname", "metric"),
    *("num_files_train", "num_files_eval", "num_samples_per_file"),
    *("host_cpu_count", "host_processor_name", "host_memory_GB", "host_cpuinfo", "host_meminfo"),
    *("data_size_per_host_GB", "potential_caching"),
}
RANK_OUTPUT = {
    *("host_memory_GB", "host_cpu_count", "host_processor_name", "potential_caching"),
    *("host_cpuinfo", "host_meminfo", "hostname"),
}
EPOCH_OUTPUT = {"start", "end", "load", "proc", "compute", "throughput", "au", "host_meminfo"}
SPAN = {"start", "end", "duration"}
CONFIGURATION = {"config.yaml", "hydra.yaml", "overrides.yaml"}
OURS = {"run.json", "steps.parquet", "spans.parquet", "counters.parquet", "stages.json"}
METRIC_LINES = (
    "[METRIC] Number of Simulated Accelerators: ",
    "[METRIC] Training Accelerator Utilization [AU] (%): ",
    "[METRIC] Training Throughput (samples/second): ",
    "[METRIC] Training I/O Throughput (MiB/second): ",
    "[METRIC] train_au_meet_expectation: ",
)

SCALED_DOWN = (
    "workflow.generate_data=True",
    "workflow.checkpoint=False",
    "dataset.num_files_train=2",
    "dataset.record_length_bytes_stdev=0",
    "reader.batch_size=2",
    "reader.read_threads=0",  # torch's loader reads in the rank itself
    "train.epochs=2",
    "train.computation_time=0.001",
)
SHIPPED = {loaded.workload.full_name: loaded.workload for loaded in shipped()}


def command(name: str, *settings: str) -> list[str]:
    """A shipped workload on two small files; columns, where there are some, say how long a record is."""
    dataset = SHIPPED[name].dataset
    small = [*SCALED_DOWN]
    if dataset.num_samples_per_file > 1:
        small.append("dataset.num_samples_per_file=2")
    if not dataset.parquet.columns:
        small.append("dataset.record_length_bytes=4096")
    return [f"workload={name}", *(f"++workload.{setting}" for setting in (*small, *settings))]


def on_ranks(ranks: int, words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    folder = Path(sys.executable).parent
    launch = [str(folder / "mpiexec"), "-n", str(ranks), str(folder / "penstock-dlio"), *words]
    return subprocess.run(launch, check=False, cwd=cwd, capture_output=True, text=True, timeout=120)


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def check_files(folder: Path, *, ranks: int, epochs: int, subfolder: str = ".hydra") -> None:
    """Every file that DLIO leaves is there, and no other but ours, with DLIO's keys and no others."""
    by_rank = {f"{rank}_{what}.json" for rank in range(ranks) for what in ("output", "per_epoch_stats")}
    assert names_in(folder) == {"summary.json", "dlio.log", subfolder, *by_rank, *OURS}
    assert names_in(folder / subfolder) == CONFIGURATION
    summary = document(folder / "summary.json")
    assert set(summary) == SUMMARY
    assert set(summary["metric"]) == {f"train_{key}" for key in PHASE}
    assert summary["num_accelerators"] == ranks
    assert len(summary["metric"]["train_au_percentage"]) == summary["epochs"] == epochs
    numbers = {str(epoch) for epoch in range(1, epochs + 1)}
    for rank in range(ranks):
        output = document(folder / f"{rank}_output.json")
        assert set(output) == RANK_OUTPUT | numbers
        stats = document(folder / f"{rank}_per_epoch_stats.json")
        assert set(stats) == numbers
        for number in numbers:
            assert set(output[number]) == EPOCH_OUTPUT
            assert set(output[number]["load"]) == {"block1"}
            assert len(output[number]["load"]["block1"]) == len(output[number]["compute"]["block1"]) > 0
            assert set(stats[number]) == {*SPAN, "block1"}
            assert set(stats[number]["block1"]) == SPAN


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DLIO_OUTPUT_FOLDER", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_workload_writes_dlios_files(
    name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command(name), "hydra.run.dir=out", "hydra.output_subdir=configs"]) == 0
    shown = capsys.readouterr()
    check_files(here / "out", ranks=1, epochs=2, subfolder="configs")
    for start in METRIC_LINES:
        assert sum(line.startswith(start) for line in shown.out.splitlines()) == 1
    assert (here / "out" / "dlio.log").read_text() == shown.out
    assert "Generation done" in shown.out
    assert read_record(here / "out").outcome is RunOutcome.FINISHED


def test_two_ranks_under_mpiexec_leave_files_of_both(here: Path) -> None:
    settings = ("dataset.num_files_train=8", "train.epochs=1", "reader.data_loader=dali")
    result = on_ranks(2, [*command("unet3d_h100", *settings), "hydra.run.dir=out"], here)
    assert result.returncode == 0, result.stderr
    check_files(here / "out", ranks=2, epochs=1)
    assert "[METRIC] Number of Simulated Accelerators: 2" in result.stdout
    assert result.stdout.count("[METRIC] Training Throughput") == 1
    assert result.stderr.count("reader.data_loader: ") == 1
    assert len(list((here / "data" / "unet3d" / "train").iterdir())) == 8


def test_one_rank_under_mpiexec_is_the_same_as_alone(here: Path) -> None:
    result = on_ranks(1, [*command("cosmoflow_h100"), "hydra.run.dir=out"], here)
    assert result.returncode == 0, result.stderr
    check_files(here / "out", ranks=1, epochs=2)


def test_two_ranks_under_torchrun_join_one_job(here: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["--no-python", str(Path(sys.executable).with_name("penstock-dlio"))]
    settings = ("dataset.num_files_train=4", "dataset.keep_files=False")
    words = [*command("unet3d_h100", *settings), "hydra.run.dir=out"]
    result = subprocess.run(
        [*launch, *program, *words], check=False, cwd=here, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    check_files(here / "out", ranks=2, epochs=2)
    assert "4 files deleted" in result.stderr


def test_generation_and_training_can_be_separate_commands(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("unet3d_h100")
    assert main([*words, "++workload.workflow.train=False", "hydra.run.dir=made"]) == 0
    assert names_in(here / "made") == {".hydra", "dlio.log"}
    assert "Starting data generation" in (here / "made" / "dlio.log").read_text()
    assert "[METRIC]" not in capsys.readouterr().out
    assert main([*words, "++workload.workflow.generate_data=False", "hydra.run.dir=run"]) == 0
    check_files(here / "run", ranks=1, epochs=2)
    assert "Generation" not in capsys.readouterr().out


def test_request_is_kept_in_hydras_files(here: Path) -> None:
    words = command("unet3d_h100", "storage.storage_options.secret_access_key=hidden")
    assert main([*words, "hydra.run.dir=out"]) == 0
    kept = here / "out" / ".hydra"
    overrides = yaml.safe_load((kept / "overrides.yaml").read_text())
    assert overrides[:3] == words[:3]
    assert yaml.safe_load((kept / "config.yaml").read_text())["workload"]["reader"]["batch_size"] == 2
    assert yaml.safe_load((kept / "hydra.yaml").read_text())["hydra"]["run"]["dir"] == str(here / "out")
    assert not any(b"hidden" in path.read_bytes() for path in (here / "out").rglob("*") if path.is_file())


def test_a_reader_of_dlios_results_reads_ours(here: Path) -> None:
    assert main([*command("resnet50_h100"), "hydra.run.dir=out"]) == 0
    (here / "out" / "run.json").unlink()
    found = summarize_run(here / "out")
    assert found.notes == ()
    assert (found.kind, found.workload, found.ranks) == ("DLIO", "resnet50_h100", 1)
    assert found.au_compat_percent is not None


def test_remainders_are_dropped_as_in_dlio_and_remarks_are_recorded(here: Path) -> None:
    settings = ("dataset.num_files_train=5", "reader.data_loader=dali")
    assert main([*command("unet3d_h100", *settings), "hydra.run.dir=out"]) == 0
    record = read_record(here / "out")
    assert record.plan["division"] == "drop"
    assert record.plan["epochs"][0]["steps"] == 2
    assert record.plan["epochs"][0]["left_out"]["samples"] == 1
    assert any("dali is not used" in remark for remark in record.remarks)
    assert record.command[:2] == ("penstock-dlio", "workload=unet3d_h100")


def test_evaluation_has_figures_of_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("workflow.evaluation=True", "dataset.num_files_eval=2", "evaluation.eval_time=0.001")
    assert main([*command("unet3d_h100", *settings), "hydra.run.dir=out"]) == 0
    metric = document(here / "out" / "summary.json")["metric"]
    assert set(metric) == {f"{prefix}_{key}" for prefix in ("train", "eval") for key in PHASE}
    assert set(document(here / "out" / "0_output.json")["1"]["load"]) == {"block1", "eval"}
    assert "[METRIC] Eval Throughput (samples/second): " in capsys.readouterr().out


def test_default_run_folder_is_hydras(here: Path) -> None:
    assert main(command("unet3d_h100")) == 0
    (folder,) = (here / "hydra_log" / "unet3d").iterdir()
    check_files(folder, ranks=1, epochs=2)


def test_a_null_subfolder_leaves_no_configuration(here: Path) -> None:
    assert main([*command("unet3d_h100"), "hydra.run.dir=out", "hydra.output_subdir=null"]) == 0
    assert not list((here / "out").rglob("*.yaml"))
    assert (here / "out" / "summary.json").is_file()


def test_workload_in_config_dir_is_found(here: Path) -> None:
    own = {
        "model": {"name": "mine"},
        "framework": "pytorch",
        "workflow": {"generate_data": True, "train": True},
        "dataset": {"data_folder": "mine", "format": "npy", "num_files_train": 4, "record_length": 4096},
        "reader": {"batch_size": 2, "data_loader": "pytorch", "read_threads": 0},
        "train": {"epochs": 1, "computation_time": 0.001},
    }
    (here / "conf" / "workload").mkdir(parents=True)
    (here / "conf" / "workload" / "mine.yaml").write_text(yaml.safe_dump(own))
    assert main(["workload=mine", "--config-dir", str(here / "conf"), "hydra.run.dir=out"]) == 0
    check_files(here / "out", ranks=1, epochs=1)
    assert len(list((here / "mine" / "train").iterdir())) == 4


def test_data_files_are_deleted_unless_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command("unet3d_h100", "dataset.keep_files=False"), "hydra.run.dir=out"]) == 0
    assert not [path for path in (here / "data").rglob("*") if path.is_file()]
    assert "keep_files is false: 2 files deleted" in capsys.readouterr().err
    check_files(here / "out", ranks=1, epochs=2)


def test_files_for_evaluation_are_deleted_as_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("dataset.keep_files=False", "dataset.num_files_eval=3", "workflow.evaluation=True")
    assert main([*command("unet3d_h100", *settings), "hydra.run.dir=out"]) == 0
    assert not [path for path in (here / "data").rglob("*") if path.is_file()]
    assert "keep_files is false: 5 files deleted" in capsys.readouterr().err


def test_reused_folder_holds_only_the_later_run(here: Path) -> None:
    settings = ("dataset.num_files_train=4", "train.epochs=1", "reader.data_loader=tensorflow")
    words = [*command("unet3d_h100", *settings), "hydra.run.dir=out"]
    assert on_ranks(2, words, here).returncode == 0
    assert main(words) == 0
    check_files(here / "out", ranks=1, epochs=1)


def test_synthetic_samples_are_not_generated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command("unet3d_h100", "dataset.format=synthetic"), "hydra.run.dir=out"]) == 0
    check_files(here / "out", ranks=1, epochs=2)
    assert "nothing is generated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("skip", "said"),
    [("True", "train/img_0_of_2.npz"), ("False", "root folder failed: No such file or directory")],
)
def test_missing_data_ends_the_run_and_keeps_its_configuration(
    here: Path, capsys: pytest.CaptureFixture[str], skip: str, said: str
) -> None:
    words = command("unet3d_h100", "workflow.generate_data=False", f"dataset.skip_listing={skip}")
    assert main([*words, "hydra.run.dir=out"]) == 2
    assert said in capsys.readouterr().err
    assert names_in(here / "out") == {".hydra", "dlio.log"}


def test_wrong_usage_on_ranks_is_reported_once_and_leaves_nothing(here: Path) -> None:
    result = on_ranks(2, ["workload=unet3d_h100", "++workload.dataset.num_fils_train=3"], here)
    assert result.returncode != 0  # which one is up to the launcher, as ranks leave it one after the other
    assert result.stderr.count("did you mean dataset.num_files_train?") == 1
    assert not (here / "hydra_log").exists()


def test_objects_are_written_read_and_deleted_by_dlios_keys(
    here: Path, moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = (
        "storage.storage_type=s3",
        f"storage.storage_root={BUCKET}",
        "dataset.data_folder=dlio/unet3d",
        "dataset.keep_files=False",
        "storage.storage_options.region=us-east-1",
        f"storage.storage_options.endpoint_url={moto.endpoint}",
        f"storage.storage_options.access_key_id={ACCESS_KEY}",
        f"storage.storage_options.secret_access_key={SECRET_KEY}",
        "storage.post_generation_settle_seconds=0.01",
    )
    assert main([*command("unet3d_h100", *settings), "hydra.run.dir=out"]) == 0
    check_files(here / "out", ranks=1, epochs=2)
    stages = document(here / "out" / "stages.json")
    assert stages["storage"]["uri"] == f"s3://{BUCKET}/dlio/unet3d"
    assert stages["storage"]["counters"]["read_bytes"] > 0
    assert not any(
        SECRET_KEY.encode() in path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()
    )
