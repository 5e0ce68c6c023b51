"""DLIO's files: every key, its odd units, right values; and the files of others, read."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.run_events import RankScript, even_run

from penstock.errors import StorageError
from penstock.results.dlio_files import (
    DlioOutputs,
    checkpoint_sizes,
    metric_lines,
    rank_output,
    rank_per_epoch_stats,
    summary,
    write_configuration,
    write_dlio_files,
)
from penstock.results.phase_figures import compute_phase_figures, mean_and_stdev
from penstock.results.provenance import HostFacts
from penstock.results.run_comparison import summarize_run
from penstock.results.step_events import RankEvents, SpanKind, StepPhase
from penstock.workload.load_workload import load
from penstock.workload.spec import Dataset, Metric, ReaderSection, Workload

GOLDEN = Path(__file__).parents[2] / "golden" / "results"
PUBLISHED = Path(os.environ.get("PENSTOCK_MLPERF_RESULTS", "/nowhere"))
START = datetime(2026, 1, 1, tzinfo=UTC)

SUMMARY_KEYS = {
    "start", "end", "epochs", "num_accelerators", "num_hosts", "hostname", "num_files_train",
    "num_files_eval", "num_samples_per_file", "host_cpu_count", "host_processor_name", "host_memory_GB",
    "host_cpuinfo", "host_meminfo", "data_size_per_host_GB", "potential_caching", "metric",
}  # fmt: skip
PHASE_KEYS = {
    "au_percentage", "au_mean_percentage", "au_stdev_percentage", "au_meet_expectation",
    "throughput_samples_per_second", "throughput_mean_samples_per_second",
    "throughput_stdev_samples_per_second", "io_mean_MB_per_second", "io_stdev_MB_per_second",
}  # fmt: skip
CHECKPOINT_KEYS = {
    "checkpoint_io_mean_GB_per_second", "checkpoint_io_stdev_GB_per_second",
    "checkpoint_duration_mean_seconds", "checkpoint_duration_stdev_seconds",
}  # fmt: skip


def host(name: str, gib: int) -> HostFacts:
    return HostFacts(
        host=name, kernel="Linux 6.1", machine="x86_64", num_cores=64, memory_bytes=gib * 2**30,
        cpuinfo={"model name": "A Processor"}, meminfo={"MemTotal": f"{gib * 2**20} kB"},
    )  # fmt: skip


def rank_with_everything(rank: int) -> RankEvents:
    """Two blocks around a checkpoint, an evaluation, a loaded checkpoint, a second plain epoch."""
    script = RankScript(rank, f"node{rank + 1}")
    script.epoch()
    for wait in (1.0, 0.1, 0.1):
        script.step(wait, 0.9, 0.05, samples=2, read_bytes=4096)
    script.end_block()
    script.checkpoint(SpanKind.SAVE, 2.0, 2**30)
    script.block()
    for _ in range(3):
        script.step(0.1, 0.9, 0.05, samples=2, read_bytes=4096)
    script.end_block()
    script.evaluation()
    for _ in range(3):
        script.step(0.2, 0.3, samples=1)
    script.end_block()
    script.end_epoch()
    script.checkpoint(SpanKind.LOAD, 4.0, 2**30)
    script.epoch()
    for _ in range(6):
        script.step(0.1, 0.9, 0.05, samples=2, read_bytes=4096)
    script.end_block()
    script.end_epoch()
    return script.events()


def run_of(ranks: list[RankEvents], **changes: Any) -> DlioOutputs:
    workload = Workload(
        name="tiny",
        dataset=Dataset(num_files_train=24, num_files_eval=6, num_samples_per_file=1),
        reader=ReaderSection(batch_size=2, batch_size_eval=1),
        metric=Metric(au=0.8),
    )
    hosts = [host(name, 1) for name in dict.fromkeys(rank.clock.host for rank in ranks)]
    plain = DlioOutputs(
        workload=workload,
        ranks=ranks,
        hosts=hosts,
        started=START,
        ended=START + timedelta(seconds=30),
        train=compute_phase_figures(ranks, workload),
        evaluation=compute_phase_figures(ranks, workload, phase=StepPhase.EVAL),
    )
    return replace(plain, **changes)


@pytest.fixture(scope="module")
def full_run() -> DlioOutputs:
    return run_of([rank_with_everything(0), rank_with_everything(1)])


OVERRIDES = ["++workload.dataset.num_files_train=24"]


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_the_summary_is_as_it_was_agreed(full_run: DlioOutputs) -> None:
    assert summary(full_run) == golden("summary.json")


def test_a_ranks_files_are_as_they_were_agreed(full_run: DlioOutputs) -> None:
    rank = full_run.ranks[1]
    assert rank_output(full_run, rank) == golden("1_output.json")
    assert rank_per_epoch_stats(rank, checkpoint_sizes(full_run.ranks)) == golden("1_per_epoch_stats.json")


def test_the_metric_lines_are_those_that_others_parse(full_run: DlioOutputs) -> None:
    assert metric_lines(summary(full_run)) == (GOLDEN / "metric_lines.txt").read_text().splitlines()


def test_every_key_of_dlios_is_there(full_run: DlioOutputs) -> None:
    found = summary(full_run)
    assert set(found) == SUMMARY_KEYS
    wanted = {f"{phase}_{key}" for phase in ("train", "eval") for key in PHASE_KEYS}
    wanted |= {f"{kind}_{key}" for kind in ("save", "load") for key in CHECKPOINT_KEYS}
    assert set(found["metric"]) == wanted | {"checkpoint_size_GB"}


def test_phases_that_did_not_run_have_no_figures() -> None:
    found = summary(run_of(even_run()))
    assert set(found["metric"]) == {f"train_{key}" for key in PHASE_KEYS}
    assert not any("heckpoint" in line or "Eval" in line for line in metric_lines(found))
    empty = summary(run_of(even_run(), train=None))
    assert (empty["epochs"], empty["metric"]) == (0, {})
    assert len(metric_lines(empty)) == 3


def test_checkpoints_count_all_ranks_bytes_over_the_slowest_ranks_time(full_run: DlioOutputs) -> None:
    metric = summary(full_run)["metric"]
    assert metric["checkpoint_size_GB"] == 2.0
    assert metric["save_checkpoint_io_mean_GB_per_second"] == 1.0
    assert metric["save_checkpoint_duration_mean_seconds"] == 2.0
    assert metric["load_checkpoint_io_mean_GB_per_second"] == 0.5


def test_a_rank_that_takes_longer_than_rank_zero_shows_in_its_checkpoints() -> None:
    ranks = []
    for rank, seconds in enumerate(((2.0, 4.0), (8.0, 2.0))):
        script = RankScript(rank, "node")
        script.epoch()
        script.checkpoint(SpanKind.SAVE, seconds[0], 2**30)
        script.block()
        script.checkpoint(SpanKind.SAVE, seconds[1], 2**30)
        script.end_epoch()
        ranks.append(script.events())
    metric = summary(run_of(ranks))["metric"]
    assert metric["save_checkpoint_duration_mean_seconds"] == 6.0
    assert metric["save_checkpoint_io_mean_GB_per_second"] == pytest.approx((2 / 8 + 2 / 4) / 2)


def test_gb_is_gib_and_caching_is_a_matter_of_memory() -> None:
    ranks = even_run()
    big = run_of(ranks, workload=load("unet3d_h100").workload)
    found = summary(big)
    assert found["host_memory_GB"] == [1.0]
    assert found["data_size_per_host_GB"] == pytest.approx(168 * 146600628 / 2**30)
    assert found["potential_caching"] == [0]
    assert summary(run_of(ranks))["potential_caching"] == [1]


def test_success_is_the_thresholds_word(full_run: DlioOutputs) -> None:
    assert summary(full_run)["metric"]["train_au_meet_expectation"] == "success"
    strict = replace(full_run.workload, metric=Metric(au=0.99))
    failed = replace(full_run, train=compute_phase_figures(full_run.ranks, strict))
    assert summary(failed)["metric"]["train_au_meet_expectation"] == "fail"


def test_durations_are_text_but_those_of_checkpoints(full_run: DlioOutputs) -> None:
    stats = rank_per_epoch_stats(full_run.ranks[0], checkpoint_sizes(full_run.ranks))
    epoch = stats["1"]
    plain = {"start", "end", "duration", "block1", "block2", "eval"}
    assert set(epoch) == plain | {"save_ckpt1", "load_ckpt1"}
    assert isinstance(epoch["duration"], str)
    assert isinstance(epoch["eval"]["duration"], str)
    assert (epoch["save_ckpt1"]["duration"], epoch["load_ckpt1"]["duration"]) == (2.0, 4.0)


def test_a_checkpoint_that_takes_no_time_has_no_rate() -> None:
    script = RankScript()
    script.epoch()
    script.end_block()
    script.checkpoint(SpanKind.SAVE, 0.0, 10)
    script.end_epoch()
    found = summary(run_of([script.events()], train=None))
    assert found["metric"]["save_checkpoint_io_mean_GB_per_second"] == 0.0


def test_host_without_facts_gets_those_of_the_first(full_run: DlioOutputs) -> None:
    lone = replace(full_run, hosts=full_run.hosts[:1])
    assert rank_output(lone, lone.ranks[1])["hostname"] == "node1"


def test_the_whole_set_of_files_is_written(tmp_path: Path, full_run: DlioOutputs) -> None:
    lines = write_dlio_files(tmp_path, full_run, overrides=OVERRIDES)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert names == [
        ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml",
        "0_output.json", "0_per_epoch_stats.json", "1_output.json", "1_per_epoch_stats.json",
        "dlio.log", "summary.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_text()) == golden("summary.json")
    log = (tmp_path / "dlio.log").read_text().splitlines()
    assert log[-len(lines) :] == lines
    for words in (
        "Starting epoch 2: 6 steps expected",
        "Starting block 1",
        "Ending block 1 - ",
        "Epoch 2 - Block 1 [Training] Accelerator Utilization [AU] (%): ",
        "Epoch 2 - Block 1 [Training] Throughput (samples/second): ",
        "Epoch 2 - Block 1 [Training] Computation time per step (second): ",
        "Ending epoch 2 - 6 steps completed in ",
        "Starting saving checkpoint 1 after total step ",
        "Finished saving checkpoint 1 for epoch 1 in ",
    ):
        assert any(words in line for line in log), words
    assert [line.split()[1] for line in log if "[OUTPUT]" in line] == sorted(
        line.split()[1] for line in log if "[OUTPUT]" in line
    )


def test_the_configuration_is_what_hydra_leaves(tmp_path: Path, full_run: DlioOutputs) -> None:
    workload = replace(
        load("unet3d_h100").workload, output=replace(full_run.workload.output, log_file="my.log")
    )
    write_dlio_files(
        tmp_path, replace(full_run, workload=workload), overrides=OVERRIDES, subfolder="dlio_config"
    )
    folder = tmp_path / "dlio_config"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["workload"]["dataset"]["record_length_bytes"] == 146600628
    assert config["workload"]["train"]["computation_time"] == 0.323
    task = ["workload=unet3d_h100", "++workload.dataset.num_files_train=24"]
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == task
    hydra = yaml.safe_load((folder / "hydra.yaml").read_text())["hydra"]
    assert hydra["overrides"]["task"] == task
    assert hydra["runtime"]["choices"]["workload"] == "unet3d_h100"
    assert hydra["run"]["dir"] == str(tmp_path)
    assert (tmp_path / "my.log").exists()


def test_our_own_export_is_read_like_any_other(tmp_path: Path, full_run: DlioOutputs) -> None:
    write_dlio_files(tmp_path, full_run, overrides=OVERRIDES)
    found = summarize_run(tmp_path)
    assert found.notes == ()
    assert (found.kind, found.workload, found.ranks, found.outcome) == ("DLIO", "tiny", 2, "finished")
    assert full_run.train is not None
    assert found.au_compat_percent == full_run.train.au_compat_percent.mean
    assert found.samples_per_s_compat == full_run.train.samples_per_s_compat.mean
    assert found.settings["reader.batch_size"] == 2


def test_missing_or_malformed_parts_of_dlio_files_are_noted(tmp_path: Path) -> None:
    summary_of = {
        "num_accelerators": "4",
        "metric": {"train_au_percentage": 97.5, "train_au_mean_percentage": "x"},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary_of))
    found = summarize_run(tmp_path)
    assert (found.ranks, found.au_compat_percent, found.workload, found.started) == (4, None, "unknown", None)
    assert (found.outcome, found.why) == ("unknown", "Its summary has no end.")
    assert "summary.json has no start, end, epochs" in found.notes[0]
    assert found.notes[1:] == ("its configuration was not kept",)


def test_configuration_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"metric": []}')
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "overrides.yaml").write_text("{: [")
    (tmp_path / "configs" / "config.yaml").write_text("- just\n- a list")
    found = summarize_run(tmp_path)
    assert found.settings == {}
    assert any("cannot read overrides.yaml" in note for note in found.notes)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"workload": {"model": "unet3d"}}, "unet3d"),
        ({"workload": {"model": {"name": "bert"}}}, "bert"),
        ({"workload": {"model": {"type": "cnn"}}}, "unknown"),
        ({"workload": "odd"}, "unknown"),
        (["odd"], "unknown"),
    ],
)
def test_a_workload_without_an_override_is_named_by_its_model(
    tmp_path: Path, config: object, wanted: str
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("words")
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    assert summarize_run(tmp_path).workload == wanted


@pytest.mark.parametrize("content", ["", "[]", "{", "3"])
def test_a_summary_that_is_none_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(StorageError, match=r"summary\.json"):
        summarize_run(tmp_path)


published = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="PENSTOCK_MLPERF_RESULTS names no folder of published results"
)


def published_runs() -> list[Path]:
    return sorted(path.parent for path in PUBLISHED.rglob("summary.json"))


@published
def test_every_published_run_is_read_whole() -> None:
    runs = published_runs()
    assert runs
    for folder in runs:
        found = summarize_run(folder)
        assert found.notes == (), folder
        assert found.workload.rpartition("_")[2] in ("a100", "h100")
        assert found.outcome == "finished"


@published
def test_our_formulas_of_means_and_sizes_are_those_of_published_summaries() -> None:
    """Means, deviations, nominal I/O and sizes, recomputed from the published figures of each epoch."""
    for folder in published_runs():
        told = json.loads((folder / "summary.json").read_text())
        metric = told["metric"]
        record_bytes = summarize_run(folder).settings["dataset.record_length"]
        rates = mean_and_stdev(metric["train_throughput_samples_per_second"])
        au = mean_and_stdev(metric["train_au_percentage"])
        assert au.mean == pytest.approx(metric["train_au_mean_percentage"])
        assert au.stdev == pytest.approx(metric["train_au_stdev_percentage"])
        assert rates.mean == pytest.approx(metric["train_throughput_mean_samples_per_second"])
        assert rates.mean * record_bytes / 2**20 == pytest.approx(metric["train_io_mean_MB_per_second"])
        assert rates.stdev * record_bytes / 2**20 == pytest.approx(metric["train_io_stdev_MB_per_second"])
        size = told["num_files_train"] * told["num_samples_per_file"] * record_bytes / 2**30
        assert told["data_size_per_host_GB"] == pytest.approx(size / (told["num_hosts"] or 1))


@published
def test_our_summary_has_the_keys_of_published_ones_and_more() -> None:
    ours = summary(run_of(even_run()))
    for folder in published_runs():
        theirs = json.loads((folder / "summary.json").read_text())
        assert set(theirs) <= set(ours)
        assert set(theirs["metric"]) <= set(ours["metric"])
        for key, value in theirs.items():
            assert type(value) is type(ours[key]), key


def test_the_configuration_is_not_written_through_a_linked_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "run/.hydra").symlink_to(tmp_path / "outside")
    workload = load("unet3d_h100").workload
    with pytest.raises(StorageError, match="leads out of the root"):
        write_configuration(tmp_path / "run", workload, (), subfolder=".hydra", run_folder=tmp_path / "run")
    assert list((tmp_path / "outside").iterdir()) == []
