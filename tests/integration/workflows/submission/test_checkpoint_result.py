"""Leaves of checkpointing that our own runs leave in a submission's tree."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.support.rank_threads import on_ranks

from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest, change_checkpoint_section
from penstock.bench.state_layout import plan_layout
from penstock.environment import process_environment
from penstock.progress import Progress
from penstock.storage import open_storage
from penstock.submission.authoring.owned_tree import RunSeries, claim_tree
from penstock.submission.authoring.preflight import locate_checkpoints
from penstock.submission.authoring.run_sequence import list_progress
from penstock.submission.check import check
from penstock.submission.code_image import Program, capture
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Verdict
from penstock.submission.tree_layout import Benchmark
from penstock.transfer.pipeline import PipelineSettings
from penstock.workflows.submission_results import ResultWriter, add_checkpoints
from penstock.workload.load_workload import load_model
from penstock.workload.mlperf_divisions import SubmissionDivision

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

from tests.integration.workflows.submission.small_result import DESCRIBED, small_host

SCALE = Fraction(1, 100_000)
RANKS = 8
SCALE_BREAKS = {"checkpoint.size", "parameters.configuration"}


@pytest.fixture(scope="module")
def published_dir(tmp_path_factory: pytest.TempPathFactory, apart: Path) -> Path:
    """A tree with one invocation of ten writes and ten reads, by eight ranks of one host."""
    place = tmp_path_factory.mktemp("made")
    (place / "program").mkdir()
    (place / "program" / "main.py").write_text("print()")
    began = datetime(2026, 7, 1, 10, 0, 0, tzinfo=UTC)
    ticks = iter(range(10_000))
    root = claim_tree(place / "tree", "acme", now=began, by="tests").root
    model = change_checkpoint_section(
        load_model("llama3-8b"), time_between_checkpoints_s=0.0, checkpoint_folder=str(apart / "saves")
    )
    located = locate_checkpoints(model.workload, str(apart / "saves"))
    program = Program(folder=place / "program", version="1.0")
    session = ResultWriter(
        series=RunSeries(
            tree=claim_tree(root, "acme", now=began, by="tests"),
            division=SubmissionDivision.CLOSED,
            system="fast",
            benchmark=Benchmark.CHECKPOINTING,
            model="llama3-8b",
        ),
        program=replace(program, digest=capture(program, root, now=began)),
        data_path=located.data_path,
        changed=located.changes,
        command=("penstock", "submission", "run", "checkpointing", "llama3-8b"),
        clock=lambda: began + timedelta(seconds=next(ticks)),
    )
    request = CheckpointRequest(
        model=model,
        layout=plan_layout(model, num_processes=RANKS, scale=SCALE),
        scale=SCALE,
        pipe=PipelineSettings(streams=1, chunk_bytes=64 << 10, buffer_memory_bytes=256 << 10),
        results=root,
        facts_of=small_host,
    )

    def rank(comm: Comm) -> str:
        reopen = partial(open_storage, str(apart / "saves"), process_environment(), rank=comm.rank)
        result = add_checkpoints(
            session,
            request,
            reopen,
            accelerator="b200",
            edition=load_edition("v3.0"),
            comm=comm,
            progress=Progress(),
            note=print,
            format_logs=lambda result: (f"{result.results_dir}\n", ""),
        )
        return result.results_dir

    (folder,) = set(on_ranks(RANKS, rank, hosts=["here"] * RANKS, timeout_s=250))
    systems = root / "closed" / "acme" / "systems"
    systems.mkdir()
    (systems / "fast.pdf").write_text("%PDF-1.4")
    (systems / "fast.yaml").write_text(yaml.safe_dump(DESCRIBED))
    return Path(folder)


def test_a_run_of_checkpoints_becomes_a_leaf_with_all_its_files(published_dir: Path) -> None:
    stamp = published_dir.name
    expected = {
        "checkpointing_run.stdout.log", "checkpointing_run.stderr.log", "0_output.json", "summary.json",
        "7_per_epoch_stats.json", "dlio.log", "dlio_config", "fs_separation.json", "provenance.json",
        f"checkpointing_{stamp}_metadata.json", ".mlps-code-image", "run.json", "checkpoints.json",
    }  # fmt: skip
    assert expected <= {path.name for path in published_dir.iterdir()}
    metadata = json.loads((published_dir / f"checkpointing_{stamp}_metadata.json").read_text())
    assert metadata["accelerator"] == metadata["args"]["accelerator_type"] == "b200"
    assert (metadata["num_processes"], metadata["args"]["num_checkpoints_write"]) == (8, 10)
    assert metadata["parameters"]["checkpoint"]["fsync"] is True


def test_a_tree_of_our_own_checkpoints_is_valid_but_for_its_scale(published_dir: Path) -> None:
    root = published_dir.parents[6]
    (judged,) = check(root, load_edition("v3.0"))
    bad = {Verdict.FAIL, Verdict.NOT_CHECKED}
    found = [(each.rule, each.verdict, each.proof) for each in judged.findings if each.verdict in bad]
    is_one = published_dir.stat().st_dev == Path("/dev/shm").stat().st_dev
    allowed = SCALE_BREAKS | ({"paths.filesystems"} if is_one else set())
    assert {rule for rule, _, _ in found} <= allowed, found


def test_the_status_of_a_checkpointing_is_one_of_one(published_dir: Path) -> None:
    root = published_dir.parents[6]
    now = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)
    (found,) = list_progress(claim_tree(root, "acme", now=now, by="tests"), load_edition("v3.0"), now=now)
    assert (found["num_runs"], found["num_runs_wanted"], found["lacks"]) == (1, 1, [])
