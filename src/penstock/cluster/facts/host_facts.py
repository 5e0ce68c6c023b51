"""The file of cluster facts: the report of each host, or the reason why there is none.

Each agent prints a `HostReport`; `collect_facts` combines the reports into `ClusterFacts`, which rules and
checks read. Invariant: every queried host is in the file, as present or as absent, so that the facts of some
hosts cannot be mistaken for those of all.
"""

from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import DataDamaged, ObjectNotFound, Unavailable
from penstock.storage.files.local_files import read_document

VERSION: Final = 1
"""Incremented with every change that an older reader would misinterpret."""

Via = Literal["local", "ssh", "slurm", "mpi", "ranks"]
"""The way in which hosts were queried. With `ranks`, the ranks of a run read the facts of their own hosts."""
_Size = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(gt=0)]


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Cpu(_Facts):
    """The processor.

    `num_physical` is the number of pairs of socket and core; None if the kernel reports neither.
    """

    model: str
    machine: str
    num_logical: _Count
    num_physical: _Count | None
    num_sockets: _Count | None


class NumaNode(_Facts):
    """One memory node and its cores, as the kernel lists them: `0-7,16-23`."""

    node: _Size
    cores: str
    memory_bytes: _Size


class Nic(_Facts):
    """One physical network interface. It has no speed if its link is down."""

    name: str
    kind: Literal["ethernet", "infiniband", "other"]
    state: str
    mtu: _Size
    speed_mbit_per_s: _Size | None


class Drive(_Facts):
    """One non-removable drive."""

    name: str
    model: str
    transport: str
    size_bytes: _Size
    is_rotational: bool


class Mount(_Facts):
    """A file system that stores files. The kernel's virtual file systems are left out."""

    folder: str
    device: str
    kind: str
    options: tuple[str, ...]


class Clock(_Facts):
    """The host's wall clock during the query, and whether its kernel considers it synchronized."""

    read_unix_s: float
    is_synchronised: bool


class HostReport(_Facts):
    """The facts of one host. Facts that could not be read are None; `unread` has the reasons."""

    name: str
    boot_id: str | None
    cpu: Cpu | None
    memory_bytes: _Count | None
    numa: tuple[NumaNode, ...] | None
    nics: tuple[Nic, ...] | None
    drives: tuple[Drive, ...] | None
    mounts: tuple[Mount, ...] | None
    kernel: str
    system: str | None
    dmi: dict[str, str] | None
    sysctl: dict[str, str] | None
    limits: dict[str, str] | None
    environment: dict[str, str]
    versions: dict[str, str]
    clock: Clock | None
    unread: dict[str, str]


class PresentHost(_Facts):
    """A host that reported, with its name in the query, and the times of the query by the local clock."""

    host: str
    asked_unix_s: float
    answered_unix_s: float
    report: HostReport


class AbsentHost(_Facts):
    """A host that did not report.

    `exit_code` is that of the launcher's process, None if it was ended at its time limit.
    """

    host: str
    reason: str
    exit_code: int | None
    stderr: str


class ClusterFacts(_Facts):
    """The facts of all hosts of a cluster at one time."""

    version: Literal[1] = VERSION
    via: Via
    collected_at: str
    asked: tuple[str, ...] = Field(min_length=1)
    is_partial: bool
    present: tuple[PresentHost, ...]
    absent: tuple[AbsentHost, ...]

    @property
    def memory_bytes(self) -> int | None:
        """The sum over all hosts; None if a host is absent or its memory is unknown."""
        sizes = [host.report.memory_bytes for host in self.present]
        known = [size_bytes for size_bytes in sizes if size_bytes is not None]
        return None if self.is_partial or len(known) < len(sizes) else sum(known)

    @model_validator(mode="after")
    def _accounts_for_every_host(self) -> Self:
        accounted = sorted([host.host for host in self.present] + [host.host for host in self.absent])
        if accounted != sorted(set(self.asked)):
            raise ValueError(f"hosts asked are {sorted(self.asked)}, but those accounted for are {accounted}")
        if self.is_partial != bool(self.absent):
            raise ValueError(f"is_partial is {self.is_partial}, but {len(self.absent)} hosts are absent")
        return self


Model = TypeVar("Model", HostReport, ClusterFacts)


def parse_facts(kind: type[Model], text: str | bytes, *, where: str) -> Model:
    """Parse `text` as a `kind`. Missing, unknown or mistyped fields are refused by name."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"]) or "the document"
        raise DataDamaged(
            f"This version of Penstock cannot read these facts: {place}: {first['msg']}",
            where=where,
            fix="Collect them again, with the same version of Penstock on all hosts.",
        ) from error


def read_cluster_facts(path: Path) -> ClusterFacts:
    """Read the cluster facts that `penstock cluster collect` wrote to `path`."""
    fix = "Collect them with: penstock cluster collect -o cluster.json"
    try:
        content = read_document(path)
    except FileNotFoundError as error:
        raise ObjectNotFound("There are no cluster facts here", uri=str(path), fix=fix) from error
    except OSError as error:
        raise Unavailable(
            f"The cluster facts cannot be read: {error.strerror}", where=str(path), fix=fix
        ) from error
    return parse_facts(ClusterFacts, content, where=str(path))


BEGIN = "<<penstock-facts"
END = "penstock-facts>>"


def frame_document(document: str) -> str:
    """Mark the beginning and end of `document`, because launchers and login shells print other lines."""
    return f"\n{BEGIN}\n{document}\n{END}\n"


def extract_document(output: str) -> str | None:
    """Extract the document from an agent's output; None if there is none, or if it is cut off."""
    _, begun, after = output.partition(f"{BEGIN}\n")
    document, ended, _ = after.partition(f"\n{END}")
    return document if begun and ended else None
