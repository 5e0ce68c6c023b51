"""Checkpoints through each S3 client, side by side on the same local server, in the same run.

Ratios are a client's rates over obstore's. The server is moto's, in Python, so rates tell what a client costs
beside a slow service, not what it could reach; every byte is verified.
"""

import tempfile
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path

from tests.support.s3.moto_server import running_moto
from tests.support.s3.server import BUCKET, S3Server

from harness import Ratio, interleave
from penstock.bench.checkpoint.checkpoint_run import (
    CheckpointRequest,
    change_checkpoint_section,
    run_checkpoints,
)
from penstock.bench.state_layout import plan_layout
from penstock.cluster.comm import SoloComm
from penstock.progress import Progress
from penstock.storage import open_storage
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.load_workload import load_model

CLIENTS = ("minio", "s3dlio", "s3torchconnector")
SCALE = Fraction(1, 1000)
"""About 107 MiB, in two objects of 15 and 92 MiB."""
PIPE = PipelineSettings(streams=2, chunk_bytes=8 << 20, buffer_memory_bytes=128 << 20)


def measure(repetitions: int) -> list[Ratio]:
    """Writing and reading with each client, over obstore."""
    ratios: list[Ratio] = []
    with running_moto() as server, tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for client in CLIENTS:
            ours, theirs = Side(server, client, client, folder), Side(server, "obstore", client, folder)
            ratios += interleave(ours, theirs, repetitions=repetitions, unit="GiB/s")
    return ratios


class Side:
    """One client's run; `label` names the pair that is compared."""

    def __init__(self, server: S3Server, client: str, label: str, folder: str) -> None:
        self._server, self._client, self._label, self._folder = server, client, label, folder

    def __call__(self) -> Mapping[str, float]:
        """Write a checkpoint, read it back, remove it."""
        model = change_checkpoint_section(
            load_model("llama3-8b"), num_checkpoints_write=1, num_checkpoints_read=1
        )
        request = CheckpointRequest(
            model=change_checkpoint_section(model, time_between_checkpoints_s=0.0),
            layout=plan_layout(model, num_processes=1, scale=SCALE),
            scale=SCALE,
            pipe=PIPE,
            results=Path(self._folder),
            removes=True,
        )
        uri = f"s3://{BUCKET}/{self._client}"
        reopen = partial(open_storage, uri, self._server.environment, options={"client": self._client})
        result = run_checkpoints(request, reopen, comm=SoloComm(), progress=Progress())
        rates = {
            "writing": result.write["gib_per_s"] if result.write else None,
            "reading": result.read["gib_per_s"] if result.read else None,
        }
        if not result.is_right or None in rates.values():
            raise SystemExit(f"{self._client} did not bring back what was written")
        return {f"{name}, {self._label} / obstore": rate for name, rate in rates.items() if rate}
