"""Runs side by side: found whatever lies beside them, and never compared silently where not alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.run_events import RankScript, even_run

from penstock.errors import StorageError
from penstock.results.active_run import ActiveRun
from penstock.results.event_files import SpoolWriter, recompute_figures, spool_path
from penstock.results.history import read_catalog
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.provenance import HostFacts
from penstock.results.run_comparison import (
    VARIABLE_SETTINGS,
    RunSummary,
    compare_runs,
    may_vary,
    summarize_run,
)
from penstock.results.run_record import RunRequest, read_record
from penstock.workload.load_workload import load
from penstock.workload.settings import dotted, parse_settings
from penstock.workload.spec import Workload, known_paths

HOST = HostFacts(
    host="node1", kernel="Linux 6.1", machine="x86_64", num_cores=4, memory_bytes=2**30,
    cpuinfo={}, meminfo={},
)  # fmt: skip


def finished_run(parent: Path, *settings: str, num_ranks: int = 2, num_steps: int = 4) -> Path:
    workload = load("unet3d_h100", overrides=parse_settings(settings)).workload
    with ActiveRun.start(parent, a_request(workload, num_ranks)) as run:
        run.finish(train=compute_phase_figures(even_run(num_ranks=num_ranks, num_steps=num_steps), workload))
    return run.folder


def a_request(workload: Workload, num_ranks: int) -> RunRequest:
    return RunRequest(workload=workload, ranks=num_ranks, hosts=[HOST], command=["x"], remarks=["So it is."])


def dlio_run(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    metric = {"train_au_mean_percentage": 91.5, "train_throughput_mean_samples_per_second": 20.0}
    document = {"start": "2024-01-01T00:00:00", "end": "2024-01-01T00:10:00", "num_accelerators": 2}
    (folder / "summary.json").write_text(json.dumps({**document, "metric": metric, **changes}))
    return folder


def test_runs_are_found_newest_first_with_dlios_among_them(tmp_path: Path) -> None:
    old = dlio_run(tmp_path / "run1")
    first, second = finished_run(tmp_path), finished_run(tmp_path)
    runs, complaints = read_catalog(tmp_path)
    assert [run.folder for run in runs] == [second.name, first.name, old.name]
    assert complaints == []
    kinds = [run.summary.kind for run in runs if run.summary is not None]
    assert kinds == ["penstock", "penstock", "DLIO"]


def test_unreadable_folder_is_named_and_hides_no_other(tmp_path: Path) -> None:
    good = finished_run(tmp_path)
    for name, text in (("half", '{"format": 1, "id"'), ("newer", '{"format": 9}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    dlio_run(tmp_path / "odd").joinpath("summary.json").write_text("[]")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "file").write_text("")
    runs, _ = read_catalog(tmp_path)
    assert [run.folder for run in runs if run.outcome != "unreadable"] == [good.name]
    unreadable = {run.folder: run.why for run in runs if run.outcome == "unreadable"}
    assert sorted(unreadable) == ["half", "newer", "odd"]
    assert all(str(tmp_path / name) in why for name, why in unreadable.items())


def test_a_runs_own_folder_lists_itself(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    assert [run.folder for run in read_catalog(folder)[0]] == [folder.name]


def test_a_view_shows_the_recorded_figures(tmp_path: Path) -> None:
    view = summarize_run(finished_run(tmp_path))
    assert (view.workload, view.ranks, view.outcome) == ("unet3d_h100", 2, "finished")
    assert view.notes == ("So it is.",)
    assert view.au_compat_percent is not None
    assert view.samples_per_s_strict == pytest.approx(2 * 2 * 4 / 4.9)
    assert view.read_bytes == 2 * 2 * 4 * 4096
    assert view.bottleneck == "none"
    assert view.settings["reader.batch_size"] == 7


def test_a_run_without_figures_has_none_in_its_view(tmp_path: Path) -> None:
    with ActiveRun.start(tmp_path, a_request(load("unet3d_h100").workload, 2)) as run:
        view = summarize_run(run.folder)
        assert (view.outcome, view.au_compat_percent, view.bottleneck) == ("running", None, None)
        run.finish(train=compute_phase_figures(even_run(num_steps=1), load("unet3d_h100").workload))
    view = summarize_run(run.folder)
    assert (view.au_compat_percent, view.au_strict_percent, view.bottleneck) == (0.0, None, None)


def test_dlios_runs_show_what_they_tell(tmp_path: Path) -> None:
    view = summarize_run(dlio_run(tmp_path / "run1"))
    assert (view.au_compat_percent, view.samples_per_s_compat, view.ranks) == (91.5, 20.0, 2)
    assert (view.au_strict_percent, view.read_bytes, view.outcome) == (None, None, "finished")
    saved = {"save_checkpoint_io_mean_GB_per_second": 1.5, "load_checkpoint_io_mean_GB_per_second": 0.5}
    checkpoints = summarize_run(dlio_run(tmp_path / "run3", metric=saved))
    assert (checkpoints.write_gib_per_s, checkpoints.read_gib_per_s) == (1.5, 0.5)
    cut = summarize_run(dlio_run(tmp_path / "run2", end=None))
    assert (cut.outcome, cut.why) == ("unknown", "Its summary has no end.")


def test_the_same_request_is_comparable_and_differs_by_parts_of_the_first(tmp_path: Path) -> None:
    runs = [summarize_run(finished_run(tmp_path)), summarize_run(finished_run(tmp_path, num_steps=8))]
    found = compare_runs(runs)
    assert not found.obstacles
    assert not found.varied
    deltas = {delta["figure"]: delta for delta in found.deltas}
    assert list(deltas["read_bytes"]["values"]) == [65536, 131072]
    assert list(deltas["read_bytes"]["changes"]) == [0.0, 1.0]


def test_settings_that_one_varies_do_not_make_runs_incomparable(tmp_path: Path) -> None:
    settings = "reader.read_threads=8"
    found = compare_runs(
        [summarize_run(finished_run(tmp_path)), summarize_run(finished_run(tmp_path, settings))]
    )
    assert not found.obstacles
    assert [(each["key"], each["values"]) for each in found.varied] == [("reader.read_threads", (4, 8))]


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("reader.batch_size=9", "reader.batch_size"),
        ("dataset.num_files_train=99", "dataset.num_files_train"),
        ("train.computation_time=1", "train.computation_time"),
    ],
)
def test_another_request_is_named_as_an_obstacle(tmp_path: Path, setting: str, key: str) -> None:
    found = compare_runs(
        [summarize_run(finished_run(tmp_path)), summarize_run(finished_run(tmp_path, setting))]
    )
    assert found.obstacles
    assert [each["key"] for each in found.obstacles] == [key]


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("checkpoint.steps_between_checkpoints=10", "checkpoint.steps_between_checkpoints"),
        ("train.total_training_steps=3", "train.total_training_steps"),
    ],
)
def test_a_setting_that_only_one_run_has_is_a_difference(tmp_path: Path, setting: str, key: str) -> None:
    views = [summarize_run(finished_run(tmp_path, *settings)) for settings in ((), (setting,))]
    assert key in [each["key"] for each in compare_runs(views).obstacles]
    older = replace(views[1], penstock_version="0.1")  # it may not know the key
    assert not compare_runs([views[0], older]).obstacles


@pytest.mark.parametrize(
    ("plans", "varied", "obstacles"),
    [
        (({"data": "direct:///d"}, {"data": "file:///d"}), ["access.data"], []),
        (({"loader": {"threads": 4}}, {"loader": {"threads": 8}}), ["access.loader.threads"], []),
        (({"decode": False}, {"decode": True}), ["access.decode"], []),
        (({}, {"storage": {"client": "minio"}}), ["access.storage.client"], []),
    ],
)
def test_what_was_given_next_to_the_workload_is_compared(
    tmp_path: Path, plans: tuple[dict[str, object], ...], varied: list[str], obstacles: list[str]
) -> None:
    views = []
    for access in plans:
        request = replace(a_request(load("unet3d_h100").workload, 2), plan={"access": access})
        with ActiveRun.start(tmp_path, request) as run:
            run.finish()
        views.append(summarize_run(run.folder))
    found = compare_runs(views)
    assert [each["key"] for each in found.varied] == varied
    assert [each["key"] for each in found.obstacles] == obstacles


def test_other_ranks_workloads_and_endings_are_obstacles(tmp_path: Path) -> None:
    view = summarize_run(finished_run(tmp_path))
    other = replace(view, ranks=3, workload="bert", outcome="failed")
    assert [each["key"] for each in compare_runs([view, other]).obstacles] == ["workload", "ranks", "outcome"]
    assert [each["key"] for each in compare_runs([other, other]).obstacles] == ["outcome"]


def test_own_loaders_are_what_one_varies(tmp_path: Path) -> None:
    def watched(name: str) -> RunSummary:
        request = replace(a_request(Workload(name=name), 1), plan={"loader": {"name": name}})
        with ActiveRun.start(tmp_path, request) as run:
            run.finish()
        return summarize_run(run.folder)

    found = compare_runs([watched("before"), watched("after")])
    assert not found.obstacles
    assert [(each["key"], each["values"]) for each in found.varied] == [("loader", ("before", "after"))]


def test_settings_that_a_run_does_not_state_are_no_differences(tmp_path: Path) -> None:
    ours = replace(summarize_run(finished_run(tmp_path)), workload="unknown")
    found = compare_runs([ours, summarize_run(dlio_run(tmp_path / "run1"))])
    assert not found.obstacles
    changes = {delta["figure"]: delta["changes"] for delta in found.deltas}
    assert changes["au_strict_percent"] == (0.0, None)


def test_nothing_is_divided_by_nothing(tmp_path: Path) -> None:
    view = summarize_run(finished_run(tmp_path))
    without: RunSummary = replace(view, au_compat_percent=0.0, read_bytes=None)
    changes = {delta["figure"]: delta["changes"] for delta in compare_runs([without, view]).deltas}
    assert changes["au_compat_percent"] == (None, None)
    assert changes["read_bytes"] == (None, None)


def test_every_free_key_is_a_key() -> None:
    known = {dotted(path) for path in known_paths()}
    assert set(VARIABLE_SETTINGS) <= known
    assert may_vary("storage.storage_options.region")
    assert not may_vary("dataset.format")


def test_the_figures_of_a_run_that_was_cut_short_are_those_of_its_complete_epochs(tmp_path: Path) -> None:
    workload = load("unet3d_h100").workload
    script = RankScript()
    script.epoch()
    script.step(1, 1)
    script.step(1, 1, samples=7)
    script.end_block()
    script.end_epoch()
    script.epoch()
    script.step(9, 1)
    events = script.events()
    with ActiveRun.start(tmp_path, a_request(workload, 1)) as run:
        with SpoolWriter(spool_path(run.folder, 0), events.clock) as spool:
            spool.append(events.steps)
            spool.append(events.spans)
        figures = recompute_figures(run.folder, read_record(run.folder))
        run.finish()
    assert figures is not None
    assert [epoch.epoch for epoch in figures.epochs] == [1]
    assert figures.au_strict_percent is not None
    assert figures.au_strict_percent.mean == 50.0
    assert figures.times is not None
    assert set(figures.times.by_rank) == {0}


def test_missing_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such directory of runs"):
        read_catalog(tmp_path / "absent")


@pytest.mark.parametrize("config", ["workload: &a {b: *a}\n", "x: &a [1]\nworkload: {y: *a}\n"])
def test_a_configuration_with_aliases_is_noted_and_not_read(tmp_path: Path, config: str) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]")
    (tmp_path / ".hydra" / "config.yaml").write_text(config)
    assert "cannot read config.yaml: it has aliases" in summarize_run(tmp_path).notes
