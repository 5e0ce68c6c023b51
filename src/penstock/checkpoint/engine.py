"""The records and protocols that separate decisions about a save from the transfer of its bytes.

A manager decides when and where to save and which step to load. A save goes through `Saver.prepare` (ranks
agree on a plan), `PreparedSave.stage` (copying begins), `StagedSave.write_to` (files become durable),
`PreparedSave.seal` and the commit; files that the program has written itself go through the same calls. This
module does not need torch.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from socket import gethostname
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from weakref import WeakSet

from penstock.checkpoint.state.walk import NamePatterns
from penstock.cluster.comm import Comm, SoloComm
from penstock.errors import PenstockError, UsageError
from penstock.progress import Progress
from penstock.units import format_bytes, format_rate

if TYPE_CHECKING:
    from penstock.checkpoint.commit.protocol import Seal
    from penstock.checkpoint.formats.description import WrittenFile
    from penstock.checkpoint.state.regions import Regions
    from penstock.storage import Storage


State = Mapping[str, Any]

TRANSFER_TIMEOUT_S: Final = 1800.0
"""The longest wait for ranks that write or read a checkpoint's bytes, if the caller sets no limit."""
Replicas = Literal["share", "compare"]
"""The treatment of regions that several ranks hold.

"share" lets each rank write a part of them. It assumes that DTensors and whatever DDP synchronizes are equal
on all ranks; if other tensors differ, each rank's own version is saved. "compare" compares all replicas
first and refuses to save any that differ.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveChoice:
    """The parts of a state to save, and their dtype. The default is everything, unchanged."""

    only: NamePatterns | None = None
    dtype: Any = None
    """The torch.dtype to which floating-point tensors are converted."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The parts of a state to load, and how strictly they must match the checkpoint."""

    only: NamePatterns | None = None
    exclude: NamePatterns | None = None
    rename: Mapping[str, str] | None = None
    _: KW_ONLY
    strict: bool = True
    convert_dtypes: bool = False
    """Convert values if a tensor's dtype differs from the checkpoint's."""
    trust: bool = False
    """Unpickle objects of any kind, which can run code from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaveStats:
    """The cost of one rank's share of a save. `memory_bytes` is the size of its buffers."""

    rank: int
    payload_bytes: int
    file_bytes: int = 0
    compare_s: float = 0.0
    """The time taken to compare replicas; not included in `plan_s`."""
    plan_s: float = 0.0
    stage_s: float = 0.0
    write_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    memory_bytes: int = 0

    def __str__(self) -> str:
        rate = format_rate(self.file_bytes / self.write_s) if self.write_s else "no time"
        compared = f"compare {self.compare_s:.3f} s, " if self.compare_s else ""
        return (
            f"{format_bytes(self.payload_bytes)}; {compared}plan {self.plan_s:.3f} s, "
            f"stage {self.stage_s:.3f} s, write {self.write_s:.3f} s ({rate}), sync {self.sync_s:.3f} s, "
            f"commit {self.commit_s:.3f} s; memory {format_bytes(self.memory_bytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShareContents:
    """The contents of one rank's files, from which the checkpoint is described."""

    regions: tuple[Regions, ...] = ()
    """The regions in each file; their `tensor` column has the numbers that the plan gave to the tensors of
    all ranks.
    """
    objects: tuple[tuple[tuple[str, tuple[str | int, ...]], ...], ...] = ()
    """The name of each object in each file, and its path in the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare:
    """One rank's report to rank 0, made when all its files are durable."""

    files: tuple[WrittenFile, ...]
    stats: RankSaveStats
    contents: ShareContents = field(default_factory=ShareContents)


Urgency = Literal["copy", "commit"]
"""The event that the caller waits for.

With "copy", it is the end of copying, after which the tensors may change. All of the staging memory is used;
if that can hold everything, nothing is written until everything is copied, because a busy disk slows memory
down. With "commit", it is the durable checkpoint. A few buffers are written while others are filled, so they
stay in the processor's caches; nothing is copied before the files are created, because copies keep the
processor busy, and the disk would have to wait.
"""


class SaveCancelled(PenstockError):
    """The save was cancelled before it was committed."""

    def __init__(self) -> None:
        super().__init__("The save was cancelled before it was committed", fix="Save the step again.")


class StagedSave(Protocol):
    """One rank's share of a save. None of its methods is collective.

    Copying begins when the object is created or, if only the commit is urgent, in `write_to`.
    """

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the tensors may change; raise `WaitTimeout`, or the error that made staging fail.

        If the share does not fit into memory, this waits until `write_to` has written the excess to storage.
        """

    def count_bytes(self, storage: Storage, key_of: Callable[[str], str]) -> int:
        """Count the bytes that `write_to` will write if it is called with the same arguments."""

    def write_to(
        self, storage: Storage, key_of: Callable[[str], str], progress: Progress | None = None
    ) -> WrittenShare:
        """Write all files durably, each under `key_of(file name)`. Called once, from any thread.

        Files that the program itself has written are read through `storage` once, from beginning to end.
        """

    def cancel(self) -> None:
        """Make `wait_staged` and `write_to` raise, and leave nothing in flight. May be called twice."""


class PreparedSave(Protocol):
    """A save that all ranks have planned together; nothing is copied yet."""

    def stage(self, urgent: Urgency = "copy") -> StagedSave:
        """Take memory for this rank's share, waiting for earlier saves to free theirs. Not collective."""

    def seal(self, shares: Sequence[WrittenShare], facts: Mapping[str, object]) -> Seal:
        """On rank 0: describe the whole checkpoint from the shares of all ranks, in rank order.

        `facts` go into the manifest; a step's checkpoint has at least `step`.
        """


_MADE: Final[WeakSet[Comm]] = WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the remaining groups: gloo's threads release tensors, and must end before Python does."""
    for comm in tuple(_MADE):
        comm.close()


def make_comm(ranks: Sequence[int], timeout_s: float = TRANSFER_TIMEOUT_S) -> Comm:
    """Connect these ranks, numbered as in the job, for work that runs while the program trains.

    Collective over these ranks alone. Their messages never mix with the trainer's, and no wait takes longer
    than `timeout_s`.
    """
    made: Comm = SoloComm(gethostname())
    if len(ranks) > 1:
        from penstock.cluster.torch_comm import TorchComm, make_group  # noqa: PLC0415 - loads torch

        made = TorchComm(gethostname(), make_group(ranks, timeout_s))
        _MADE.add(made)
    made.job_ranks, made.timeout_s = ranks, timeout_s
    return made


@contextmanager
def borrowed_comm(process_group: Any = None) -> Iterator[Comm]:
    """Connect through the caller's group, or a new one if that lacks gloo. For work within one call."""
    ranks, borrowed = list_ranks(process_group), None
    if len(ranks) > 1:
        import torch.distributed as dist  # noqa: PLC0415 - already loaded by now

        from penstock.cluster.torch_comm import TorchComm  # noqa: PLC0415 - likewise

        if "gloo" in str(dist.get_backend_config(process_group)):
            group = dist.group.WORLD if process_group is None else process_group
            borrowed = TorchComm(gethostname(), group)
            borrowed.job_ranks, borrowed.timeout_s = ranks, TRANSFER_TIMEOUT_S
    with closing(borrowed or make_comm(ranks)) as comm:
        yield comm


def list_ranks(process_group: Any) -> list[int]:
    """Return the ranks of a group, numbered as in the job; `[0]` if this process runs alone."""
    if "torch" not in sys.modules:
        # A program that has not imported torch cannot have a process group.
        return [0]
    import torch.distributed as dist  # noqa: PLC0415 - see above

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError(
                "A process group was given, but torch.distributed is not initialized",
                fix="Call torch.distributed.init_process_group first.",
            )
        return [0]
    if process_group is None:
        return list(range(dist.get_world_size()))
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(process_group) < 0:
        raise UsageError(
            f"Rank {dist.get_rank()} is not in the process group that was given",
            fix="Call this only on the ranks of the group, or pass the group that this rank belongs to.",
        )
    return dist.get_process_group_ranks(process_group)
