"""The ranks that save or load together: a process group of torch, or this process alone.

Everything collective in the engine goes through a group of our own, or the caller's where that speaks gloo.
Invariant: a rank that is not in the group gets an error at once, and the ranks in it do not wait for it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from socket import gethostname
from typing import TYPE_CHECKING, Any

from penstock.cluster.base_comm import SoloComm
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.cluster.base_comm import BaseComm


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """One rank's view of those it saves and loads with. `group` is torch's; None where there is only one."""

    comm: BaseComm
    group: Any = None

    def close(self) -> None:
        """Let the group go, if it was made for us; every member does."""
        self.comm.close()


def own_members(process_group: Any = None) -> Members:
    """A group of our own with the ranks of `process_group` (None: all): for what runs beside a training.

    Collective over these ranks alone. Its messages never meet those of the trainer.
    """
    return members_of_ranks(_ranks_of(process_group))


def members_of_ranks(ranks: Sequence[int]) -> Members:
    """A group of our own of these ranks, by their numbers in the job. Collective over them alone."""
    if len(ranks) < 2:
        return Members(SoloComm(gethostname()))
    from penstock.checkpoint.own_group import GroupComm, make_group  # noqa: PLC0415 - loads torch

    group = make_group(ranks)
    return Members(GroupComm(gethostname(), group), group)


def borrowed_members(process_group: Any = None) -> Members:
    """The caller's group where it speaks gloo, else one of our own: for what ends before the call returns."""
    ranks = _ranks_of(process_group)
    if len(ranks) < 2:
        return Members(SoloComm(gethostname()))
    import torch.distributed as dist  # noqa: PLC0415 - loads torch, which is there by now

    from penstock.cluster.torch_comm import TorchComm  # noqa: PLC0415 - likewise

    if "gloo" not in str(dist.get_backend_config(process_group)):
        return own_members(process_group)
    group = dist.group.WORLD if process_group is None else process_group
    return Members(TorchComm(gethostname(), group), group)


@contextmanager
def meeting(process_group: Any = None) -> Iterator[Members]:
    """Borrowed members for one call."""
    members = borrowed_members(process_group)
    try:
        yield members
    finally:
        members.close()


def _ranks_of(process_group: Any) -> list[int]:
    """The ranks of a group, by their numbers in the job; of a job without ranks, this one."""
    if "torch" not in sys.modules:
        # Whoever has not loaded torch has no process group either.
        return [0]
    import torch.distributed as dist  # noqa: PLC0415 - see above

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError(
                "A process group was given, but torch.distributed is not initialised",
                fix="Call torch.distributed.init_process_group first.",
            )
        return [0]
    if process_group is None:
        return list(range(dist.get_world_size()))
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(process_group) < 0:
        raise UsageError(
            f"Rank {dist.get_rank()} is not in the process group that was given",
            fix="Call this only on the ranks of the group, or give the group that this rank belongs to.",
        )
    return dist.get_process_group_ranks(process_group)
