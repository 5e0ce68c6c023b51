"""All rules, in the order in which findings are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.submission.rules.checkpoint_rules import (
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
from penstock.submission.rules.dataset_rules import FileSystems, Generated, GeneratedBytes, PathsSet, Sized
from penstock.submission.rules.host_rules import AlikeHosts, EqualAccelerators, FewAccelerators, SingleHost
from penstock.submission.rules.metric_rules import (
    CheckpointMeans,
    EpochsTold,
    ReportedMeans,
    ResultsMeans,
    RunMeans,
    StatedSuccess,
    Utilization,
)
from penstock.submission.rules.parameter_rules import AllowedParameters, Configuration, Odirect
from penstock.submission.rules.provenance_rules import (
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
from penstock.submission.rules.run_rules import (
    ConfigFiles,
    DatagenFiles,
    DatagenLeaf,
    KnownWorkload,
    NumRuns,
    Pauses,
    ResultsFile,
    RunFiles,
    SameInAllRuns,
)
from penstock.submission.rules.sample_order_rules import LeftOut, OnlyOnce, Shuffled
from penstock.submission.rules.sizing_rules import EnoughForMemory, EnoughSteps
from penstock.submission.rules.structure_rules import (
    BesideDivisions,
    BesideResults,
    Categories,
    Description,
    Folders,
    Names,
    OtherBenchmarks,
    Phases,
    StrayFiles,
    SystemFiles,
)
from penstock.submission.rules.system_rules import SameSystem, Schema, SystemName

if TYPE_CHECKING:
    from penstock.submission.rules.rule import Rule

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
