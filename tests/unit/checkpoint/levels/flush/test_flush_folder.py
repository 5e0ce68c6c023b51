"""The flush folder of a cache: one daemon, notes of the living, orders that are whole or not there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.levels.flush.daemon import RateMeter
from penstock.checkpoint.levels.flush.flush_folder import (
    DaemonProgress,
    FlushFolder,
    FlushOrder,
    FlushOrders,
    PresenceFiles,
    read_order,
)
from penstock.errors import DataDamaged
from penstock.storage.process_id import current_process


def order_of(step: int, **fields: Any) -> FlushOrder:
    given = {
        "step": step,
        "save_id": f"{step:016x}",
        "durable": "file:///pfs/run",
        "node": 1,
        "nodes": [[{"name": "a", "size_bytes": 3}], [{"name": "b", "size_bytes": 4}]],
        "keep": None,
        "bytes_per_s": 1e9,
        "threads": 2,
        "pause_while_saving": False,
        "cores": [],
        "given_s": 1.5,
    }
    return FlushOrder.model_validate({**given, **fields})


def test_only_one_process_is_the_daemon_of_a_cache(tmp_path: Path) -> None:
    folder = FlushFolder(tmp_path)
    assert not folder.path.exists()
    assert not folder.daemon_is_running()
    assert folder.daemon_pid() is None
    with folder.locked() as held:
        assert folder.daemon_is_running()
        assert folder.daemon_pid() == current_process().pid
        with pytest.raises(BlockingIOError), FlushFolder(tmp_path).locked():
            pass
        assert held.is_valid()
        (tmp_path / ".penstock-flush/lock").unlink()
        assert not held.is_valid()
    assert not folder.daemon_is_running()


def test_presence_files_of_dead_processes_are_ignored_and_removed(tmp_path: Path) -> None:
    dead = PresenceFiles(tmp_path, "saving", owner=lambda: replace(current_process(), started="1"))
    path = dead.put()
    living = PresenceFiles(tmp_path, "saving")
    assert not living.any_alive()
    assert not path.exists()
    with living.present():
        assert living.any_alive()
    assert not living.any_alive()
    assert not PresenceFiles(tmp_path, "never-used").any_alive()


def test_an_order_survives_a_round_trip(tmp_path: Path) -> None:
    book = FlushOrders(tmp_path)
    assert book.steps() == []
    order = order_of(7)
    book.put(order)
    assert book.all() == {7: order}
    assert (order.name, order.size_bytes, order.sizes) == ("step-7", 4, {"a": 3, "b": 4})
    assert [file.name for file in order.files] == ["b"]


def test_removing_an_order_keeps_a_newer_one_of_its_step(tmp_path: Path) -> None:
    book = FlushOrders(tmp_path)
    older, newer = order_of(7), order_of(7, save_id="f" * 16)
    book.put(older)
    book.put(newer)
    book.remove(older)
    assert book.all() == {7: newer}
    book.remove(newer)
    book.remove(newer)
    assert book.steps() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("save_id", "x"), ("nodes", []), ("threads", 0), ("bytes_per_s", 0), ("colour", "red")],
)
def test_an_invalid_order_is_an_error_that_names_the_field(field: str, value: object) -> None:
    text = json.dumps({**json.loads(order_of(1).model_dump_json()), field: value})
    with pytest.raises(DataDamaged, match=field):
        read_order(text.encode(), "the cache")


def test_progress_is_reported_and_may_be_absent(tmp_path: Path) -> None:
    folder = FlushFolder(tmp_path)
    assert folder.progress() is None
    assert folder.log_tail() == ""
    folder.path.mkdir()
    speed = DaemonProgress(at_s=1.0, step=3, copied_bytes=4, moved_bytes=5, bytes_per_s=6.5, is_paused=False)
    folder.write_progress(speed)
    assert folder.progress() == speed
    folder.log.write_text("x" * 9000 + " the end\n")
    assert folder.log_tail().endswith("the end")
    assert len(folder.log_tail()) <= 4096


def test_a_rate_is_that_of_the_last_seconds() -> None:
    meter = RateMeter(window_s=5.0)
    assert meter.rate(0.0, 0) == 0.0
    assert meter.rate(4.0, 400) == 100.0
    assert meter.rate(8.0, 400) == 0.0
