"""Checkpoints on an object service that delays, drops, refuses and loses: right bytes, or a clear failure."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from tests.support.s3.fake_server import FakeServer
from tests.support.s3.fault_plan import ALWAYS, Fault
from tests.support.s3.server import BUCKET

from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
from penstock.bench.checkpoint.checkpoint_run import (
    CheckpointRequest,
    change_checkpoint_section,
    run_checkpoints,
)
from penstock.bench.state_layout import plan_layout
from penstock.cluster.comm import SoloComm
from penstock.errors import RankFailed
from penstock.progress import Progress
from penstock.results.run_folder import run_folders
from penstock.results.run_record import RunOutcome, read_record
from penstock.storage import open_storage
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.load_workload import load_model

StartFaulty = Callable[..., FakeServer]

PART = 5 << 20
SCALE = Fraction(1, 8000)
"""A checkpoint of two objects, one put whole and one in parts: 2 and 12 MB."""
PIPE = PipelineSettings(streams=2, chunk_bytes=PART, buffer_memory_bytes=4 * PART)
PATIENCE = {"request_timeout_s": "20s", "attempts": "6", "backoff_s": "10ms", "part_bytes": "5MiB"}
TROUBLE = (
    Fault(action="delay", operation="UploadPart", seconds=0.05, times=3),
    Fault(action="drop", operation="UploadPart", nth=4),
    Fault(action="refuse", operation="PutObject", nth=2),
    Fault(action="drop", operation="GetObject", nth=2),
    Fault(action="refuse", operation="GetObject", nth=6, status=500, code="InternalError"),
    Fault(action="truncate", operation="GetObject", nth=9),
)

_places = itertools.count()


def run(server: FakeServer, client: str, results: Path) -> CheckpointResult:
    model = change_checkpoint_section(
        load_model("llama3-8b"),
        num_checkpoints_write=2,
        num_checkpoints_read=2,
        time_between_checkpoints_s=0.0,
    )
    layout = plan_layout(model, num_processes=1, scale=SCALE)
    request = CheckpointRequest(model=model, layout=layout, scale=SCALE, pipe=PIPE, results=results, seed=5)
    uri = f"s3://{BUCKET}/place-{next(_places)}"
    options = {"client": client, **PATIENCE}
    reopen = partial(open_storage, uri, server.as_server().environment, options=options)
    return run_checkpoints(request, reopen, comm=SoloComm(), progress=Progress())


@pytest.mark.parametrize("client", ["obstore", "minio"])
def test_delays_drops_and_refusals_are_retried_and_counted_and_all_bytes_are_right(
    client: str, faulty: StartFaulty, tmp_path: Path
) -> None:
    server = faulty(*TROUBLE)
    result = run(server, client, tmp_path)
    document = result.document()
    assert result.is_right
    assert document["read"]["verified_bytes"] == document["write"]["bytes"] == 2 * result.total_bytes
    # A library may quietly send a request again whose old connection was gone; an answer it has to report.
    counted = document["read"]["streams"]
    assert sum(stream["retries"] for stream in counted) >= 1
    assert set(server.plan.fired) == {"delay", "drop", "refuse", "truncate"}


@pytest.mark.parametrize("client", ["obstore", "minio"])
def test_a_lost_part_fails_the_run_by_the_name_of_its_object(
    client: str, faulty: StartFaulty, tmp_path: Path
) -> None:
    server = faulty(Fault(action="lose", operation="UploadPart", part=2))
    with pytest.raises(RankFailed, match=r"global_epoch1_step1/.*optim_states\.pt"):
        run(server, client, tmp_path)
    (folder,) = run_folders(tmp_path)
    assert read_record(folder).outcome is RunOutcome.FAILED


def test_a_service_that_refuses_for_good_ends_the_run(faulty: StartFaulty, tmp_path: Path) -> None:
    server = faulty(Fault(action="refuse", operation="UploadPart", times=ALWAYS))
    with pytest.raises(RankFailed, match=r"optim_states\.pt"):
        run(server, "obstore", tmp_path)
    assert server.bucket.open_uploads == []
