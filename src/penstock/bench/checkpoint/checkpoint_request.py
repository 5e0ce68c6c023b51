"""What a checkpoint benchmark is asked to do, and what follows from that alone.

The workload in a request is what is really run, options included, so the record of a run shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.checkpoint.checkpoint_folder import CheckpointShape
from penstock.results.dlio.output_files import HYDRA_FOLDER
from penstock.results.provenance import read_host
from penstock.workload.choices import CheckpointMode

if TYPE_CHECKING:
    from penstock.bench.model_state import StateLayout
    from penstock.checkpoint.saving.pipeline import PipelineSettings
    from penstock.cluster.gates.preflight import PreflightResult
    from penstock.environment import Environment
    from penstock.results.provenance import ReadHostFacts
    from penstock.storage import Storage
    from penstock.workload.checkpoint_model import CheckpointModel

OpenStorage = Callable[[], "Storage"]
"""Opens one more storage at the same place, with counters of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """One run. `model.workload.checkpoint` says how many writes and reads, and how.

    `results` is the folder in which the run's own is made, unless `run_folder` names that itself. A `seed` of
    None is drawn anew for writing, and taken from the marker for reading. With `resumes`, checkpoints
    that an interrupted run left whole are kept; with `removes`, all are deleted at the end. `facts_of` reads
    what a rank's machine is; `inspection` is the result of the preflight gates, None if none ran.
    """

    model: CheckpointModel
    layout: StateLayout
    scale: Fraction
    pipe: PipelineSettings
    results: Path
    seed: int | None = None
    resumes: bool = False
    removes: bool = False
    command: Sequence[str] = ()
    environment: Environment = field(default_factory=dict)
    overrides: Sequence[str] = ()
    remarks: Sequence[str] = ()
    run_folder: Path | None = None
    hydra_subfolder: str = HYDRA_FOLDER
    log_before: Sequence[str] = ()
    facts_of: ReadHostFacts = read_host
    inspection: PreflightResult | None = None

    @property
    def shape(self) -> CheckpointShape:
        """What others must ask for to read these checkpoints."""
        layout, mode = self.layout, "subset" if self.layout.is_subset else "default"
        return CheckpointShape(
            model=self.model.name,
            processes=layout.num_processes,
            mode=mode,
            scale=str(self.scale),
            total_bytes=layout.total_bytes,
            num_files=layout.num_files,
        )

    def plan_document(self) -> dict[str, Any]:
        """The plan for the run's record, as plain values."""
        mesh = self.layout.mesh
        return {
            "kind": "checkpoint",
            "model": self.model.name,
            "parameters": self.layout.num_parameters,
            "parallelism": {"tensor": mesh.tensor, "pipeline": mesh.pipeline, "data": mesh.data},
            "is_subset": self.layout.is_subset,
            "is_folded": self.layout.is_folded,
            "scale": str(self.scale),
            "total_bytes": self.layout.total_bytes,
            "num_files": self.layout.num_files,
            "pipe": pipe_document(self.pipe),
        }


def pipe_document(pipe: PipelineSettings) -> Mapping[str, Any]:
    """How bytes are moved, as plain values."""
    return {
        "streams": pipe.streams,
        "chunk_bytes": pipe.chunk_bytes,
        "buffer_memory_bytes": pipe.buffer_memory_bytes,
        "verify": pipe.verify,
        "silence_s": pipe.silence_s,
    }


def change_checkpoint_section(model: CheckpointModel, **changes: object) -> CheckpointModel:
    """The model with values of its workload's section `checkpoint` changed; None leaves one as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "mode" in given:
        given["mode"] = CheckpointMode(str(given["mode"]))
    checkpoint = replace(model.workload.checkpoint, **given)  # type: ignore[arg-type]  # callers name fields
    return replace(model, workload=replace(model.workload, checkpoint=checkpoint))
