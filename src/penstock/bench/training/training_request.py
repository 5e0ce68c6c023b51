"""What a training run is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.sample_decoder import ContentCheck
from penstock.results.dlio.output_files import HYDRA_FOLDER
from penstock.results.provenance import read_host

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import LoaderOptions, OpenStorage
    from penstock.bench.training.training_checkpoints import CheckpointsRequest
    from penstock.bench.training.training_files import OpenFormat
    from penstock.cluster.gates.preflight import PreflightResult
    from penstock.environment import Environment
    from penstock.results.provenance import ReadHostFacts
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """One run. `results` is the folder in which the run's own is made, unless `run_folder` names that itself.

    `overrides` are in DLIO's words; `hydra_subfolder` and `log_before` are of DLIO's files: where the
    configuration goes ("": nowhere), and the log's lines about what came before the run. `reopen` is for
    loaders whose processes open the storage themselves. `checkpoints` are what is saved on the way, and
    where. `decodes` makes samples of what is read; `check` holds them against their generator, which takes
    decoding. `reader` knows files of a format of its own. `facts_of` reads what a rank's machine is;
    `inspection` is the result of the preflight gates, None if none ran.
    """

    workload: Workload
    results: Path
    seed: int
    division: Remainder = Remainder.ROTATE
    loader: LoaderOptions
    reopen: OpenStorage | None = None
    checkpoints: CheckpointsRequest | None = None
    decodes: bool = False
    check: ContentCheck = ContentCheck.OFF
    reader: OpenFormat | None = None
    command: Sequence[str] = ()
    environment: Environment = field(default_factory=dict)
    overrides: Sequence[str] = ()
    remarks: Sequence[str] = ()
    run_folder: Path | None = None
    hydra_subfolder: str = HYDRA_FOLDER
    log_before: Sequence[str] = ()
    facts_of: ReadHostFacts = read_host
    inspection: PreflightResult | None = None
