"""`penstock checkpoint status`, `flush`, `drop`, `rebuild`, `scavenge`, `halt`: what a dead job left."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.command_line import CommandResult, run_command
from tests.support.flush_daemons import ending_daemons
from tests.support.flush_orders import order

from penstock.checkpoint.commit.protocol import WriterLease
from penstock.checkpoint.manager.manager import Manager
from penstock.cli.app import app
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage import process_id
from penstock.storage.process_id import current_process
from penstock.storage.uri import open_here


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


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Two cached steps, of which the second was handed over and nobody flushed it."""
    with Manager(tmp_path / "durable", cache=tmp_path / "cache", flush=None) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((50_000,), step)})
    (tmp_path / "durable").mkdir(exist_ok=True)
    order(tmp_path, 2)
    return tmp_path


def test_status_shows_levels_and_pending_flushes(left: Path) -> None:
    words = ("status", left / "durable", "--cache", left / "cache")
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
    assert "given 0 %" in stdout
    assert "no daemon; 1 step to flush" in stderr


def test_flush_makes_pending_steps_of_a_dead_job_durable(left: Path) -> None:
    (states,) = document_of("flush", left / "cache")["caches"].values()
    assert {step: state["phase"] for step, state in states.items()} == {"2": "durable"}
    found = document_of("status", left / "durable", "--cache", left / "cache", "--watch")
    assert found["durable"] == [2]
    assert found["flushes"][0]["states"]["2"]["phase"] == "durable"
    # Again, with nothing to do.
    assert document_of("flush", left / "cache") == {
        "schema": "checkpoint-flush/1",
        "caches": {str(left / "cache"): {}},
    }


def test_steps_that_stay_undurable_are_reported_with_the_reason(left: Path) -> None:
    (left / "durable/step-2").mkdir()
    (left / "durable/step-2/notes.txt").write_text("mine")
    code, _, stderr = call("flush", left / "cache", "--timeout", "5s")
    assert code == 1
    assert "step 2 is not durable" in stderr
    assert "notes.txt" in stderr
    code, _, stderr = call("status", left / "durable", "--cache", left / "cache")
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


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Two cached steps, neither of them durable, and no flush."""
    with Manager(tmp_path / "durable", cache=tmp_path / "cache", flush=None) as manager:
        for step in (1, 2):
            manager.save(step, {"weight": torch.full((1000,), step)})
    (tmp_path / "durable").mkdir(exist_ok=True)
    return tmp_path


def rows(text: str) -> list[list[str]]:
    """The cells of each line below a table's rule."""
    lines = text.split("── \n", 1)[-1].splitlines()
    return [line.split() for line in lines if line.strip()]


def test_status_without_flushes_shows_caches_alone(cached: Path) -> None:
    result = checkpoint("status", cached / "durable", "--cache", cached / "cache")
    assert result.returncode == 0
    first, second = rows(result.stdout)
    assert first[:6] == ["1", "-", "1", "of", "1", "shares"]
    assert first[-3:] == ["0", "(single)", "-"]
    assert second[0] == "2"
    assert result.stderr.endswith("no daemon; nothing to flush\n")


def test_rebuild_reports_the_outcome_of_each_step(cached: Path) -> None:
    result = checkpoint("rebuild", cached / "cache")
    assert result.returncode == 0
    assert rows(result.stdout) == [["1", "whole", "-", "-"], ["2", "whole", "-", "-"]]
    (step,) = checkpoint("rebuild", cached / "cache", "--step", "2", "--json").document["steps"]
    assert (step["step"], step["outcome"], step["reason"]) == (2, "whole", "")


def test_rebuild_exits_with_1_for_what_cannot_be_rebuilt(cached: Path) -> None:
    for file in (cached / "cache").rglob("*.distcp"):
        if "step-2" in str(file) or "2" in file.parent.name:
            file.unlink()
    result = checkpoint("rebuild", cached / "cache")
    assert result.returncode == 1
    assert "step 2: " in result.stderr
    assert "step 1: " not in result.stderr


@pytest.mark.parametrize("verb", [("rebuild",), ("scavenge", "--to", "durable")])
def test_recovery_names_what_the_caches_lack(cached: Path, verb: tuple[str, ...]) -> None:
    command, *more = verb
    absent = checkpoint(command, cached / "cache", *more, "--step", "7")
    assert absent.returncode == 2
    assert "Step 7 is in none of these caches. The caches hold: 1, 2." in absent.stderr
    too_many = checkpoint(command, cached / "cache", cached / "cache", *more)
    assert too_many.returncode == 2
    assert "2 caches for 1 ranks" in too_many.stderr
    (cached / "empty").mkdir()
    empty = checkpoint(command, cached / "empty", *more)
    assert empty.returncode == 2
    assert "No step is in these caches" in empty.stderr


def test_scavenge_makes_the_newest_step_durable(cached: Path) -> None:
    result = checkpoint("scavenge", cached / "cache", "--to", cached / "durable")
    assert result.returncode == 0
    assert result.stdout.startswith("step 2 is durable: file://")
    assert (cached / "durable" / "step-2" / ".metadata").exists()
    status = document_of("status", cached / "durable", "--cache", cached / "cache")
    assert status["durable"] == [2]


def test_scavenge_exits_with_1_if_nothing_can_be_recovered(cached: Path) -> None:
    for file in (cached / "cache").rglob("*.distcp"):
        file.unlink()
    result = checkpoint("scavenge", cached / "cache", "--to", cached / "durable")
    assert result.returncode == 1
    assert result.stdout == "nothing to scavenge\n"
    assert "step 2: " in result.stderr


def test_drop_needs_durable_copies_or_force(cached: Path) -> None:
    cache, durable = cached / "cache", cached / "durable"
    assert checkpoint("drop", cache).returncode == 2
    assert checkpoint("drop", cache, "--step", "1", "--all").returncode == 2
    dry = checkpoint("drop", cache, "--all", "--durable", durable, "--dry-run")
    assert dry.stdout.startswith("would be dropped")
    assert [(row[0], row[3]) for row in rows(dry.stdout)] == [("1", "no"), ("2", "no")]
    refused = checkpoint("drop", cache, "--all", "--durable", durable)
    assert refused.returncode == 2
    assert "nothing was dropped" in refused.stderr
    document = checkpoint("drop", cache, "--step", "1", "--force", "--json").document
    assert document["dropped"] is True
    assert [entry["step"] for entry in document["steps"]] == [1]
    assert checkpoint("scavenge", cache, "--to", durable).returncode == 0
    dropped = checkpoint("drop", cache, "--all", "--durable", durable)
    assert dropped.stdout.startswith("dropped")
    assert [(row[0], row[3], row[4]) for row in rows(dropped.stdout)] == [("2", "yes", "-")]
    assert checkpoint("rebuild", cache).returncode == 2


@pytest.mark.parametrize("verb", ["drop --all --force", "rebuild", "scavenge --to durable"])
def test_steps_of_a_cache_that_a_living_job_saves_to_are_left_alone(cached: Path, verb: str) -> None:
    parent = replace(
        current_process(), pid=os.getppid(), started=process_id._read_start_ticks(os.getppid()) or ""
    )
    WriterLease(open_here(cached / "cache"), owner=lambda: parent).hold()
    name, *options = verb.split()
    refused = checkpoint(name, cached / "cache", *options)
    assert refused.returncode == 2
    assert f"Process {os.getppid()} on {parent.host} saves steps here, too" in refused.stderr
    assert (cached / "cache/step-1").is_dir()


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
