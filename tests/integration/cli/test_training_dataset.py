"""The commands that only compute: workloads, training size, whatif and plan."""

import json
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import CommandResult, run_command

SIZE = ("training", "size", "unet3d", "--accelerator", "h100", "--accelerators", "8")


def penstock(*words: str) -> CommandResult:
    return run_command(*words, COLUMNS="120")


def document(*words: str) -> Any:
    result = penstock(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_size_comes_with_its_proof_and_the_next_command() -> None:
    found = document(*SIZE, "--hosts", "2", "--host-memory", "512GiB")
    assert found["num_files_train"] == 37501
    assert found["hosts"] == 2
    assert "memory: 5 x 1024 GiB / 146600628 B = 37,500.2 -> 37,501 files" in found["proof"]
    assert found["as_configured"] == {
        "num_files_train": 168,
        "passed": False,
        "proof": "168 files < 37,501 files needed",
    }
    assert found["next_command"] == (
        "penstock training generate unet3d --accelerator h100 --set dataset.num_files_train=37501 "
        "--set dataset.num_subfolders_train=4 --data URI"
    )
    assert found["remarks"] == []


def test_report_shows_the_same_figures() -> None:
    result = penstock(*SIZE, "--hosts", "2", "--host-memory", "512GiB")
    assert result.returncode == 0
    assert result.stderr == ""
    for said in ("37,501 files in 4 subfolders", "2.96 GiB/s an accelerator", "too few", "training generate"):
        assert said in result.stdout


def test_the_next_command_carries_the_users_settings_and_sizes_to_enough() -> None:
    settings = ("--set", "dataset.file_prefix='a b'", "--set", "dataset.record_length_bytes=1GiB")
    found = document(*SIZE, "--host-memory", "64GiB", *settings)
    words = shlex.split(found["next_command"])
    assert words[:4] == ["penstock", "training", "generate", "unet3d"]
    assert "dataset.file_prefix='a b'" in words
    changes = [word for flag, word in pairwise(words) if flag == "--set"]
    again = document(
        *SIZE, "--host-memory", "64GiB", *(word for change in changes for word in ("--set", change))
    )
    assert again["as_configured"]["passed"]
    assert again["num_files_train"] == found["num_files_train"] == 28000


def test_the_next_command_repeats_no_secret() -> None:
    secret = "storage.storage_options.secret_access_key=hush"
    result = penstock(*SIZE, "--host-memory", "64GiB", "--set", secret)
    assert result.returncode == 0
    assert "secret_access_key=..." in result.stdout
    assert "hush" not in result.stdout + result.stderr


def test_hosts_may_have_different_memory() -> None:
    found = document(*SIZE, "--host-memory", "512GiB,256GiB")
    assert found["hosts"] == 2
    assert found["host_memory_bytes"] == [512 << 30, 256 << 30]
    assert document(*SIZE, "--hosts", "2", "--host-memory", "512GiB,256GiB") == found


def test_accelerators_that_hosts_cannot_share_equally_are_noted() -> None:
    words = (*SIZE, "--hosts", "3", "--host-memory", "64GiB")
    noted = "8 accelerators on 3 hosts: in a submission, every host must have the same number (hosts.equal)"
    assert noted in penstock(*words).stderr
    assert document(*words)["remarks"] == [noted]


@pytest.mark.parametrize("command", ["whatif", "size"])
@pytest.mark.parametrize(
    "setting",
    [
        "train.computation_time=1e-300",
        "train.computation_time=1e300",
        "train.computation_time={type: gamma, shape: 1e300, scale: 1}",
        "train.computation_time=" + "9" * 400,
        "metric.au=1e-300",
        "dataset.record_length_bytes=1e300",
        "dataset.record_length_bytes=1e-300",
        "dataset.record_length_bytes_stdev=1e300",
        "dataset.record_dims=[" + ",".join(["9" * 18] * 20) + "]",
        "dataset.num_files_train=" + "9" * 30,
        "reader.batch_size=" + "9" * 30,
        "checkpoint.time_between_checkpoints=1e300",
    ],
)
def test_numbers_with_which_sums_overflow_are_refused_by_name(command: str, setting: str) -> None:
    with_rate = ("--bandwidth", "40GiB/s")
    with_hosts = ("--accelerators", "8", "--host-memory", "64GiB")
    words = ("unet3d_h100", *(with_rate if command == "whatif" else with_hosts))
    deviation = "dataset.record_length_bytes_stdev=0"  # which dimensions exclude
    extra = ("--set", deviation) if "record_dims" in setting else ()
    result = penstock("training", command, *words, *extra, "--set", setting)
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert setting.partition("=")[0].removesuffix(".record_dims") in result.stderr
    assert len(result.stderr) < 1000


def test_a_workload_without_computation_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "idle.yaml"
    path.write_text("dataset: {format: npy, num_files_train: 10000000}\nreader: {file_shuffle: off}\n")
    words = ("training", "size", str(path), "--accelerators", "1", "--host-memory", "1GiB")
    found = document(*words)
    assert found["bytes_per_s"] is None
    assert found["as_configured"]["passed"]
    shown = penstock(*words)
    assert "reads" not in shown.stdout
    assert ": enough" in shown.stdout
    assert "here off means off" in shown.stderr


def test_forecast_comes_with_its_model() -> None:
    found = document("training", "whatif", "unet3d", "--accelerator", "h100", "--bandwidth", "40GiB/s")
    assert found["accelerators"] == 15
    assert found["au"] >= found["au_threshold"] > found["au_with_one_more"]
    assert found["proof"][0].startswith("model: prefetching hides reading")
    shown = penstock("training", "whatif", "dlrm_b200", "--bandwidth", "40GiB/s")
    assert "40 GiB/s feeds 8 accelerators" in shown.stdout
    assert "40 of 200 columns" in shown.stdout


def test_settings_change_the_forecast_and_remarks_go_to_stderr() -> None:
    words = ("training", "whatif", "unet3d_h100", "--bandwidth", "40GiB/s", "--set", "reader.batch_size=14")
    assert document(*words)["step_read_bytes"] == 14 * 146600628
    result = penstock(*words, "--set", "reader.sample_shuffle=seed")
    assert "here they are shuffled" in result.stderr
    assert result.returncode == 0


def test_list_describes_every_family() -> None:
    found = document("workloads")["workloads"]
    assert len(found) == 21
    assert {"unet3d_h100", "dlrm_mi355", "bert_v100"} <= {entry["name"] for entry in found}
    shown = penstock("workloads").stdout
    for entry in found:
        assert entry["family"] in shown
    assert "3D U-Net on medical volumes" in shown
    assert "7,200 npz files x 1 sample x 140 MiB, batch 7, 162 ms a step, AU 0.90" in shown


def test_one_workload_is_shown_with_all_values() -> None:
    found = document("workloads", "unet3d", "--accelerator", "b200", "--set", "reader.batch_size=14")
    assert (found["name"], found["accelerator"]) == ("unet3d", "b200")
    assert found["workload"]["dataset"]["num_files_train"] == 7200
    assert found["workload"]["reader"]["batch_size"] == 14
    shown = penstock("workloads", "dlrm_b200")
    assert "200 entries" in shown.stdout
    assert "dataset.parquet.row_group_size" in shown.stdout


def test_remarks_on_a_shown_workload_are_printed() -> None:
    result = penstock("workloads", "unet3d_h100", "--set", "checkpoint.fsync=true")
    assert "checkpoint.fsync: DLIO never syncs" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("training", "size", "unet3d", "--accelerators", "8", "--host-memory", "1GiB"),
            "--accelerator v100, a100",
        ),
        ((*SIZE, "--host-memory", "4G"), "--host-memory"),
        ((*SIZE, "--host-memory", "512"), "'512' has no unit (--host-memory). Write for example"),
        ((*SIZE, "--hosts", "3", "--host-memory", "1GiB,2GiB"), "2 memory sizes for 3 hosts"),
        ((*SIZE, "--host-memory", "0"), "are not a cluster"),
        ((*SIZE, "--host-memory", "1GiB", "--set", "reader.bath_size=1"), "did you mean reader.batch_size?"),
        ((*SIZE, "--host-memory", "1GiB", "--set", "reader"), "sets nothing"),
        (("training", "whatif", "unet3d_h100", "--bandwidth", "40GiB"), "--bandwidth"),
        (("training", "whatif", "unet3d_h100", "--bandwidth", "0B/s"), "bandwidth must be above 0"),
        (("workloads", "unit3d"), "Did you mean unet3d?"),
        (("workloads", "/no/such.yaml"), "Cannot read the workload"),
        (("training", "siz"), "size"),
    ],
)
def test_wrong_usage_comes_with_a_fix(words: tuple[str, ...], said: str) -> None:
    result = penstock(*words)
    assert result.returncode == 2, result.stderr
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [("training", "size"), ("training", "whatif"), ("workloads",)])
def test_every_verb_shows_examples_and_offers_json(words: tuple[str, ...]) -> None:
    result = penstock(*words, "--help")
    assert "Examples:" in result.stdout
    assert "--json" in result.stdout


def test_help_loads_no_workload_code() -> None:
    program = (
        "import sys; from penstock.cli import main; code = main(['training', 'size', '--help'])\n"
        "heavy = [name for name in sys.modules if name in ('numpy', 'yaml') or 'penstock.workload' in name]\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


PLAN = ("training", "plan", "unet3d_h100")


def test_the_data_set_of_a_family_needs_no_accelerator(tmp_path: Path) -> None:
    small = [f"--set=dataset.{value}" for value in ("num_files_train=2", "record_length_bytes=512")]
    words = ("--data", str(tmp_path / "data"), *small)
    assert document("training", "generate", "unet3d", *words)["num_files"] == 2
    assert document("training", "verify", "unet3d", *words)["num_wrong"] == 0


def test_a_wrong_file_is_named_with_the_way_to_replace_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    small = [f"--set=dataset.{value}" for value in ("num_files_train=2", "record_length_bytes=512")]
    words = ("unet3d", "--data", str(data), *small)
    document("training", "generate", *words)
    victim = min(data.rglob("img_*"))
    content = bytearray(victim.read_bytes())
    content[-200] ^= 1
    victim.write_bytes(content)
    result = penstock("training", "verify", *words)
    assert result.returncode == 1
    assert "`penstock training generate` keeps files that exist: delete the wrong ones" in result.stdout
    victim.unlink()
    document("training", "generate", *words)
    right = penstock("training", "verify", *words)
    assert right.returncode == 0
    assert "delete" not in right.stdout


def test_plan_document_lists_samples_and_files() -> None:
    plan = document(*PLAN, "--ranks", "4", "--rank", "2", "--epoch", "3")
    assert len(plan["samples"]) == 10
    assert plan["num_samples"] == 42
    first = plan["samples"][0]
    assert first["file"] == f"train/img_{first['index']:03d}_of_168.npz"


def test_plan_table_names_rank_and_epoch() -> None:
    result = penstock(*PLAN, "--ranks", "4", "--rank", "2", "--epoch", "3")
    assert "Rank 2 of 4 reads 42 samples in epoch 3" in result.stdout


def test_invalid_division_names_its_option() -> None:
    result = penstock(*PLAN, "--remainder", "conquer")
    assert result.returncode == 2
    assert "--remainder" in result.stderr
    assert "rotate, drop, pad, error" in result.stderr


def test_plan_follows_the_seed_and_the_division() -> None:
    words = (*PLAN, "--set", "reader.batch_size=1", "--ranks", "5")
    usual = document(*words)
    assert document(*words, "--set", "train.seed=7")["samples"] != usual["samples"]
    assert usual["num_samples"] in (33, 34)
    assert document(*words, "--remainder", "drop")["num_samples"] == 33


def test_sizes_of_hosts_must_match_their_number() -> None:
    several = penstock(*SIZE, "--hosts", "3", "--host-memory", "1GiB,2GiB")
    assert several.returncode == 2
    assert "2 memory sizes for 3 hosts" in several.stderr
    assert document(*SIZE, "--hosts", "2", "--host-memory", "1GiB,2GiB")["hosts"] == 2
    assert document(*SIZE, "--host-memory", "1GiB,2GiB")["host_memory_bytes"] == [1 << 30, 2 << 30]
    assert document(*SIZE, "--hosts", "3", "--host-memory", "1GiB")["host_memory_bytes"] == [1 << 30] * 3
