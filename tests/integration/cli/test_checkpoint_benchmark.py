"""`penstock checkpoint run` as it is typed: on one rank, on several, on an object server, and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.s3.server import BUCKET, S3Server

from penstock.cli import main
from penstock.results.run_folder import run_folders

WITHOUT_ACCOUNTS = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
SMALL = ("llama3-8b", "--scale", "0.00005", "--interval", "0s", "--chunk", "1MiB", "--buffer-memory", "8MiB")


def penstock(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "checkpoint", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**WITHOUT_ACCOUNTS, "COLUMNS": "120", **environment},
    )


def here(capsys: pytest.CaptureFixture[str], *words: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: a second quicker."""
    code = main(["checkpoint", *words])
    said = capsys.readouterr()
    return subprocess.CompletedProcess(words, code, said.out, said.err)


def document(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_ranks_write_and_read_on_files_past_the_page_cache(tmp_path: Path) -> None:
    place = ("--to", f"direct://{tmp_path}/ckpt", "--results", str(tmp_path / "runs"))
    found = document(
        penstock("run", *SMALL, *place, "--writes", "2", "--reads", "2", "--ranks", "2", "--json")
    )
    assert found["ranks"] == 2
    assert found["write"]["bytes"] == found["read"]["verified_bytes"] == 2 * found["checkpoint_bytes"]
    assert found["checkpoint_bytes"] == pytest.approx(14 * 8_030_261_248 * 0.00005, rel=0.01)
    assert found["read"]["from_memory"] is False
    assert found["bottleneck"] in ("storage", "generator", "verifier", "durability")
    assert len(found["peak_rss_bytes"]) == 2
    record = json.loads((Path(found["results_dir"]) / "run.json").read_text())
    assert (record["outcome"], record["ranks"]) == ("finished", 2)
    assert len(list((tmp_path / "ckpt" / "global_epoch1_step1").iterdir())) == 4


def test_report_shows_rates_bottleneck_and_results_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    result = here(capsys, "run", *SMALL, *place, "--writes", "1", "--reads", "1", "--no-fsync", "--remove")
    assert result.returncode == 0, result.stderr
    for said in ("GiB/s", "write", "read", "Bottleneck", "results:", "a checkpoint of llama3-8b"):
        assert said in result.stdout
    assert not (tmp_path / "ckpt").exists()
    (folder,) = run_folders(tmp_path / "runs")
    assert json.loads((folder / "checkpoints.json").read_text())["storage_options"]["fsync"] is False
    assert main(["results", "ls", str(tmp_path / "runs")]) == 0
    assert "written at" in capsys.readouterr().out
    assert main(["results", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "all right" in shown
    assert "gap before reads" in shown
    assert main(["results", "compare", str(folder), str(folder), "--json"]) == 0
    deltas = {each["figure"]: each for each in json.loads(capsys.readouterr().out)["deltas"]}
    assert deltas["write_gib_per_s"]["changes"] == [0.0, 0.0]


@pytest.mark.parametrize(
    "client",
    [
        "obstore",
        pytest.param("minio", marks=pytest.mark.slow),
        pytest.param("s3dlio", marks=pytest.mark.slow),
        pytest.param("s3torchconnector", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_are_written_to_and_read_from_an_object_store(
    tmp_path: Path, moto: S3Server, client: str
) -> None:
    place = ("--to", f"s3://{BUCKET}/ckpt-{client}", "--results", str(tmp_path / "runs"))
    words = ("--writes", "1", "--reads", "1", "-O", f"client={client}", "-O", "part_bytes=5MiB", "--json")
    small = ("llama3-8b", "--scale", "0.00005", "--chunk", "5MiB", "--buffer-memory", "20MiB")
    found = document(penstock("run", *small, *place, *words, **moto.environment))
    assert found["read"]["verified_bytes"] == found["write"]["bytes"] == found["checkpoint_bytes"]
    assert sum(stream["requests"] for stream in found["write"]["streams"]) > 0
    assert found["checkpoints"][1]["cold"]["path"] == "no page cache"


def test_wrong_bytes_exit_with_1_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    assert here(capsys, "run", *SMALL, *place, "--writes", "1", "--reads", "0").returncode == 0
    path = next((tmp_path / "ckpt" / "global_epoch1_step1").glob("*optim*"))
    content = bytearray(path.read_bytes())
    content[1_500_000] ^= 255
    path.write_bytes(content)
    result = here(capsys, "run", *SMALL, *place, "--writes", "0", "--reads", "1", "--json")
    assert result.returncode == 1
    assert "Checkpoint 1: 1 chunks do not hold the bytes that were written" in result.stderr
    assert f"the first at byte 1,500,000 of global_epoch1_step1/{path.name}" in result.stderr
    assert json.loads(result.stdout)["is_right"] is False


def test_ctrl_c_keeps_complete_checkpoints_and_resume_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    words = ["run", *SMALL, *place, "--writes", "3", "--reads", "1"]
    words[words.index("--interval") + 1] = "60s"
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock", "checkpoint", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    marker = tmp_path / "ckpt" / "penstock-checkpoints.json"
    deadline = time.monotonic() + 200
    while not marker.exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=100)
    assert running.returncode == 130, said
    (folder,) = run_folders(tmp_path / "runs")
    assert json.loads((folder / "run.json").read_text())["outcome"] == "interrupted"
    words[words.index("--interval") + 1] = "0s"
    found = document(here(capsys, *words, "--resume", "--json"))
    assert [(each["direction"], each["step"]) for each in found["checkpoints"]] == [
        ("write", 2),
        ("write", 3),
        ("read", 1),
    ]
    assert found["earlier"]["run_folder"] == str(folder)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--verify", "some"), "--verify"),
        (("--buffer-memory", "1MiB"), "Give at least"),
        (("--writes", "0", "--reads", "1"), "Write some first"),
        (("--writes", "1", "--reads", "2"), "only 1 will exist"),
        (("--set", "checkpoint.num_checkpoint=1"), "did you mean"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_mistake(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--to", str(tmp_path / "ckpt"), "--results", str(tmp_path / "runs"))
    assert main(["checkpoint", "run", "llama3-8b", "--scale", "0.00005", *place, *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["run", "size", "models"])
def test_every_verb_shows_examples_and_offers_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert f"penstock checkpoint {verb}" in shown
    assert "--json" in shown


@pytest.mark.slow
def test_eight_ranks_move_eight_gib_in_bounded_memory(tmp_path: Path) -> None:
    place = ("--to", f"direct://{tmp_path}/ckpt", "--results", str(tmp_path / "runs"))
    words = ("--scale", "0.0765", "--writes", "1", "--reads", "1", "--interval", "0s", "--ranks", "8")
    found = document(penstock("run", "llama3-8b", *words, *place, "--remove", "--json"))
    assert found["write"]["bytes"] == found["read"]["verified_bytes"] > 8 * 2**30
    assert max(found["peak_rss_bytes"]) < 1 << 30, found["peak_rss_bytes"]
