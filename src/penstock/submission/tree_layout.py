"""The names of folders and files in a tree of v2.0 and v3.0, whose runs are named by their time.

    TOP/code-images/code-<8 digits>/                       the program (v3.0; names in `code_image`)
    TOP/<closed|open>/ORG/submission.yaml                  what the folder holds (v3.0)
    TOP/<closed|open>/ORG/systems/SYSTEM.{yaml,pdf}
    TOP/<closed|open>/ORG/results/SYSTEM/training/MODEL/{datasize,datagen,run}/20260102_030405/
    TOP/<closed|open>/ORG/results/SYSTEM/checkpointing/MODEL/20260102_030405/

Writers and checkers share them. Invariant: a result directory is a folder that is named by a time.
"""

import re
from enum import StrEnum
from typing import Final

MANIFEST: Final = "submission.yaml"
PUBLIC_IDS: Final = "public_ids.json"
SENTINEL: Final = "mlperf-results.yaml"
RESULTS_FILE: Final = "results.json"
SUMMARY: Final = "summary.json"
CONFIG_FOLDER: Final = "dlio_config"
CONFIG_FILES: Final = ("config.yaml", "hydra.yaml", "overrides.yaml")
PROVENANCE: Final = "provenance.json"
SEPARATION: Final = "fs_separation.json"
DATAGEN_MANIFEST: Final = "datagen-manifest.json"
RUN_RECORD: Final = "run.json"
METADATA_SUFFIX: Final = "_metadata.json"
REHEARSAL: Final = "rehearsal"
"""The key in metadata that marks a rehearsal, whose sizes are scaled down."""
TIME_FORMAT: Final = "%Y%m%d_%H%M%S"

_TIME: Final = re.compile(r"\d{8}_\d{6}")


class Benchmark(StrEnum):
    """The benchmark of a result, by the name of its folder."""

    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    VECTOR_SEARCH = "vector_database"
    KV_CACHE = "kv_cache"


class SubmissionPhase(StrEnum):
    """The phase of training that a result directory belongs to, by the name of its folder."""

    DATASIZE = "datasize"
    DATAGEN = "datagen"
    RUN = "run"


RUNNABLE_BENCHMARKS: Final = (Benchmark.TRAINING, Benchmark.CHECKPOINTING)
"""Those that Penstock itself runs; it judges all."""


def is_result_dir_name(name: str) -> bool:
    """Check whether a folder of this name is a result directory."""
    return _TIME.fullmatch(name) is not None


def metadata_name(benchmark: Benchmark, time: str) -> str:
    """The file of a result directory that states what was requested and how it ended."""
    return f"{benchmark.value}_{time}{METADATA_SUFFIX}"


def log_names(benchmark: Benchmark, phase: SubmissionPhase) -> tuple[str, str]:
    """The files of a run's standard output and standard error."""
    return f"{benchmark.value}_{phase.value}.stdout.log", f"{benchmark.value}_{phase.value}.stderr.log"
