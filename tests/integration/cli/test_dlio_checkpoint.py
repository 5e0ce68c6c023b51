"""`penstock-dlio` with workloads of checkpoints alone: DLIO's words, keys, files and figures."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.s3.server import BUCKET, S3Server

from penstock.cli.dlio import main
from penstock.cli.dlio_storage import checkpoint_location
from penstock.workload.enums import StorageKind
from penstock.workload.load_workload import load
from penstock.workload.settings import parse_settings

TINY = """
model:
  name: tiny
  type: transformer
  num_layers: 2
  parallelism: {tensor: 1, pipeline: 1, zero_stage: 3}
  transformer:
    {vocab_size: 500, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 8, num_kv_heads: 4}
framework: pytorch
workflow: {train: False, checkpoint: True}
checkpoint:
  checkpoint_folder: checkpoints/tiny
  time_between_checkpoints: 0.01
  num_checkpoints_write: 2
  num_checkpoints_read: 2
  fsync: True
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return tmp_path


def run(*words: str) -> int:
    return main(["workload=tiny", "--config-dir", ".", "hydra.run.dir=out", *words])


def found() -> Any:
    return json.loads(Path("out/checkpoints.json").read_text())


def test_log_summary_and_files_have_dlios_form(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    said = capsys.readouterr().out
    assert "[METRIC] Checkpoint save duration (seconds):" in said
    assert "[METRIC] Checkpoint load I/O Throughput (GiB/second):" in said
    metric = json.loads(Path("out/summary.json").read_text())["metric"]
    assert metric["checkpoint_size_GB"] == found()["checkpoint_bytes"] / 2**30
    assert sorted(path.name for path in Path("checkpoints/tiny/global_epoch1_step2").iterdir()) == [
        "zero_pp_rank_0_mp_rank_0_model_states.pt",
        "zero_pp_rank_0_mp_rank_0_optim_states.pt",
    ]
    assert Path("out/.hydra/config.yaml").is_file()
    assert json.loads(Path("out/run.json").read_text())["outcome"] == "finished"


@pytest.mark.parametrize("fsync", [True, False])
def test_fsync_follows_its_key(here: Path, *, fsync: bool) -> None:
    assert run(f"++workload.checkpoint.fsync={fsync}") == 0
    assert found()["storage_options"]["fsync"] is fsync


def test_writes_and_reads_can_be_separate_invocations(here: Path) -> None:
    assert run("++workload.checkpoint.num_checkpoints_read=0") == 0
    written = found()
    assert run("++workload.checkpoint.num_checkpoints_write=-1") == 0
    read = found()
    assert (written["read"], read["write"]) == (None, None)
    assert read["read"]["verified_bytes"] == written["write"]["bytes"]
    assert read["gap_s"] > 0


def test_rank_shift_is_accepted_and_reported_as_useless_on_one_host(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("++workload.checkpoint.rank_sync=True", "++workload.checkpoint.recovery_rank_shift=True")
    assert run(*settings) == 0
    assert "all ranks are on one host" in capsys.readouterr().err


def test_subset_requires_the_number_of_replicas(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("++workload.checkpoint.mode=subset") == 2
    assert "model.parallelism.data" in capsys.readouterr().err
    assert run("++workload.checkpoint.mode=subset", "++workload.model.parallelism.data=4") == 0
    whole = 14 * (2 * 500 * 64 + 64 + 2 * (2 * 64 + 64 * 128 + 64 * 64 + 3 * 128 * 64))
    assert found()["checkpoint_bytes"] == pytest.approx(whole / 4, rel=0.001)


def test_wrong_bytes_fail_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("++workload.checkpoint.num_checkpoints_read=0") == 0
    path = next(Path("checkpoints/tiny/global_epoch1_step1").glob("*optim*"))
    path.write_bytes(bytes(path.stat().st_size))
    assert run("++workload.checkpoint.num_checkpoints_write=0") == 1
    assert "differ from those that were written" in capsys.readouterr().err


def test_checkpoints_go_to_an_object_service_by_dlios_keys(here: Path, moto: S3Server) -> None:
    environment = moto.environment
    keys = {
        "storage.storage_type": "s3",
        "storage.storage_root": BUCKET,
        "storage.storage_options.endpoint_url": environment["AWS_ENDPOINT_URL"],
        "storage.storage_options.access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "storage.storage_options.secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "checkpoint.checkpoint_folder": "dlio-ckpt",
    }
    assert run(*(f"++workload.{key}={value}" for key, value in keys.items())) == 0
    assert found()["target"] == f"s3://{BUCKET}/dlio-ckpt"
    assert found()["is_right"] is True


def test_checkpoint_folders_are_not_joined_with_the_storage_root(here: Path) -> None:
    changes = ["checkpoint.checkpoint_folder=ckpt", "storage.storage_root=/data"]
    workload = load("llama_8b_zero3", overrides=parse_settings(changes)).workload
    assert checkpoint_location(workload, {}).uri == f"file://{here}/ckpt"
    direct = load(
        "llama_8b_zero3", overrides=parse_settings([*changes, "storage.storage_type=direct_fs"])
    ).workload
    assert direct.storage.storage_type is StorageKind.DIRECT_FS
    assert checkpoint_location(direct, {}).uri == f"direct://{here}/ckpt"


def test_checkpoint_folder_may_be_a_uri(here: Path) -> None:
    changes = [
        "checkpoint.checkpoint_folder=s3://other/a/b",
        "storage.storage_type=s3",
        "storage.storage_root=x",
    ]
    workload = load("llama_8b_zero3", overrides=parse_settings(changes)).workload
    assert checkpoint_location(workload, {}).uri == "s3://other/a/b"
