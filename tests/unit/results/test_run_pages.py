"""Pages of runs answer five questions before anything else, and name what went wrong in the run.

The questions are those of a reader who has not seen the run: did it pass, how much, what limits it, since
when, what to do. The answers below are all that stands in the page's banner.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.page_checks import read_banner
from tests.support.recorded_runs import (
    MIB,
    CheckpointStory,
    TrainingStory,
    record_checkpoints,
    record_training,
)

from penstock.errors import ObjectNotFound
from penstock.reports.report import Banner, Look, Report
from penstock.results.active_run import ActiveRun
from penstock.results.checkpoint_page import make_checkpoint_page
from penstock.results.run_page import draw_run, leave_run_page
from penstock.results.run_record import RunRequest, read_record
from penstock.workload.spec import Workload

TRAINING = {
    "good": (
        TrainingStory(),
        {
            "Passed?": "passed",
            "How much": "AU 98.04 %, 90 % asked (ceiling of this client 98.5 %); 274.5 samples/s and "
            "275 MiB/s for 4 H100s",
            "Limited by": "nothing: Of the accelerators' time 98.0% was computation",
            "Since": "no change",
            "To do": "Nothing.",
            "Troubles": "",
        },
    ),
    "ceiling measured on a busy client": (
        TrainingStory(ceiling_percent=80.0),
        {
            "Passed?": "passed",
            "How much": "AU 98.04 %, 90 % asked (ceiling of this client 80.0 %: does not count, the run "
            "exceeded it); 274.5 samples/s",
            "Limited by": "nothing: Of the accelerators' time 98.0% was computation",
            "To do": "Nothing.",
            "Troubles": "",
        },
    ),
    "slow storage, and a ceiling measured on a busy client": (
        TrainingStory(waits=lambda *_: 0.05, read_share=0.6, ceiling_percent=60.0),
        {
            "Passed?": "failed",
            "Limited by": "storage. Of the accelerators' time 66.7% was computation",
            "To do": "Compare with the storage's limits: `penstock storage probe direct:///mnt/pfs/unet3d`.",
            "Troubles": "",
        },
    ),
    "slow storage": (
        TrainingStory(waits=lambda *_: 0.05, read_share=0.6),
        {
            "Passed?": "failed",
            "How much": "AU 66.67 %, 90 % asked",
            "Limited by": "storage. Of the accelerators' time 66.7% was computation",
            "Since": "the first step: waits had no lasting change (p50 50.0 ms, p99 50.0 ms a step)",
            "To do": "Compare with the storage's limits: `penstock storage probe direct:///mnt/pfs/unet3d`.",
            "Troubles": "",
        },
    ),
    "one slow rank": (
        TrainingStory(waits=lambda rank, _epoch, _step: 0.05 if rank == 3 else 0.001),
        {
            "Passed?": "failed",
            "Limited by": "storage.",
            "To do": "Look at rank 3's path to storage",
            "Troubles": "Rank 3 on node2 waits for samples 50.0 ms a step, the usual rank 1.00 ms",
        },
    ),
    "slower in the second half": (
        TrainingStory(waits=lambda _rank, epoch, step: 0.08 if (epoch, step) >= (2, 5) else 0.002),
        {
            "Passed?": "failed",
            "How much": "AU 77",
            "Since": "4.49 s after the first step: epoch 2, step 5",
            "To do": "Look at what else used the storage then",
            "Troubles": "From 4.49 s on (epoch 2, step 5) a step waits 80.0 ms for samples instead of 2.00",
        },
    ),
    "page cache warm": (
        TrainingStory(delivered_share=0.25),
        {
            "Passed?": "doubtful",
            "How much": "AU 98.04 %",
            "To do": "Read past the page cache",
            "Troubles": "The page cache served 75% of what was read: devices and networks delivered 560 MiB "
            "of 2.19 GiB. This is not the storage's speed.",
        },
    ),
    "too few workers": (
        TrainingStory(waits=lambda *_: 0.05, threads=1, read_share=0.3, decode_share=0.68),
        {
            "Passed?": "failed",
            "Limited by": "client CPU.",
            "To do": "Raise reader.read_threads (1 now)",
            "Troubles": "The only reader of each rank was busy 98% of the time",
        },
    ),
    "slow client": (
        TrainingStory(waits=lambda *_: 0.05, ceiling_percent=80.0),
        {
            "Passed?": "failed",
            "Limited by": "client CPU.",
            "To do": "Use fewer ranks for each host",
            "Troubles": "On storage that costs nothing this client reaches AU 80.0 %: no storage can give it",
        },
    ),
}


@pytest.mark.parametrize(("story", "expected"), TRAINING.values(), ids=TRAINING)
def test_a_training_page_answers_five_questions_and_names_the_trouble(
    tmp_path: Path, story: TrainingStory, expected: dict[str, str]
) -> None:
    found = read_banner(record_training(tmp_path, story) / "report.html")
    assert {question: found[question][: len(text)] for question, text in expected.items()} == expected
    assert all(found[question] for question in ("How much", "Limited by", "Since", "To do"))
    assert bool(found["Troubles"]) == bool(expected["Troubles"])


def test_means_of_charts_say_that_they_include_what_the_figures_leave_out(tmp_path: Path) -> None:
    page = draw_run(record_training(tmp_path, TrainingStory()), {})
    charts = [*page.highlights, *(chart for section in page.sections for chart in section.charts)]
    means = [chart.note for chart in charts if "mean " in chart.note]
    assert len(means) == 2
    assert all(mean.endswith(", time between epochs included") for mean in means)


CHECKPOINTS = {
    "good": (
        CheckpointStory(),
        {
            "Passed?": "passed",
            "How much": "5 GiB of llama3-8b: written with 5.00 GiB/s, durable after 1.00 s; read back with "
            "5.00 GiB/s, verified after 1.00 s. All 50 GiB of it at this rate: 10.0 s and 10.0 s",
            "Limited by": "Writing: storage (p99 of a chunk 30 ms).",
            "Since": "no lasting change: writing at 5.00 to 5.00 GiB/s, reading at 5.00 to 5.00 GiB/s",
            "To do": "Compare with the storage's limits: `penstock storage probe direct:///mnt/pfs/ckpt`",
            "Troubles": "",
        },
    ),
    "one slow rank": (
        CheckpointStory(
            rank_bytes=lambda _direction, _step, rank: [16 * MIB] * 80 if rank == 2 else [64 * MIB] * 20
        ),
        {
            "Passed?": "passed",
            "To do": "Look at rank 2's path to storage",
            "Troubles": "Rank 2 is writing for 4.00 s a checkpoint, the others for 1.00 s",
        },
    ),
    "slower in the second half": (
        CheckpointStory(
            rank_bytes=lambda direction, step, _rank: (
                [16 * MIB] * 80 if (direction, step) == ("write", 2) else [64 * MIB] * 20
            )
        ),
        {
            "Passed?": "passed",
            "Since": "1.56 s after the first byte (writing)",
            "To do": "Look for a write cache that was full then",
            "Troubles": "From 1.56 s on writing fell from 5 GiB/s to 1.25 GiB/s.",
        },
    ),
    "page cache warm": (
        CheckpointStory(resident_share=0.8),
        {
            "Passed?": "doubtful",
            "To do": "Read past the page cache",
            "Troubles": "2 of 2 reads came from the page cache: up to 80% of their bytes.",
        },
    ),
    "wrong bytes": (
        CheckpointStory(wrong_bytes=1),
        {
            "Passed?": "failed",
            "To do": "Do not trust this storage with checkpoints",
            "Troubles": "2 chunks do not hold what was written, the first at byte 4,096 of epoch1_step1/",
        },
    ),
}


@pytest.mark.parametrize(("story", "expected"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_page_answers_five_questions_and_names_the_trouble(
    tmp_path: Path, story: CheckpointStory, expected: dict[str, str]
) -> None:
    found = read_banner(record_checkpoints(tmp_path, story) / "report.html")
    assert {question: found[question][: len(text)] for question, text in expected.items()} == expected
    assert all(found[question] for question in ("How much", "Limited by", "Since", "To do"))


def test_a_run_keeps_its_figures_where_its_page_cannot_be_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = record_training(tmp_path, TrainingStory())
    (folder / "report.html").unlink()
    stages = (folder / "stages.json").read_text()
    (folder / "stages.json").write_text("[]")
    with caplog.at_level(logging.WARNING):
        leave_run_page(folder, {})
        assert f"`penstock results page {folder}` makes it" in caplog.text
        (folder / "stages.json").write_text(stages)
        caplog.clear()
        monkeypatch.setitem(sys.modules, "jinja2", None)
        leave_run_page(folder, {})
        assert "pip install 'penstock-io[pages]'" in caplog.text
    assert not (folder / "report.html").exists()


def test_a_run_without_a_step_has_no_page_and_the_error_says_so(tmp_path: Path) -> None:
    folder = record_training(tmp_path, TrainingStory())
    for name in ("steps.parquet", "spans.parquet"):
        (folder / name).unlink()
    with pytest.raises(ObjectNotFound, match="no step events"):
        draw_run(folder, {})


def test_packages_above_draw_the_pages_of_their_own_kinds(tmp_path: Path) -> None:
    request = RunRequest(
        workload=Workload(name="storage-probe"), ranks=1, hosts=[], command=["x"], plan={"kind": "probe"}
    )
    banner = Banner(verdict="measured", look=Look.PLAIN, figure="fast", limited_by="a", since="b", to_do="c")

    def draw(folder: Path) -> Report:
        return Report(title=folder.name, subtitle="4 streams", banner=banner)

    with ActiveRun.start(tmp_path, request, pages={"probe": draw}) as run:
        run.finish()
    text = (run.folder / "report.html").read_text()
    assert run.folder.name in text
    assert "4 streams" in text


def test_a_short_last_interval_of_a_round_is_drawn_as_fast_as_it_was(tmp_path: Path) -> None:
    sizes_bytes = [*[64 * MIB] * 2, 26 * MIB]
    story = CheckpointStory(rank_bytes=lambda *_: sizes_bytes, last_s=0.05 * 26 / 64)
    folder = record_checkpoints(tmp_path, story)
    page, _ = make_checkpoint_page(folder, read_record(folder))
    (chart,) = (chart for chart in page.highlights if chart.title == "Throughput of all ranks")
    for series in chart.series:
        rates = np.asarray(series.y)
        # In the first and the last interval of a round, bytes were transferred for only a part of the time.
        inside = (rates[:-2] > 0) & (rates[1:-1] > 0) & (rates[2:] > 0)
        assert inside.sum() >= 8
        assert rates[1:-1][inside] == pytest.approx(4 * 64 * MIB / 0.05)
