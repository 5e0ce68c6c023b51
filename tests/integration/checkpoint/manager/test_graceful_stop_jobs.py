"""Jobs that are asked to leave: all ranks at the same step, with that step committed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from tests.support.gloo_ranks import on_gloo_ranks

from penstock.checkpoint.levels.options import Flush
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.manager.policies import EverySteps, StopConditions, find_stop_request
from penstock.cli.app import app
from penstock.storage.uri import open_here


def run_job(rank: int, root: Path) -> tuple[int, str, list[int]]:
    """A training that saves every 100 steps, in which one rank gets a signal at its third step."""
    with Manager(
        root / "durable",
        cache=root / f"host-{rank}",
        flush=Flush(every=50, by="trainer"),
        save_policy=EverySteps(100),
        stop=StopConditions(signals=("SIGTERM",)),
        timeout_s=60,
    ) as manager:
        for step in range(1, 20):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.should_save(step):
                manager.save(step, {"a": torch.full((10,), step)})
            if manager.stop_reason:
                break
    return step, manager.stop_reason, manager.steps()


def test_a_signal_on_one_rank_lets_all_save_flush_and_leave_at_the_same_step(tmp_path: Path) -> None:
    results = on_gloo_ranks(2, run_job, tmp_path)
    assert results == [(3, "rank 1: SIGTERM was received", [3])] * 2
    assert (tmp_path / "durable/step-3/.metadata").exists(), "the last step is flushed, whatever its turn"


def steps_until_halt(root: Path, **choices: Any) -> int:
    with Manager(root, save_policy=EverySteps(100), **choices) as manager:
        for step in range(1, 20):
            if manager.should_save(step):
                manager.save(step, {"a": torch.ones(3)})
            if manager.stop_reason:
                return step
    return 0


def test_a_job_out_of_time_saves_and_leaves(tmp_path: Path) -> None:
    assert steps_until_halt(tmp_path, stop=StopConditions(time_limit=50, margin_s=60)) == 1
    assert (tmp_path / "step-1/.metadata").exists()


def penstock(*words: str) -> str:
    done = CliRunner().invoke(app, ["checkpoint", "halt", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_stops_the_next_job_once(tmp_path: Path) -> None:
    run = str(tmp_path)
    assert "no stop is requested" in penstock(run, "--status")
    penstock(run, "--reason", "maintenance")
    status = json.loads(penstock(run, "--status", "--json"))
    assert status["order"]["reason"] == "maintenance"
    assert "maintenance" in penstock(run, "--status")
    assert steps_until_halt(tmp_path) == 1
    assert find_stop_request(open_here(run)) is None
    assert steps_until_halt(tmp_path) == 0


def test_a_stop_request_can_be_cancelled(tmp_path: Path) -> None:
    run = str(tmp_path)
    assert "requested by" in penstock(run)
    assert json.loads(penstock(run, "--cancel", "--json"))["cancelled"] is True
    assert "no stop was requested" in penstock(run, "--cancel")
    assert steps_until_halt(tmp_path) == 0


def test_mutually_exclusive_options_are_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["checkpoint", "halt", str(tmp_path), "--cancel", "--status"])
    assert "mutually exclusive" in f"{done.output}{done.exception}"


def test_sets_of_files_count_among_the_saves_whose_time_is_kept_free(tmp_path: Path) -> None:
    with Manager(tmp_path, stop=StopConditions(time_limit=1000, margin_s=0)) as manager:
        assert manager.should_save(1)
        assert not manager.stop_reason
        with manager.output(1) as out:
            out.path("a").write_bytes(b"a")
        assert manager._stop._slowest_save_s > 0
