"""`penstock checkpoint status` and `flush` as their users call them, on what a dead job left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from tests.support.flush_daemons import ending_daemons
from tests.support.flush_orders import order

from penstock.checkpoint.manager.manager import Manager
from penstock.cli.app import app
from penstock.errors import ObjectNotFound, UsageError


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
    assert "no daemon; 1 steps to flush" in stderr


def test_flush_makes_pending_steps_of_a_dead_job_durable(left: Path) -> None:
    (states,) = document_of("flush", left / "cache")["caches"].values()
    assert {step: state["phase"] for step, state in states.items()} == {"2": "durable"}
    found = document_of("status", left / "durable", "--cache", left / "cache", "--watch")
    assert found["durable"] == [2]
    assert found["flushes"][0]["states"]["2"]["phase"] == "durable"
    # Again, with nothing to do.
    assert document_of("flush", left / "cache") == {"caches": {str(left / "cache"): {}}}


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
