"""All rules, in the order in which findings are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.submission.rules.checkpoints import (
    AcceleratorMemory,
    Counts,
    DataRatio,
    Fsync,
    Gap,
    Invocations,
    PerHost,
    Processes,
    Remap,
    SharedAccess,
    Size,
    SubsetRun,
    TotalTime,
)
from penstock.submission.rules.dataset import Generated, GeneratedBytes, Sized
from penstock.submission.rules.described import SameSystem, Schema, SystemName
from penstock.submission.rules.hosts import AlikeHosts, EqualAccelerators, FewAccelerators, SingleHost
from penstock.submission.rules.layout import (
    BesideDivisions,
    BesideResults,
    Categories,
    ConfigFiles,
    DatagenFiles,
    DatagenLeaf,
    Names,
    Phases,
    ResultsFile,
    SystemFiles,
)
from penstock.submission.rules.means import CheckpointMeans, EpochsTold, ReportedMeans, ResultsMeans, RunMeans
from penstock.submission.rules.order import LeftOut, OnlyOnce, Shuffled
from penstock.submission.rules.parameters import AllowedParameters, Configuration, Odirect
from penstock.submission.rules.paths import FileSystems, PathsSet
from penstock.submission.rules.pauses import Pauses
from penstock.submission.rules.provenance import (
    ExitStatus,
    Image,
    Manifest,
    Metadata,
    Pointer,
    PoolIsUsed,
    Provenance,
    StatedDivision,
    StatedEdition,
)
from penstock.submission.rules.scope import OtherBenchmarks
from penstock.submission.rules.sizing import EnoughForMemory, EnoughSteps
from penstock.submission.rules.structure import (
    Description,
    Folders,
    KnownWorkload,
    NumRuns,
    RunFiles,
    SameInAllRuns,
    StrayFiles,
)
from penstock.submission.rules.utilization import StatedSuccess, Utilization

if TYPE_CHECKING:
    from penstock.submission.rules.base import Rule

RULES: Final[tuple[Rule, ...]] = (
    OtherBenchmarks(),
    Names(),
    BesideDivisions(),
    BesideResults(),
    Folders(),
    SystemFiles(),
    Categories(),
    Phases(),
    StrayFiles(),
    Description(),
    Schema(),
    SystemName(),
    SameSystem(),
    Pointer(),
    Image(),
    PoolIsUsed(),
    Provenance(),
    StatedEdition(),
    Manifest(),
    Metadata(),
    ExitStatus(),
    StatedDivision(),
    DatagenLeaf(),
    DatagenFiles(),
    NumRuns(),
    RunFiles(),
    ConfigFiles(),
    ResultsFile(),
    KnownWorkload(),
    SameInAllRuns(),
    Pauses(),
    PathsSet(),
    FileSystems(),
    Sized(),
    Generated(),
    GeneratedBytes(),
    EnoughSteps(),
    EnoughForMemory(),
    FewAccelerators(),
    SingleHost(),
    EqualAccelerators(),
    AlikeHosts(),
    Utilization(),
    StatedSuccess(),
    EpochsTold(),
    RunMeans(),
    CheckpointMeans(),
    ResultsMeans(),
    ReportedMeans(),
    AllowedParameters(),
    Odirect(),
    Configuration(),
    Invocations(),
    Counts(),
    Gap(),
    TotalTime(),
    Remap(),
    SharedAccess(),
    Fsync(),
    Processes(),
    PerHost(),
    SubsetRun(),
    AcceleratorMemory(),
    DataRatio(),
    Size(),
    LeftOut(),
    Shuffled(),
    OnlyOnce(),
)


def rule_by_id(name: str) -> Rule:
    """The rule called `name`."""
    found = next((rule for rule in RULES if rule.id == name), None)
    if found is None:
        raise UsageError(f"There is no rule {name!r}", fix=f"Rules are: {', '.join(r.id for r in RULES)}.")
    return found
