"""The checkpoint stage of `penstock-dlio`: workloads that write and read checkpoints without any training.

Place in the flow: called by a session for `train=False checkpoint=True`. Invariant: every key of the section
`checkpoint` is done as it is written, or refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.cli.dlio_place import DataPlace
    from penstock.cli.terminal import Terminal
    from penstock.cluster.comm import Comm
    from penstock.environment import Environment
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStage:
    """What a session knows when its checkpoint stage comes. `name` is that of `workload=NAME`."""

    name: str
    workload: Workload
    folder: Path
    hydra_subfolder: str
    words: tuple[str, ...]
    overrides: tuple[str, ...]
    remarks: tuple[str, ...]
    log_before: tuple[str, ...]

    def run(self, *, comm: Comm, terminal: Terminal, environment: Environment) -> CheckpointResult:
        """All writes, then all reads; results lie in the session's folder."""
        from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest
        from penstock.bench.model_state import LayoutRequest, plan_layout
        from penstock.checkpoint.pipe.base import PipeSettings
        from penstock.cli.checkpoint.run import carry_out
        from penstock.workload.checkpoint_model import model_of_workload

        model = model_of_workload(self.name, self.workload)
        mode = self.workload.checkpoint.mode
        place = checkpoint_place(self.workload, environment)
        request = CheckpointRequest(
            model=model,
            layout=plan_layout(LayoutRequest(model=model, num_processes=comm.size, mode=mode)),
            scale=Fraction(1),
            pipe=PipeSettings(),
            results=self.folder.parent,
            run_folder=self.folder,
            command=("penstock-dlio", *self.words),
            environment=place.environment,
            overrides=self.overrides,
            remarks=self.remarks,
            hydra_subfolder=self.hydra_subfolder,
            log_before=self.log_before,
        )
        return carry_out(request, place.uri, place.options, comm=comm, terminal=terminal)


def checkpoint_place(workload: Workload, environment: Environment) -> DataPlace:
    """Where `checkpoint.checkpoint_folder` is: a path as it stands, or a prefix in the bucket of the data."""
    from penstock.cli.dlio_place import data_place
    from penstock.workload.choices import StorageKind

    folder = workload.checkpoint.checkpoint_folder
    storage = workload.storage
    if storage.storage_type is not StorageKind.S3:
        # DLIO joins data folders with the storage's root, but not those of checkpoints.
        storage = replace(storage, storage_root="./")
    elif "://" in folder:
        bucket, _, prefix = folder.partition("://")[2].partition("/")
        storage, folder = replace(storage, storage_root=bucket), prefix
    return data_place(
        replace(
            workload,
            storage=storage,
            dataset=replace(workload.dataset, data_folder=folder),
            reader=replace(workload.reader, odirect=False),
        ),
        environment,
    )
