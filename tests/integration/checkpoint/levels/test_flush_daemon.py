"""The flush daemon of a node: what it commits, what it outlives, and what ends it."""

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.child_processes import exit_code_of
from tests.support.flush_daemons import daemons_below, ending_daemons, wait_until
from tests.support.flush_orders import order, serve
from tests.support.gloo_ranks import on_gloo_ranks
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from penstock.checkpoint.levels.flush import daemon_client
from penstock.checkpoint.levels.flush.flush_folder import FlushFolder, parse_entries
from penstock.checkpoint.levels.options import Flush, Xor
from penstock.checkpoint.manager.manager import Manager
from penstock.checkpoint.tools.verify import verify
from penstock.errors import RankFailed, StorageError, Unavailable
from penstock.storage.uri import open_here

BY_DAEMON = Flush(by="daemon")


@pytest.fixture(autouse=True)
def _no_daemon_outlives_its_test(tmp_path: Path) -> Iterator[None]:
    with ending_daemons(tmp_path):
        yield


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((50_000,), float(step)), "step": torch.tensor(step)}


def manager_of(root: Path, **choices: Any) -> Manager:
    return Manager(root / "durable", cache=root / "cache", **{"flush": BY_DAEMON, "timeout_s": 60, **choices})


def durable_steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in (root / "durable").glob("step-*/.metadata"))


def loaded_by_torch(path: Path) -> dict[str, Any]:
    state = {"weight": torch.zeros(50_000), "step": torch.tensor(-1)}
    stock_load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_a_daemon_makes_steps_durable_byte_for_byte_as_they_are_cached(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))
    assert durable_steps(tmp_path) == [1]
    cached, durable = tmp_path / "cache/step-1", tmp_path / "durable/step-1"
    for path in durable.iterdir():
        assert path.read_bytes() == (cached / path.name).read_bytes(), path.name
    assert verify(str(durable)).is_whole
    assert torch.equal(loaded_by_torch(durable)["weight"], state_of(1)["weight"])
    assert (tmp_path / "durable/latest").read_text() == "step-1\n"
    hidden = [path.name for path in (tmp_path / "durable").iterdir() if path.name.startswith(".penstock")]
    assert hidden == []


def test_without_background_a_save_returns_when_its_step_is_durable(tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by="daemon", background=False, every=2)) as manager:
        manager.save(1, state_of(1))
        assert durable_steps(tmp_path) == []
        manager.save(2, state_of(2))
        assert durable_steps(tmp_path) == [2]


def save_and_die(root: Path) -> None:
    manager = manager_of(root, engine=None)
    manager.save(1, state_of(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_outlives_a_trainer_that_is_killed_and_stock_torch_loads_what_it_leaves(tmp_path: Path) -> None:
    assert exit_code_of(save_and_die, tmp_path) == -signal.SIGKILL
    wait_until(lambda: durable_steps(tmp_path) == [1], "step 1 is durable")
    assert torch.equal(loaded_by_torch(tmp_path / "durable/step-1")["weight"], state_of(1)["weight"])
    wait_until(lambda: not daemons_below(tmp_path), "the daemon ends by itself")
    assert FlushFolder(tmp_path / "cache").orders.steps() == []


def test_a_daemon_that_was_killed_is_started_again_by_the_trainer_that_waits_for_it(tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by="daemon", bandwidth="400KiB/s")) as manager:
        manager.save(1, state_of(1))
        folder = FlushFolder(tmp_path / "cache")
        wait_until(lambda: folder.daemon_pid() is not None, "a daemon runs")
        first = folder.daemon_pid()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: folder.daemon_pid() is None, "it is gone")
    assert durable_steps(tmp_path) == [1]


def test_a_step_whose_daemon_cannot_start_is_saved_and_the_next_call_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FlushFolder) -> None:
        raise Unavailable("The flush daemon could not be started")

    manager = manager_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(daemon_client, "start_daemon", refuse)
        assert manager.save(1, state_of(1)).uri.endswith("cache/step-1")
        with pytest.raises(
            RankFailed, match="making durable step 1 in the background: The flush daemon could"
        ):
            manager.save(2, state_of(2))
    manager.close()
    assert durable_steps(tmp_path) == [1]


def test_a_daemon_is_detached_and_has_the_lowest_priority(tmp_path: Path) -> None:
    with manager_of(tmp_path, flush=Flush(by="daemon", bandwidth="200KiB/s")) as manager:
        manager.save(1, state_of(1))
        folder = FlushFolder(tmp_path / "cache")
        wait_until(lambda: folder.daemon_pid() is not None, "a daemon runs")
        pid = folder.daemon_pid()
        assert pid is not None
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19, "it has stepped behind")
        assert os.getsid(pid) != os.getsid(0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) != os.getpid()


def test_a_lasting_failure_is_raised_by_the_next_call_and_retried(tmp_path: Path) -> None:
    (tmp_path / "durable/step-1").mkdir(parents=True)
    notes = tmp_path / "durable/step-1/notes.txt"
    notes.write_text("not a checkpoint")
    manager = manager_of(tmp_path)
    manager.save(1, state_of(1))
    with pytest.raises(RankFailed, match=r"making durable step 1 in the background.*notes\.txt"):
        manager.close()
    notes.unlink()
    wait_until(lambda: durable_steps(tmp_path) == [1], "the flush that was tried again is done")


def test_the_cap_holds_over_the_whole_flush_as_the_daemons_own_account_says(tmp_path: Path) -> None:
    rate, size_bytes = 16 << 20, 24 << 20
    state = {"weight": torch.ones(size_bytes // 8), "bias": torch.ones(size_bytes // 8)}
    with manager_of(tmp_path, flush=Flush(by="daemon", bandwidth=rate)) as manager:
        manager.save(1, state)
        folder = FlushFolder(tmp_path / "cache")
        wait_until(lambda: folder.orders.steps() == [], "the step is durable")
        pid = folder.daemon_pid()
        assert pid is not None
        moved_bytes = written_by(pid)
    times_s = {line.what: line.at_s for line in parse_entries(folder.journal.read_bytes())}
    elapsed_s = times_s["marked"] - times_s["begun"]
    assert moved_bytes >= size_bytes
    # What may pass without waiting: half a second of unused time, and a block of each thread.
    assert moved_bytes <= rate * (elapsed_s + 1.0)


def written_by(pid: int) -> int:
    """What a process has handed to the kernel to be written."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))


def test_without_a_daemon_the_trainer_flushes_and_logs_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    durable = open_here("mem://where-no-daemon-can-write")
    caplog.set_level(logging.WARNING)
    with Manager(durable, cache=tmp_path / "cache", flush=BY_DAEMON) as manager:
        manager.save(1, state_of(1))
    assert (
        "Flushing in the trainer instead of a daemon: the durable level was given as an open" in caplog.text
    )
    assert manager.steps() == [1]
    assert daemons_below(tmp_path) == []


def save_two(rank: int, root: Path, first: int, flush: Flush | None) -> list[int]:
    with Manager(
        root / "durable",
        cache=root / f"node-{rank}",
        failure_domain=str(rank),
        flush=flush,
        keep_cached=None,
        timeout_s=60,
    ) as manager:
        for step in (first, first + 1):
            manager.save(step, {f"rank_{rank}": torch.full((5000,), rank + step)})
    return manager.steps()


def test_orders_that_a_kill_left_on_one_node_are_completed_or_removed(tmp_path: Path) -> None:
    on_gloo_ranks(2, save_two, tmp_path, 1, None)
    for step in (1, 2):
        order(tmp_path, step, "node-0", "node-1", node=0)
    shutil.rmtree(tmp_path / "node-1/step-1")
    on_gloo_ranks(2, save_two, tmp_path, 3, BY_DAEMON)
    wait_until(lambda: durable_steps(tmp_path) == [2, 3, 4], "the step that both nodes have is durable, too")
    # An order is removed only after its step is durable.
    orders = [FlushFolder(tmp_path / node).orders for node in ("node-0", "node-1")]
    wait_until(lambda: not any(each.steps() for each in orders), "all orders are carried out or removed")
    for step in (2, 3, 4):
        assert verify(str(tmp_path / f"durable/step-{step}")).is_whole


def save_on(rank: int, root: Path, nodes: list[int], step: int, flush: Flush | None) -> None:
    node = f"node-{nodes[rank]}"
    with Manager(
        root / "durable",
        cache=root / node,
        failure_domain=node,
        redundancy=Xor(),
        flush=flush,
        keep_cached=None,
        timeout_s=60,
    ) as manager:
        manager.save(step, {f"rank_{rank}": torch.full((5000,), rank + step)})


def test_orders_of_more_nodes_than_are_left_are_divided_anew(tmp_path: Path) -> None:
    on_gloo_ranks(3, save_on, tmp_path, [0, 1, 2], 1, None)
    for node in (0, 2):
        order(tmp_path, 1, "node-0", "node-1", "node-2", node=node)
    shutil.rmtree(tmp_path / "node-1")
    on_gloo_ranks(2, save_on, tmp_path, [2, 0], 2, BY_DAEMON)
    wait_until(lambda: durable_steps(tmp_path) == [1, 2], "the step of three nodes is durable by two")
    for step in (1, 2):
        assert verify(str(tmp_path / f"durable/step-{step}")).is_whole
    wait_until(
        lambda: not [path for path in (tmp_path / "durable").iterdir() if path.name.startswith(".")],
        "nothing unfinished is left",
    )


def test_a_foreground_save_fails_if_its_step_cannot_become_durable(tmp_path: Path) -> None:
    (tmp_path / "durable/step-1").mkdir(parents=True)
    (tmp_path / "durable/step-1/notes.txt").write_text("not a checkpoint")
    manager = manager_of(tmp_path, flush=Flush(by="daemon", background=False))
    with pytest.raises(StorageError, match=r"Step 1 is cached, but not durable.*notes\.txt"):
        manager.save(1, state_of(1))
    with pytest.raises(RankFailed, match="making durable step 1"):
        manager.close()


def test_failed_flushes_of_an_earlier_job_do_not_prevent_a_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path, flush=None) as manager:
        manager.save(1, state_of(1))
    (tmp_path / "durable/step-1").mkdir(parents=True)
    (tmp_path / "durable/step-1/notes.txt").write_text("not a checkpoint")
    serve(order(tmp_path, 1))
    with manager_of(tmp_path) as manager:
        assert manager.restore(state := state_of(0)) == 1
    assert torch.equal(state["weight"], state_of(1)["weight"])
    assert "Step 1 of an earlier job is not durable" in caplog.text
