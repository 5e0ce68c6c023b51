"""Figures for Prometheus, read by its own parser: text, the file of the collector, their cost."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.run_events import WAITING_STATUS as STATUS

from penstock.errors import UsageError
from penstock.progress import RunName
from penstock.results.run_status import DIED, KEPT_S, Meter, TextCollectorFile, format_metrics


def values_of(text: str) -> dict[tuple[str, ...], float]:
    """By name and labels but for the run's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == STATUS.run
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_prometheus_reads_every_figure() -> None:
    found = values_of(format_metrics(STATUS))
    assert found["penstock_run_counted_total", "read_bytes"] == 2.0**40
    assert found["penstock_run_counted_total", "steps"] == 25
    assert found["penstock_run_rank0_seconds_total", "sample_wait"] == 1.5
    assert found["penstock_run_state", "waiting_for_ranks"] == 1
    assert found["penstock_run_state", "computing"] == 0
    assert found["penstock_run_state_seconds",] == 42
    assert found["penstock_run_absent_rank", "3"] == found["penstock_run_absent_rank", "5"] == 1
    assert found["penstock_run_phase_done_ratio", "epoch 1 of 5, steps"] == 0.25
    assert found["penstock_run_done_ratio",] == 0.05
    assert found["penstock_run_left_seconds",] == 1234.5
    assert found["penstock_run_outcome", "running"] == 1
    assert found["penstock_run_update_time_seconds",] == 2000.5
    assert ("penstock_run_exit_code",) not in found
    died = values_of(format_metrics(replace(STATUS, outcome=DIED, why="killed", exit_code=1)))
    assert died["penstock_run_outcome", "died"] == 1
    assert died["penstock_run_exit_code",] == 1
    assert died["penstock_run_state", "waiting_for_ranks"] == 0


def test_the_collectors_file_is_replaced_and_old_ones_of_ours_are_removed(tmp_path: Path) -> None:
    old, other = tmp_path / "penstock-old.prom", tmp_path / "node.prom"
    for path in (old, other):
        path.write_text("")
        os.utime(path, (0, time.time() - KEPT_S - 60))
    recent = tmp_path / "penstock-recent.prom"
    recent.write_text("")
    follower = TextCollectorFile(tmp_path)
    follower.show(replace(STATUS, run="r1"))
    follower.show(replace(STATUS, run="r1", outcome="finished", exit_code=0))
    follower.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "node.prom", "penstock-r1.prom", "penstock-recent.prom",
    ]  # fmt: skip
    assert 'penstock_run_exit_code{run="r1"} 0.0' in (tmp_path / "penstock-r1.prom").read_text()


def test_a_command_leaves_no_file_that_says_running(tmp_path: Path) -> None:
    follower = TextCollectorFile(tmp_path)
    with Meter([follower], name=f"process-{os.getpid()}") as meter:
        follower.show(meter.status())
        (tmp_path / "runs").mkdir()
        meter.attach(RunName(folder=tmp_path / "runs", kind="training", workload="unet3d", ranks=1))
        follower.show(meter.status())
        assert [path.name for path in tmp_path.glob("*.prom")] == ["penstock-runs.prom"]
        meter.settle("finished", "", 0)
    text = (tmp_path / "penstock-runs.prom").read_text()
    assert 'penstock_run_outcome{run="runs",outcome="finished"} 1.0' in text
    with Meter([TextCollectorFile(tmp_path)], name=f"process-{os.getpid()}"):
        pass
    assert [path.name for path in tmp_path.glob("*.prom")] == ["penstock-runs.prom"]


def test_a_missing_directory_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such directory"):
        TextCollectorFile(tmp_path / "missing")


def test_labels_of_any_text_come_back() -> None:
    odd = replace(STATUS, workload='a "b" \\ c\nd é')
    families = text_string_to_metric_families(format_metrics(odd))
    (info,) = next(family for family in families if family.name == "penstock_run_info").samples
    assert info.labels["workload"] == odd.workload


def test_the_text_costs_less_than_a_thousandth_of_a_core_a_second() -> None:
    began_s = time.thread_time()
    for _ in range(200):
        format_metrics(STATUS)
    assert (time.thread_time() - began_s) / 200 < 1e-3  # one look a second


def test_a_link_in_the_place_of_the_next_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "thesis").write_text("precious")
    (tmp_path / "folder" / f".penstock-{STATUS.run}.prom.{os.getpid()}").symlink_to(tmp_path / "thesis")
    TextCollectorFile(tmp_path / "folder").show(STATUS)
    assert (tmp_path / "thesis").read_text() == "precious"
    (published,) = (tmp_path / "folder").iterdir()
    assert published.read_text() == format_metrics(STATUS)
