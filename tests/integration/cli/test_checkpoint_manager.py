"""`penstock checkpoint status`, `flush`, `rm` of cached steps, `halt`: what a dead job left."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.command_line import CommandResult, run_command
from tests.support.flush_daemons import ending_daemons
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from penstock.checkpoint.commit.protocol import WriterLease
from penstock.checkpoint.formats.description import read_manifest
from penstock.checkpoint.levels.flush import FlushFolder, FlushNote
from penstock.checkpoint.levels.options import Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.cli.app import app
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage import process_id
from penstock.storage.process_id import current_process
from penstock.storage.uri import open_here

HOSTS = 3


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


def call(*words: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, ["checkpoint", *map(str, words)])
    return ended.exit_code, ended.stdout, ended.stderr


def document_of(*words: object) -> Any:
    code, stdout, stderr = call(*words, "--json")
    assert code == 0, stderr
    return json.loads(stdout)


def note(root: Path, step: int) -> None:
    """Note that a cached step is to become durable."""
    manifest = read_manifest((root / f"cache/step-{step}/penstock.json").read_bytes(), "here")
    noted = FlushNote(save_id=manifest.save_id, durable=f"file://{root}/durable")
    FlushFolder(root / "cache").put(step, noted)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Two cached steps, neither of them durable, and no flush."""
    with Manager(tmp_path / "durable", cache=tmp_path / "cache", flush=None) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((50_000,), step)})
    (tmp_path / "durable").mkdir(exist_ok=True)
    return tmp_path


def test_status_shows_levels_and_pending_flushes(cached: Path) -> None:
    note(cached, 2)
    words = ("status", cached / "durable", "--cache", cached / "cache")
    found = document_of(*words)
    assert found["durable"] == []
    assert [(each["step"], each["num_shares"], each["scheme"]) for each in found["cached"]] == [
        (1, 1, "single"),
        (2, 1, "single"),
    ]
    (flush,) = found["flushes"]
    assert flush["daemon"] is None
    assert flush["states"]["2"]["phase"] == "given"
    code, stdout, stderr = call(*words)
    assert code == 0
    assert "1 of 1 shares" in stdout
    assert "0 (single)" in stdout
    assert "given" in stdout
    assert "no daemon; 1 step to flush" in stderr


def test_flush_makes_pending_steps_and_the_newest_one_durable(cached: Path) -> None:
    note(cached, 1)
    document = document_of("flush", cached / "cache")
    (states,) = document["caches"].values()
    assert {step: state["phase"] for step, state in states.items()} == {"1": "durable", "2": "durable"}
    assert [(each["step"], each["outcome"]) for each in document["steps"]] == [(2, "whole"), (1, "whole")]
    status = document_of("status", cached / "durable", "--cache", cached / "cache", "--watch")
    assert status["durable"] == [1, 2]
    # Again, with nothing to do.
    assert document_of("flush", cached / "cache") == {
        "schema": "checkpoint-flush/1",
        "caches": {str(cached / "cache"): {}},
        "steps": [],
    }


def test_flush_of_one_step_to_another_run(cached: Path) -> None:
    words = ("flush", cached / "cache", "--step", 1, "--to", cached / "other")
    (states,) = document_of(*words)["caches"].values()
    assert list(states) == ["1"]
    assert [path.name for path in (cached / "other").glob("step-*")] == ["step-1"]
    assert not list((cached / "durable").glob("step-*"))


def test_steps_that_stay_undurable_are_reported_with_the_reason(cached: Path) -> None:
    (cached / "durable/step-2").mkdir()
    (cached / "durable/step-2/notes.txt").write_text("mine")
    code, _, stderr = call("flush", cached / "cache", "--timeout", "5s")
    assert code == 1
    assert "step 2 is not durable" in stderr
    assert "notes.txt" in stderr
    code, _, stderr = call("status", cached / "durable", "--cache", cached / "cache")
    assert code == 1
    assert "notes.txt" in stderr


@pytest.mark.parametrize("words", [("flush",), ("status", "/nowhere", "--cache")])
def test_missing_cache_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = CliRunner().invoke(app, ["checkpoint", *words, str(tmp_path / "no-cache")])
    assert isinstance(ended.exception, ObjectNotFound)
    assert "no-cache" in str(ended.exception)
    ended = CliRunner().invoke(app, ["checkpoint", *words, "s3://bucket/cache"])
    assert isinstance(ended.exception, UsageError)
    assert "is not a local folder" in str(ended.exception)


def checkpoint(*words: object) -> CommandResult:
    return run_command("checkpoint", *words)


def rows(text: str) -> list[list[str]]:
    """The cells of each line below a table's rule."""
    lines = re.split("── *\n", text, maxsplit=1)[-1].splitlines()
    return [line.split() for line in lines if line.strip()]


def test_status_without_flushes_shows_caches_alone(cached: Path) -> None:
    result = checkpoint("status", cached / "durable", "--cache", cached / "cache")
    assert result.returncode == 0
    first, second = rows(result.stdout)
    assert first[:6] == ["1", "-", "1", "of", "1", "shares"]
    assert first[-3:] == ["0", "(single)", "-"]
    assert second[0] == "2"
    assert result.stderr.endswith("no daemon; nothing to flush\n")


def test_flush_names_what_the_caches_lack(cached: Path) -> None:
    absent = checkpoint("flush", cached / "cache", "--step", "7")
    assert absent.returncode == 2
    assert "Step 7 is in none of these caches. They hold 1, 2" in absent.stderr
    too_many = checkpoint("flush", cached / "cache", cached / "cache")
    assert too_many.returncode == 2
    assert "2 caches for 1 rank" in too_many.stderr
    assert "--ranks 2" in too_many.stderr
    (cached / "empty").mkdir()
    empty = checkpoint("flush", cached / "empty")
    assert empty.returncode == 2
    assert "No step is in these caches" in empty.stderr


def test_flush_exits_with_1_if_nothing_can_be_recovered(cached: Path) -> None:
    for file in (cached / "cache").rglob("*.distcp"):
        file.unlink()
    result = checkpoint("flush", cached / "cache")
    assert result.returncode == 1
    assert "step 2: " in result.stderr
    assert "step 1: " in result.stderr


@pytest.mark.parametrize("harm", ["damaged", "another step"])
def test_a_newest_step_without_its_manifest_does_not_count_as_durable(cached: Path, harm: str) -> None:
    victim = cached / "cache/step-2"
    if harm == "damaged":
        flip(victim / "penstock.json")
    else:
        shutil.rmtree(victim)
        shutil.copytree(cached / "cache/step-1", victim)
    document = document_of("flush", cached / "cache")
    assert [(each["step"], each["outcome"]) for each in document["steps"]] == [
        (2, "beyond repair"),
        (1, "whole"),
    ]
    assert [path.name for path in (cached / "durable").glob("step-*")] == ["step-1"]


@pytest.mark.parametrize("verb", ["rm", "flush"])
def test_steps_of_a_cache_that_a_living_job_saves_to_are_left_alone(cached: Path, verb: str) -> None:
    parent = replace(
        current_process(), pid=os.getppid(), started=process_id._read_start_ticks(os.getppid()) or ""
    )
    WriterLease(open_here(cached / "cache"), owner=lambda: parent).hold()
    words = {"rm": ["rm", cached / "cache/step-1", "--even-last"], "flush": ["flush", cached / "cache"]}
    refused = checkpoint(*words[verb])
    assert refused.returncode == 2
    assert f"Process {os.getppid()} on {parent.host} saves steps here, too" in refused.stderr
    assert (cached / "cache/step-1").is_dir()


def test_a_cached_step_is_removed_if_it_is_durable_or_may_be_lost(cached: Path) -> None:
    first, second = (cached / f"cache/step-{step}" for step in (1, 2))
    refused = checkpoint("rm", first)
    assert refused.returncode == 2
    assert f"step-1 is not durable in file://{cached}/durable; nothing was removed" in refused.stderr
    note(cached, 1)
    assert checkpoint("rm", first, "--even-last").returncode == 0
    assert FlushFolder(cached / "cache").notes() == {}
    assert checkpoint("flush", cached / "cache").returncode == 0
    removed = checkpoint("rm", second, "--json").document
    assert (removed["step"], removed["stays"]) == (2, f"file://{cached}/durable/step-2")
    assert not first.exists()
    assert not second.exists()


def save_on_hosts(rank: int, root: Path) -> None:
    with Manager(
        root / "durable",
        cache=root / f"host-{rank}",
        redundancy=Xor(group=HOSTS),
        failure_domain=f"host-{rank}",
        flush=None,
        timeout_s=60,
    ) as manager:
        for step in (1, 2):
            manager.save(step, {f"rank_{rank}": torch.arange(20_000) * (rank + 1) + step})


@pytest.fixture(scope="module")
def saved_on_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hosts")
    on_gloo_ranks(HOSTS, save_on_hosts, root)
    return root


@pytest.fixture
def hosts(saved_on_hosts: Path, tmp_path: Path) -> Path:
    """Caches of three hosts with two steps that were never flushed, to be damaged."""
    ignored = shutil.ignore_patterns(".penstock-run")  # it names where they were before
    return Path(shutil.copytree(saved_on_hosts, tmp_path / "run", ignore=ignored))


def flush_hosts(root: Path, *hosts: int) -> tuple[int, Any, str]:
    places = [str(root / f"host-{host}") for host in hosts]
    command = [sys.executable, "-m", "penstock", "checkpoint", "flush", *places, "--ranks", str(len(hosts))]
    # Alone, a host waits as long for the others; ranks start at different times.
    command += ["--to", str(root / "durable"), "--json", "--timeout", "60s" if len(hosts) > 1 else "5s"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def require_durable(root: Path, step: int) -> None:
    wanted = {f"rank_{rank}": torch.arange(20_000) * (rank + 1) + step for rank in range(HOSTS)}
    found = {name: torch.zeros_like(value) for name, value in wanted.items()}
    stock_load(found, checkpoint_id=str(root / f"durable/step-{step}"), no_dist=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_surviving_hosts_rebuild_a_lost_one_and_make_the_newest_step_durable(hosts: Path) -> None:
    before = {path.name: path.read_bytes() for path in (hosts / "host-2/step-2").iterdir()}
    shutil.rmtree(hosts / "host-2")
    (hosts / "host-2").mkdir()
    code, document, stderr = flush_hosts(hosts, 0, 1, 2)
    assert code == 0, stderr
    (step,) = document["steps"]
    assert (step["step"], step["outcome"], step["missing"]) == (2, "rebuilt", [2])
    assert {path.name: path.read_bytes() for path in (hosts / "host-2/step-2").iterdir()} == before
    require_durable(hosts, 2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_older_step_becomes_durable_if_the_newest_is_beyond_repair(hosts: Path) -> None:
    shutil.rmtree(hosts / "host-0/step-2")
    flip(next((hosts / "host-1/step-2").glob("*1*.distcp")))
    code, document, stderr = flush_hosts(hosts, 0, 1, 2)
    assert code == 0, stderr
    outcomes = [(each["step"], each["outcome"]) for each in document["steps"]]
    assert outcomes == [(2, "beyond repair"), (1, "whole")]
    assert document["steps"][0]["damaged"] == [1]
    assert "xor survives 1 loss" in stderr
    require_durable(hosts, 1)


def test_one_loss_too_many_is_reported_and_leaves_nothing(hosts: Path) -> None:
    code, document, stderr = flush_hosts(hosts, 1)
    assert code == 1
    assert [each["step"] for each in document["steps"]] == [2, 1]
    assert "ranks 0, 2 of one group lost their files" in stderr
    assert not (hosts / "durable").exists() or not list((hosts / "durable").iterdir())


def test_halt_of_a_directory_that_no_job_has_is_refused(tmp_path: Path) -> None:
    typo = tmp_path / "chekpoints"
    refused = checkpoint("halt", typo)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "There is no such directory of checkpoints" in refused.stderr
    assert not typo.exists()


def test_halt_requests_shows_and_withdraws_a_stop(tmp_path: Path) -> None:
    assert checkpoint("halt", tmp_path, "--status").stdout.endswith(": no stop is requested\n")
    requested = checkpoint("halt", tmp_path, "--reason", "maintenance").stdout
    assert "requested by " in requested
    assert requested.endswith(": maintenance\n")
    assert checkpoint("halt", tmp_path, "--status").stdout == requested
    document = checkpoint("halt", tmp_path, "--status", "--json").document
    assert document["asked"] is True
    assert document["order"]["reason"] == "maintenance"
    assert checkpoint("halt", tmp_path, "--cancel").stdout.endswith(": withdrawn\n")
    assert checkpoint("halt", tmp_path, "--cancel").stdout.endswith(": no stop was requested\n")
    assert checkpoint("halt", tmp_path, "--status", "--json").document == {
        "schema": "checkpoint-halt/1",
        "asked": False,
        "order": None,
    }
    assert checkpoint("halt", tmp_path, "--cancel", "--status").returncode == 2
